import json
import re
from types import SimpleNamespace

import pytest

from toyexp import RunFailed
from toyexp.cli.main import main
from toyexp_callbacks.stopping import EarlyStop, QualityGate

NO_LEARNING = "lr=0"  # the held-out loss then never falls


def count_evals_until_stop(stop, losses):
    """Return the number of evaluations until the callback stops the run, or None."""
    for count, loss in enumerate(losses, start=1):
        stop.on_eval({"loss": loss})
        if stop.stop_reason():
            return count
    return None


def test_early_stop_ends_a_run_that_no_longer_learns_with_its_reason(train):
    run = train(
        "callbacks=[default,early_stop]", NO_LEARNING, "steps=40", "eval_every=2", "callbacks.early_stop.patience=3"
    )
    assert run.code == 0
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("aborted", 0)
    # The first evaluation sets the best loss; the next three (at steps 2, 4 and 6) are not better.
    assert 6 <= end["final_step"] <= 7
    assert run.result["why"].startswith("early_stop: 3 evals without a held-out loss below ")
    assert f"stopped after {end['final_step']} steps in " in run.out
    assert "stopped because early_stop: 3 evals" in run.out
    assert (run.dir / "model.gguf").exists()


def test_early_stop_lets_a_run_that_learns_finish(train):
    run = train("callbacks=[default,early_stop]", "eval_every=3", "callbacks.early_stop.patience=1")
    assert run.events[-1]["reason"] == "completed" and run.events[-1]["final_step"] == 12


def test_patience_counts_evaluations_since_the_last_improvement():
    assert count_evals_until_stop(EarlyStop(patience=2), [3, 2, 2.5, 1.9, 2, 2.1, 1]) == 6
    assert count_evals_until_stop(EarlyStop(patience=1), [3, 2, 1]) is None
    impatient = EarlyStop(patience=1)
    assert count_evals_until_stop(impatient, [1, 1]) == 2, "an equal loss must not count as an improvement"
    assert "early_stop: 1 eval without a held-out loss below" in impatient.stop_reason()


def test_small_improvements_add_up():
    falling = [3 - 0.04 * i for i in range(20)]
    assert count_evals_until_stop(EarlyStop(patience=3, min_delta=0.1), falling) is None
    assert count_evals_until_stop(EarlyStop(patience=2, min_delta=0.1), falling) == 3


def test_a_nan_loss_is_no_improvement():
    assert count_evals_until_stop(EarlyStop(patience=2), [float("nan"), float("nan")]) == 2


def test_the_quality_gate_passes_a_run_that_learned(train):
    run = train("callbacks=[default,quality_gate]", "lr=0.02", "steps=30")
    assert run.code == 0
    gate = run.events[-1]["quality_gate"]
    ratio = run.result["eval_loss"] / run.result["first_eval_loss"]
    assert gate == {"passed": True, "metric": "loss_ratio", "value": ratio, "threshold": 0.95}
    assert ratio < 0.9


def test_the_quality_gate_fails_a_run_that_did_not_learn_and_keeps_its_results(train):
    run = train("callbacks=[default,quality_gate]", NO_LEARNING)
    assert run.code == 1
    assert run.err == "toyexp: error: quality gate: held-out loss_ratio is 1.0000; it must be at most 0.95\n"
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("completed", 1)
    assert end["quality_gate"] == {"passed": False, "metric": "loss_ratio", "value": 1.0, "threshold": 0.95}
    assert run.result["steps"] == 12 and "quality gate" in run.result["error"]
    assert (run.dir / "model.gguf").exists()


def test_the_gate_on_the_loss_itself_names_the_metric_that_failed(train):
    run = train("callbacks=[default,quality_gate]", "lr=0.02", "steps=30", "callbacks.quality_gate.max_loss=0.5")
    assert run.code == 1
    assert run.events[-1]["quality_gate"]["metric"] == "loss"
    assert run.events[-1]["quality_gate"]["threshold"] == 0.5
    assert "held-out loss is" in run.err


def test_the_gate_judges_the_null_engines_known_losses(train):
    # 2 before the first step and 1 + 1/13 after the twelfth.
    run = train("callbacks=[events,quality_gate]", "callbacks.quality_gate.max_ratio=0.54", engine="noop")
    assert run.events[-1]["quality_gate"]["value"] == pytest.approx((1 + 1 / 13) / 2, rel=1e-6)
    assert run.code == 0


def test_the_quality_gate_does_not_judge_a_failed_run(train):
    run = train("callbacks=[events,quality_gate]", "engine.nan_at=3", engine="noop")
    assert run.code == 1 and "quality gate" not in run.err
    assert "quality_gate" not in run.events[-1]


@pytest.mark.parametrize("name", ["early_stop", "quality_gate"])
def test_a_run_without_evaluations_is_rejected_before_anything_is_written(train, name):
    run = train(f"callbacks=[default,{name}]", "eval_every=0")
    assert run.code == 2
    needs = "needs evaluations of the held-out data: eval_every must be above 0"
    assert run.err == f"toyexp: error: callbacks.{name} {needs} (more: toyexp help callbacks)\n"
    assert not run.dir.exists()


