"""What a stack does with its graphs, on the CPU with stand-ins for what only a GPU has.

The stand-ins overwrite what the real ones overwrite; that a real graph reads all that changes is held on a GPU, in
tests/devices/test_stack_cuda.py.
"""

import numpy as np
import pytest
import torch
from stacks import ADAMW, EXACT, OPTIMISERS, alone, built, jobs_of, training
from tiny import batches, weighted

from toyexp.training.driver import drive_together
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_torch import stack, stack_step


class Inputs:
    """Arrays that one copy brings, in the CPU's memory."""

    def __init__(self, kinds, sets=2):
        self._arrays = {key: np.zeros(shape, dtype) for key, (shape, dtype) in kinds.items()}
        self.tensors = {key: torch.from_numpy(array) for key, array in self._arrays.items()}

    def put(self, arrays):
        for key, array in arrays.items():
            np.copyto(self._arrays[key], array, casting="same_kind")

    def put_joined(self, parts):
        assert parts.keys() == self._arrays.keys()
        for key, arrays in parts.items():
            np.concatenate(arrays, out=self._arrays[key], casting="same_kind")


class Results:
    """Places for the numbers of so many steps on their way, of which one more overwrites the first."""

    def __init__(self, size, dtype, steps=2):
        self._hosts = [torch.full((size,), torch.nan, dtype=dtype) for _ in range(steps)]

    def fetch(self, numbers):
        host = self._hosts.pop(0).copy_(numbers)
        self._hosts.append(host)
        return host.tolist


class Captured:
    """Rehearsed twice and then noted, as a graph is."""

    made: list = []

    def __init__(self, title, work, rehearse, pool, refused=""):
        self._work, self._rehearse, self.refused, self._ready = work, rehearse, refused, False
        self.made.append(self)

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
    for it in (Inputs, Results, Captured):
        monkeypatch.setattr(stack_step, it.__name__, it)
    monkeypatch.setattr(Captured, "made", [])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(stack.Stack, "runs_ahead", True)
    return Captured.made


def opened(jobs):
    return built(EXACT.realize_stack([job.plan for job in jobs]))


