"""What a run's next steps take, made before their turn: the batch, the learning rate, the optimiser's numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toyexp.base.errors import BadBatch
from toyexp.interfaces.dataset import Batch, Batches
from toyexp.interfaces.micro_batches import readied
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run import Run
from toyexp.interfaces.session import StepInput
from toyexp.training.bus import Bus
from toyexp.training.verdict import boundary

MOST, BYTES = 32, 1 << 19  # batches made at once, and what they may take


@dataclass(frozen=True)
class NextStep:
    """What a step takes."""

    step: int  # from 0
    batch: Batch
    lr: float
    factors: Mapping[str, float]  # of the optimiser's other numbers
    input: StepInput


class NextSteps:
    """The next steps of a run, as far as they were made."""

    def __init__(self, run: Run, bus: Bus, batches: Batches):
        self._run, self._bus, self._batches = run, bus, BatchBlocks(batches, run.plan, run.steps)
        self._optim, self._data, self._engine = (boundary(run, bus, kind) for kind in ("optim", "data", "engine"))
        self.ready: list[NextStep] = []

    def make(self, step: int) -> None:
        """Make a step, which follows those that are ready, unless it was made."""
        if self.ready and self.ready[-1].step >= step:
            return
        run, bus = self._run, self._bus
        bus.step = step + 1
        lr, factors = bus.lr(run, step), bus.factors(run, step)
        with self._optim:
            numbers = run.plan.numbers(step, lr, factors)
        with self._data:
            batch = self._batches.batch(step)
        with self._engine:
            self.ready.append(NextStep(step, batch, lr, factors, run.session.step_input(batch, numbers)))

    def can_make(self, step: int) -> bool:
        """Make a step behind others; return False for one that is wrong, which is told when its turn comes."""
        with contextlib.suppress(Exception):
            self.make(step)
        return self.ready[-1].step >= step

    def take(self, count: int) -> list[NextStep]:
        """Remove the first steps that are ready, and return them."""
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken


class BatchBlocks:
    """Batches made several at a time, where the data can: making a block takes little longer than making one.

    Batch k is a function of k alone, so making it early changes nothing.
    """

    def __init__(self, batches: Batches, plan: Plan, steps: int):
        self._batches, self._plan, self._steps = batches, plan, steps
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        few = min(MOST, BYTES // max(row * plan.rows * plan.accumulate, 1))
        self._count = few if _blocks_are_batches(batches) else 1
        self._first, self._ready = 0, list[Batch]()

    def batch(self, k: int) -> Batch:
        """Return batch `k`, counted from 0."""
        if not self._first <= k < self._first + len(self._ready):
            self._first, self._ready = k, [*self._make(k)]
        return self._ready[k - self._first]

    def _make(self, k: int) -> Sequence[Batch]:
        count = min(self._count, self._steps - k)
        block = self._batches.block(k, count) if count > 1 else None
        if block is not None:
            try:
                return readied(self._plan, block, count)
            except BadBatch:  # each is refused, or not, when its turn comes
                self._count = 1
        return [self._batches.batch(k)]


def _blocks_are_batches(batches: Batches) -> bool:
    """Return True if the class with `block` also has `batch`: one that overrides `batch` alone is in no block."""
    for kind in type(batches).__mro__:
        if "block" in vars(kind):
            return kind is not Batches and "batch" not in vars(batches)
        if "batch" in vars(kind):
            break
    return False
