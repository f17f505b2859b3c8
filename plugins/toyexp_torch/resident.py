"""Training step and held-out loss of a session on a GPU, as CUDA graphs.

Everything that changes from call to call is read from GPU memory, so that both can be captured. The host waits only for
the loss and the gradient's norm.
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
from toyexp_torch.capture import ArraySpec, CapturedCall, Inputs, Results
from toyexp_torch.update import Update

SELECTED = "selected positions"  # key in a micro-batch: the positions whose logits the loss needs
PARTS, ROWS = 8, 128  # sizes of graph for numbers of selected positions; multiple at which products work best

Micro = dict[str, Tensor]


class Resident:
    """Step and held-out loss of one session, whose inputs are in GPU memory.

    `compute_metrics` computes the gradients of micro-batches and returns [loss, norm]; `evaluate_loss` returns the loss
    of one. With `selects` a micro-batch lists all positions whose targets have a weight, and a few others, under
    `SELECTED`.
    """

    def __init__(
        self, plan: Plan, update: Update, compute_metrics: Callable[[Sequence[Micro]], Tensor],
        evaluate_loss: Callable[[Micro], Tensor], capture: bool, selects: bool = False,
    ):  # fmt: skip
        self._plan, self._update, self._selects = plan, update, selects
        self._compute_metrics, self._evaluate_loss = compute_metrics, evaluate_loss
        self._positions = plan.rows * math.prod(plan.inputs["targets"].shape)
        off = "" if capture else "engine.capture=false"
        pool = torch.cuda.graph_pool_handle()  # graphs that never run at the same time can share memory
        specs: dict[str, ArraySpec] = {
            name: ((plan.rows, *spec.shape), np.dtype(spec.dtype)) for name, spec in plan.inputs.items()
        }
        if selects:
            specs[SELECTED] = (self._positions,), np.dtype(np.int64)
        self._loss_inputs = Inputs({(0, name): spec for name, spec in specs.items()})
        self._loss = GraphsByCount(
            self._positions, lambda n: CapturedCall("a held-out loss", *2 * (partial(self._run_loss, n),), pool, off)
        )
        if plan.trainable:
            numbers: dict[Hashable, ArraySpec] = {
                i: ((size,), np.dtype(np.float64)) for i, size in enumerate(update.sizes())
            }
            micros: dict[Hashable, ArraySpec] = {(i, n): x for i in range(plan.accumulate) for n, x in specs.items()}
            self._inputs, self._results = Inputs(micros | numbers), Results(2)
            self._numbers = [self._inputs.tensors[i] for i in numbers]
            run = self._run_step
            self._step = GraphsByCount(
                self._positions,
                lambda n: CapturedCall("a step", partial(run, n), partial(run, n, idle=True), pool, off),
            )
            self._step.complete.prepare()

    @property
    def uncaptured_reason(self) -> str:
        """Reason why the step is not captured as a graph; empty if it is."""
        return (self._step if self._plan.trainable else self._loss).complete.uncaptured_reason

    def launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], list[float]]:
        """Launch a step; return a function that waits for its loss and its gradient's norm."""
        arrays, count = self._read(micros)
        self._inputs.put(arrays | {i: [vector] for i, vector in enumerate(numbers)})
        return self._results.fetch(self._step.get(count)())

    def loss(self, micro: Batch) -> Tensor:
        """Return the held-out loss of one micro-batch."""
        arrays, count = self._read([micro])
        self._loss_inputs.put(arrays)
        return self._loss.get(count)()

    def close(self) -> None:
        """Free the graphs."""
        self._loss.close()
        if self._plan.trainable:
            self._step.close()

    def _read(self, micros: Sequence[Batch]) -> tuple[dict[Any, list[np.ndarray]], int]:
        """Return the graphs' input arrays, and the number of positions of each micro-batch to compute."""
        arrays: dict[Any, list[np.ndarray]]
        arrays = {(i, name): [micro[name]] for i, micro in enumerate(micros) for name in self._plan.inputs}
        if not self._selects:
            return arrays, self._positions
        weighted = [np.flatnonzero(micro["weights"]) for micro in micros]
        count = round_up_count(max(map(len, weighted)), self._positions)
        if count < self._positions:
            for i, (micro, selected) in enumerate(zip(micros, weighted, strict=True)):
                arrays[i, SELECTED] = [selected, np.flatnonzero(micro["weights"].ravel() == 0)]
        return arrays, count

    def _micro(self, inputs: Inputs, i: int, count: int) -> Micro:
        """Return micro-batch `i`; with fewer positions than it has, also which ones to compute."""
        micro = {name: inputs.tensors[i, name] for name in self._plan.inputs}
        return micro if count == self._positions else {**micro, SELECTED: inputs.tensors[i, SELECTED][:count]}

    def _run_loss(self, count: int) -> Tensor:
        return self._evaluate_loss(self._micro(self._loss_inputs, 0, count))

    def _run_step(self, count: int, idle: bool = False) -> Tensor:
        """Compute a step; if `idle`, without changing weights or state."""
        metrics = self._compute_metrics([self._micro(self._inputs, i, count) for i in range(self._plan.accumulate)])
        skip = torch.ones((), device=metrics.device) if idle else self._skip(metrics)
        self._update.step_on_device(self._numbers, self._divisor(metrics[1]), skip)
        return metrics

    def _divisor(self, norm: Tensor) -> Tensor | None:
        """Return the gradients' divisor for clipping (1 if the norm is small enough); None without clipping."""
        return ((norm + 1e-6) / self._plan.grad_clip).clamp(min=1.0) if self._plan.grad_clip else None

    def _skip(self, metrics: Tensor) -> Tensor | None:
        """Return 1 to skip a step whose loss or norm is not finite, else 0; None if steps are never skipped."""
        return 1 - metrics.isfinite().all().to(torch.float32) if self._plan.skip_nonfinite else None


class GraphsByCount:
    """Graphs of the same work on different numbers of selected positions, each captured when it is first needed."""

    def __init__(self, positions: int, make: Callable[[int], CapturedCall]):
        self._make, self.complete = make, make(positions)
        self._by_count = {positions: self.complete}

    def get(self, count: int) -> CapturedCall:
        """Return the graph for `count` positions, or the one for all if only that could be captured."""
        if count not in self._by_count:
            self._by_count[count] = self._make(count)
            self._by_count[count].uncaptured_reason = self.complete.uncaptured_reason
        captured = self._by_count[count]
        captured.prepare()
        return self.complete if captured.uncaptured_reason and not self.complete.uncaptured_reason else captured

    def close(self) -> None:
        """Free all graphs."""
        for captured in self._by_count.values():
            captured.close()


def round_up_count(count: int, positions: int) -> int:
    """Round a number of positions up to one of `PARTS` sizes, so that few graphs are needed."""
    step = -(-positions // (PARTS * ROWS)) * ROWS
    return min(-(-max(count, 1) // step) * step, positions)
