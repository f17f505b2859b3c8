"""What a run asks for, and who answers it: one run from one session, or several from those of a stack.

Who takes steps ahead is another driver and no other loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, TypeVar

import numpy as np

from toyexp.contract.batch import Batch
from toyexp.contract.engine import Engine
from toyexp.contract.model import scores_of
from toyexp.contract.plan import Plan
from toyexp.contract.session import Session, StepMetrics


@dataclass(frozen=True)
class Realize:
    """Asks for an open session of a plan, which answers all that is asked for later."""

    engine: Engine
    plan: Plan

    def answer(self) -> Session:
        """Opens one of its own."""
        return self.engine.realize(self.plan).opened()


@dataclass(frozen=True)
class Step:
    """Asks for one training step to begin; the answer waits for its StepMetrics when it is called."""

    batch: Batch
    numbers: Sequence[np.ndarray]  # of `plan.numbers`

    def answer(self, session: Session) -> Callable[[], StepMetrics]:
        """Launches it."""
        return session.launch(self.batch, self.numbers)


@dataclass(frozen=True)
class Evaluate:
    """Asks for the loss and the model's scores on the batches that `batches()` gives, without a change."""

    batches: Callable[[], Iterable[Batch]]

    def answer(self, session: Session) -> tuple[float, Mapping[str, float]]:
        """Computes them."""
        return session.evaluate(self.batches()), scores_of(session.plan.model, session.logits, self.batches())


T = TypeVar("T")
Asks = Generator[Realize | Step | Evaluate, Any, T]


def drive(loop: Asks[T], session: Session | None = None) -> T:
    """Answers a loop until it ends, from a session or from the one that it asks for first.

    What an answer raises, and a signal in between, is raised where the loop asked for it.
    """
    go_on: GoOn = partial(next, loop)
    while True:
        try:
            request = go_on()
            if isinstance(request, Realize):
                session = request.answer()
                go_on = partial(loop.send, session)
            else:
                assert session is not None
                go_on = _answered(loop, request, session)
        except BaseException as error:
            if getgeneratorstate(loop) != GEN_CLOSED:  # it was not the loop that raised
                go_on = partial(loop.throw, error)
            elif isinstance(error, StopIteration):
                result: T = error.value
                return result
            else:
                raise


def drive_together(
    loops: Sequence[Asks[T]], sessions: Sequence[Session], begun: Sequence[GoOn] = ()
) -> list[T | Exception]:
    """Answers several loops until the last one ends, each from its session; how each ended, or what it raised.

    `begun` has loops go on that were begun already. A round is a step of each loop that goes on: all are launched
    before the first is waited for, so that sessions of a stack take them as one. What a loop raises ends no other, but
    for what is no Exception, such as a second signal.
    """
    ends: dict[int, T | Exception] = {}

    def next_step(i: int, go_on: GoOn) -> Step | None:
        """The step that a loop asks for next; what it wants evaluated before is, and None means that it has ended."""
        try:
            while not isinstance(request := go_on(), Step):
                assert isinstance(request, Evaluate)
                go_on = _answered(loops[i], request, sessions[i])
            return request
        except StopIteration as end:
            ends[i] = end.value
        except Exception as error:
            ends[i] = error
        return None

    going: dict[int, GoOn] = dict(enumerate(begun or [partial(next, loop) for loop in loops]))
    while going:
        asked = {i: step for i, go_on in going.items() if (step := next_step(i, go_on))}
        going = {i: _answered(loops[i], step, sessions[i]) for i, step in asked.items()}
    return [ends[i] for i in range(len(loops))]


GoOn = Callable[[], Realize | Step | Evaluate]  # has a loop go on to what it asks for next; StopIteration where it ends


def _answered(loop: Asks[Any], request: Step | Evaluate, session: Session) -> GoOn:
    """Answers a request; what it gives hands the answer to the loop."""
    try:
        return partial(loop.send, request.answer(session))
    except BaseException as error:
        return partial(loop.throw, error)
