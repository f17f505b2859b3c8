"""A session's step and held-out loss on a GPU: what changes from call to call is read from the GPU's own memory.

So both can be captured as graphs, and nothing is waited for but the loss and the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Plan
from toyexp_torch.capture import Captured, Inputs, Kind, Results
from toyexp_torch.update import Update

Micro = dict[str, Tensor]


class Resident:
    """`measured` leaves the gradients and gives [loss, norm], `evaluated` a loss, both of batches on the GPU."""

    def __init__(
        self, plan: Plan, update: Update, measured: Callable[[Sequence[Micro]], Tensor],
        evaluated: Callable[[Micro], Tensor], capture: bool,
    ):  # fmt: skip
        self._plan, self._update, self._measured, self._evaluated = plan, update, measured, evaluated
        self._off = "" if capture else "engine.capture=false"
        pool = torch.cuda.graph_pool_handle()  # one after the other, graphs can share their memory
        one: dict[Hashable, Kind] = {
            name: ((plan.rows, *spec.shape), np.dtype(spec.dtype)) for name, spec in plan.inputs.items()
        }
        self._alone = Inputs(one)
        self._loss = Captured(self._loss_there, self._loss_there, pool, self._off)
        if plan.trainable:
            numbers: dict[Hashable, Kind] = {
                i: ((size,), np.dtype(np.float64)) for i, size in enumerate(update.sizes())
            }
            many: dict[Hashable, Kind] = {(i, name): kind for i in range(plan.accumulate) for name, kind in one.items()}
            self._inputs, self._results = Inputs(many | numbers), Results(2)
            self._micros: list[Micro] = [
                {n: self._inputs.tensors[i, n] for n in plan.inputs} for i in range(plan.accumulate)
            ]
            self._numbers = [self._inputs.tensors[i] for i in numbers]
            self._step = Captured(self._work, self._rehearse, pool, self._off)
            self._step.prepare()

    @property
    def refused(self) -> str:
        """Why the step is not captured; empty where it is."""
        return self._step.refused if self._plan.trainable else self._loss.refused

    def launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], list[float]]:
        """Begins a step; what it returns waits for its loss and the gradient's norm."""
        batches = {(i, name): micro[name] for i, micro in enumerate(micros) for name in self._plan.inputs}
        self._inputs.put(batches | dict(enumerate(numbers)))
        return self._results.fetch(self._step())

    def loss(self, micro: Batch) -> Tensor:
        """Of one micro-batch, without training."""
        self._alone.put({name: micro[name] for name in self._plan.inputs})
        return self._loss()

    def close(self) -> None:
        """Frees the graphs."""
        self._loss.close()
        if self._plan.trainable:
            self._step.close()

    def _loss_there(self) -> Tensor:
        return self._evaluated({name: self._alone.tensors[name] for name in self._plan.inputs})

    def _work(self) -> Tensor:
        metrics = self._measured(self._micros)
        self._update.on_device(self._numbers, self._divisor(metrics[1]), self._skip(metrics))
        return metrics

    def _rehearse(self) -> None:
        metrics = self._measured(self._micros)
        never = torch.ones((), device=metrics.device)
        self._update.on_device(self._numbers, self._divisor(metrics[1]), never)

    def _divisor(self, norm: Tensor) -> Tensor | None:
        """What gradients beyond the largest norm are divided by; 1 for others."""
        return ((norm + 1e-6) / self._plan.grad_clip).clamp(min=1.0) if self._plan.grad_clip else None

    def _skip(self, metrics: Tensor) -> Tensor | None:
        """1 where a bad number is to leave everything as it was, else 0."""
        return 1 - metrics.isfinite().all().to(torch.float32) if self._plan.skip_nonfinite else None
