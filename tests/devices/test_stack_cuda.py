"""engine=cuda: steps of a stack as one graph, against the same kernels launched one by one, and against single runs."""

import dataclasses

import numpy as np
import pytest
from multi_device import OPTIMISERS
from stacks import lora_jobs
from tiny import add_weights, batches, plan

from toyexp import Stack, Unavailable
from toyexp.batching.tokens import Dropout
from toyexp.interfaces.plan import apply_optimiser
from toyexp_torch.engines import TorchCPU, TorchCUDA

pytestmark = pytest.mark.device("cuda")

try:
    TorchCUDA().check()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

STEPS, RATES = 8, (1e-2, 3e-3, 1e-3)
EXACT = TorchCUDA(dtype="float64")


def make_plans(name="adamw", model="llama", **changes):
    rule = OPTIMISERS[name].with_mode("lora")
    return [apply_optimiser(plan(model, seed=i, **changes), rule, lr) for i, lr in enumerate(RATES)]


def batch(the_plan, i, step):
    stream = batches(the_plan.rows * the_plan.accumulate, i)
    return add_weights((Dropout(stream, the_plan) if the_plan.dropout_adapters else stream).batch(step), step)


def step_input(session, i, step):
    return session.step_input(batch(session.plan, i, step), session.plan.numbers(step, RATES[i] / (1 + step / 10)))


def begin(stack, rows, step):
    """Begin a step of these rows; return a function for each that waits for its metrics."""
    return stack.step({i: step_input(stack.sessions[i], i, step) for i in rows})


def open_stack(plans, engine):
    stack = engine.realize_stack(plans)
    for session in stack.sessions:
        session.build()
    return stack


def train_together(plans, engine, lengths=(STEPS,) * 3, ahead=1):
    """Return each run's losses and norms, its held-out loss and final state, and why steps were not captured."""
    stack = open_stack(plans, engine)
    sessions = stack.sessions
    metrics, pending, ends = [[] for _ in plans], [[] for _ in plans], {}
    for step in range(max(lengths)):
        active = [i for i in range(len(plans)) if step < lengths[i]]
        for i, wait in begin(stack, active, step).items():
            pending[i].append(wait)
        for i in range(len(plans)):
            while len(pending[i]) > (ahead if step + 1 < lengths[i] else 0):
                metrics[i].append(pending[i].pop(0)())
        ending = [i for i in range(len(plans)) if step + 1 == lengths[i]]
        waits = stack.losses({i: [batch(plans[i], 9, k) for k in range(1 + i)] for i in ending})
        for i, wait in waits.items():
            ends[i] = wait(), sessions[i].snapshot(), sessions[i].describe()["captured"]
            sessions[i].close()
    return [(metrics[i], *ends[i]) for i in range(len(plans))]


def train_alone(the_plan, i, engine, steps=STEPS):
    with engine.realize(the_plan) as session:
        session.build()
        stack = Stack([session])
        metrics = [stack.step({0: step_input(session, i, step)})[0]() for step in range(steps)]
        return metrics, session.evaluate([batch(the_plan, 9, k) for k in range(1 + i)]), session.snapshot()


def assert_same_as_uncaptured(plans, lengths=(STEPS,) * 3, **settings):
    """Check that captured and uncaptured steps agree bit for bit, and that first losses equal those of single runs."""
    engine = TorchCUDA(deterministic=True, **settings)
    captured = train_together(plans, engine, lengths)
    uncaptured = train_together(plans, dataclasses.replace(engine, capture=False), lengths, ahead=0)
    for i, (ours, theirs) in enumerate(zip(captured, uncaptured, strict=True)):
        assert (ours[3], theirs[3]) == (True, "engine.capture=false")
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_equal(ours[1], theirs[1])
        for name, array in ours[2].items():
            np.testing.assert_array_equal(array, theirs[2][name], err_msg=name)
        rtol = 2e-2 if settings else 1e-5  # lower precision increases the effect of a different order of sums
        losses_alone = train_alone(plans[i], i, engine, lengths[i])[0]
        np.testing.assert_allclose([m.loss for m in ours[0]], [m.loss for m in losses_alone], rtol=rtol)


