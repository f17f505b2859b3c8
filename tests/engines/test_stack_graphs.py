"""A stack's use of CUDA graphs, on the CPU with stand-ins for GPU objects.

The stand-ins overwrite the memory that real graphs overwrite. tests/devices/test_stack_cuda.py checks on a GPU that
real graphs read all arrays that change.
"""

import numpy as np
import pytest
import torch
from stacks import (
    ADAMW,
    EXACT,
    OPTIMISERS,
    begin,
    begin_all,
    build_sessions,
    build_stack,
    make_jobs,
    make_training,
    take_all,
    train_alone,
)
from tiny import add_weights, batches

from toyexp.training.driver import drive
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_torch.stacks import stack
from toyexp_torch.stacks import step as stack_step


class Inputs:
    """Arrays in CPU memory that are uploaded together."""

    def __init__(self, kinds, sets=2):
        self._arrays = {key: np.zeros(shape, dtype) for key, (shape, dtype) in kinds.items()}
        self.tensors = {key: torch.from_numpy(array) for key, array in self._arrays.items()}

    def put(self, parts):
        assert [*parts] == ["idle"] or parts.keys() == self._arrays.keys()
        for key, arrays in parts.items():
            np.concatenate(arrays, out=self._arrays[key], casting="same_kind")


class Results:
    """Buffers for the numbers of `steps` steps under way; a further step overwrites the first."""

    def __init__(self, size, dtype, steps=2):
        self._hosts = [torch.full((size,), torch.nan, dtype=dtype) for _ in range(steps)]

    def fetch(self, numbers):
        host = self._hosts.pop(0).copy_(numbers)
        self._hosts.append(host)
        return host.tolist


class CapturedCall:
    """A call that is rehearsed twice and then recorded, like a graph."""

    instances: list = []

    def __init__(self, title, work, rehearse, pool, uncaptured_reason=""):
        self._work, self._rehearse, self.uncaptured_reason, self._ready = work, rehearse, uncaptured_reason, False
        self.instances.append(self)

    def prepare(self):
        if not self._ready:
            for _ in range(2):
                self._rehearse()
            self._ready = True

    def __call__(self):
        self.prepare()
        return self._work()

    def close(self):
        self._work = None


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    for stand_in in (Inputs, Results, CapturedCall):
        monkeypatch.setattr(stack_step, stand_in.__name__, stand_in)
    monkeypatch.setattr(CapturedCall, "instances", [])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(stack.TorchStack, "on_gpu", True)
    return CapturedCall.instances


