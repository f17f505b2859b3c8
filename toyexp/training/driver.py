"""What the training loop asks for, and who answers it: one loop from one session.

Who answers several loops from one program, or takes steps ahead, is another driver and no other loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    try:
        request = next(loop)
        while True:
            try:
                answer = request.answer(session)
            except BaseException as error:
                request = loop.throw(error)
            else:
                request = loop.send(answer)
    except StopIteration as end:
        return end.value
