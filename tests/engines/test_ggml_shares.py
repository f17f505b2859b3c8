"""Steps whose rows are computed in two concurrent shares, and when that is done."""

import dataclasses

import numpy as np
import pytest
from tiny import CONTEXT, batches, plan

from toyexp import AdamW, SessionError
from toyexp_ggml import session as session_module
from toyexp_ggml.engines import GGMLCPU, GGMLMetal

ROWS = 4
ENGINE = GGMLCPU(threads=2, products="ggml")
ADAMW = AdamW.for_lora()


@pytest.fixture
def every_step_is_long(monkeypatch):
    """Make every step long enough to be shared."""
    monkeypatch.setattr(session_module, "LONG", 0)


def train_steps(engine, the_plan, steps=6):
    """Return losses and norms of the steps, and the final weights."""
    rows = the_plan.rows * the_plan.accumulate
    with engine.realize(the_plan) as session:
        session.build()
        metrics = [session.step(batches(rows=rows).batch(k), ADAMW.hp_for_step(k)) for k in range(steps)]
        weights = {t.name: session.download(t.name) for t in session.plan.trainable}
        return [(m.loss, m.grad_norm) for m in metrics], weights, session.describe().get("shares", 1)


SETTINGS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"grad_clip": 0.1},
    "asked": {"skip_nonfinite": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shares_give_the_losses_of_an_unshared_step(name, settings, monkeypatch):
    the_plan = dataclasses.replace(plan(name, rows=ROWS), **settings)
    expected, weights, count = train_steps(ENGINE, the_plan)
    assert count == 1
    monkeypatch.setattr(session_module, "LONG", 0)
    losses, shared_weights, count = train_steps(ENGINE, the_plan)
    assert count == 2
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for tensor, array in weights.items():
        np.testing.assert_allclose(shared_weights[tensor], array, atol=2e-5, err_msg=tensor)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_numbers_of_shares_do_not_depend_on_the_threads(name, every_step_is_long):
    losses_on_one, weights, _ = train_steps(GGMLCPU(threads=1, products="ggml"), plan(name, rows=ROWS))
    losses_on_two, weights_on_two, count = train_steps(ENGINE, plan(name, rows=ROWS))
    assert count == 2
    assert losses_on_one == losses_on_two
    for tensor, array in weights.items():
        np.testing.assert_array_equal(array, weights_on_two[tensor], err_msg=tensor)


def test_a_bad_id_in_the_second_share_raises_and_does_not_affect_the_next_step(every_step_is_long):
    the_plan = plan("llama", rows=ROWS)
    good = batches(rows=ROWS).batch(0)
    bad = {**good, "tokens": good["tokens"].copy()}
    bad["tokens"][-1, 0] = the_plan.model.vocab
    with ENGINE.realize(the_plan) as session, ENGINE.realize(the_plan) as other:
        session.build()
        other.build()
        with pytest.raises(SessionError, match="tokens"):
            session.step(bad, ADAMW.hp_for_step(0))
        assert session.step(good, ADAMW.hp_for_step(0)) == other.step(good, ADAMW.hp_for_step(0))


def test_closing_a_session_waits_for_shares_that_are_still_running(every_step_is_long, monkeypatch):
    """This happens after Ctrl-C, which interrupts only the first share's thread."""
    share_futures = []

    def interrupt(futures):
        share_futures.extend(futures)
        raise KeyboardInterrupt

    monkeypatch.setattr(session_module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), ENGINE.realize(plan("llama", rows=ROWS)) as session:
        session.build()
        session.step(batches(rows=ROWS).batch(0), ADAMW.hp_for_step(0))
    assert [future.done() for future in share_futures] == [True, True]


@pytest.mark.parametrize(("rows", "accumulate", "count"), [(4, 1, 2), (4, 3, 2), (3, 1, 1), (1, 4, 1)])
def test_a_step_is_shared_if_its_rows_are_even(rows, accumulate, count, every_step_is_long):
    assert session_module.choose_share_count(plan("llama", rows=rows, accumulate=accumulate)) == count


def test_a_small_large_or_partly_frozen_model_is_not_shared(monkeypatch):
    the_plan = plan("llama", rows=ROWS)
    assert session_module.choose_share_count(the_plan) == 1
    monkeypatch.setattr(session_module, "LONG", 0)
    first, *rest = the_plan.tensors
    partly = dataclasses.replace(the_plan, tensors=(dataclasses.replace(first, trainable=False), *rest))
    assert session_module.choose_share_count(partly) == 1
    monkeypatch.setattr(session_module, "MOST", 100)
    assert session_module.choose_share_count(the_plan) == 1


def test_the_length_of_a_step_is_its_weights_times_its_positions(monkeypatch):
    weight_count = sum(t.size for t in plan("llama").trainable)
    monkeypatch.setattr(session_module, "LONG", weight_count * 4 * CONTEXT)
    assert [session_module.choose_share_count(plan("llama", rows=rows)) for rows in (2, 4, 6)] == [1, 2, 2]


@pytest.mark.parametrize(("threads", "each"), [(2, [2, 1, 1]), (4, [4, 2, 2]), (1, [1, 1, 1])])
def test_shares_divide_the_threads_of_the_session(threads, each, every_step_is_long, monkeypatch):
    """The first backends compute whole batches: evaluations, and the update."""
    thread_counts = []

    class RecordingBackend(session_module.Backend):
        def __init__(self, device, threads, *arguments, **options):
            thread_counts.append(threads)
            super().__init__(device, threads, *arguments, **options)

    monkeypatch.setattr(session_module, "Backend", RecordingBackend)
    the_plan = plan("llama", rows=ROWS)
    session_module.GGMLSession(the_plan, ENGINE.device, ENGINE.profile, threads, False).open().close()
    assert thread_counts == each


def test_a_gpus_graph_is_never_shared(every_step_is_long):
    assert train_steps(GGMLMetal(threads=1, emulate=True), plan("llama", rows=ROWS), steps=1)[2] == 1