def assert_as_alone(jobs, losses, sessions, steps):
    for i, (job, ours) in enumerate(zip(jobs, losses, strict=True)):
        theirs, kept = alone(job, steps, EXACT)
        np.testing.assert_allclose(ours, theirs, rtol=1e-11)
        for name, values in sessions[i].snapshot().items() if sessions else ():
            np.testing.assert_allclose(values, kept[name], atol=1e-11, err_msg=name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_are_those_of_each_run_alone_also_when_they_are_launched_ahead(name, ahead):
    jobs = jobs_of("llama", OPTIMISERS[name], accumulate=2, rows=2, grad_clip=0.3, skip_nonfinite=True)
    sessions = opened(jobs)
    assert all(session.runs_ahead for session in sessions)
    losses, under_way = [[] for _ in jobs], [[] for _ in jobs]
    for step in range(7):
        for i, (job, session) in enumerate(zip(jobs, sessions, strict=True)):
            under_way[i].append(job.step(session, step))
            if len(under_way[i]) > ahead:
                losses[i].append(under_way[i].pop(0)()) if ahead or i == len(jobs) - 1 else None
        if not ahead:
            for i in range(len(jobs) - 1):
                losses[i].append(under_way[i].pop(0)())
    for i, waits in enumerate(under_way):
        losses[i] += [wait() for wait in waits]
    assert_as_alone(jobs, losses, sessions, 7)


def test_several_steps_at_once_are_those_of_each_run_alone(graphs):
    """More of them than numbers are kept of before one is waited for; a run that wants fewer rests."""
    jobs, lengths = jobs_of("llama", OPTIMISERS["adamw"], accumulate=2, rows=2), [(8, 8, 8), (3, 8, 8), (8, 1, 8)]
    sessions = opened(jobs)
    assert [session.steps_at_once for session in sessions] == [8, 8, 8]
    waits, steps = [[] for _ in jobs], [0] * len(jobs)
    for turn in range(3):
        for i, (job, session) in enumerate(zip(jobs, sessions, strict=True)):
            asked = range(steps[i], steps[i] + lengths[i][turn])
            wanted = [(job.batch(k), job.plan.numbers(k, job.lr / (1 + k / 10))) for k in asked]
            waits[i].append(session.launch_several(wanted))
            steps[i] += len(wanted)
    for i, job in enumerate(jobs):
        losses = [metrics for wait in waits[i] for metrics in wait()]
        assert_as_alone([job], [losses], [sessions[i]], sum(lengths[i]))
    assert len(graphs) == 2


def test_steps_before_one_that_cannot_be_begun_count_among_those_whose_numbers_are_kept(monkeypatch):
    (job, *_) = jobs = jobs_of("llama", OPTIMISERS["adamw"])
    sessions = opened(jobs)

    def several(first):
        wanted = [(job.batch(k), job.plan.numbers(k, job.lr / (1 + k / 10))) for k in range(first, first + 8)]
        return sessions[0].launch_several(wanted)

    waiting = several(0)
    sessions[0].all_launched()
    launch, left = stack_step.StackedResident.launch, [None] * 3
    with monkeypatch.context() as patch:
        patch.setattr(stack_step.StackedResident, "launch", lambda *given: [left.pop(), launch(*given)][1])
        broken = several(8)
        with pytest.raises(IndexError):
            broken()
    several(8)
    sessions[0].all_launched()
    theirs, _ = alone(job, 8, EXACT)
    np.testing.assert_allclose(waiting(), theirs, rtol=1e-11)


def test_a_run_that_asks_for_no_step_keeps_all_that_it_has(graphs):
    jobs = jobs_of("llama", ADAMW)
    sessions = opened(jobs)
    before = sessions[1].snapshot()
    losses = [[], [], []]
    for step in range(5):
        going = [0, 2] if step < 3 else [0, 1, 2]
        waits = [(i, jobs[i].step(sessions[i], step - 3 if i == 1 else step)) for i in going]
        for i, wait in waits:
            losses[i].append(wait())
        if step == 2:
            assert all(np.array_equal(values, before[name]) for name, values in sessions[1].snapshot().items())
    assert_as_alone([jobs[0], jobs[2]], [losses[0], losses[2]], None, 5)
    assert_as_alone([jobs[1]], [losses[1]], [sessions[1]], 2)
    assert len(graphs) == 2  # of the step and of the held-out loss, once each


def test_a_graph_is_made_anew_when_enough_runs_have_left(graphs):
    optimisers = [(AdamWOptimiser(mode="lora", weight_decay=0.1), 0.01 / (1 + i)) for i in range(6)]
    jobs, sessions = jobs_of("llama", optimisers), None
    sessions = opened(jobs)
    lengths, losses, steps = [2, 6, 4, 6, 4, 6], [[] for _ in jobs], []
    for step in range(6):
        waits = [(i, jobs[i].step(sessions[i], step)) for i in range(6) if step < lengths[i]]
        for i, wait in waits:
            losses[i].append(wait())
        steps.append(len(graphs) // 2)
        for i in range(6):
            if lengths[i] == step + 1 < 6:
                sessions[i].close()
    assert steps == [1, 1, 1, 1, 2, 2]  # five of six are enough, three are not
    for job, ours, count in zip(jobs, losses, lengths, strict=True):
        assert_as_alone([job], [ours], None, count)


def test_losses_of_several_runs_are_computed_together_and_are_those_of_each(graphs):
    jobs = jobs_of("llama", ADAMW)
    sessions = opened(jobs)
    for wait in [job.step(session, 0) for job, session in zip(jobs, sessions, strict=True)]:
        wait()
    held_out = [[weighted(batches(3, 9).batch(k), k) for k in range(count)] for count in (3, 1, 2)]
    waits = [session.launch_evaluation(own) for session, own in zip(sessions, held_out, strict=True)]
    found = [wait() for wait in waits]
    for job, own, loss in zip(jobs, held_out, found, strict=True):
        with built([EXACT.realize(job.plan)])[0] as other:
            job.step(other, 0)()
            assert loss == pytest.approx(other.evaluate(own), rel=1e-12)
    assert sessions[1].evaluate(held_out[0]) == pytest.approx(sessions[1].launch_evaluation(held_out[0])(), rel=0)


def test_loops_run_ahead_and_hear_what_they_hear_alone(tmp_path):
    jobs = jobs_of("llama", ADAMW)
    how = [(9, 3, 0), (9, 4, 0), (6, 2, 0)]
    sessions = opened(jobs)
    stacked = [training(job, s, tmp_path, *of) for job, s, of in zip(jobs, sessions, how, strict=True)]
    for watch, _ in stacked:
        watch.looks = lambda step: False
    ends = drive_together([it.asks() for _, it in stacked], sessions)
    assert [end.steps for end in ends] == [9, 9, 6]
    for job, of, (ours, _) in zip(jobs, how, stacked, strict=True):
        with built([EXACT.realize(job.plan)])[0] as session:
            theirs, it = training(job, session, tmp_path, *of)
            it.train()
        np.testing.assert_allclose(ours.steps, theirs.steps, rtol=1e-9)
        np.testing.assert_allclose(ours.evals, theirs.evals, rtol=1e-9)
