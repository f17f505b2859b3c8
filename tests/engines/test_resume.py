"""Resumed runs: bit-identical on the same engine, within tolerance on another, and never another experiment."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from faults import TEXT, Trace, words

from toyexp.cli.main import main
from toyexp.training import checkpoint

CONSTANT = [
    "callbacks=[constant,events,gguf_export]",
    "eval_every=4",
    "checkpoint_every=2",
]  # steps do not depend on their number


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def settings(engine, recipe="scratch", model="llama"):
    return [*words(recipe, model, engine), *CONSTANT]


def run(*args):
    assert main([*args]) == 0


def events(directory, kind):
    lines = map(json.loads, Path(directory, "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def losses(directory):
    return [event["loss"] for event in events(directory, "step")]


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_an_extended_run_equals_an_uninterrupted_one(engine):
    weighted = [*settings(engine), "objective.class_weights={101: 2.5}", "objective.smoothing=0.1"]
    run(*weighted, "steps=12", "hydra.run.dir=whole/run")
    run(*weighted, "steps=5", "hydra.run.dir=begun/run")
    run("resume=begun/run", "steps=12")
    uninterrupted, extended = Trace.read(Path("whole/run")), Trace.read(Path("begun/run"))
    assert extended.files == uninterrupted.files
    extra = [e for e in extended.events if e not in uninterrupted.events]
    assert [(e["kind"], e["step"]) for e in extra] == [("eval", 5)], (
        "the only extra event is the evaluation after step 5"
    )
    (resumed,) = events("begun/run", "resume")
    assert (resumed["step"], resumed["changed"], resumed["inexact"]) == (5, {"steps": [5, 12]}, None)
    assert resumed["added"] == {}
    assert json.loads(Path("begun/run/result.json").read_text())["steps"] == 12


@pytest.mark.parametrize(
    ("model", "recipe", "first", "second"),
    [("llama", "scratch", "cpu", "ggml"), ("gpt2", "warm", "ggml", "cpu"), ("vit", "vit_tiny", "cpu", "ggml")],
)
def test_a_run_resumed_on_another_engine_stays_within_tolerance(model, recipe, first, second):
    run(*settings(first, recipe, model), "steps=12", "hydra.run.dir=whole")
    run(*settings(first, recipe, model), "steps=6", "hydra.run.dir=moved")
    run("resume=moved", "steps=12", f"engine={second}", "engine.threads=1")
    # The tolerance for 200 steps on two engines; six steps are far closer.
    np.testing.assert_allclose(losses("moved"), losses("whole"), atol=1e-4)
    assert losses("moved")[:6] == losses("whole")[:6]
    (resumed,) = events("moved", "resume")
    assert resumed["changed"]["engine.name"] == [first, second]
    assert resumed["inexact"].startswith("engine ")


CHANGED_SETTINGS = [
    ("seed=1", "seed was 0 and is 1"),
    ("batch_size=2", "batch_size was 4 and is 2"),
    ("model.d_model=64", "model.d_model was 32 and is 64"),
    ("optim.beta1=0.8", "optim.beta1 was 0.9 and is 0.8"),
    ("data.val_fraction=0.2", "data.val_fraction was 0.05 and is 0.2"),
    ("seed=1 batch_size=2 name=other", "batch_size was 4 and is 2"),
    ("seed=1 batch_size=2 optim.beta1=0.8 model.d_model=64", ", and 1 more"),
    ("objective.class_weights={3:2}", "objective.class_weights.3 was null and is 2.0"),
    ("optim.groups={blk.0.*:{frozen:true}}", "optim.groups.blk.0.* was null and is {frozen: true}"),
]


def test_resuming_another_experiment_is_rejected_with_the_keys_that_differ(capsys):
    run(*settings("ggml"), "steps=2", "hydra.run.dir=run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for change, message in CHANGED_SETTINGS:
        capsys.readouterr()
        assert main(["resume=run", "steps=4", *change.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("toyexp: error: resume=run: the run has other settings or data: ")
        assert message in line
        assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before, change


def test_a_setting_newer_than_the_checkpoint_is_reported_and_may_only_have_its_default(capsys):
    run(*settings("ggml"), "steps=2", "hydra.run.dir=run")
    (state,) = Path("run/checkpoints").glob("step-*/state.json")
    saved = json.loads(state.read_text())
    config = saved["config"]
    for section, key in ((config, "nonfinite"), (config["optim"], "eps"), (config["callbacks"]["events"], "every")):
        del section[key]
    state.write_text(json.dumps(saved))
    manifest = json.loads(state.with_name("manifest.json").read_text())
    manifest["files"][state.name] = {
        "bytes": state.stat().st_size, "sha256": hashlib.sha256(state.read_bytes()).hexdigest(),
    }  # fmt: skip
    state.with_name("manifest.json").write_text(json.dumps(manifest))
    run("resume=run", "steps=3")
    (event,) = events("run", "resume")
    assert (event["changed"], event["added"]) == ({"steps": [2, 3]}, {"nonfinite": "stop", "optim.eps": 1e-8})
    assert "from step 2; changed: steps 2 -> 3; new settings: optim.eps=1e-08, nonfinite=stop\n" in (
        capsys.readouterr().out
    )
    assert main(["resume=run", "steps=4", "optim.eps=1e-7"]) == 2
    assert "optim.eps was 1e-08 and is 1e-07" in capsys.readouterr().err


def test_resuming_after_a_change_of_data_or_base_is_rejected(capsys):
    run(*settings("ggml"), "steps=2", "hydra.run.dir=first")
    shutil.copy("first/model.gguf", "base.gguf")
    run("recipe=full", "recipe.base=base.gguf", "data=text", "data.path=book.txt", "model.context=16", "engine=ggml",
        "engine.threads=1", "steps=2", "checkpoint_every=1", "hydra.run.dir=second")  # fmt: skip
    Path("book.txt").write_text(TEXT.replace("April", "March"))
    capsys.readouterr()
    assert main(["resume=first", "steps=4"]) == 2
    error = capsys.readouterr().err
    assert "contents of the text changed since the run started; put the old file (data.path=" in error
    Path("book.txt").write_text(TEXT)
    run("resume=first", "steps=4")
    shutil.copy("first/model.gguf", "base.gguf")  # now with different weights
    capsys.readouterr()
    assert main(["resume=second", "steps=4"]) == 2
    assert "contents of the base changed since the run started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "problem"),
    [(lambda text: text.partition(b"\nrecipe:")[0], "has no recipe"), (lambda text: b"", "has no model"),
     (lambda text: text[:-200] + b"\nx: [", "not valid YAML"), (lambda text: b"\xff" + text, "not UTF-8 text")],
)  # fmt: skip
def test_a_damaged_configuration_of_a_run_is_named(capsys, damage, problem):
    run(*settings("ggml"), "steps=2", "hydra.run.dir=run")
    Path("run/config.yaml").write_bytes(damage(Path("run/config.yaml").read_bytes()))
    for command in (["resume=run", "steps=3"], ["eval", "run"]):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "run/config.yaml" in error and problem in error and "; this file of the run is damaged; restore" in error


def test_a_checkpoint_without_a_manifest_is_named(capsys):
    run(*settings("ggml"), "steps=2", "hydra.run.dir=run")
    for path in Path("run/checkpoints").glob("*/manifest.json"):
        path.unlink()
    capsys.readouterr()
    assert main(["resume=run", "steps=3"]) == main(["eval", "run/checkpoints/step-2"]) == 2
    resume, evaluation, *_ = capsys.readouterr().err.splitlines()
    assert "checkpoints/step-2: is incomplete or damaged: it has no manifest.json" in resume
    assert "run/checkpoints/step-2: is a damaged checkpoint: it has no manifest.json" in evaluation


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(capsys):
    run(*settings("ggml"), "steps=12", "hydra.run.dir=whole/run")
    run(*settings("ggml"), "steps=6", "hydra.run.dir=begun/run")
    arrays = Path("begun/run/checkpoints/step-6", checkpoint.ARRAYS)
    arrays.write_bytes(arrays.read_bytes()[:-1])
    capsys.readouterr()
    run("resume=begun/run", "steps=12")
    out = capsys.readouterr().out
    assert "begun/run/checkpoints/step-6/state.safetensors: does not match the manifest" in out
    assert "using the previous checkpoint" in out
    assert "resumed from step 4; changed: steps 6 -> 12" in out
    uninterrupted, resumed = Trace.read(Path("whole/run")), Trace.read(Path("begun/run"))
    assert resumed.files == uninterrupted.files
    assert losses("begun/run") == losses("whole/run")


def test_resume_auto_starts_resumes_or_reports_a_complete_run(capsys):
    base = [*settings("ggml"), "name=tale", "resume=auto"]
    run(*base, "steps=2")
    assert "no run named tale with a checkpoint" in capsys.readouterr().out
    run(*base, "steps=4")
    assert "resumed from step 2; changed: steps 2 -> 4" in capsys.readouterr().out
    run(*base, "steps=4")
    assert "is complete, 4 of 4 steps" in capsys.readouterr().out
    (directory,) = Path("outputs/tale").iterdir()
    assert len(losses(directory)) == 4
    assert main([*base, "steps=6", "seed=1"]) == 2
    error = capsys.readouterr().err
    assert "seed was 0 and is 1; to start a new run, set another name=..." in error
    run(*settings("ggml"), "name=other", "steps=2", "resume=auto")
    assert [p.name for p in Path("outputs").iterdir() if p.name == "other"]


def test_fewer_steps_than_the_checkpoint_has_are_rejected(capsys):
    run(*settings("ggml"), "steps=4", "hydra.run.dir=run")
    capsys.readouterr()
    assert main(["resume=run", "steps=3"]) == 2
    assert "steps=3: the run is already at step 4" in capsys.readouterr().err
