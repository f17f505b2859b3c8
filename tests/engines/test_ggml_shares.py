"""Steps whose rows are computed in two concurrent shares, and when that is done."""

import dataclasses

import numpy as np
import pytest
from tiny import CONTEXT, batches, plan

from toyexp import AdamW, SessionError
from toyexp_ggml import session as session_module
from toyexp_ggml.engines import GGMLCPU, GGMLMetal

ROWS = 4
ENGINE = GGMLCPU(threads=2, blas=False)
ADAMW = AdamW.for_lora()


@pytest.fixture
def short(monkeypatch):
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
def test_shares_give_the_losses_of_the_whole(name, settings, monkeypatch):
    the_plan = dataclasses.replace(plan(name, rows=ROWS), **settings)
    whole, weights, count = train_steps(ENGINE, the_plan)
    assert count == 1
    monkeypatch.setattr(session_module, "LONG", 0)
    ours, others, count = train_steps(ENGINE, the_plan)
    assert count == 2
    np.testing.assert_allclose(ours, whole, rtol=2e-6)
    for tensor, array in weights.items():
        np.testing.assert_allclose(others[tensor], array, atol=2e-5, err_msg=tensor)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_numbers_of_shares_do_not_depend_on_the_threads(name, short):
    first, weights, _ = train_steps(GGMLCPU(threads=1, blas=False), plan(name, rows=ROWS))
    second, others, count = train_steps(ENGINE, plan(name, rows=ROWS))
    assert count == 2
    assert first == second
    for tensor, array in weights.items():
        np.testing.assert_array_equal(array, others[tensor], err_msg=tensor)


def test_a_bad_id_in_the_second_share_is_told_and_the_next_step_is_what_it_was(short):
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


def test_a_session_that_is_closed_waits_for_a_share_at_work(short, monkeypatch):
    """As after Ctrl-C, which interrupts only the first share's thread."""
    ended = []

    def interrupt(futures):
        ended.extend(futures)
        raise KeyboardInterrupt

    monkeypatch.setattr(session_module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), ENGINE.realize(plan("llama", rows=ROWS)) as session:
        session.build()
        session.step(batches(rows=ROWS).batch(0), ADAMW.hp_for_step(0))
    assert [future.done() for future in ended] == [True, True]


@pytest.mark.parametrize(("rows", "accumulate", "count"), [(4, 1, 2), (4, 3, 2), (3, 1, 1), (1, 4, 1)])
def test_rows_are_shared_where_they_are_an_even_number(rows, accumulate, count, short):
    assert session_module.choose_share_count(plan("llama", rows=rows, accumulate=accumulate)) == count


def test_what_is_small_or_large_or_frozen_stays_whole(monkeypatch):
    the_plan = plan("llama", rows=ROWS)
    assert session_module.choose_share_count(the_plan) == 1
    monkeypatch.setattr(session_module, "LONG", 0)
    first, *rest = the_plan.tensors
    partly = dataclasses.replace(the_plan, tensors=(dataclasses.replace(first, trainable=False), *rest))
    assert session_module.choose_share_count(partly) == 1
    monkeypatch.setattr(session_module, "MOST", 100)
    assert session_module.choose_share_count(the_plan) == 1


def test_a_step_is_long_by_its_numbers_times_all_positions_of_its_rows(monkeypatch):
    trained = sum(t.size for t in plan("llama").trainable)
    monkeypatch.setattr(session_module, "LONG", trained * 4 * CONTEXT)
    assert [session_module.choose_share_count(plan("llama", rows=rows)) for rows in (2, 4, 6)] == [1, 2, 2]


@pytest.mark.parametrize(("threads", "each"), [(2, [2, 1, 1]), (4, [4, 2, 2]), (1, [1, 1, 1])])
def test_shares_have_the_threads_of_one_session_between_them(threads, each, short, monkeypatch):
    """The first backends compute whole batches: evaluations, and the update."""
    opened = []

    class Noted(session_module.Backend):
        def __init__(self, device, threads, *how, **more):
            opened.append(threads)
            super().__init__(device, threads, *how, **more)

    monkeypatch.setattr(session_module, "Backend", Noted)
    the_plan = plan("llama", rows=ROWS)
    session_module.GGMLSession(the_plan, ENGINE.device, ENGINE.profile, threads, False).open().close()
    assert opened == each


def test_a_gpus_graph_is_never_shared(short):
    assert train_steps(GGMLMetal(threads=1, emulate=True), plan("llama", rows=ROWS), steps=1)[2] == 1
