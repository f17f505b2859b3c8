"""checkpoint_best: exports and commands use the checkpoint with the best metric."""

import json
import shutil
from pathlib import Path

import pytest
from faults import TEXT, words

from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.model_files import _load_run, checkpoint_gguf
from toyexp.plugins.discovery import current_registry
from toyexp.results.run_dirs import read_run
from toyexp.training import checkpoint

# A rate so high that the held-out loss also rises, and a constant one: steps do not depend on their number.
WILD = [*words("scratch", "llama", "ggml"), "lr=0.5", "eval_every=2", "checkpoint_every=100", "steps=12"]
CALLBACKS = "constant,events,gguf_export"


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(directory, *more, callbacks=CALLBACKS):
    settings = {w.partition("=")[0]: w for w in [*WILD, f"callbacks=[{callbacks}]", *more]}
    assert main([*settings.values(), f"hydra.run.dir={directory}"]) == 0


def events(directory, kind):
    lines = map(json.loads, Path(directory, "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def best_look(directory):
    """Return step and loss of the best evaluation after a step, from the events."""
    evals = [(e["loss"], e["step"]) for e in events(directory, "eval") if e["step"]]
    return min(evals)[1], min(evals)[0]


def tensors(path):
    with GGUFFile(path) as file:
        return {name: file.read(name).tobytes() for name in file.tensors}, file.metadata["general.step"]


def result(directory):
    return json.loads(Path(directory, "result.json").read_text())


@pytest.fixture
def wild(capsys):
    """Train a run whose best evaluation is not its last; return that step."""
    run("wild/run", "checkpoint_best=loss", callbacks=f"{CALLBACKS},safetensors_export,hf_export")
    step, loss = best_look("wild/run")
    assert 0 < step < 12, "the rate is not as wild as it should be"
    return step, loss, capsys.readouterr().out


def test_a_run_that_keeps_its_best_exports_it_in_every_format_and_says_its_step(wild):
    step, loss, out = wild
    run("short/run", f"steps={step}", callbacks=f"{CALLBACKS},safetensors_export,hf_export")
    assert tensors(Path("wild/run/model.gguf")) == tensors(Path("short/run/model.gguf"))
    for name in ("model.safetensors", "model-hf/model.safetensors"):
        one, two = (Path(directory, name).read_bytes() for directory in ("wild/run", "short/run"))
        assert one == two or name == "model.safetensors"  # its metadata contains the configuration's hash
    assert {(e["step"], e["weights"]) for e in events("wild/run", "export")} == {(step, "best")}
    assert result("wild/run")["best"] == {"step": step, "metric": "loss", "score": loss}
    assert set(result("wild/run")["artifact_steps"].values()) == {step}
    told, last = result("wild/run"), events("wild/run", "eval")[-1]
    assert (told["eval_step"], told["eval_loss"]) == (step, loss), "what is exported decides in tables and sweeps"
    assert told["eval_scores"] == told["last_eval"]["scores"] == {}, "a perplexity is its loss and no score of its own"
    assert told["last_eval"]["step"] == 12 and told["last_eval"]["loss"] == last["loss"] > loss
    assert read_run(Path("wild/run")).loss == loss
    assert f"best held-out loss {loss:.4f} after step {step}" in out
    assert f"kB  of step {step}, the best" in out


def test_the_last_weights_are_exported_where_that_is_asked_for(wild):
    run("last/run", "checkpoint_best=loss", "callbacks.gguf_export.weights=last")
    run("plain/run")
    assert tensors(Path("last/run/model.gguf")) == tensors(Path("plain/run/model.gguf"))
    assert tensors(Path("last/run/model.gguf")) != tensors(Path("wild/run/model.gguf"))
    assert [(e["step"], e["weights"]) for e in events("last/run", "export")] == [(12, "last")]
    assert result("last/run")["eval_step"] == 12 and "last_eval" not in result("last/run")
    assert main([*WILD, "callbacks.gguf_export.weights=first", "hydra.run.dir=first"]) == 2


def test_early_stop_alone_keeps_the_best_even_without_other_checkpoints(wild):
    more = ["callbacks.early_stop.patience=2", "checkpoint_every=0", "steps=100"]
    run("early/run", *more, callbacks=f"{CALLBACKS},early_stop")
    step, _ = best_look("early/run")
    end = result("early/run")
    assert (end["reason"], end["best"]["step"]) == ("aborted", step) and end["steps"] > step
    assert list(checkpoint.list_checkpoints(Path("early/run/checkpoints"))) == [step]
    run("short/run", f"steps={step}")
    assert tensors(Path("early/run/model.gguf")) == tensors(Path("short/run/model.gguf"))


@pytest.mark.parametrize("at", [-2, 1])
def test_a_resumed_run_exports_the_same_bytes(wild, at):
    """The run is stopped before its best evaluation, and after it."""
    step, _, _ = wild
    run("part/run", "checkpoint_best=loss", f"steps={step + at}")
    assert main(["resume=part/run", "steps=12"]) == 0
    assert Path("part/run/model.gguf").read_bytes() == Path("wild/run/model.gguf").read_bytes()
    keys = ("eval_step", "eval_loss", "eval_scores", "last_eval", "train_loss", "first_train_loss")
    assert [result("part/run")[key] for key in keys] == [result("wild/run")[key] for key in keys]


def test_scores_of_another_metric_are_not_mixed_with_those_before(wild):
    shutil.copytree("wild/run", "other/run")
    assert main(["resume=other/run", "steps=14", "checkpoint_best=ppl"]) == 0
    assert result("other/run")["best"]["metric"] == "ppl" and result("other/run")["best"]["step"] == 14


def test_a_best_that_is_damaged_is_told_and_the_last_is_exported(capsys):
    run("run", "checkpoint_best=loss", "steps=9")
    step, _ = best_look("run")
    assert step < 9
    path = Path("run/checkpoints", f"step-{step}", checkpoint.ARRAYS)
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["resume=run", "steps=10"]) == 0
    assert "the best weights cannot be read" in capsys.readouterr().out
    assert [(e["step"], e["weights"]) for e in events("run", "export")][-1] == (10, "last")


# -- a checkpoint as a file -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_exported_evaluated_described_and_continued(wild, capsys):
    step, loss, _ = wild
    path = f"wild/run/checkpoints/step-{step}"
    assert main(["export", path, "--type", "f32"]) == 0
    assert Path(f"wild/run/step-{step}-f32.gguf").read_bytes() == Path("wild/run/model.gguf").read_bytes()
    capsys.readouterr()
    words = ["engine=ggml", "engine.threads=1", "data=text", "data.path=book.txt", "data.eval_batches=8"]
    assert main(["eval", path, *words, "batch_size=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["loss"]) == (path, pytest.approx(loss, abs=2e-5))
    assert main(["describe", path]) == 0
    out = capsys.readouterr().out
    assert f"file        {path}" in out and f"made by     run run, step {step}" in out and "tmp" not in out
    assert main(["generate", path, "--prompt", "It ", "--tokens", "2", "--engine", "ggml:threads=1"]) == 0
    base = ["data=text", "data.path=book.txt", "model.context=16", "engine=ggml", "engine.threads=1", "steps=1"]
    assert main(["recipe=full", f"recipe.base={path}", *base, "lr=0", "hydra.run.dir=on", "eval_every=0"]) == 0
    assert tensors(Path("on/model.gguf"))[0] == tensors(Path("wild/run/model.gguf"))[0]


@pytest.mark.parametrize("recipe", ["warm", "lora"])
def test_what_a_checkpoint_does_not_hold_comes_from_where_the_run_had_it(recipe):
    based = []
    if recipe == "lora":
        run("first", "steps=1")
        based = ["recipe.base=first/model.gguf", "data.tokenizer=auto"]
    settings = {w.partition("=")[0]: w for w in [*words(recipe, "llama", "ggml"), *based, "steps=2"]}
    assert main([*settings.values(), "hydra.run.dir=run"]) == 0
    assert main(["export", "run/checkpoints/step-2", "--type", "f32"]) == 0
    assert tensors(Path("run/step-2-f32.gguf")) == tensors(Path("run/model.gguf"))


@pytest.mark.parametrize("own", [[], ["model_seed=5"]])
def test_what_a_recipe_draws_and_does_not_train_is_drawn_again_by_the_seed_of_the_model(own):
    """This concerns plugins' recipes: the checkpoints of built-in recipes contain all drawn values."""
    assert main([*WILD, "callbacks=[events]", "steps=1", "seed=3", *own, "hydra.run.dir=run"]) == 0
    _, plan, _, _ = _load_run(Path("run/checkpoints/step-1"), current_registry())
    assert plan.seed == (5 if own else 3)


def test_a_checkpoint_whose_run_cannot_be_set_up_again_says_why(capsys):
    run("run", "steps=1")
    Path("book.txt").write_text(TEXT + "é")
    Path("book.txt").unlink()
    assert main(["eval", "run/checkpoints/step-1"]) == 2
    told = capsys.readouterr().err
    assert "run/checkpoints/step-1: cannot rebuild the run's plan: " in told
    assert "cd to where its files are now; or name a GGUF file of that run" in told
    Path("run/model.gguf").unlink()
    assert main(["eval", "run"]) == 2
    assert "using its newest checkpoint, run/checkpoints/step-1" in capsys.readouterr().err


def test_a_checkpoint_that_was_replaced_is_read_again():
    unlearned = [w for w in WILD if not w.startswith(("engine", "eval_every"))]
    assert main([*unlearned, "plugins=[toyexp.testing.null]", "engine=noop", "eval_every=0", "steps=1",
                 "hydra.run.dir=run"]) == 0  # fmt: skip
    path = Path("run/checkpoints/step-1")
    first, found = tensors(checkpoint_gguf(path))[0], checkpoint.read_checkpoint(path)
    checkpoint.write_checkpoint(path.parent, 1, {name: array + 1 for name, array in found.arrays.items()}, found.state)
    second = tensors(checkpoint_gguf(path))[0]
    assert first.keys() == second.keys() and all(first[name] != second[name] for name in first)
