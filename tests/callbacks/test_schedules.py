import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toyexp import RunPreview
from toyexp.cli.main import main
from toyexp_callbacks.schedules import Constant, Cosine, Linear, WarmupStableDecay

# n=20, 1e-3 -> 1e-5, warm-up 5: the original's own table.
GOLDEN = [
    2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3, 9.891831e-4, 9.57205e-4, 9.054634e-4, 8.362197e-4, 7.525e-4,
    6.579634e-4, 5.567416e-4, 4.532584e-4, 3.520366e-4, 2.575e-4, 1.737803e-4, 1.045366e-4, 5.2795e-5, 2.081694e-5,
]  # fmt: skip
DIGITS = 5e-7  # relative; the table has seven digits

SCHEDULES = [Constant, Linear, Cosine, WarmupStableDecay]


def test_cosine_stays_at_its_low_end_after_the_last_step():
    schedule = Cosine(warmup=5, floor=0.01)
    assert [schedule.factor(k, 20) for k in (20, 10**6)] == pytest.approx([0.01, 0.01], rel=1e-12)


def test_cosine_gives_the_golden_warm_up_of_the_vision_recipe():
    schedule = Cosine(warmup=10, floor=1e-4 / 3e-3)
    assert [3e-3 * schedule.factor(k, 100) for k in range(5)] == pytest.approx([3e-4, 6e-4, 9e-4, 1.2e-3, 1.5e-3])


def test_cosine_with_no_room_after_the_warm_up_falls_to_its_low_end():
    schedule = Cosine(warmup=3, floor=0.25)
    assert [schedule.factor(k, 3) for k in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 0.25])


def test_the_cosine_callback_times_the_base_rate_is_the_golden_table():
    schedule = Cosine(warmup=5, floor=0.01)
    assert [1e-3 * schedule.factor(k, 20) for k in range(20)] == pytest.approx(GOLDEN, rel=DIGITS)


def test_constant_is_one_after_its_warm_up():
    assert [Constant(warmup=4).factor(k, 6) for k in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert Constant().factor(0, 6) == 1


def test_linear_is_a_straight_line_to_its_floor():
    assert [Linear(warmup=2, floor=0.5).factor(k, 6) for k in range(7)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]


def test_wsd_is_flat_and_then_a_straight_line():
    schedule = WarmupStableDecay(warmup=2, decay=0.4, floor=0.0)
    assert [schedule.factor(k, 10) for k in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_wsd_without_descent_stays_on_its_plateau():
    assert {WarmupStableDecay(decay=0.0).factor(k, 10) for k in range(10)} == {1.0}


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 300))
def test_every_schedule_rises_to_at_most_one_and_then_never_rises_again(kind, steps, warmup):
    rates = [kind(warmup=warmup).factor(k, steps) for k in range(steps)]
    assert all(0 <= r <= 1 for r in rates)
    assert all(b >= a for a, b in itertools.pairwise(rates[:warmup]))
    assert all(b <= a for a, b in itertools.pairwise(rates[warmup:]))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_warmup_below_one_is_a_share_of_the_run(kind):
    share, steps = kind(warmup=0.1), kind(warmup=3)  # of 21 steps, rounded up
    assert [share.factor(k, 21) for k in range(21)] == [steps.factor(k, 21) for k in range(21)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_warmup_of_one_is_a_step_and_no_share(kind):
    for warmup in (1, 1.0):
        assert [kind(warmup=warmup).factor(k, 20) for k in (0, 1)] == [1.0, kind(warmup=1).decay_factor(1, 20)]
    assert kind(warmup=0.99).factor(1, 20) == 0.1


def test_a_share_of_warmup_that_reaches_into_the_descent_is_told():
    """Of 10 steps the last 6 descend: a warmup of half reaches into them, one of 0.4 ends where they begin."""
    planned = RunPreview({"steps": 10}, None, None, SimpleNamespace(updates=()))
    told = [[*WarmupStableDecay(warmup=share, decay=0.6).warnings(planned)] for share in (0.5, 0.4)]
    assert [len(lines) for lines in told] == [1, 0] and "warmup=0.5: overlaps the decay" in told[0][0]


def test_the_rate_a_run_uses_is_the_base_rate_times_the_factor(train):
    run = train("callbacks=[wsd,events]", "callbacks.wsd.warmup=3", "callbacks.wsd.decay=0.5", "lr=0.01")
    expected = [0.01 * WarmupStableDecay(warmup=3, decay=0.5).factor(k, 12) for k in range(12)]
    assert [e["lr"] for e in run.of("step")] == pytest.approx(expected, rel=1e-15)


def test_what_is_scaled_beside_the_rate_is_recorded_at_each_step(train):
    falls = ["callbacks=[constant,linear,events]", "callbacks.linear.scales=weight_decay", "optim.weight_decay=2"]
    own = "optim.groups={*attn*:{weight_decay:1}}"
    run = train(*falls, own, "steps=4")
    assert [e["weight_decay_factor"] for e in run.of("step")] == [1, 0.75, 0.5, 0.25]
    assert [e["weight_decay"] for e in run.of("step")] == [2, 1.5, 1, 0.5]
    assert run.events[0]["schedules"] == {"constant": "lr", "linear": "weight_decay"}


def test_one_schedule_scales_two_numbers_of_a_run_under_its_two_names(train):
    words = ["optim=sgd", "callbacks=[linear,linear_2,events]", "callbacks.linear.warmup=4", "lr=0.1"]
    words += ["callbacks.linear_2.scales=momentum", "callbacks.linear_2.floor=0.5", "checkpoint_every=2"]
    run = train(*words, "steps=2")
    assert run.code == 0, run.err
    assert main([f"resume={run.dir}", "steps=4"]) == 0
    assert [e["lr"] for e in run.of("step")] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    factors = [e["momentum_factor"] for e in run.of("step")]
    assert factors == pytest.approx([Linear(floor=0.5).factor(*at) for at in ((0, 2), (1, 2), (2, 4), (3, 4))])
    assert [e["momentum"] for e in run.of("step")] == pytest.approx([0.9 * factor for factor in factors])


def test_the_value_of_a_number_is_that_of_the_rule_which_has_it(train):
    run = train("optim=muon", "callbacks=[constant,events]", "callbacks.constant.scales=momentum",
                "callbacks.constant.warmup=2", "steps=3")  # fmt: skip
    assert [e["momentum"] for e in run.of("step")] == [0.475, 0.95, 0.95]


def test_a_run_without_a_schedule_uses_the_base_rate(train):
    run = train("callbacks=[events]", "lr=0.01", "steps=3")
    assert [e["lr"] for e in run.of("step")] == [0.01] * 3


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("default,linear,linear", "has linear twice; name it once (a second schedule is linear_2)"),
        ("events,plots,events", "has events twice; name it once"),
    ],
)
def test_a_callback_that_is_named_twice_is_refused(train, names, said):
    run = train(f"callbacks=[{names}]")
    assert run.code == 2 and not run.dir.exists()
    assert run.err.startswith(f"toyexp: error: callbacks=[{names}]: {said}")


def test_two_schedules_are_refused_with_what_to_type(train):
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
def test_numbers_out_of_range_are_refused_by_name(train, word):
    key, _, value = word.partition("=")
    run = train(f"callbacks=[{key.split('.')[1]}]", word)
    assert run.code == 2
    assert key in run.err and value in run.err
    assert not run.dir.exists()
