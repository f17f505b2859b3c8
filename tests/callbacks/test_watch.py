"""Spikes and divergence of the loss are reported once; ordinary training causes no warning."""

import json
import math
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from toyexp.testing import CallbackSuite
from toyexp_callbacks.stopping import Watch


class TestWatch(CallbackSuite):
    callback = Watch


class WatchedRun:
    """A stand-in for a run that records its warnings."""

    remedy = "try a lower lr"
    steps = 10_000

    def __init__(self, watch=None):
        self.watch, self.warnings, self.step = watch or Watch(), [], 0

    def emit(self, kind, **fields):
        assert kind == "warning"
        self.warnings.append(fields)

    def train(self, *losses):
        for loss in losses:
            self.step += 1
            self.watch.on_step(self, self.step, {"loss": loss})
        return self

    def evaluate(self, *losses):
        for loss in losses:
            self.watch.on_eval(self, self.step, {"loss": loss})
        return self

    @property
    def kinds_and_steps(self):
        return [(w["about"], w["step"]) for w in self.warnings]


def falling(steps, seed=0, noise=0.05, start=7.0, end=3.0):
    draw = random.Random(seed)
    return [end + (start - end) * math.exp(-i / 100) + draw.gauss(0, noise) for i in range(steps)]


def test_each_spike_is_reported_once():
    run = WatchedRun().train(*falling(300))
    assert run.warnings == []
    run.train(6.0, 7.0, 6.5, *falling(100, 1, start=3.2), 5.0, *falling(50, 2, start=3.1))
    assert run.kinds_and_steps == [("loss_spike", 301), ("loss_spike", 404)]
    first = run.warnings[0]
    assert first["loss"] == 6.0 and 3 < first["mean"] < 3.6 and first["deviation"] < 0.5
    assert first["text"].startswith("step 301: the loss jumped to 6.0000; its recent mean is 3.")


def test_one_spike_does_not_hide_the_next():
    """A spike changes mean and deviation only up to the limit that it has crossed."""
    run = WatchedRun().train(*falling(300), 1e6, *falling(30, 1, start=3.2), 6.0)
    assert run.kinds_and_steps == [("loss_spike", 301), ("loss_spike", 332)]


def test_no_spike_is_reported_before_the_warmup_or_without_variation():
    assert WatchedRun().train(*[3.0] * 20, 9.0, *[3.0] * 28).warnings == []
    assert WatchedRun().train(*[3.0] * 100, 3.02).warnings == []
    assert WatchedRun().train(*[3.0] * 100, 3.04).kinds_and_steps == [("loss_spike", 101)]


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_no_false_alarms_in_many_runs(noise):
    for seed in range(20):
        assert WatchedRun().train(*falling(1000, seed, noise, 12, 4)).warnings == [], seed


def test_no_false_alarm_for_small_losses_that_vary_by_multiples_of_themselves():
    """The losses of an almost perfect classifier are exponentially distributed, with a mean of 0.02."""
    draw = random.Random(1)
    losses = [2.3 * math.exp(-i / 40) + draw.expovariate(50) for i in range(1000)]
    assert WatchedRun(Watch(factor=12)).train(*losses).evaluate(2.3, 0.05, 0.04, 0.06, 0.07, 0.08).warnings == []


def test_a_rising_loss_is_reported_once_until_it_has_recovered():
    climbing = [3.0 + i / 100 for i in range(400)]
    run = WatchedRun().train(*falling(400), *climbing)
    assert [a for a, _ in run.kinds_and_steps] == ["divergence"]
    assert 500 < run.warnings[0]["step"] < 720 and "smoothed training loss has risen from 3." in run.warnings[0]["text"]
    run.train(*falling(400), *climbing)
    assert [a for a, _ in run.kinds_and_steps].count("divergence") == 2


def test_a_loss_that_rises_from_the_start_is_reported():
    run = WatchedRun().train(*[7 + i / 20 for i in range(200)])
    assert [a for a, _ in run.kinds_and_steps if a == "divergence"] == ["divergence"]