@pytest.mark.parametrize(
    "word",
    [
        "early_stop.patience=0",
        "early_stop.min_delta=-1",
        "quality_gate.max_ratio=0",
        "quality_gate.max_ratio=-1",
        "quality_gate.max_loss=0",
    ],
)
def test_invalid_settings_are_rejected(train, word):
    run = train(f"callbacks=[{word.partition('.')[0]}]", f"callbacks.{word}")
    assert run.code == 2 and f"callbacks.{word.partition('=')[0]}" in run.err
    assert not run.dir.exists()


# -- other metrics than the loss --------------------------------------------------------------------------------------


def test_early_stop_expects_an_accuracy_to_rise():
    stop = EarlyStop(metric="accuracy", patience=2, min_delta=0.01)
    for accuracy in (0.1, 0.5, 0.9, 0.905):
        stop.on_eval({"loss": 9.0, "accuracy": accuracy})  # the loss does not matter
        assert stop.stop_reason() is None
    restored = EarlyStop(metric="accuracy", patience=2, min_delta=0.01)
    restored.resume(json.loads(json.dumps(stop.state())))
    restored.on_eval({"loss": 0.0, "accuracy": 0.9})
    assert restored.stop_reason() == "early_stop: 2 evals without a held-out accuracy above 0.9100"


def judge(values, reason="completed", **settings):
    """Return the verdict on a run whose evaluations had these accuracies, and the error message."""
    emitted = []
    gate = QualityGate(metric="accuracy", **settings)
    gate.check()
    for value in values:
        gate.on_eval({"loss": 1.0, "accuracy": value})
    try:
        gate.on_end(SimpleNamespace(emit=lambda kind, **fields: emitted.append(fields)), reason)
    except RunFailed as error:
        return emitted[0]["passed"], str(error)
    return emitted[0]["passed"], ""


def test_the_quality_gate_expects_an_accuracy_to_rise():
    assert judge([0.1, 0.9]) == (True, "")
    assert judge([0.9, 0.9]) == (False, "quality gate: held-out accuracy_ratio is 1.0000; it must be at most 0.95")
    assert judge([0.5, 0.0])[0] is False
    assert judge([0.0, 0.5], least=0.5) == (True, "")
    assert judge([0.1, 0.9], least=0.95) == (
        False, "quality gate: held-out accuracy is 0.9000; it must be at least 0.95"
    )  # fmt: skip


def test_a_run_stopped_early_is_judged_as_a_completed_one():
    for values in ([0.1, 0.9], [0.9, 0.9]):
        assert judge(values, reason="aborted") == judge(values)


def test_an_unknown_metric_is_rejected_with_the_available_ones(train):
    for name in ("early_stop", "quality_gate"):
        run = train(f"callbacks=[default,{name}]", f"callbacks.{name}.metric=los", to=name)
        assert run.code == 2 and f"callbacks.{name}.metric=los: did you mean loss?" in run.err
        assert not run.dir.exists()
    run = train("checkpoint_best=acuracy", to="best")
    assert (
        run.code == 2
        and re.search("checkpoint_best=acuracy: choose one of: .*loss, ppl", run.err)
        and not run.dir.exists()
    )


def test_a_nan_held_out_loss_at_the_end_fails_the_run(train):
    run = train("engine.nan_at=12", "nonfinite=skip", engine="noop")
    assert run.code == 1 and "the held-out loss after step 12 is nan" in run.err
    assert run.events[-1]["exit_code"] == 1 and "held-out loss" in run.result["error"]
    assert (run.dir / "model.gguf").exists()


@pytest.mark.parametrize("words", [["metric=accuracy", "max_loss=1"], ["metric=ppl", "max_loss=1"], ["least=0.9"]])
def test_limits_that_do_not_apply_to_the_metric_are_rejected(train, words):
    run = train("callbacks=[default,quality_gate]", *(f"callbacks.quality_gate.{w}" for w in words))
    assert run.code == 2 and "has no effect with callbacks.quality_gate.metric=" in run.err


def test_a_quality_gate_cannot_be_added_to_a_resumed_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["engine=noop", "plugins=[toyexp.testing.null]", "data=random", "steps=4", "hydra.run.dir=run"]
    assert main([*words, "callbacks=[events]"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = ["resume=run", "plugins=[toyexp.testing.null]", "steps=6"]
    assert main([*again, "callbacks=[events,quality_gate]"]) == 2
    assert "needs the first evaluation, but the run resumes at step 4" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert main([*again, "callbacks=[events,early_stop]"]) == 0
    assert "changed: steps 4 -> 6, callbacks.early_stop added" in capsys.readouterr().out


@pytest.mark.parametrize("values", [[], [1.0], ["x", 1.0], [None, 1.0], 5])
def test_the_quality_gate_rejects_an_invalid_saved_state(values):
    with pytest.raises((TypeError, ValueError)):
        QualityGate().resume({"values": values})
