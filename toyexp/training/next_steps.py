"""What a run is trained and evaluated on: its next steps, made before they are asked for, and held-out batches."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toyexp.base.errors import BadBatch, PluginFailed
from toyexp.interfaces.dataset import Batch, Batches
from toyexp.interfaces.micro_batches import prepare_batches
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run import Run
from toyexp.interfaces.session import StepInput, StepMetrics
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

    def scaled_settings(self, plan: Plan) -> dict[str, float]:
        """Return the factors by name, and the numbers that they give."""
        if not self.factors:
            return {}
        return {**{f"{n}_factor": f for n, f in self.factors.items()}, **plan.scaled_settings(self.factors)}


@dataclass
class Launched:
    """Steps that are under way together, those that were told of left out."""

    steps: list[NextStep]
    began: float
    waits: Sequence[Callable[[], StepMetrics]]  # for each of them
    found: list[StepMetrics] = field(default_factory=list)  # of each, once they were waited for
    seconds: float = 0.0  # each has taken

    def wait(self, since: float) -> float:
        """Wait for all; return when they ended. They began when they were launched, or `since`, if that is later."""
        self.found = [wait() for wait in self.waits]
        ended = time.perf_counter()
        self.seconds = (ended - max(self.began, since)) / len(self.steps)
        return ended


class NextSteps:
    """The next steps of a run, as far as they were made, from batches made several at a time if the data can.

    Batch k is a function of k alone, so making it early changes nothing; a block takes little longer than a batch.
    """

    def __init__(self, run: Run, bus: Bus, batches: Batches):
        self._run, self._bus, self._batches, plan = run, bus, batches, run.plan
        self._in_optim, self._in_data, self._in_engine = (
            boundary(run, bus, kind) for kind in ("optim", "data", "engine")
        )
        self.ready: list[NextStep] = []
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        few = min(MOST, BYTES // max(row * plan.rows * plan.accumulate, 1))
        self._count = few if _blocks_are_batches(batches) else 1
        self._first, self._made = 0, list[Batch]()

    def make(self, step: int) -> None:
        """Make a step, which follows those that are ready, unless it was made."""
        if self.ready and self.ready[-1].step >= step:
            return
        run, bus = self._run, self._bus
        bus.step = step + 1
        lr, factors = bus.lr(run, step), bus.factors(run, step)
        with self._in_optim:
            numbers = run.plan.numbers(step, lr, factors)
        with self._in_data:
            batch = self.batch(step)
        with self._in_engine:
            self.ready.append(NextStep(step, batch, lr, factors, run.session.step_input(batch, numbers)))

    def try_make(self, step: int) -> bool:
        """Make a step behind others; return False for one that is wrong, which is told when its turn comes."""
        with contextlib.suppress(Exception):
            self.make(step)
        return self.ready[-1].step >= step

    def batch(self, k: int) -> Batch:
        """Return batch `k`, counted from 0."""
        if not self._first <= k < self._first + len(self._made):
            self._first, self._made = k, [*self._block(k)]
        return self._made[k - self._first]

    def _block(self, k: int) -> Sequence[Batch]:
        count = min(self._count, self._run.steps - k)
        block = self._batches.block(k, count) if count > 1 else None
        if block is not None:
            try:
                return prepare_batches(self._run.plan, block, count)
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


def held_out(run: Run, bus: Bus, batches: Batches, every: int) -> Sequence[Batch]:
    """Return the batches that a run is evaluated on; raise PluginFailed if the data hold none out."""
    with boundary(run, bus, "data"):
        found = batches.held_out()
        if not len(found):  # what has no length is no sequence
            name, needs = run.config.get("data", {}).get("name", "?"), f"eval_every={every} needs"
            raise PluginFailed(f"data.{name} holds no batch out, which {needs}; eval_every=0 trains without")
        return found