def test_a_held_out_loss_is_reported_after_two_high_evaluations():
    assert WatchedRun().evaluate(7.0, 4.0, 6.0, 4.0, 6.0).warnings == []
    run = WatchedRun().evaluate(7.0, 4.0, 6.0, 6.0, 6.0)
    assert (
        run.kinds_and_steps == [("divergence", 0)]
        and "the held-out loss has risen from 4.0000 to 6.0000" in (run.warnings[0]["text"])
    )
    assert WatchedRun().evaluate(7.0, 4.0, *[4.2] * 10).warnings == [], "slight overfitting must not be reported"


def test_a_held_out_loss_above_the_first_one_is_reported_at_the_last_evaluation():
    for losses, warned in (((7.0, 84.0), 1), ((7.0, 6.0, 9.0), 1), ((7.0, 4.0, 6.0), 0), ((7.0, 84.0, 84.0), 1)):
        run = WatchedRun()
        run.evaluate(*losses[:-1])
        run.step = run.steps
        run.evaluate(losses[-1])
        assert len(run.warnings) == warned, losses
    assert "held-out loss has risen from 7.0000 to 84.0000" in run.warnings[0]["text"]


def test_nan_and_infinite_losses_are_ignored():
    run = WatchedRun().train(*falling(100), math.nan, math.inf, *falling(50, 1, start=4.5)).evaluate(math.nan, math.inf)
    assert run.warnings == []
    json.dumps(run.watch.state(), allow_nan=False)


def test_a_resumed_run_has_the_warnings_of_an_uninterrupted_one():
    losses = [*falling(200), 9.0, 9.0, *falling(100, 1, start=4.0), *[8.0] * 120]
    uninterrupted = WatchedRun().train(*losses)
    assert len(uninterrupted.warnings) >= 2
    for cut in (10, 201, 330, 400):
        before = WatchedRun().train(*losses[:cut])
        after = WatchedRun()
        after.watch.resume(json.loads(json.dumps(before.watch.state())))
        after.step = cut
        after.train(*losses[cut:])
        assert before.warnings + after.warnings == uninterrupted.warnings


def test_a_warning_is_printed_logged_and_recorded_as_an_event(train):
    run = train("lr=1", "steps=100", "callbacks.watch.patience=5")
    assert run.code == 0, "a warning must not stop the run"
    warnings = run.select("warning")
    assert "divergence" in [w["about"] for w in warnings]
    for warning in warnings:
        assert f"toyexp: warning: {warning['text']}\n" in run.out
        assert f"WARNING {warning['text']}" in (run.dir / "log.txt").read_text()


def test_the_plots_mark_the_steps_of_warnings(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    from toyexp_callbacks.plots import Plots

    marked_steps = []
    monkeypatch.setattr(Axes, "axvline", lambda self, x, **style: marked_steps.append(x))
    plots = Plots()
    for step in range(1, 4):
        plots.on_step(step, {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0})
    plots.on_event("warning", {"about": "loss_spike", "step": 2, "text": "x"})
    plots.on_event("warning", {"text": "the disk is full"})
    plots.on_end(
        SimpleNamespace(steps=3, dir=tmp_path, bus=None, emit=lambda *a, **k: None, output=nullcontext), "completed"
    )
    assert {*marked_steps} == {2}


@pytest.mark.parametrize("word", ["factor=0", "factor=inf", "warmup=1", "horizon=0", "rise=-1", "patience=0"])
def test_invalid_settings_are_rejected(train, word):
    run = train(f"callbacks.watch.{word}")
    assert run.code == 2 and f"callbacks.watch.{word.split('=')[0]}=" in run.err


@pytest.mark.parametrize(
    "change",
    [{"mean": "x"}, {"steps": None}, {"training": {"first": "5", "best": 1.0, "high": 0}}, {"held_out": {}}],
)
def test_a_saved_state_with_wrong_types_is_rejected(change):
    watch = WatchedRun().train(*falling(20)).watch
    with pytest.raises((TypeError, ValueError)):
        watch.resume({**watch.state(), **change})
