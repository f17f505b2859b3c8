import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toyexp import RunPreview
from toyexp.cli.main import main
from toyexp_callbacks.schedules import Constant, Cosine, Linear, WarmupStableDecay

# 20 steps, 1e-3 -> 1e-5, warmup 5: the table of the original program.
GOLDEN = [
    2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3, 9.891831e-4, 9.57205e-4, 9.054634e-4, 8.362197e-4, 7.525e-4,
    6.579634e-4, 5.567416e-4, 4.532584e-4, 3.520366e-4, 2.575e-4, 1.737803e-4, 1.045366e-4, 5.2795e-5, 2.081694e-5,
]  # fmt: skip
DIGITS = 5e-7  # relative; the table has seven digits

SCHEDULES = [Constant, Linear, Cosine, WarmupStableDecay]


def test_cosine_stays_at_its_floor_after_the_last_step():
    schedule = Cosine(warmup=5, floor=0.01)
    assert [schedule.factor(k, 20) for k in (20, 10**6)] == pytest.approx([0.01, 0.01], rel=1e-12)


def test_cosine_has_the_reference_warmup_of_the_vision_recipe():
    schedule = Cosine(warmup=10, floor=1e-4 / 3e-3)
    assert [3e-3 * schedule.factor(k, 100) for k in range(5)] == pytest.approx([3e-4, 6e-4, 9e-4, 1.2e-3, 1.5e-3])


def test_cosine_without_steps_after_the_warmup_falls_to_its_floor():
    schedule = Cosine(warmup=3, floor=0.25)
    assert [schedule.factor(k, 3) for k in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 0.25])


def test_cosine_agrees_with_the_reference_table():
    schedule = Cosine(warmup=5, floor=0.01)
    assert [1e-3 * schedule.factor(k, 20) for k in range(20)] == pytest.approx(GOLDEN, rel=DIGITS)


