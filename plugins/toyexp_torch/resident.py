"""A session's step and held-out loss on a GPU: what changes from call to call is read from the GPU's own memory.

So both can be captured as graphs, and nothing is waited for but the loss and the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Plan
from toyexp_torch.capture import Captured, Inputs, Kind, Results
from toyexp_torch.update import Update

KEPT = "kept positions"  # beside a micro-batch's inputs: those of which the loss is made
PARTS, ROWS = 8, 128  # how finely their number is graded: a graph for each; a multiple in which products work best

Micro = dict[str, Tensor]


class Resident:
    """`measured` leaves the gradients and gives [loss, norm], `evaluated` a loss, both of batches on the GPU.

    Where it `selects`, they are told the positions whose targets weigh something, and a few that do not.
    """

    def __init__(
        self, plan: Plan, update: Update, measured: Callable[[Sequence[Micro]], Tensor],
        evaluated: Callable[[Micro], Tensor], capture: bool, selects: bool = False,
    ):  # fmt: skip
        self._plan, self._update, self._measured, self._evaluated = plan, update, measured, evaluated
        self._positions, self._selects = plan.rows * math.prod(plan.inputs["targets"].shape), selects
        off = "" if capture else "engine.capture=false"
        pool = torch.cuda.graph_pool_handle()  # one after the other, graphs can share their memory
        one: dict[str, Kind] = {
            name: ((plan.rows, *spec.shape), np.dtype(spec.dtype)) for name, spec in plan.inputs.items()
        }
        if selects:
            one[KEPT] = (self._positions,), np.dtype(np.int64)
        self._alone = Inputs({(0, name): kind for name, kind in one.items()})
        self._loss = ByCount(
            self._positions, lambda n: Captured("a held-out loss", *2 * (partial(self._loss_of, n),), pool, off)
        )
        if plan.trainable:
            numbers: dict[Hashable, Kind] = {
                i: ((size,), np.dtype(np.float64)) for i, size in enumerate(update.sizes())
            }
            many: dict[Hashable, Kind] = {(i, name): kind for i in range(plan.accumulate) for name, kind in one.items()}
            self._inputs, self._results = Inputs(many | numbers), Results(2)
            self._numbers = [self._inputs.tensors[i] for i in numbers]
            self._step = ByCount(
                self._positions,
                lambda n: Captured("a step", partial(self._work, n), partial(self._work, n, idle=True), pool, off),
            )
            self._step.whole.prepare()

    @property
    def refused(self) -> str:
        """Why the step is not captured; empty where it is."""
        return self._step.whole.refused if self._plan.trainable else self._loss.whole.refused

    def launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], list[float]]:
        """Begins a step; what it returns waits for its loss and the gradient's norm."""
        arrays, count = self._read(micros)
        self._inputs.put(arrays | {i: [vector] for i, vector in enumerate(numbers)})
        return self._results.fetch(self._step.of(count)())

    def loss(self, micro: Batch) -> Tensor:
        """Of one micro-batch, without training."""
        arrays, count = self._read([micro])
        self._alone.put(arrays)
        return self._loss.of(count)()

    def close(self) -> None:
        """Frees the graphs."""
        self._loss.close()
        if self._plan.trainable:
            self._step.close()

    def _read(self, micros: Sequence[Batch]) -> tuple[dict[Any, list[np.ndarray]], int]:
        """What the graphs are to read, and how many positions of each micro-batch they are to look at."""
        arrays: dict[Any, list[np.ndarray]]
        arrays = {(i, name): [micro[name]] for i, micro in enumerate(micros) for name in self._plan.inputs}
        if not self._selects:
            return arrays, self._positions
        weighing = [np.flatnonzero(micro["weights"]) for micro in micros]
        count = graded(max(map(len, weighing)), self._positions)
        if count < self._positions:
            for i, (micro, some) in enumerate(zip(micros, weighing, strict=True)):
                arrays[i, KEPT] = [some, np.flatnonzero(micro["weights"].ravel() == 0)]
        return arrays, count

    def _micro(self, inputs: Inputs, i: int, count: int) -> Micro:
        """Micro-batch `i`, and `count` of its positions unless that is all."""
        micro = {name: inputs.tensors[i, name] for name in self._plan.inputs}
        return micro if count == self._positions else {**micro, KEPT: inputs.tensors[i, KEPT][:count]}

    def _loss_of(self, count: int) -> Tensor:
        return self._evaluated(self._micro(self._alone, 0, count))

    def _work(self, count: int, idle: bool = False) -> Tensor:
        """A step; an idle one changes nothing."""
        metrics = self._measured([self._micro(self._inputs, i, count) for i in range(self._plan.accumulate)])
        skip = torch.ones((), device=metrics.device) if idle else self._skip(metrics)
        self._update.on_device(self._numbers, self._divisor(metrics[1]), skip)
        return metrics

    def _divisor(self, norm: Tensor) -> Tensor | None:
        """What gradients beyond the largest norm are divided by; 1 for others."""
        return ((norm + 1e-6) / self._plan.grad_clip).clamp(min=1.0) if self._plan.grad_clip else None

    def _skip(self, metrics: Tensor) -> Tensor | None:
        """1 where a bad number is to leave everything as it was, else 0."""
        return 1 - metrics.isfinite().all().to(torch.float32) if self._plan.skip_nonfinite else None


class ByCount:
    """The same work on some of all positions: a graph for each number of them, captured when it is first asked for."""

    def __init__(self, positions: int, made: Callable[[int], Captured]):
        self._made, self.whole = made, made(positions)
        self._some = {positions: self.whole}

    def of(self, count: int) -> Captured:
        """The one for that many, or for all where it cannot be captured, as where memory is short, and that can."""
        if count not in self._some:
            self._some[count] = self._made(count)
            self._some[count].refused = self.whole.refused
        some = self._some[count]
        some.prepare()
        return self.whole if some.refused and not self.whole.refused else some

    def close(self) -> None:
        """Frees them."""
        for captured in self._some.values():
            captured.close()


def graded(count: int, positions: int) -> int:
    """The next larger of a few numbers up to all positions."""
    step = -(-positions // (PARTS * ROWS)) * ROWS
    return min(-(-max(count, 1) // step) * step, positions)
