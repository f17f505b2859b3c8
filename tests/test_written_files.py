"""The documentation lists all files that runs and sweeps write, and all events with their fields."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from toyexp.cli.main import main

PAGES = Path(__file__).parent.parent / "docs" / "pages" / "reference"
SMALL = ["engine=ggml", "data.max_mb=0.2", "data.eval_batches=1", "model.context=16", "model.d_model=32",
         "model.n_layers=1", "model.d_ff=48", "batch_size=2", "eval_every=4"]  # fmt: skip
ALL = ["steps=8", "checkpoint_every=4", "checkpoint_best=loss", "callbacks.sample.every=4", "callbacks.sample.tokens=4",
       "callbacks=[default,sample,plots,safetensors_export,hf_export,watch,quality_gate]",
       "callbacks.quality_gate.max_ratio=2", "callbacks.gguf_export.every=4", "callbacks.watch.warmup=4"]  # fmt: skip


def rows(page, title=""):
    """Return the rows of the tables below a title: from each name in the first cell to the other cells."""
    text = (PAGES / page).read_text()
    part = text[text.index(title) :].split("\n## ")[0] if title else text
    lines = re.findall(r"^\| (`.*?) \| (.*) \|$", part, re.MULTILINE)
    return {name: rest for names, rest in lines for name in re.findall(r"`([^`]+)`", names)}


@pytest.fixture(scope="module")
def output_root(tmp_path_factory):
    """Train with all callbacks that write files, resume that run, and run a search of two trials."""
    root = tmp_path_factory.mktemp("output_root")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("TOYEXP_CACHE", str(root / "cache"))
        assert main([*SMALL, *ALL, "hydra.run.dir=run"]) == 0
        assert main(["resume=run", "steps=12"]) == 0
        search = ["sweep.search=random", "sweep.trials=2", "lr=interval(1e-3,1e-2)", "sweep.isolate=false"]
        assert main(["-m", *SMALL, "steps=4", *search, "hydra.sweep.dir=sweep"]) == 0
    return root


@pytest.mark.parametrize(("folder", "title"), [("run", "## A run"), ("sweep", "## A sweep"), ("cache", "## The cache")])
def test_every_written_file_is_documented(output_root, folder, title):
    patterns = [re.sub(r"<[^>]*>", "*", name) for name in rows("written.md", title)]
    for path in (output_root / folder).rglob("*"):
        name = str(path.relative_to(output_root / folder))
        is_listed = any(
            fnmatch(f"{part}/", k)
            for part in (name, *map(str, path.relative_to(output_root / folder).parents))
            for k in patterns
        )
        is_parent_listed = any(k.startswith(f"{name.split('/')[0]}/") for k in patterns) and path.is_dir()
        assert is_listed or is_parent_listed or any(fnmatch(name, k) for k in patterns), name


def test_runs_and_searches_write_the_documented_files(output_root):
    for name in ("config.yaml", "events.jsonl", "log.txt", "result.json", "model.gguf", "model-4.gguf", "model-hf",
                 "model.safetensors", "plots", "run.lock", "written.json",
                 "checkpoints/step-12/manifest.json"):  # fmt: skip
        assert (output_root / "run" / name).exists(), name
    for name in ("sweep.json", "summary.csv", "summary.md", "search.json", "study.log", "run.lock"):
        assert (output_root / "sweep" / name).exists(), name


def documented_fields():
    """Return the names in the tables of events.md by kind of event; rows with `...` in the first cell are optional."""
    fields, kind = {}, ""
    for line in (PAGES / "events.md").read_text().splitlines():
        if heading := re.match(r"## (\w+)$|## Other|\| field of `(\w+)`", line):
            kind = heading[1] or heading[2] or ""
        elif row := re.match(r"\| (`.*?) \| (.*) \|$", line):
            if kind:
                fields.setdefault(kind, []).append(row[1])
            else:
                fields |= {name: [row[2]] for name in re.findall(r"`(\w+)`", row[1])}
    return fields


def test_every_event_and_field_is_documented(output_root):
    documented = documented_fields()
    kinds = set()
    for line in (output_root / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        kind = event.pop("kind")
        kinds.add(kind)
        assert kind in documented, kind
        for name in event.keys() - {"t"}:
            assert any(f"`{name}`" in cell for cell in documented[kind]), f"the page does not list {name} of {kind}"
    assert kinds >= {"run_start", "step", "eval", "checkpoint", "export", "sample", "resume", "run_end"}


def test_common_events_have_the_documented_fields(output_root):
    documented = documented_fields()
    events = {}
    for line in (output_root / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        events.setdefault(event["kind"], set()).update(event)
    for kind in ("step", "eval", "checkpoint", "sample", "resume"):
        for cell in documented[kind]:
            required = "" if "..." in cell else re.sub(r" \([^)]*\)", "", cell).partition(";")[0]
            for name in re.findall(r"`(\w+)`", required):
                assert name in events[kind], (kind, name)