def test_steps_launched_ahead_are_bit_identical():
    """More steps are launched than there are result buffers before the first one is waited for."""
    plans, engine = make_plans(accumulate=2, rows=2), TorchCUDA(deterministic=True)
    expected = train_together(plans, engine, (24,) * 3)
    stack = open_stack(plans, engine)
    sessions = stack.sessions
    assert [session.depth for session in sessions] == [16] * 3
    waits = [begin(stack, range(3), step) for step in range(24)]
    for i, (metrics, _, snapshot, _) in enumerate(expected):
        np.testing.assert_array_equal([each[i]() for each in waits], metrics)
        for name, array in sessions[i].snapshot().items():
            np.testing.assert_array_equal(array, snapshot[name], err_msg=name)
        sessions[i].close()


@pytest.mark.parametrize("name", OPTIMISERS)
def test_captured_steps_of_every_optimiser_are_bit_identical(name):
    assert_same_as_uncaptured(make_plans(name))


@pytest.mark.parametrize("model", ["llama_all", "gemma", "gpt2", "qwen3"])
def test_captured_steps_of_every_family_are_bit_identical(model):
    assert_same_as_uncaptured(make_plans(model=model))


def test_captured_steps_of_plans_with_different_settings_are_bit_identical():
    plans = make_plans(accumulate=2, rows=2)
    clips = zip(plans, (0.0, 0.05, 1.0), (False, True, True), strict=True)
    assert_same_as_uncaptured([dataclasses.replace(p, grad_clip=clip, skip_nonfinite=skip) for p, clip, skip in clips])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_that_ends_does_not_affect_the_others(name):
    assert_same_as_uncaptured(make_plans(name), lengths=(3, 8, 5))


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"tf32": True}])
def test_captured_steps_with_settings_of_the_engine_are_bit_identical(settings):
    assert_same_as_uncaptured(make_plans(), **settings)


@pytest.mark.parametrize("bases", [(0, 0, 0), (0, 1, 2)], ids=["of one base", "of three bases"])
def test_captured_steps_of_adapters_with_dropout_are_bit_identical(tmp_path, bases):
    plans = [job.plan for job in lora_jobs(tmp_path, bases, dropout=0.5)]
    assert_same_as_uncaptured(plans, lengths=(8, 4, 6))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
@pytest.mark.parametrize("model", ["llama", "gpt2_untied"])
def test_results_in_float64_agree_with_each_run_alone_on_the_cpu(model, name):
    plans = make_plans(name, model, grad_clip=0.1)
    for i, (metrics, loss, snapshot, _) in enumerate(train_together(plans, EXACT, (8, 3, 6))):
        theirs = train_alone(plans[i], i, TorchCPU(dtype="float64"), (8, 3, 6)[i])
        np.testing.assert_allclose(metrics, theirs[0], rtol=1e-9)
        assert loss == pytest.approx(theirs[1], rel=1e-9)
        for tensor, values in theirs[2].items():
            np.testing.assert_allclose(snapshot[tensor], values, atol=1e-9, err_msg=tensor)


def test_losses_in_float32_agree_with_each_run_alone_on_the_cpu():
    plans = make_plans()
    for i, (ours, *_) in enumerate(train_together(plans, TorchCUDA())):
        theirs = train_alone(plans[i], i, TorchCPU())[0]
        np.testing.assert_allclose([m.loss for m in ours], [m.loss for m in theirs], rtol=1e-4)


@pytest.mark.parametrize("skips", [True, False])
def test_nonfinite_numbers_of_one_run_do_not_affect_the_others(skips):
    plans = [dataclasses.replace(p, skip_nonfinite=skips) for p in make_plans()]
    expected = train_together(plans, TorchCUDA(deterministic=True))
    stack = TorchCUDA(deterministic=True).realize_stack(plans)
    sessions = stack.sessions
    sessions[1].upload("output_norm.weight", np.full(32, np.nan, np.float32))
    for session in sessions:
        session.build()
    before = sessions[1].snapshot()
    for step in range(STEPS):
        waits = begin(stack, range(3), step)
        assert [bool(np.isfinite(wait()).all()) for wait in waits.values()] == [True, False, True]
    for i in (0, 2):
        for name, values in sessions[i].snapshot().items():
            np.testing.assert_array_equal(values, expected[i][2][name], err_msg=name)
    unchanged = all(np.array_equal(v, before[n], equal_nan=True) for n, v in sessions[1].snapshot().items())
    assert unchanged == skips
