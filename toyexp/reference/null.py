"""Engine that holds tensors and computes nothing, for tests of plans and runs without a framework."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.session import Session, StepMetrics


@dataclass
class NullEngine(Engine):
    """Engine that computes nothing. Its loss depends only on the number of steps, and falls from 2 towards 1."""

    name: ClassVar[str] = "noop"
    priority: ClassVar[int] = -1

    nan_at: int = 0  # number of the step (from 1) at which the loss is NaN; 0: never

    def check(self) -> str:
        return "computes nothing"

    def realize(self, plan: Plan) -> Session:
        return NullSession(plan, self).open()


class NullSession(Session):
    """Session that keeps the plan's tensors in numpy and counts steps."""

    def __init__(self, plan: Plan, engine: NullEngine):
        super().__init__(plan)
        self._engine = engine
        self._tensors: dict[str, np.ndarray] = {}
        self._steps = 0

    def do_open(self) -> None:
        """Do nothing: there is nothing to allocate."""

    def _loss(self) -> float:
        return math.nan if self._steps and self._steps == self._engine.nan_at else 1 + 1 / (1 + self._steps)

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        self._tensors[tensor.name] = array.copy()

    def do_build(self) -> None:
        """Do nothing: there is nothing to build."""

    def do_reset_state(self) -> None:
        """Do nothing: this session has no optimiser state."""

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        self._steps += 1
        return StepMetrics(self._loss(), 0.0)

    def do_loss(self, micro: Batch) -> float:
        """Return the loss, which depends only on the number of steps taken, times the sum of the batch's weights."""
        return self._loss() * float(micro["weights"].sum())

    def do_metrics(self, micro: Batch) -> Mapping[str, float]:
        return dict.fromkeys(self.plan.objective.metric_names, 0.0)

    def do_logits(self, micro: Batch, rows: int) -> np.ndarray:
        """Return zeros, so that all tokens are equally likely."""
        shape = self.plan.inputs["weights"].shape
        classes = next(t.shape[0] for t in self.plan.tensors if len(t.shape) > 1)
        return np.zeros((rows, *shape, classes), np.float32)

    def do_gradients(self, micros: Sequence[Batch]) -> dict[str, np.ndarray]:
        return {t.name: np.zeros(t.shape, np.float32) for t in self.plan.trainable}

    def do_download(self, tensor: PlanTensor) -> np.ndarray:
        return self._tensors[tensor.name].copy()

    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the tensors' values, and state arrays filled with the number of steps, which determines the loss."""
        states = {
            t.name: {slot: np.full(shape, self._steps, np.float32) for slot, shape in self.plan.slots(t).items()}
            for t in self.plan.trainable
        }
        return self.name_arrays({name: array.copy() for name, array in self._tensors.items()}, states)

    def do_restore(self, tensor: PlanTensor, values: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        self._tensors[tensor.name] = values.copy()
        self._steps = next((int(array.flat[0]) for array in state.values()), self._steps)

    def do_close(self) -> None:
        self._tensors.clear()
