"""How many jobs of one program train together: as many as memory takes, and no more than are faster for it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from toyexp.base.errors import RunFailed
from toyexp.base.formatting import counted, in_bytes
from toyexp.base.memory import running_out
from toyexp.interfaces.stack import Stack
from toyexp.interfaces.values import Constant
from toyexp.training.memory import bytes_in_a_stack
from toyexp.training.run_config import Prepared

SHARE = 0.8  # of the memory that is free
SHORT = 5.0  # seconds of all steps one after another, for which nothing is tried
SIZES = (4, 16, 64)  # that are tried, and the most that fit
WARM_UP, STEPS, SLICE, PATIENCE = 3, 3, 0.1, 3.0  # steps not measured; steps and seconds that are at least; at most
GAIN, LOSS = 0.95, 1.3  # of a job's share of a step beside the best one's: what is better; what ends the trying


def size_of(alike: Sequence[Prepared], steps: int, limit: int, shared_by: int = 1) -> tuple[int, str]:
    """Return how many jobs of one program, with so many steps in all, train together, and why, in words.

    With a `limit` nothing is tried but whether it fits.

    Several stacks share the memory; on one GPU they would measure one another: there nothing is tried either.
    """
    plan, engine = alike[0].plan, alike[0].config.engine
    each, free = engine.bytes_in_a_stack(plan) or bytes_in_a_stack(plan), engine.free_bytes()
    most = min(limit or len(alike), len(alike))
    trained = sum(t.size for t in plan.trainable)
    words = (
        f"{counted(len(alike), 'job')} of one program, {trained:,} parameters that train, about {in_bytes(each)} each"
    )
    if free is not None:
        frozen = 4 * sum(tensor.size for tensor in plan.tensors if not tensor.trainable)  # held once in each stack
        free = max(free // shared_by - frozen, 0)
        words += f" of {in_bytes(free)} that are free"
        if each * most > SHARE * free:
            most = max(int(SHARE * free / each), 1)
            words += f": at most {most} at once"
    if limit or most == 1 or (shared_by > 1 and engine.on_gpu):
        return most, words
    return _paying(alike, steps, most, words)


def _paying(alike: Sequence[Prepared], steps: int, most: int, words: str) -> tuple[int, str]:
    """Return the size whose jobs have the least share of a step each."""
    blank = [_blank(prepared) for prepared in alike[:most]]
    alone = _seconds(blank[:1])
    if alone * steps < SHORT:
        return most, words
    best, share = 1, alone
    for size in (*(size for size in SIZES if size < most), most):
        try:
            with running_out():
                now = _seconds(blank[:size]) / size
        except RunFailed:  # that many do not fit
            break
        if now < GAIN * share:
            best, share = size, now
        elif now > LOSS * share and size > SIZES[0]:
            break
    if best == 1:
        return 1, f"{words}; together they are no faster here than alone: they train one after another"
    took = f"a step of {best} takes {best * share * 1e3:.3g} ms, of one {alone * 1e3:.3g} ms"
    return best, f"{words}; {took}: {alone / share:.1f} times as fast"


def _blank(prepared: Prepared) -> Prepared:
    """The same run with zeros in place of its weights: to draw or read those takes longer than a few steps."""
    plan = prepared.plan
    return replace(prepared, plan=replace(plan, tensors=tuple(replace(t, values=Constant(0)) for t in plan.tensors)))


def _seconds(some: Sequence[Prepared]) -> float:
    """Seconds of a step of these jobs, on weights that are dropped afterwards."""
    engine, plans = some[0].config.engine, [prepared.plan for prepared in some]
    stack = Stack([])
    try:
        stack = engine.realize_stack(plans) if len(plans) > 1 else Stack([engine.realize(plans[0]).opened()])
        for session in stack.sessions:
            session.build()
        batches = [prepared.batches.batch(0) for prepared in some]
        numbers = [plan.numbers(0, prepared.config.settings.lr, {}) for plan, prepared in zip(plans, some, strict=True)]
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < WARM_UP + STEPS or math.fsum(taken[WARM_UP:]) < SLICE:
            before = time.perf_counter()
            given = [s.step_input(b, n) for s, b, n in zip(stack.sessions, batches, numbers, strict=True)]
            for wait in stack.step(dict(enumerate(given))).values():
                wait()
            taken.append(time.perf_counter() - before)
            if len(taken) > WARM_UP and time.perf_counter() - began > PATIENCE:
                break
        return statistics.median(taken[WARM_UP:])
    finally:
        for session in stack.sessions:
            session.close()