def assert_as_alone(jobs, losses, sessions, steps):
    for i, (job, ours) in enumerate(zip(jobs, losses, strict=True)):
        theirs, kept = train_alone(job, steps, EXACT)
        np.testing.assert_allclose(ours, theirs, rtol=1e-11)
        for name, values in sessions[i].snapshot().items() if sessions else ():
            np.testing.assert_allclose(values, kept[name], atol=1e-11, err_msg=name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_launched_ahead_have_the_losses_of_each_run_alone(name, ahead):
    jobs = make_jobs("llama", OPTIMISERS[name], accumulate=2, rows=2, grad_clip=0.3, skip_nonfinite=True)
    stack, sessions = build_stack(jobs, EXACT)
    assert all(session.depth == 16 for session in sessions)
    losses, pending = [[] for _ in jobs], [[] for _ in jobs]
    for step in range(7):
        for i, wait in enumerate(begin_all(stack, jobs, step)):
            pending[i].append(wait)
        for i, waits in enumerate(pending):
            if len(waits) > ahead:
                losses[i].append(waits.pop(0)())
    for i, waits in enumerate(pending):
        losses[i] += [wait() for wait in waits]
    assert_as_alone(jobs, losses, sessions, 7)


def test_more_steps_can_be_launched_than_there_are_result_buffers(graphs):
    jobs = make_jobs("llama", OPTIMISERS["adamw"], accumulate=2, rows=2)
    stack, sessions = build_stack(jobs, EXACT)
    waits = [begin_all(stack, jobs, step) for step in range(24)]
    assert_as_alone(jobs, [[each[i]() for each in waits] for i in range(len(jobs))], sessions, 24)
    assert len(graphs) == 2


def test_a_step_that_fails_to_launch_does_not_change_earlier_results(monkeypatch):
    (job, *_) = jobs = make_jobs("llama", OPTIMISERS["adamw"])
    stack, _ = build_stack(jobs, EXACT)
    waits = [begin(stack, jobs, {0: step})[0] for step in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(stack_step.StackedResident, "launch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begin(stack, jobs, {0: 8})
    for step in range(8, 20):
        begin(stack, jobs, {0: step})
    expected, _ = train_alone(job, 8, EXACT)
    np.testing.assert_allclose([wait() for wait in waits], expected, rtol=1e-11)


def test_a_run_that_takes_no_step_keeps_its_state(graphs):
    jobs = make_jobs("llama", ADAMW)
    stack, sessions = build_stack(jobs, EXACT)
    before = sessions[1].snapshot()
    losses = [[], [], []]
    for step in range(5):
        active = [0, 2] if step < 3 else [0, 1, 2]
        steps = {i: step - 3 if i == 1 else step for i in active}
        for i, wait in zip(active, begin(stack, jobs, steps), strict=True):
            losses[i].append(wait())
        if step == 2:
            assert all(np.array_equal(values, before[name]) for name, values in sessions[1].snapshot().items())
    assert_as_alone([jobs[0], jobs[2]], [losses[0], losses[2]], None, 5)
    assert_as_alone([jobs[1]], [losses[1]], [sessions[1]], 2)
    assert len(graphs) == 2  # one for the step and one for the held-out loss


def test_the_graph_is_captured_again_when_enough_runs_have_ended(graphs):
    optimisers = [(AdamWOptimiser(mode="lora", weight_decay=0.1), 0.01 / (1 + i)) for i in range(6)]
    jobs = make_jobs("llama", optimisers)
    stack, sessions = build_stack(jobs, EXACT)
    lengths, losses, capture_counts = [2, 6, 4, 6, 4, 6], [[] for _ in jobs], []
    for step in range(6):
        active = [i for i in range(6) if step < lengths[i]]
        for i, wait in zip(active, begin(stack, jobs, dict.fromkeys(active, step)), strict=True):
            losses[i].append(wait())
        capture_counts.append(len(graphs) // 2)
        for i in range(6):
            if lengths[i] == step + 1 < 6:
                sessions[i].close()
    assert capture_counts == [1, 1, 1, 1, 2, 2]  # five of six are enough, three are not
    for job, ours, count in zip(jobs, losses, lengths, strict=True):
        assert_as_alone([job], [ours], None, count)


def test_held_out_losses_computed_together_are_those_of_each_run(graphs):
    jobs = make_jobs("llama", ADAMW)
    stack, sessions = build_stack(jobs, EXACT)
    take_all(stack, jobs, 0)
    held_out = [[add_weights(batches(3, 9).batch(k), k) for k in range(count)] for count in (3, 1, 2)]
    losses = [wait() for wait in stack.losses(dict(enumerate(held_out))).values()]
    for job, batches_of_job, loss in zip(jobs, held_out, losses, strict=True):
        with build_sessions([EXACT.realize(job.plan)])[0] as other:
            job.step(other, 0)
            assert loss == pytest.approx(other.evaluate(batches_of_job), rel=1e-12)
    assert sessions[1].evaluate(held_out[1]) == pytest.approx(losses[1], rel=1e-12)


def test_loops_that_launch_ahead_report_the_same_events_as_alone(tmp_path):
    jobs = make_jobs("llama", ADAMW)
    schedules = [(9, 3, 0), (9, 4, 0), (6, 2, 0)]
    stack, sessions = build_stack(jobs, EXACT)
    loops = [
        make_training(job, s, tmp_path, *schedule) for job, s, schedule in zip(jobs, sessions, schedules, strict=True)
    ]
    for watch, _ in loops:
        watch.should_wait = lambda step: False
    ends = drive([loop.requests() for _, loop in loops], stack)
    assert [end.steps for end in ends] == [9, 9, 6]
    for job, schedule, (ours, _) in zip(jobs, schedules, loops, strict=True):
        with build_sessions([EXACT.realize(job.plan)])[0] as session:
            theirs, loop = make_training(job, session, tmp_path, *schedule)
            loop.train()
        np.testing.assert_allclose(ours.steps, theirs.steps, rtol=1e-9)
        np.testing.assert_allclose(ours.evals, theirs.evals, rtol=1e-9)
