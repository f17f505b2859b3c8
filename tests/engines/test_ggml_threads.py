"""The number of threads that ggml uses on the CPU: fewer if that is faster, always with the same results."""

import numpy as np
import pytest
from tiny import batches, plan

from toyexp import AdamW
from toyexp_ggml.binding.backend import GAIN, PAUSE, ThreadTuner
from toyexp_ggml.engines import GGMLCPU


class Machine:
    """A machine whose clock advances by the time that a computation takes with the given threads.

    `busy` other processes occupy a core each. `look_in` counts preemptions by short-lived processes, which cost no
    time.
    """

    def __init__(self, cores, busy=0, look_in=0):
        self.cores, self.busy, self.look_in, self.now, self.lost = cores, busy, look_in, 0.0, 0

    def compute(self, tuner):
        with tuner.measure():
            is_oversubscribed = tuner.threads + self.busy > self.cores
            seconds = 0.2 if is_oversubscribed else 0.04 / tuner.threads
            self.now += seconds
            self.lost += 20 if is_oversubscribed else self.look_in
        return tuner.threads

    def crew(self, **fixed):
        return ThreadTuner(
            self.cores, **fixed, clock=lambda: self.now, lost=lambda: self.lost, others=lambda: self.busy
        )

    def compute_often(self, crew, times):
        return [self.compute(crew) for _ in range(times)]


def test_all_threads_are_used_while_no_core_is_lost():
    machine = Machine(cores=4)
    assert set(machine.compute_often(machine.crew(), 1000)) == {4}


@pytest.mark.parametrize(("busy", "best"), [(1, 3), (2, 2), (3, 1)])
def test_the_tuner_leaves_busy_cores_to_others_within_a_few_computations(busy, best):
    machine = Machine(cores=4, busy=busy)
    crew = machine.crew()
    first, later = machine.compute_often(crew, 30), machine.compute_often(crew, 2000)
    assert first[-1] == best
    assert later.count(best) > 0.9 * len(later)


def test_trials_cost_little_where_fewer_threads_are_no_faster():
    machine = Machine(cores=2, look_in=10)
    used = machine.compute_often(machine.crew(), 1000)
    assert 1 in used, "there were no trials"
    assert machine.now < 1000 * 0.02 * (1 + 2 / PAUSE)


def test_failed_trials_become_rarer_down_to_an_eighth_of_their_rate():
    machine, trial_times = Machine(cores=2, look_in=10), []
    tuner = machine.crew()
    while len(trial_times) < 6:
        before = tuner.threads
        machine.compute(tuner)
        if tuner.threads < before:
            trial_times.append(machine.now)
    intervals = np.diff(trial_times)
    np.testing.assert_allclose(intervals[1:] / intervals[:-1], [2, 2, 1, 1], rtol=0.1)


def test_all_threads_are_used_again_after_other_processes_end():
    machine = Machine(cores=2, busy=1)
    crew = machine.crew()
    assert machine.compute_often(crew, 100)[-1] == 1
    machine.busy, ended = 0, machine.now
    while crew.threads == 1:
        machine.compute(crew)
    machine.compute_often(crew, 50)
    assert crew.threads == 2
    assert machine.now - ended < 60


def test_a_gain_below_the_threshold_changes_nothing():
    machine = Machine(cores=2, busy=1)
    crew, used = machine.crew(), []
    for _ in range(500):
        used.append(crew.threads)
        with crew.measure():
            machine.now += 0.1 if crew.threads == 2 else 0.1 * (GAIN + 1) / 2
            machine.lost += 5
    assert used.count(2) > 0.9 * len(used)


def test_a_fixed_number_of_threads_is_not_tuned():
    machine = Machine(cores=2, busy=2)
    assert set(machine.compute_often(machine.crew(fixed=True), 100)) == {2}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_numbers_do_not_depend_on_the_threads(name):
    """Results must be bit-identical, because the number of threads changes during a run."""
    weights = []
    for threads in (1, 2):
        with GGMLCPU(threads=threads, products="ggml").realize(plan(name, rows=3)) as session:
            session.build()
            for k in range(2):
                session.step(batches(rows=3).batch(k), AdamW.for_lora().hp_for_step(k))
            weights.append({t.name: session.download(t.name) for t in session.plan.trainable})
    for tensor, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][tensor], err_msg=tensor)
