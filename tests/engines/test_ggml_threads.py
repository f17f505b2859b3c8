"""The number of threads that ggml uses on the CPU: fewer if that is faster, always with the same results."""

import numpy as np
import pytest
from tiny import batches, plan

from toyexp import AdamW
from toyexp_ggml.binding.backend import GAIN, PAUSE, ThreadTuner
from toyexp_ggml.engines import GGMLCPU


class Machine:
    """A clock that advances by the time of a computation with so many threads while `busy` other processes run.

    Processes that run only briefly take cores away, but no time.
    """

    def __init__(self, cores, busy=0, look_in=0):
        self.cores, self.busy, self.look_in, self.now, self.lost = cores, busy, look_in, 0.0, 0

    def compute(self, crew):
        with crew.measure():
            waiting = crew.threads + self.busy > self.cores
            seconds = 0.2 if waiting else 0.04 / crew.threads
            self.now += seconds
            self.lost += 20 if waiting else self.look_in
        return crew.threads

    def crew(self, **fixed):
        return ThreadTuner(
            self.cores, **fixed, clock=lambda: self.now, lost=lambda: self.lost, others=lambda: self.busy
        )

    def compute_often(self, crew, times):
        return [self.compute(crew) for _ in range(times)]


def test_all_threads_compute_while_no_core_is_lost():
    machine = Machine(cores=4)
    assert set(machine.compute_often(machine.crew(), 1000)) == {4}


@pytest.mark.parametrize(("busy", "best"), [(1, 3), (2, 2), (3, 1)])
def test_busy_cores_are_left_to_others_within_a_few_computations(busy, best):
    machine = Machine(cores=4, busy=busy)
    crew = machine.crew()
    first, later = machine.compute_often(crew, 30), machine.compute_often(crew, 2000)
    assert first[-1] == best
    assert later.count(best) > 0.9 * len(later)


def test_trials_cost_little_where_fewer_threads_are_no_faster():
    machine = Machine(cores=2, look_in=10)
    used = machine.compute_often(machine.crew(), 1000)
    assert 1 in used, "there were trials"
    assert machine.now < 1000 * 0.02 * (1 + 2 / PAUSE)


def test_trials_in_vain_become_rarer_but_never_rarer_than_at_an_eighth():
    machine, began = Machine(cores=2, look_in=10), []
    crew = machine.crew()
    while len(began) < 6:
        before = crew.threads
        machine.compute(crew)
        if crew.threads < before:
            began.append(machine.now)
    between = np.diff(began)
    np.testing.assert_allclose(between[1:] / between[:-1], [2, 2, 1, 1], rtol=0.1)


def test_all_threads_are_back_once_the_others_have_ended():
    machine = Machine(cores=2, busy=1)
    crew = machine.crew()
    assert machine.compute_often(crew, 100)[-1] == 1
    machine.busy, ended = 0, machine.now
    while crew.threads == 1:
        machine.compute(crew)
    machine.compute_often(crew, 50)
    assert crew.threads == 2
    assert machine.now - ended < 60


def test_a_gain_that_is_none_changes_nothing():
    machine = Machine(cores=2, busy=1)
    crew, used = machine.crew(), []
    for _ in range(500):
        used.append(crew.threads)
        with crew.measure():
            machine.now += 0.1 if crew.threads == 2 else 0.1 * (GAIN + 1) / 2
            machine.lost += 5
    assert used.count(2) > 0.9 * len(used)


def test_as_many_threads_as_were_asked_for():
    machine = Machine(cores=2, busy=2)
    assert set(machine.compute_often(machine.crew(fixed=True), 100)) == {2}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_numbers_do_not_depend_on_the_threads(name):
    """Results must be bit-identical, because the number of threads changes during a run."""
    weights = []
    for threads in (1, 2):
        with GGMLCPU(threads=threads, blas=False).realize(plan(name, rows=3)) as session:
            session.build()
            for k in range(2):
                session.step(batches(rows=3).batch(k), AdamW.for_lora().hp_for_step(k))
            weights.append({t.name: session.download(t.name) for t in session.plan.trainable})
    for tensor, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][tensor], err_msg=tensor)
