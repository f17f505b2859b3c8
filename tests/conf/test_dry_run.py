"""--dry-run says what a run or a sweep would be, by the figures of the run that follows, and leaves nothing."""

import json
import math
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
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))


def tree():
    """Everything below the working directory, with what is in it."""
    return {p: p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


def dry(capsys, *words):
    assert main([*words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_what_was_said_of_it(capsys):
    words = [
        *SMALL[:-1],
        "callbacks=[events,gguf_export]",
        "recipe=lora",
        "recipe.base=base/model.gguf",
        "steps=11",
        "eval_every=4",
        "name=mine",
    ]
    assert main([*SMALL, "steps=1", "hydra.run.dir=base", "callbacks=[events,gguf_export]"]) == 0
    capsys.readouterr()
    before = tree()
    told = dry(capsys, *words, "hydra.run.dir=deep/run")
    assert tree() == before
    assert main([*words, "hydra.run.dir=deep/run"]) == 0
    events = [json.loads(line) for line in Path("deep/run/events.jsonl").read_text().splitlines()]
    model = GGUFFile(Path("base/model.gguf"))
    base = sum(math.prod(tensor.shape) for tensor in model.tensors.values())
    assert told["parameters"] == events[0]["model"]["parameters"] == base
    shapes = [tensor.shape for tensor in GGUFFile(Path("deep/run/adapter.gguf")).tensors.values()]
    assert told["trainable"] == events[0]["model"]["trainable"] == sum(map(math.prod, shapes))
    frozen = sum(tensor.nbytes for tensor in model.tensors.values())
    assert told["frozen_bytes"] == pytest.approx(frozen, rel=0.01) and told["weights_bytes"] < frozen / 2
    assert told["tokens"] == sum(e["tokens"] for e in events if e["kind"] == "step")
    assert told["epochs"] == pytest.approx(told["tokens"] / events[0]["data"]["train_tokens"])
    assert told["tried"]["evaluations"] == sum(e["kind"] == "eval" for e in events)
    assert told["directory"] == str(Path("deep/run").absolute())
    assert {"recipe=lora", "name=mine", "steps=11", "model.n_layers=1"} <= set(told["settings"])
    assert not any(word.startswith(("seed", "lr", "optim")) for word in told["settings"])  # which are the defaults
    assert told["flops"] == 11 * told["flops_per_step"] > 0 and told["seconds"] > 0


def test_passes_through_data_count_what_is_learned_and_no_padding(capsys):
    lines = [json.dumps({"prompt": f"what is {n}", "completion": " it is red"}) for n in range(100, 120)]
    Path("chats.jsonl").write_text("\n".join(lines))
    words = [w for w in SMALL if not w.startswith("data")] + [
        "data=jsonl",
        "data.path=chats.jsonl",
        "data.tokenizer=byte",
    ]
    told = dry(capsys, *words, "model.context=64", "batch_size=4", "steps=10", "eval_every=0")
    assert told["epochs"] == pytest.approx(40 / 19) and told["tokens"] < 40 * 64 / 2
    assert main([*words, "model.context=64", "batch_size=4", "steps=10", "eval_every=0", "hydra.run.dir=run"]) == 0
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert told["tokens"] == pytest.approx(sum(e["tokens"] for e in events if e["kind"] == "step"), rel=0.02)
    assert any("in 19 examples" in line for line in told["about"])


def test_epochs_of_data_without_an_end_are_refused(capsys, monkeypatch):
    endless = property(lambda batches: None, lambda batches, rows: None)
    monkeypatch.setattr("toyexp.batching.tokens.TokenBatches.rows_per_epoch", endless, raising=False)
    assert main([*SMALL, "epochs=2", "hydra.run.dir=endless"]) == 2 and not Path("endless").exists()
    error = "epochs=2: data=random does not know the length of an epoch; set steps=... instead"
    assert error in capsys.readouterr().err
    assert main([*SMALL, "steps=1", "hydra.run.dir=endless"]) == 0


def test_epochs_become_steps_when_the_data_are_open(capsys):
    """Of examples their rows, of text its windows; the run's configuration holds the steps, and resume takes more."""
    lines = [json.dumps({"prompt": f"what is {n}", "completion": " it is red"}) for n in range(100, 120)]
    Path("chats.jsonl").write_text("\n".join(lines))
    words = [word for word in SMALL if not word.startswith(("data", "batch_size", "callbacks"))]
    words += ["data=jsonl", "data.path=chats.jsonl", "data.tokenizer=byte", "batch_size=4", "eval_every=0",
              "callbacks=[events,cosine]", "callbacks.cosine.warmup=0.2", "model.context=32"]  # fmt: skip
    assert dry(capsys, *words, "epochs=3")["epochs"] == pytest.approx(60 / 19)
    assert main([*words, "epochs=3", "hydra.run.dir=run"]) == 0
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert "steps: 15" in (saved := Path("run/config.yaml").read_text()) and "epochs: null" in saved
    assert (rates := [e["lr"] for e in events if e["kind"] == "step"]).index(max(rates)) == 2 and len(rates) == 15
    assert main(["resume=run", "epochs=4"]) == 0 and "steps: 19" in Path("run/config.yaml").read_text()
    Path("book.txt").write_text("abcdefgh" * 200)
    text = [*words, "data=text", "data.path=book.txt", "data.val_fraction=0.1"]
    capsys.readouterr()
    assert dry(capsys, *text, "epochs=0.5")["steps"] == -(-(1439 // 32 - 1) // 8), "half of the windows, by 4"


def test_a_person_reads_every_figure(capsys):
    assert main([*SMALL, "steps=11", "--dry-run"]) == 0
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    order = ("settings", "engine", "model", "data", "recipe", "trains", "steps", "memory", "compute", "time", "writes")
    assert [head for head in heads if head in order] == list(order)
    assert tree() == {}


@pytest.mark.parametrize("wrong", ["steps=0", "hydra.run.dir=full", "hydra.run.dir=file/run", "resume=full", "batch=3"])
def test_what_would_be_refused_is_refused_in_the_same_words(wrong, capsys):
    Path("full").mkdir()
    Path("full/note.txt").write_text("mine")
    Path("file").touch()
    before, words = tree(), [*([] if wrong.startswith("resume") else SMALL), wrong]
    assert main(words) == 2
    of_run = capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err == of_run and tree() == before


def test_a_run_that_goes_on_has_the_steps_that_are_left(capsys):
    assert main([*SMALL, "steps=3", "hydra.run.dir=run"]) == 0
    capsys.readouterr()
    before = tree()
    told = dry(capsys, "resume=run", "steps=10")
    assert (told["begins"], told["steps"], told["directory"]) == (3, 7, str(Path("run").absolute()))
    assert main(["resume=run", "--dry-run"]) == 2
    assert "is complete, 3 of 3 steps" in capsys.readouterr().err
    assert tree() == before


def test_flags_that_would_be_passed_over_are_refused(capsys):
    assert main(["--json"]) == 2 and "--json: needs --dry-run" in capsys.readouterr().err
    assert main(["--cfg", "job", "--dry-run"]) == 2 and "one thing at a time" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform not in PLATFORMS, reason="jobs are only forked on Linux")
def test_a_job_of_a_sweep_is_tried_as_jobs_are_started(capsys, monkeypatch):
    """By the fork server: a process that imports everything takes a second or more to begin, which no job does."""

    def spawn(*order):
        raise AssertionError("no job is spawned here")

    monkeypatch.setattr("toyexp.sweeps.launchers.launcher.spawn", spawn)
    monkeypatch.setattr("toyexp.sweeps.launchers.forking.spawn", spawn)
    told = dry(capsys, "-m", *SMALL, "seed=0,1", "steps=4", "hydra.sweep.dir=s")
    assert told["jobs"] == 2 and told["shapes"][0]["start"] > 0 and tree() == {}


def test_of_a_sweep_one_job_of_each_shape_is_tried(capsys, monkeypatch):
    monkeypatch.setenv(CORES_VARIABLE, "2")
    sweep = [*SMALL[:3], *SMALL[4:], "model.d_model=16,32", "seed=0,1", "steps=4,8", "lr=1e-3", "hydra.sweep.dir=s",
             "sweep.launcher=processes"]  # fmt: skip
    told = dry(capsys, "-m", *sweep)
    assert tree() == {}
    assert told["jobs"] == 8 and told["at_once"] == 2 and told["cores"] == 1
    assert [(shape["own"], shape["jobs"]) for shape in told["shapes"]] == [
        (["model.d_model=16"], [0, 1, 2, 3]),
        (["model.d_model=32"], [4, 5, 6, 7]),
    ]
    assert all("1 thread" in shape["about"][0] for shape in told["shapes"])  # as its jobs have
    small, large = (shape["flops_per_step"] for shape in told["shapes"])
    assert small < large and told["flops"] == pytest.approx(24 * small + 24 * large)
    alone = sum(told["seconds_of_jobs"].values())
    assert alone / 2 <= told["seconds"] < alone
    assert told["directory"] == str(Path("s").absolute())


def test_of_a_sweep_that_goes_on_only_what_is_left_is_said_and_a_job_that_cannot_be_is_told(capsys):
    sweep = ["-m", *SMALL, "steps=2,0,5", "hydra.sweep.dir=s"]
    assert main([*sweep, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert "job 1: steps=0: must be an integer from 1" in err and "2 jobs" in out and tree() == {}
    assert main([*sweep, "sweep.isolate=false"]) == 2
    state = json.loads(Path("s/sweep.json").read_text())
    state["jobs"][2]["status"] = "waiting"
    Path("s/sweep.json").write_text(json.dumps(state))
    shutil.rmtree("s/2-scratch-llama/checkpoints")
    capsys.readouterr()
    before = tree()
    told = dry(capsys, "sweep.resume=s", "sweep.isolate=true")
    assert [shape["jobs"] for shape in told["shapes"]] == [[2]] and told["shapes"][0]["steps"] == 5
    assert tree() == before


def test_a_job_that_goes_on_is_tried_from_its_checkpoint_with_the_plugins_of_its_sweep(capsys):
    plugins = "plugins=[toyexp.testing.null]"
    sweep = ["engine=noop", *SMALL[1:], plugins, "checkpoint_every=2", "steps=5", "seed=0", "hydra.sweep.dir=s"]
    assert main(["-m", *sweep]) == 0
    state = json.loads(Path("s/sweep.json").read_text())
    state["jobs"][0]["status"] = "interrupted"
    Path("s/sweep.json").write_text(json.dumps(state))
    shutil.rmtree(Path("s", state["jobs"][0]["directory"], "checkpoints/step-5"))
    capsys.readouterr()
    told = dry(capsys, "sweep.resume=s", plugins)
    assert [(shape["begins"], shape["steps"]) for shape in told["shapes"]] == [(4, 1)]


def test_a_job_whose_file_is_missing_is_refused_when_it_is_tried(capsys):
    words = ["-m", *SMALL, "recipe=lora", "recipe.base=nowhere.gguf", "seed=0,1", "--dry-run"]
    assert main(words) == 2
    assert "nowhere.gguf: not found" in capsys.readouterr().err and tree() == {}


@pytest.mark.parametrize(("begins", "steps", "every"), [(0, 10, 4), (0, 8, 4), (3, 10, 4), (4, 8, 4), (0, 3, 50)])
def test_evaluations_are_those_that_the_loop_makes(begins, steps, every):
    assert evaluations(begins, steps, every) == sum(s % every == 0 or s == steps for s in range(begins, steps + 1))


def test_a_duration_has_its_unit():
    told = [format_duration(s) for s in (0.00123, 1.5, 99, 100, 7200, 200_000)]
    assert told == ["1.23 ms", "1.5 s", "99 s", "1.67 min", "2 h", "2.31 days"]
