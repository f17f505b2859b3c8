"""Training step and held-out loss of a session on a GPU, as CUDA graphs.

A graph always reads the same addresses, so all inputs that change from call to call are at fixed places in GPU memory.
The host waits only for the loss and the gradient norm.
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

SELECTED = "selected positions"  # key of a micro-batch's list of the positions whose logits the loss needs
PARTS, ROWS = 8, 128  # at most PARTS numbers of positions have a graph; ROWS divides them, for fast products

Micro = dict[str, Tensor]


class Resident:
    """Launcher of one session's training step and held-out loss, as CUDA graphs with inputs in GPU memory.

    `compute_metrics` computes the gradients of micro-batches and returns a tensor [loss, gradient norm].
    `evaluate_loss` returns the loss of one micro-batch. If `selects` is True, a micro-batch may have an entry
    `SELECTED`, a list of the positions whose logits are computed. The list contains all positions of non-zero weight,
    and as many others as are needed to reach a length for which a graph exists.
    """

    def __init__(
        self, plan: Plan, update: Update, compute_metrics: Callable[[Sequence[Micro]], Tensor],
        evaluate_loss: Callable[[Micro], Tensor], capture: bool, selects: bool = False,
    ):  # fmt: skip
        self._plan, self._update, self._selects = plan, update, selects
        self._compute_metrics, self._evaluate_loss = compute_metrics, evaluate_loss
        self._positions = plan.rows * math.prod(plan.inputs["weights"].shape)
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
        """Reason why the step (or, in a plan without training, the loss) is not captured as a graph; empty if it is."""
        return (self._step if self._plan.trainable else self._loss).complete.uncaptured_reason

    def launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], list[float]]:
        """Launch a step; return a function that waits for it and returns the list [loss, gradient norm].

        `numbers` has a vector of scalars, such as the learning rate, for each parameter group.
        """
        arrays, count = self._read(micros)
        self._inputs.put(arrays | {i: [vector] for i, vector in enumerate(numbers)})
        return self._results.fetch(self._step.get(count)())

    def loss(self, micro: Batch) -> Tensor:
        """Return the held-out loss of one micro-batch, as a GPU tensor that the next call may overwrite."""
        arrays, count = self._read([micro])
        self._loss_inputs.put(arrays)
        return self._loss.get(count)()

    def close(self) -> None:
        """Free the captured CUDA graphs."""
        self._loss.close()
        if self._plan.trainable:
            self._step.close()

    def _read(self, micros: Sequence[Batch]) -> tuple[dict[Any, list[np.ndarray]], int]:
        """Return the input arrays of a graph, and the number of positions per micro-batch at which it computes logits.

        Each key is a pair (index of the micro-batch, name of the input). The caller joins the arrays of each key.
        """
        arrays: dict[Any, list[np.ndarray]]
        arrays = {(i, name): [micro[name]] for i, micro in enumerate(micros) for name in self._plan.inputs}
        if not self._selects:
            return arrays, self._positions
        weighted = [np.flatnonzero(micro["weights"]) for micro in micros]
        # A CUDA graph is captured for each `count`, so it is rounded up to one of at most PARTS numbers.
        step = -(-self._positions // (PARTS * ROWS)) * ROWS
        count = min(-(-max(*map(len, weighted), 1) // step) * step, self._positions)
        if count < self._positions:
            for i, (micro, selected) in enumerate(zip(micros, weighted, strict=True)):
                arrays[i, SELECTED] = [selected, np.flatnonzero(micro["weights"].ravel() == 0)]
        return arrays, count

    def _micro(self, inputs: Inputs, i: int, count: int) -> Micro:
        """Return the tensors of micro-batch `i`.

        If `count` is less than the micro-batch's number of positions, an extra tensor `SELECTED` [count] lists the
        positions whose logits are computed.
        """
        micro = {name: inputs.tensors[i, name] for name in self._plan.inputs}
        return micro if count == self._positions else {**micro, SELECTED: inputs.tensors[i, SELECTED][:count]}

    def _run_loss(self, count: int) -> Tensor:
        return self._evaluate_loss(self._micro(self._loss_inputs, 0, count))

    def _run_step(self, count: int, idle: bool = False) -> Tensor:
        """Compute a step, and return the tensor [loss, gradient norm].

        If `idle` is True, weights and optimiser state do not change.
        """
        metrics = self._compute_metrics([self._micro(self._inputs, i, count) for i in range(self._plan.accumulate)])
        skip = torch.ones((), device=metrics.device) if idle else self._skip(metrics)
        clip = self._plan.grad_clip
        divisor = ((metrics[1] + 1e-6) / clip).clamp(min=1.0) if clip else None
        self._update.step_on_device(self._numbers, divisor, skip)
        return metrics

    def _skip(self, metrics: Tensor) -> Tensor | None:
        """Return a tensor that is 1 if the step must be skipped, because loss or norm is not finite, and otherwise 0.

        Return None if the plan never skips steps.
        """
        return 1 - metrics.isfinite().all().to(torch.float32) if self._plan.skip_nonfinite else None


class GraphsByCount:
    """CUDA graphs of one computation, one for each number of positions whose logits are computed.

    Each graph is captured at its first use. `make(count)` returns the graph for `count` positions. `complete` is the
    graph for all positions.
    """

    def __init__(self, positions: int, make: Callable[[int], CapturedCall]):
        self._make, self.complete = make, make(positions)
        self._by_count = {positions: self.complete}

    def get(self, count: int) -> CapturedCall:
        """Return the graph for `count` positions, after capturing it if possible.

        If this capture fails, but the graph for all positions could be captured, return the graph for all positions.
        """
        if count not in self._by_count:
            self._by_count[count] = self._make(count)
            self._by_count[count].uncaptured_reason = self.complete.uncaptured_reason
        captured = self._by_count[count]
        captured.prepare()
        return self.complete if captured.uncaptured_reason and not self.complete.uncaptured_reason else captured

    def close(self) -> None:
        """Free all CUDA graphs."""
        for captured in self._by_count.values():
            captured.close()
