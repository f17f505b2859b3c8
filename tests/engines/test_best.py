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
UNSTABLE = [*words("scratch", "llama", "ggml"), "lr=0.5", "eval_every=2", "checkpoint_every=100", "steps=12"]
CALLBACKS = "constant,events,gguf_export"


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(directory, *more, callbacks=CALLBACKS):
    settings = {w.partition("=")[0]: w for w in [*UNSTABLE, f"callbacks=[{callbacks}]", *more]}
    assert main([*settings.values(), f"hydra.run.dir={directory}"]) == 0


def events(directory, kind):
    lines = map(json.loads, Path(directory, "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def best_eval(directory):
    """Return step and loss of the best evaluation after a step, from the events."""
    evals = [(e["loss"], e["step"]) for e in events(directory, "eval") if e["step"]]
    return min(evals)[1], min(evals)[0]


def tensors(path):
    with GGUFFile(path) as file:
        return {name: file.read(name).tobytes() for name in file.tensors}, file.metadata["general.step"]


def result(directory):
    return json.loads(Path(directory, "result.json").read_text())


@pytest.fixture
def unstable_run(capsys):
    """Train a run whose best evaluation is not its last; return that step."""
    run("wild/run", "checkpoint_best=loss", callbacks=f"{CALLBACKS},safetensors_export,hf_export")
    step, loss = best_eval("wild/run")
    assert 0 < step < 12, "the learning rate is not high enough"
    return step, loss, capsys.readouterr().out


def test_a_run_that_keeps_its_best_exports_it_in_every_format_and_reports_its_step(unstable_run):
    step, loss, out = unstable_run
    run("short/run", f"steps={step}", callbacks=f"{CALLBACKS},safetensors_export,hf_export")
    assert tensors(Path("wild/run/model.gguf")) == tensors(Path("short/run/model.gguf"))
    for name in ("model.safetensors", "model-hf/model.safetensors"):
        first, second = (Path(directory, name).read_bytes() for directory in ("wild/run", "short/run"))
        assert first == second or name == "model.safetensors"  # its metadata contains the configuration's hash
    assert {(e["step"], e["weights"]) for e in events("wild/run", "export")} == {(step, "best")}
    assert result("wild/run")["best"] == {"step": step, "metric": "loss", "score": loss}
    assert set(result("wild/run")["artifact_steps"].values()) == {step}
    summary, last = result("wild/run"), events("wild/run", "eval")[-1]
    assert (summary["eval_step"], summary["eval_loss"]) == (step, loss), (
        "tables and sweeps compare the exported weights"
    )
    assert summary["eval_scores"] == summary["last_eval"]["scores"] == {}, (
        "perplexity follows from the loss and is not stored as a metric"
    )
    assert summary["last_eval"]["step"] == 12 and summary["last_eval"]["loss"] == last["loss"] > loss
    assert read_run(Path("wild/run")).loss == loss
    assert f"best held-out loss {loss:.4f} after step {step}" in out
    assert f"kB  of step {step}, the best" in out


def test_weights_last_exports_the_last_weights(unstable_run):
    run("last/run", "checkpoint_best=loss", "callbacks.gguf_export.weights=last")
    run("plain/run")
    assert tensors(Path("last/run/model.gguf")) == tensors(Path("plain/run/model.gguf"))
    assert tensors(Path("last/run/model.gguf")) != tensors(Path("wild/run/model.gguf"))
    assert [(e["step"], e["weights"]) for e in events("last/run", "export")] == [(12, "last")]
    assert result("last/run")["eval_step"] == 12 and "last_eval" not in result("last/run")
    assert main([*UNSTABLE, "callbacks.gguf_export.weights=first", "hydra.run.dir=first"]) == 2


def test_early_stop_alone_keeps_the_best_even_without_other_checkpoints(unstable_run):
    more = ["callbacks.early_stop.patience=2", "checkpoint_every=0", "steps=100"]
    run("early/run", *more, callbacks=f"{CALLBACKS},early_stop")
    step, _ = best_eval("early/run")
    end = result("early/run")
    assert (end["reason"], end["best"]["step"]) == ("aborted", step) and end["steps"] > step
    assert list(checkpoint.list_checkpoints(Path("early/run/checkpoints"))) == [step]
    run("short/run", f"steps={step}")
    assert tensors(Path("early/run/model.gguf")) == tensors(Path("short/run/model.gguf"))


@pytest.mark.parametrize("offset", [-2, 1])
def test_a_resumed_run_exports_the_same_bytes(unstable_run, offset):
    """The run is stopped before its best evaluation, and after it."""
    step, _, _ = unstable_run
    run("part/run", "checkpoint_best=loss", f"steps={step + offset}")
    assert main(["resume=part/run", "steps=12"]) == 0
    assert Path("part/run/model.gguf").read_bytes() == Path("wild/run/model.gguf").read_bytes()
    keys = ("eval_step", "eval_loss", "eval_scores", "last_eval", "train_loss", "first_train_loss")
    assert [result("part/run")[key] for key in keys] == [result("wild/run")[key] for key in keys]


def test_a_resumed_run_with_another_metric_forgets_the_best_value_of_the_old_one(unstable_run):
    shutil.copytree("wild/run", "other/run")
    assert main(["resume=other/run", "steps=14", "checkpoint_best=ppl"]) == 0
    assert result("other/run")["best"]["metric"] == "ppl" and result("other/run")["best"]["step"] == 14


def test_a_damaged_best_checkpoint_is_reported_and_the_last_weights_are_exported(capsys):
    run("run", "checkpoint_best=loss", "steps=9")
    step, _ = best_eval("run")
    assert step < 9
    path = Path("run/checkpoints", f"step-{step}", checkpoint.ARRAYS)
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["resume=run", "steps=10"]) == 0
    assert "the best weights cannot be read" in capsys.readouterr().out
    assert [(e["step"], e["weights"]) for e in events("run", "export")][-1] == (10, "last")


# -- a checkpoint as a file -------------------------------------------------------------------------------------------


def test_a_checkpoint_can_be_exported_evaluated_described_generated_from_and_fine_tuned(unstable_run, capsys):
    step, loss, _ = unstable_run
    path = f"wild/run/checkpoints/step-{step}"
    assert main(["export", path, "--type", "f32"]) == 0
    assert Path(f"wild/run/step-{step}-f32.gguf").read_bytes() == Path("wild/run/model.gguf").read_bytes()
    capsys.readouterr()
    words = ["engine=ggml", "engine.threads=1", "data=text", "data.path=book.txt", "data.eval_batches=8"]
    assert main(["eval", path, *words, "batch_size=4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["file"], report["loss"]) == (path, pytest.approx(loss, abs=2e-5))
    assert main(["describe", path]) == 0
    out = capsys.readouterr().out
    assert f"file        {path}" in out and f"made by     run run, step {step}" in out and "tmp" not in out
    assert main(["generate", path, "--prompt", "It ", "--tokens", "2", "--engine", "ggml:threads=1"]) == 0
    base = ["data=text", "data.path=book.txt", "model.context=16", "engine=ggml", "engine.threads=1", "steps=1"]
    assert main(["recipe=full", f"recipe.base={path}", *base, "lr=0", "hydra.run.dir=on", "eval_every=0"]) == 0
    assert tensors(Path("on/model.gguf"))[0] == tensors(Path("wild/run/model.gguf"))[0]


@pytest.mark.parametrize("recipe", ["warm", "lora"])
def test_tensors_that_a_checkpoint_lacks_are_read_from_the_runs_donor_or_base(recipe):
    base_settings = []
    if recipe == "lora":
        run("first", "steps=1")
        base_settings = ["recipe.base=first/model.gguf", "data.tokenizer=auto"]
    settings = {w.partition("=")[0]: w for w in [*words(recipe, "llama", "ggml"), *base_settings, "steps=2"]}
    assert main([*settings.values(), "hydra.run.dir=run"]) == 0
    assert main(["export", "run/checkpoints/step-2", "--type", "f32"]) == 0
    assert tensors(Path("run/step-2-f32.gguf")) == tensors(Path("run/model.gguf"))


@pytest.mark.parametrize("overrides", [[], ["model_seed=5"]])
def test_the_plan_of_a_checkpoint_is_rebuilt_with_the_seed_of_the_model(overrides):
    """This concerns plugins' recipes: the checkpoints of built-in recipes contain all drawn values."""
    assert main([*UNSTABLE, "callbacks=[events]", "steps=1", "seed=3", *overrides, "hydra.run.dir=run"]) == 0
    _, plan, _, _ = _load_run(Path("run/checkpoints/step-1"), current_registry())
    assert plan.seed == (5 if overrides else 3)


def test_the_error_says_why_the_plan_of_a_checkpoint_cannot_be_rebuilt(capsys):
    run("run", "steps=1")
    Path("book.txt").write_text(TEXT + "é")
    Path("book.txt").unlink()
    assert main(["eval", "run/checkpoints/step-1"]) == 2
    error = capsys.readouterr().err
    assert "run/checkpoints/step-1: needs the run's data and files: " in error
    assert "; cd to " not in error and "; or use a GGUF file of the run" in error  # started in this directory
    Path("run/model.gguf").unlink()
    assert main(["eval", "run"]) == 2
    assert "using its newest checkpoint, run/checkpoints/step-1" in capsys.readouterr().err


def test_a_checkpoint_that_was_replaced_is_read_again():
    settings = [w for w in UNSTABLE if not w.startswith(("engine", "eval_every"))]
    assert main([*settings, "plugins=[toyexp.testing.null]", "engine=noop", "eval_every=0", "steps=1",
                 "hydra.run.dir=run"]) == 0  # fmt: skip
    path = Path("run/checkpoints/step-1")
    first, old = tensors(checkpoint_gguf(path))[0], checkpoint.read_checkpoint(path)
    checkpoint.write_checkpoint(path.parent, 1, {name: array + 1 for name, array in old.arrays.items()}, old.state)
    second = tensors(checkpoint_gguf(path))[0]
    assert first.keys() == second.keys() and all(first[name] != second[name] for name in first)
