"""--dry-run predicts the figures of a run or a sweep and writes nothing."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest

from toyexp.base.formatting import format_duration
from toyexp.base.threads import CORES_VARIABLE
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.sweeps.launchers.forking import PLATFORMS
from toyexp.training.settings import evaluations

SMALL = ["engine=ggml", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16", "batch_size=2",
         "callbacks=[events]"]  # fmt: skip


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))


def tree():
    """Return the content of all files below the working directory."""
    return {p: p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


def dry(capsys, *words):
    assert main([*words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_predicts_the_figures_of_a_run(capsys):
    words = [
        *SMALL[:-1],
        "callbacks=[events,gguf_export]",
        "recipe=lora",
        "recipe.base=base/model.gguf",
        "recipe.targets=[q]",
        "steps=11",
        "eval_every=4",
        "name=mine",
    ]
    assert main([*SMALL, "steps=1", "hydra.run.dir=base", "callbacks=[events,gguf_export]"]) == 0
    capsys.readouterr()
    before = tree()
    report = dry(capsys, *words, "hydra.run.dir=deep/run")
    assert tree() == before
    assert main([*words, "hydra.run.dir=deep/run"]) == 0
    events = [json.loads(line) for line in Path("deep/run/events.jsonl").read_text().splitlines()]
    model = GGUFFile(Path("base/model.gguf"))
    base = sum(math.prod(tensor.shape) for tensor in model.tensors.values())
    assert report["parameters"] == events[0]["model"]["parameters"] == base
    shapes = [tensor.shape for tensor in GGUFFile(Path("deep/run/adapter.gguf")).tensors.values()]
    assert report["trainable"] == events[0]["model"]["trainable"] == sum(map(math.prod, shapes))
    frozen = sum(tensor.nbytes for tensor in model.tensors.values())
    assert report["frozen_bytes"] == pytest.approx(frozen, rel=0.01) and report["weights_bytes"] < frozen / 2
    assert report["tokens"] == sum(e["tokens"] for e in events if e["kind"] == "step")
    assert report["epochs"] == pytest.approx(report["tokens"] / events[0]["data"]["train_tokens"], rel=1e-3)
    assert report["tried"]["evaluations"] == sum(e["kind"] == "eval" for e in events)
    assert report["directory"] == str(Path("deep/run").absolute())
    assert {"recipe=lora", "name=mine", "steps=11", "model.n_layers=1"} <= set(report["settings"])
    assert not any(word.startswith(("seed", "lr", "optim")) for word in report["settings"])  # defaults are not listed
    assert report["flops"] == 11 * report["flops_per_step"] > 0 and report["seconds"] > 0


def test_tokens_and_epochs_count_targets_without_padding(capsys):
    lines = [json.dumps({"prompt": f"what is {n}", "completion": " it is red"}) for n in range(100, 120)]
    Path("chats.jsonl").write_text("\n".join(lines))
    words = [w for w in SMALL if not w.startswith("data")] + [
        "data=examples",
        "data.path=chats.jsonl",
        "data.tokenizer=byte",
    ]
    report = dry(capsys, *words, "model.context=64", "batch_size=4", "steps=10", "eval_every=0")
    assert report["epochs"] == pytest.approx(40 / 19) and report["tokens"] < 40 * 64 / 2
    assert main([*words, "model.context=64", "batch_size=4", "steps=10", "eval_every=0", "hydra.run.dir=run"]) == 0
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert report["tokens"] == pytest.approx(sum(e["tokens"] for e in events if e["kind"] == "step"), rel=0.02)
    assert any("in 19 examples" in line for line in report["about"])


def test_epochs_of_endless_data_are_rejected(capsys, monkeypatch):
    endless = property(lambda batches: None, lambda batches, rows: None)
    monkeypatch.setattr("toyexp.batching.tokens.TokenBatches.rows_per_epoch", endless, raising=False)
    assert main([*SMALL, "epochs=2", "hydra.run.dir=endless"]) == 2 and not Path("endless").exists()
    error = "epochs=2: data=random has no epochs of a fixed length; set steps=... instead"
    assert error in capsys.readouterr().err
    assert main([*SMALL, "steps=1", "hydra.run.dir=endless"]) == 0


def test_epochs_are_converted_to_steps_when_the_data_is_opened(capsys):
    """An epoch is all rows or all windows of a text. The saved configuration has steps; resume accepts epochs."""
    lines = [json.dumps({"prompt": f"what is {n}", "completion": " it is red"}) for n in range(100, 120)]
    Path("chats.jsonl").write_text("\n".join(lines))
    words = [word for word in SMALL if not word.startswith(("data", "batch_size", "callbacks"))]
    words += ["data=examples", "data.path=chats.jsonl", "data.tokenizer=byte", "batch_size=4", "eval_every=0",
              "callbacks=[events,cosine]", "callbacks.cosine.warmup=0.2", "model.context=32"]  # fmt: skip
    assert dry(capsys, *words, "epochs=3")["epochs"] == pytest.approx(60 / 19)
    assert main([*words, "epochs=3", "--dry-run"]) == 0
    assert re.findall(r"\S*epochs\S*", capsys.readouterr().out) == ["epochs=3.0", "(epochs=3)"]
    assert main([*words, "steps=15", "--dry-run"]) == 0
    assert re.findall(r"\(.*epochs.*\)", capsys.readouterr().out) == ["(3.16 epochs)"]
    assert main([*words, "epochs=3", "hydra.run.dir=run"]) == 0
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert "steps: 15" in (saved := Path("run/config.yaml").read_text()) and "epochs: null" in saved
    assert (rates := [e["lr"] for e in events if e["kind"] == "step"]).index(max(rates)) == 2 and len(rates) == 15
    assert main(["resume=run", "epochs=4"]) == 0 and "steps: 19" in Path("run/config.yaml").read_text()
    Path("book.txt").write_text("abcdefgh" * 200)
    text = [*words, "data=text", "data.path=book.txt", "data.val_fraction=0.1"]
    capsys.readouterr()
    assert dry(capsys, *text, "epochs=0.5")["steps"] == -(-(1439 // 32 - 1) // 8), "half of the windows in batches of 4"


def test_a_dry_run_prints_every_figure(capsys):
    assert main([*SMALL, "steps=11", "--dry-run"]) == 0
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    order = ("settings", "engine", "model", "data", "recipe", "trains", "steps", "memory", "compute", "time", "writes")
    assert [head for head in heads if head in order] == list(order)
    assert tree() == {}


@pytest.mark.parametrize("wrong", ["steps=0", "hydra.run.dir=full", "hydra.run.dir=file/run", "resume=full", "batch=3"])
def test_a_dry_run_rejects_invalid_settings_with_the_message_of_a_run(wrong, capsys):
    Path("full").mkdir()
    Path("full/note.txt").write_text("mine")
    Path("file").touch()
    before, words = tree(), [*([] if wrong.startswith("resume") else SMALL), wrong]
    assert main(words) == 2
    of_run = capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err == of_run and tree() == before


def test_a_dry_run_of_a_resume_counts_the_remaining_steps(capsys):
    assert main([*SMALL, "steps=3", "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    before = tree()
    report = dry(capsys, "resume=run", "steps=10")
    assert (report["begins"], report["steps"], report["directory"]) == (3, 7, str(Path("run").absolute()))
    assert main(["resume=run", "--dry-run"]) == 2
    assert "is complete, 3 of 3 steps" in capsys.readouterr().err
    assert tree() == before


def test_flags_without_effect_are_rejected(capsys):
    assert main(["--json"]) == 2 and "--json: needs --dry-run" in capsys.readouterr().err
    assert main(["--cfg", "job", "--dry-run"]) == 2 and "--cfg --dry-run: only one of these" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform not in PLATFORMS, reason="jobs are only forked on Linux")
def test_a_dry_run_of_a_sweep_forks_like_its_jobs(capsys, monkeypatch):
    """Jobs are forked, so a dry run must not measure the start of a process that imports everything."""

    def spawn(*order):
        raise AssertionError("no job is spawned here")

    monkeypatch.setattr("toyexp.sweeps.launchers.launcher.spawn", spawn)
    monkeypatch.setattr("toyexp.sweeps.launchers.forking.spawn", spawn)
    report = dry(capsys, "-m", *SMALL, "seed=0,1", "steps=4", "hydra.sweep.dir=s")
    assert report["jobs"] == 2 and report["shapes"][0]["start"] > 0 and tree() == {}


def test_a_dry_run_of_a_sweep_tries_one_job_of_each_shape(capsys, monkeypatch):
    monkeypatch.setenv(CORES_VARIABLE, "2")
    sweep = [*SMALL[:3], *SMALL[4:], "model.d_model=16,32", "seed=0,1", "steps=4,8", "lr=1e-3", "hydra.sweep.dir=s",
             "sweep.launcher=processes"]  # fmt: skip
    report = dry(capsys, "-m", *sweep)
    assert tree() == {}
    assert report["jobs"] == 8 and report["at_once"] == 2 and report["cores"] == 1
    assert [(shape["own"], shape["jobs"]) for shape in report["shapes"]] == [
        (["model.d_model=16"], [0, 1, 2, 3]),
        (["model.d_model=32"], [4, 5, 6, 7]),
    ]
    assert all("1 thread" in shape["about"][0] for shape in report["shapes"])  # like the jobs of the sweep
    small, large = (shape["flops_per_step"] for shape in report["shapes"])
    assert small < large and report["flops"] == pytest.approx(24 * small + 24 * large)
    alone = sum(report["seconds_of_jobs"].values())
    assert alone / 2 <= report["seconds"] < alone
    assert report["directory"] == str(Path("s").absolute())


def test_a_dry_run_of_a_sweep_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["-m", *SMALL, "seed=0,1", "steps=4", "hydra.sweep.dir=s", "--dry-run"]) == 0
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().out.splitlines()]
    (head,) = (line for line in lines if line.startswith("jobs  "))
    assert max(map(len, lines)) <= 60 and "step" in head and "GFLOP/step" not in head
    assert any(line.startswith("columns left out to fit the terminal: GFLOP/step") for line in lines)


def test_a_dry_run_of_a_resumed_sweep_covers_remaining_jobs_and_reports_invalid_ones(capsys):
    sweep = ["-m", *SMALL, "steps=2,0,5", "hydra.sweep.dir=s"]
    assert main([*sweep, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert "job 1: steps=0: must be a whole number from 1" in err and "2 jobs" in out and tree() == {}
    assert main([*sweep, "sweep.isolate=false"]) == 2
    state = json.loads(Path("s/sweep.json").read_text())
    state["jobs"][2]["status"] = "waiting"
    Path("s/sweep.json").write_text(json.dumps(state))
    shutil.rmtree("s/2-scratch-llama/checkpoints")
    capsys.readouterr()
    before = tree()
    report = dry(capsys, "sweep.resume=s", "sweep.isolate=true")
    assert [shape["jobs"] for shape in report["shapes"]] == [[2]] and report["shapes"][0]["steps"] == 5
    assert tree() == before


def test_a_dry_run_tries_a_resumed_job_from_its_checkpoint_with_the_sweeps_plugins(capsys):
    plugins = "plugins=[toyexp.testing.null]"
    sweep = ["engine=noop", *SMALL[1:], plugins, "checkpoint_every=2", "steps=5", "seed=0", "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 0
    state = json.loads(Path("s/sweep.json").read_text())
    state["jobs"][0]["status"] = "interrupted"
    Path("s/sweep.json").write_text(json.dumps(state))
    shutil.rmtree(Path("s", state["jobs"][0]["directory"], "checkpoints/step-5"))
    capsys.readouterr()
    report = dry(capsys, "sweep.resume=s", plugins)
    assert [(shape["begins"], shape["steps"]) for shape in report["shapes"]] == [(4, 1)]


def test_a_dry_run_rejects_a_job_whose_file_is_missing(capsys):
    words = ["-m", *SMALL, "recipe=lora", "recipe.base=nowhere.gguf", "seed=0,1", "--dry-run"]
    assert main(words) == 2
    assert "nowhere.gguf: not found" in capsys.readouterr().err and tree() == {}


@pytest.mark.parametrize(("begins", "steps", "every"), [(0, 10, 4), (0, 8, 4), (3, 10, 4), (4, 8, 4), (0, 3, 50)])
def test_the_predicted_number_of_evaluations_is_that_of_the_loop(begins, steps, every):
    assert evaluations(begins, steps, every) == sum(s % every == 0 or s == steps for s in range(begins, steps + 1))


def test_a_duration_has_its_unit():
    told = [format_duration(s) for s in (0.00123, 1.5, 99, 100, 7200, 200_000)]
    assert told == ["1.23 ms", "1.5 s", "99 s", "1.67 min", "2 h", "2.31 days"]