def test_constant_is_one_after_its_warm_up():
    assert [Constant(warmup=4).factor(k, 6) for k in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert Constant().factor(0, 6) == 1


def test_linear_is_a_straight_line_to_its_floor():
    assert [Linear(warmup=2, floor=0.5).factor(k, 6) for k in range(7)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]


def test_wsd_is_constant_and_then_linear():
    schedule = WarmupStableDecay(warmup=2, decay=0.4, floor=0.0)
    assert [schedule.factor(k, 10) for k in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_wsd_without_decay_stays_constant():
    assert {WarmupStableDecay(decay=0.0).factor(k, 10) for k in range(10)} == {1.0}


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 300))
def test_every_schedule_rises_to_at_most_1_and_then_never_rises(kind, steps, warmup):
    rates = [kind(warmup=warmup).factor(k, steps) for k in range(steps)]
    assert all(0 <= r <= 1 for r in rates)
    assert all(b >= a for a, b in itertools.pairwise(rates[:warmup]))
    assert all(b <= a for a, b in itertools.pairwise(rates[warmup:]))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_warmup_below_one_is_a_share_of_the_run(kind):
    share, steps = kind(warmup=0.1), kind(warmup=3)  # 10 % of 21 steps, rounded up
    assert [share.factor(k, 21) for k in range(21)] == [steps.factor(k, 21) for k in range(21)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_warmup_of_1_is_one_step(kind):
    for warmup in (1, 1.0):
        assert [kind(warmup=warmup).factor(k, 20) for k in (0, 1)] == [1.0, kind(warmup=1).decay_factor(1, 20)]
    assert kind(warmup=0.99).factor(1, 20) == 0.1


def test_a_warning_is_printed_for_a_warmup_that_overlaps_the_decay():
    """The last 6 of 10 steps decay: a warmup of 0.5 overlaps them, a warmup of 0.4 does not."""
    preview = RunPreview({"steps": 10}, None, None, SimpleNamespace(updates=()))
    warnings = [[*WarmupStableDecay(warmup=share, decay=0.6).warnings(preview)] for share in (0.5, 0.4)]
    assert [len(lines) for lines in warnings] == [1, 0] and "warmup=0.5: overlaps the decay" in warnings[0][0]


def test_a_run_that_ends_in_the_warmup_of_its_rate_is_warned_of_the_rate_that_it_reaches():
    preview = RunPreview({"steps": 10}, None, None, SimpleNamespace(updates=(SimpleNamespace(weight_decay=1, rule=0),)))
    [line] = Linear(warmup=40).warnings(preview)
    assert line.startswith("callbacks.linear.warmup=40: the run has 10 steps") and "at 0.25 times lr" in line
    for silent in (Linear(warmup=9), Linear(warmup=0.9), Linear(warmup=40, scales="weight_decay")):
        assert [*silent.warnings(preview)] == []


def test_the_rate_a_run_uses_is_the_base_rate_times_the_factor(train):
    run = train("callbacks=[wsd,events]", "callbacks.wsd.warmup=3", "callbacks.wsd.decay=0.5", "lr=0.01")
    expected = [0.01 * WarmupStableDecay(warmup=3, decay=0.5).factor(k, 12) for k in range(12)]
    assert [e["lr"] for e in run.select("step")] == pytest.approx(expected, rel=1e-15)


def test_a_scaled_weight_decay_is_recorded_at_each_step(train):
    schedules = ["callbacks=[constant,linear,events]", "callbacks.linear.scales=weight_decay", "optim.weight_decay=2"]
    groups = "optim.groups={*attn*:{weight_decay:1}}"
    run = train(*schedules, groups, "steps=4")
    assert [e["weight_decay_factor"] for e in run.select("step")] == [1, 0.75, 0.5, 0.25]
    assert [e["weight_decay"] for e in run.select("step")] == [2, 1.5, 1, 0.5]
    assert run.events[0]["schedules"] == {"constant": "lr", "linear": "weight_decay"}


def test_a_schedule_can_be_used_twice_for_two_numbers(train):
    words = ["optim=sgd", "callbacks=[linear,linear_2,events]", "callbacks.linear.warmup=4", "lr=0.1"]
    words += ["callbacks.linear_2.scales=momentum", "callbacks.linear_2.floor=0.5", "checkpoint_every=2"]
    run = train(*words, "steps=2")
    assert run.code == 0, run.err
    assert main([f"resume={run.dir}", "steps=4"]) == 0
    assert [e["lr"] for e in run.select("step")] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    factors = [e["momentum_factor"] for e in run.select("step")]
    assert factors == pytest.approx(
        [Linear(floor=0.5).factor(*step_and_steps) for step_and_steps in ((0, 2), (1, 2), (2, 4), (3, 4))]
    )
    assert [e["momentum"] for e in run.select("step")] == pytest.approx([0.9 * factor for factor in factors])


def test_the_recorded_value_is_that_of_the_rule_that_has_the_number(train):
    run = train("optim=muon", "callbacks=[constant,events]", "callbacks.constant.scales=momentum",
                "callbacks.constant.warmup=2", "steps=3")  # fmt: skip
    assert [e["momentum"] for e in run.select("step")] == [0.475, 0.95, 0.95]


def test_a_run_without_a_schedule_uses_the_base_rate(train):
    run = train("callbacks=[events]", "lr=0.01", "steps=3")
    assert [e["lr"] for e in run.select("step")] == [0.01] * 3


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("default,linear,linear", "contains linear twice; name it once (for a second linear schedule, add linear_2)"),
        ("events,plots,events", "contains events twice; name it once"),
    ],
)
def test_a_callback_that_is_named_twice_is_rejected(train, names, message):
    run = train(f"callbacks=[{names}]")
    assert run.code == 2 and not run.dir.exists()
    assert run.err.startswith(f"toyexp: error: callbacks=[{names}]: {message}")


def test_two_schedules_of_the_learning_rate_are_rejected_with_advice(train):
    run = train("callbacks=[default,linear]")
    assert run.code == 2
    assert run.err == (
        "toyexp: error: callbacks cosine and linear both set the learning rate; drop one: '~callbacks.cosine'\n"
    )
    assert not run.dir.exists()


@pytest.mark.parametrize(
    "word",
    [
        "callbacks.cosine.warmup=-1",
        "callbacks.cosine.floor=1.5",
        "callbacks.linear.floor=-0.1",
        "callbacks.wsd.decay=2",
        "callbacks.constant.warmup=-3",
    ],
)
def test_numbers_out_of_range_are_rejected_by_name(train, word):
    key, _, value = word.partition("=")
    run = train(f"callbacks=[{key.split('.')[1]}]", word)
    assert run.code == 2
    assert key in run.err and value in run.err
    assert not run.dir.exists()
