"""Spikes and divergence are warned of once; a run that learns as usual hears nothing."""

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


class Told:
    """A run that notes what it is warned of."""

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
    def abouts(self):
        return [(w["about"], w["step"]) for w in self.warnings]


def falling(steps, seed=0, noise=0.05, start=7.0, end=3.0):
    draw = random.Random(seed)
    return [end + (start - end) * math.exp(-i / 100) + draw.gauss(0, noise) for i in range(steps)]


def test_a_spike_is_told_once_and_the_next_one_again():
    run = Told().train(*falling(300))
    assert run.warnings == []
    run.train(6.0, 7.0, 6.5, *falling(100, 1, start=3.2), 5.0, *falling(50, 2, start=3.1))
    assert run.abouts == [("loss_spike", 301), ("loss_spike", 404)]
    first = run.warnings[0]
    assert first["loss"] == 6.0 and 3 < first["mean"] < 3.6 and first["deviation"] < 0.5
    assert first["text"].startswith("step 301: the loss jumped to 6.0000; its recent mean is 3.")


def test_one_spike_does_not_hide_the_next():
    """It enters mean and deviation only up to the limit it has crossed."""
    run = Told().train(*falling(300), 1e6, *falling(30, 1, start=3.2), 6.0)
    assert run.abouts == [("loss_spike", 301), ("loss_spike", 332)]


def test_nothing_is_a_spike_before_the_warm_up_or_where_nothing_varies():
    assert Told().train(*[3.0] * 20, 9.0, *[3.0] * 28).warnings == []
    assert Told().train(*[3.0] * 100, 3.02).warnings == []
    assert Told().train(*[3.0] * 100, 3.04).abouts == [("loss_spike", 101)]


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_no_false_alarms_in_many_runs(noise):
    for seed in range(20):
        assert Told().train(*falling(1000, seed, noise, 12, 4)).warnings == [], seed


def test_no_false_alarm_for_small_losses_that_vary_by_multiples_of_themselves():
    """As of a classifier that is nearly always right: exponential, with a mean of 0.02."""
    draw = random.Random(1)
    losses = [2.3 * math.exp(-i / 40) + draw.expovariate(50) for i in range(1000)]
    assert Told(Watch(factor=12)).train(*losses).evaluate(2.3, 0.05, 0.04, 0.06, 0.07, 0.08).warnings == []


def test_a_climbing_loss_is_told_once_until_it_has_recovered():
    climbing = [3.0 + i / 100 for i in range(400)]
    run = Told().train(*falling(400), *climbing)
    assert [a for a, _ in run.abouts] == ["divergence"]
    assert 500 < run.warnings[0]["step"] < 720 and "smoothed training loss has risen from 3." in run.warnings[0]["text"]
    run.train(*falling(400), *climbing)
    assert [a for a, _ in run.abouts].count("divergence") == 2


def test_a_run_that_only_gets_worse_is_told_too():
    run = Told().train(*[7 + i / 20 for i in range(200)])
    assert [a for a, _ in run.abouts if a == "divergence"] == ["divergence"]


def test_the_held_out_loss_needs_two_high_looks():
    assert Told().evaluate(7.0, 4.0, 6.0, 4.0, 6.0).warnings == []
    run = Told().evaluate(7.0, 4.0, 6.0, 6.0, 6.0)
    assert (
        run.abouts == [("divergence", 0)]
        and "the held-out loss has risen from 4.0000 to 6.0000" in (run.warnings[0]["text"])
    )
    assert Told().evaluate(7.0, 4.0, *[4.2] * 10).warnings == [], "a model that begins to learn by heart converges"


def test_a_run_that_ends_worse_than_it_began_is_told_by_its_last_look():
    for losses, warned in (((7.0, 84.0), 1), ((7.0, 6.0, 9.0), 1), ((7.0, 4.0, 6.0), 0), ((7.0, 84.0, 84.0), 1)):
        run = Told()
        run.evaluate(*losses[:-1])
        run.step = run.steps
        run.evaluate(losses[-1])
        assert len(run.warnings) == warned, losses
    assert "held-out loss has risen from 7.0000 to 84.0000" in run.warnings[0]["text"]


def test_numbers_that_are_none_are_left_to_the_run():
    run = Told().train(*falling(100), math.nan, math.inf, *falling(50, 1, start=4.5)).evaluate(math.nan, math.inf)
    assert run.warnings == []
    json.dumps(run.watch.state(), allow_nan=False)


def test_a_resumed_run_hears_what_it_would_have_heard():
    losses = [*falling(200), 9.0, 9.0, *falling(100, 1, start=4.0), *[8.0] * 120]
    whole = Told().train(*losses)
    assert len(whole.warnings) >= 2
    for cut in (10, 201, 330, 400):
        before = Told().train(*losses[:cut])
        after = Told()
        after.watch.resume(json.loads(json.dumps(before.watch.state())))
        after.step = cut
        after.train(*losses[cut:])
        assert before.warnings + after.warnings == whole.warnings


def test_a_run_is_told_on_the_terminal_in_the_log_and_in_the_events(train):
    run = train("lr=1", "steps=100", "callbacks.watch.patience=5")
    assert run.code == 0, "it never stops a run"
    warnings = run.of("warning")
    assert "divergence" in [w["about"] for w in warnings]
    for warning in warnings:
        assert f"toyexp: warning: {warning['text']}\n" in run.out
        assert f"WARNING {warning['text']}" in (run.dir / "log.txt").read_text()


def test_the_curves_mark_what_was_warned_of(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    from toyexp_callbacks.plots import Plots

    marked = []
    monkeypatch.setattr(Axes, "axvline", lambda self, x, **style: marked.append(x))
    plots = Plots()
    for step in range(1, 4):
        plots.on_step(step, {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0})
    plots.on_event("warning", {"about": "loss_spike", "step": 2, "text": "x"})
    plots.on_event("warning", {"text": "the disk is full"})
    plots.on_end(
        SimpleNamespace(steps=3, dir=tmp_path, bus=None, emit=lambda *a, **k: None, output=nullcontext), "completed"
    )
    assert {*marked} == {2}


@pytest.mark.parametrize("word", ["factor=0", "factor=inf", "warmup=1", "horizon=0", "rise=-1", "patience=0"])
def test_settings_that_cannot_work_are_refused(train, word):
    run = train(f"callbacks.watch.{word}")
    assert run.code == 2 and f"callbacks.watch.{word.split('=')[0]}=" in run.err


@pytest.mark.parametrize(
    "change",
    [{"mean": "x"}, {"steps": None}, {"training": {"first": "5", "best": 1.0, "high": 0}}, {"held_out": {}}],
)
def test_a_state_of_other_types_is_not_taken(change):
    watch = Told().train(*falling(20)).watch
    with pytest.raises((TypeError, ValueError)):
        watch.resume({**watch.state(), **change})
