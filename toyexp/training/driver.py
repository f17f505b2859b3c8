"""What the training loop asks for, and who answers it: one loop from one session, or several from those of a stack.

Who takes steps ahead is another driver and no other loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from toyexp.contract.batch import Batch
from toyexp.contract.model import scores_of
from toyexp.contract.session import Session, StepMetrics


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
Asks = Generator[Step | Evaluate, Any, T]


def drive(loop: Asks[T], session: Session) -> T:
    """Answers a loop from a session until it ends; what an answer raises is raised where the loop asked for it."""
    go_on: GoOn = partial(next, loop)
    try:
        while True:
            go_on = _answered(loop, go_on(), session)
    except StopIteration as end:
        return end.value


def drive_together(loops: Sequence[Asks[T]], sessions: Sequence[Session]) -> list[T | Exception]:
    """Answers several loops until the last one ends, each from its session; how each ended, or what it raised.

    A round is a step of each loop that goes on: all are launched before the first is waited for, so that sessions of a
    stack take them as one. What a loop raises ends no other, but for what is no Exception, such as a second signal.
    """
    ends: dict[int, T | Exception] = {}

    def next_step(i: int, go_on: GoOn) -> Step | None:
        """The step that a loop asks for next; what it wants evaluated before is, and None means that it has ended."""
        try:
            while not isinstance(request := go_on(), Step):
                go_on = _answered(loops[i], request, sessions[i])
            return request
        except StopIteration as end:
            ends[i] = end.value
        except Exception as error:
            ends[i] = error
        return None

    going: dict[int, GoOn] = {i: partial(next, loop) for i, loop in enumerate(loops)}
    while going:
        asked = {i: step for i, go_on in going.items() if (step := next_step(i, go_on))}
        going = {i: _answered(loops[i], step, sessions[i]) for i, step in asked.items()}
    return [ends[i] for i in range(len(loops))]


GoOn = Callable[[], Step | Evaluate]  # has a loop go on to what it asks for next; StopIteration where it ends


def _answered(loop: Asks[Any], request: Step | Evaluate, session: Session) -> GoOn:
    """Answers a request; what it gives hands the answer to the loop."""
    try:
        return partial(loop.send, request.answer(session))
    except BaseException as error:
        return partial(loop.throw, error)
