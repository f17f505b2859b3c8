"""Inputs of training and evaluation: a queue of the next steps' inputs, and the held-out batches."""

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

MAX_BATCHES, MAX_BYTES = 32, 1 << 19  # limits of a block of batches that are made at once


@dataclass(frozen=True)
class NextStep:
    """Input of one training step: its number, batch, learning rate and factors of other optimiser settings."""

    step: int  # from 0
    batch: Batch
    lr: float
    factors: Mapping[str, float]  # of the optimiser's numbers other than lr
    input: StepInput

    def scaled_settings(self, plan: Plan) -> dict[str, float]:
        """Return the optimiser settings that callbacks scale in this step, such as beta1, as metrics to log.

        Each scaled setting has two metrics: its factor, as `<name>_factor`, and its scaled value, as `<name>`.
        """
        if not self.factors:
            return {}
        return {**{f"{n}_factor": f for n, f in self.factors.items()}, **plan.scaled_settings(self.factors)}


@dataclass
class Launched:
    """Steps that were launched together and not yet reported to the callbacks."""

    steps: list[NextStep]
    began: float
    waits: Sequence[Callable[[], StepMetrics]]  # one function per step
    metrics: list[StepMetrics] = field(default_factory=list)  # one per step, once `wait` was called
    seconds: float = 0.0  # duration of each step

    def wait(self, since: float) -> float:
        """Wait until these steps have ended, store their metrics and duration, and return the time at which they ended.

        Times are values of time.perf_counter(). `since` is the time at which the previous steps ended. The duration is
        measured from `since` or from the launch of these steps, whichever is later.
        """
        self.metrics = [wait() for wait in self.waits]
        ended = time.perf_counter()
        self.seconds = (ended - max(self.began, since)) / len(self.steps)
        return ended


class NextSteps:
    """Queue of the next steps' inputs. It makes inputs before the steps are due.

    If the data supports it, several batches are made as one block, which takes little longer than a single batch.
    """

    def __init__(self, run: Run, bus: Bus, batches: Batches):
        self._run, self._bus, self._batches, plan = run, bus, batches, run.plan
        self._in_optim, self._in_data, self._in_engine = (
            boundary(run, bus, kind) for kind in ("optim", "data", "engine")
        )
        self.ready: list[NextStep] = []
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        block_size = min(MAX_BATCHES, MAX_BYTES // max(row * plan.rows * plan.accumulate, 1))
        self._count = block_size if _blocks_are_batches(batches) else 1
        self._first, self._block = 0, list[Batch]()

    def make(self, step: int) -> None:
        """Append the input of `step` to the queue, unless the queue has it. Steps must be made in order."""
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
        """Make the input of `step` ahead of time; return True if the queue has it.

        Errors are ignored here: `make` raises them when the step is due.
        """
        with contextlib.suppress(Exception):
            self.make(step)
        return self.ready[-1].step >= step

    def batch(self, k: int) -> Batch:
        """Return batch `k`, counted from 0."""
        if not self._first <= k < self._first + len(self._block):
            self._first, self._block = k, [*self._make_block(k)]
        return self._block[k - self._first]

    def _make_block(self, k: int) -> Sequence[Batch]:
        count = min(self._count, self._run.steps - k)
        block = self._batches.block(k, count) if count > 1 else None
        if block is not None:
            try:
                return prepare_batches(self._run.plan, block, count)
            except BadBatch:  # each batch is checked when it is due
                self._count = 1
        return [self._batches.batch(k)]


def _blocks_are_batches(batches: Batches) -> bool:
    """Return True if `batches.block` gives the same rows as `batches.batch`.

    Return False if a subclass, or the object itself, overrides `batch` but not `block`.
    """
    for kind in type(batches).__mro__:
        if "block" in vars(kind):
            return kind is not Batches and "batch" not in vars(batches)
        if "batch" in vars(kind):
            break
    return False


def held_out(run: Run, bus: Bus, batches: Batches, every: int) -> tuple[Sequence[Batch], Mapping[str, Sequence[Batch]]]:
    """Return the held-out batches, and the parts of them whose loss is reported too, by name.

    `every` is the value of the setting eval_every; with 0 there are none. Raise PluginFailed if the data has none.
    """
    if not every:
        return (), {}
    with boundary(run, bus, "data"):
        held_out_batches = batches.held_out()
        if not len(held_out_batches):  # an object without a length fails here, too
            name = run.config.get("data", {}).get("name", "?")
            problem = f"data.{name} has no held-out batches"
            raise PluginFailed(f"eval_every={every}: {problem}; eval_every=0 trains without evaluations")
        return held_out_batches, batches.held_out_sets()
