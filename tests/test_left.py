"""What runs and sweeps leave is what the documentation says: each file, each event and each of its fields."""

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
    """The first cells and the last of the tables below a title, the first without its ticks."""
    text = (PAGES / page).read_text()
    part = text[text.index(title) :].split("\n## ")[0] if title else text
    found = re.findall(r"^\| (`.*?) \| (.*) \|$", part, re.MULTILINE)
    return {name: rest for names, rest in found for name in re.findall(r"`([^`]+)`", names)}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A run with every callback that writes, gone on from its end, and a search of two points."""
    root = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("TOYEXP_CACHE", str(root / "cache"))
        assert main([*SMALL, *ALL, "hydra.run.dir=run"]) == 0
        assert main(["resume=run", "steps=12"]) == 0
        search = ["sweep.search=random", "sweep.trials=2", "lr=interval(1e-3,1e-2)", "sweep.isolate=false"]
        assert main(["-m", *SMALL, "steps=4", *search, "hydra.sweep.dir=sweep"]) == 0
    return root


@pytest.mark.parametrize(("folder", "title"), [("run", "## A run"), ("sweep", "## A sweep"), ("cache", "## The cache")])
def test_every_file_that_is_left_is_in_the_table(left, folder, title):
    known = [re.sub(r"<[^>]*>", "*", name) for name in rows("written.md", title)]
    for path in (left / folder).rglob("*"):
        name = str(path.relative_to(left / folder))
        below = any(
            fnmatch(f"{part}/", k) for part in (name, *map(str, path.relative_to(left / folder).parents)) for k in known
        )
        inside = any(k.startswith(f"{name.split('/')[0]}/") for k in known) and path.is_dir()
        assert below or inside or any(fnmatch(name, k) for k in known), name


def test_what_the_table_names_of_a_run_and_a_search_is_there(left):
    for name in ("config.yaml", "events.jsonl", "log.txt", "result.json", "model.gguf", "model-4.gguf", "model-hf",
                 "model.safetensors", "plots", "run.lock", "written.json",
                 "checkpoints/step-12/manifest.json"):  # fmt: skip
        assert (left / "run" / name).exists(), name
    for name in ("sweep.json", "summary.csv", "summary.md", "search.json", "study.log", "run.lock"):
        assert (left / "sweep" / name).exists(), name


def test_every_event_of_a_run_and_each_of_its_fields_is_in_the_table(left):
    told = rows("events.md")
    seen = set()
    for line in (left / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        kind = event.pop("kind")
        seen.add(kind)
        assert kind in told, kind
        for name in event.keys() - {"t"}:
            assert f"`{name}`" in told[kind], f"{kind} has {name}, of which the page does not tell"
    assert seen >= {"run_start", "step", "eval", "checkpoint", "export", "sample", "resume", "run_end"}


def test_the_fields_that_the_table_has_of_the_commonest_events_are_there(left):
    told = rows("events.md")
    events = {}
    for line in (left / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        events.setdefault(event["kind"], set()).update(event)
    for kind in ("step", "eval", "checkpoint", "sample", "resume"):
        sure = told[kind].rpartition(" | ")[2].split("; what else")[0].split(" and the model's own")[0]
        for name in re.findall(r"(?:^|, )`(\w+)`", re.sub(r" \([^)]*\)", "", sure)):
            assert name in events[kind], (kind, name)
