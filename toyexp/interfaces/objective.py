"""Base class of objectives, which say what a training step minimises, and the default: cross-entropy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, final

from toyexp.base.errors import BadBatch, UserError
from toyexp.base.lazy import numpy as np
from toyexp.base.validators import require_range
from toyexp.interfaces.dataset import Batch, InputSpec
from toyexp.interfaces.model import Model, TensorSpec
from toyexp.interfaces.ops import Ops, Params, Tensor
from toyexp.interfaces.values import ArrayValues


@dataclass
class Objective(ABC):
    """Base of all objectives: subclass it as a dataclass whose fields are its settings.

    The methods run the model with `model.forward(ops, p, batch)` and call further ops on its result. They use no
    operator on tensors, so that every engine can run and differentiate them.
    """

    plugin_kind: ClassVar[str] = "objective"
    name: ClassVar[str]  # the value of `objective=` that selects it
    rows_together: ClassVar[int] = 1  # a batch can be split after each multiple of this number of rows; 0: never
    in_nats: ClassVar[bool] = False  # True: the held-out loss is a cross-entropy, whose exponential is the perplexity
    metric_names: ClassVar[tuple[str, ...]] = ()  # names of the metrics that `metrics` returns

    auxiliary: float = field(default=0.0, kw_only=True)  # factor of the model's own loss, the load balance of experts

    second_model: ClassVar[Any] = None  # the Model in `model_file()`, which toyexp loads

    def model_file(self) -> Path | None:
        """Return the GGUF file of a second model that the objective runs, such as a teacher; None if it has none."""
        return None

    def check(self) -> None:  # noqa: B027 - optional on purpose: many objectives have nothing to check
        """Raise UserError for invalid settings."""

    def warnings(self) -> Iterable[str]:
        """Return a one-sentence warning for each setting that has no effect."""
        return ()

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:  # noqa: B027 - optional
        """Raise UserError if the arrays of a batch do not suit the objective. One of them is always `weights`."""

    def tensors(self, plan: Any) -> Sequence[TensorSpec]:
        """Return specs of frozen tensors that the objective reads besides those of `plan`, the recipe's Plan.

        Their names begin with a prefix of their own, such as `teacher.blk.0.attn_q.weight`.
        """
        return ()

    def weigh(self, batch: Batch) -> Batch:
        """Return a training batch of NumPy arrays with other `weights`. toyexp then divides them by their sum."""
        return batch

    def precomputed(self, inputs: Mapping[str, InputSpec]) -> Mapping[str, InputSpec]:
        """Return the arrays that `precompute` adds to each batch, given the arrays `inputs` of the data.

        toyexp computes them once for each row, before training, and caches them for later runs. There are none by
        default.
        """
        return {}

    def precompute(self, log_probs: np.ndarray, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the values of the arrays that `precomputed` lists, for the rows of `batch`.

        `log_probs` [rows, ..., V] are the log-probabilities that `second_model` gives to all classes or tokens. If the
        objective has no second model, they are those of the trained model, as it is before training.
        """
        raise NotImplementedError

    @abstractmethod
    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss that a step minimises, a scalar: a sum over examples, each multiplied by its weight.

        In training, `batch["weights"]` sum to 1 over all rows of a step, so that the sum is a mean.
        """

    @final
    def training_loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return `loss` plus `auxiliary` times the scalars that the model's `forward` appends to `p.auxiliary`."""
        if not self.auxiliary:
            return self.loss(ops, model, p, batch)
        p = p.below("")
        p.auxiliary = []
        loss = self.loss(ops, model, p, batch)
        return reduce(ops.add, [ops.scale(term, self.auxiliary) for term in p.auxiliary], loss)

    def held_out_loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss that evaluations report: a weighted sum over examples, as in `loss`.

        Unlike in training, `batch["weights"]` are not scaled to sum to 1.
        """
        return self.loss(ops, model, p, batch)

    def metrics(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return held-out metrics besides the loss, keyed by name: sums over examples, as in `held_out_loss`.

        toyexp divides them by the sum of all weights. Larger values are better.
        """
        return {}

    def settings(self) -> dict[str, Any]:
        """Return the values of the objective's fields, keyed by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def require_class_targets(objective: str, inputs: Mapping[str, InputSpec]) -> None:
    """Raise UserError unless a batch has integer targets (class numbers or token ids) with a weight for each."""
    targets = inputs.get("targets")
    if targets is None or not targets.dtype.startswith("int"):
        found = "no targets" if targets is None else f"{targets.dtype} targets"
        raise UserError(f"objective={objective}: needs integer targets, but the data has {found}; try objective=mse")
    if "weights" in inputs and inputs["weights"].shape != targets.shape:
        problem = "needs a weight for each target, but the data has one for each row"
        raise UserError(f"objective={objective}: {problem}; data=preference is for training with objective=preference")


CLASS_WEIGHTS = "objective.class_weights"  # name of the tensor [V, 1]
LARGEST_WEIGHT = 1e30  # of a class; larger ones overflow float32


@dataclass
class CrossEntropy(Objective):
    """Cross-entropy of integer targets, with label smoothing, z-loss and class weights."""

    name: ClassVar[str] = "cross_entropy"
    in_nats: ClassVar[bool] = True

    smoothing: float = 0.0  # label smoothing: share of a target's probability that all classes get in equal parts
    z_loss: float = 0.0  # coefficient of log(sum(exp(logits)))^2, which keeps logits small; PaLM: 0.0001
    class_weights: dict[int, float] = field(default_factory=dict)  # {0: 2.5}: weights of classes or tokens, else 1

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_range("objective", self, smoothing="[0,1)", z_loss="[0,inf)")
        for key, weight in self.class_weights.items():
            if isinstance(key, bool) or not isinstance(weight, int | float):
                raise UserError(f"objective.class_weights={{{key}: {weight}}}: must map whole numbers to numbers")
            if not 0 <= weight <= LARGEST_WEIGHT or weight == 0 < self.smoothing:
                limit = "at most 1e30" if weight > LARGEST_WEIGHT else "at least 0"
                limit = f"above 0 with objective.smoothing={self.smoothing}" if weight == 0 else limit
                raise UserError(f"objective.class_weights={{{key}: {weight}}}: must be a finite number {limit}")

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError if targets are not integers, or if `class_weights` has a class that the data lacks."""
        require_class_targets(self.name, inputs)
        if self.class_weights and "second_targets" in inputs:
            raise UserError("objective.class_weights: not with data.mixup; data.sampler=balanced also balances classes")
        below = inputs["targets"].below or math.inf
        for key, weight in self.class_weights.items():
            if not 0 <= key < below:
                raise UserError(f"objective.class_weights={{{key}: {weight}}}: classes are 0 to {below - 1}")
        if len(self.class_weights) == below and not any(self.class_weights.values()):
            raise UserError("objective.class_weights: at least one class must have a weight above 0")

    def weigh(self, batch: Batch) -> Batch:
        """Return the batch with its weights multiplied by those of the targets' classes."""
        if not self.class_weights:
            return batch
        by_class = self._weights_by_class(int(batch["targets"].max()) + 1)
        weights = batch["weights"] * by_class[batch["targets"]]
        if not weights.any():
            hint = "increase batch_size, or give these classes small weights above 0"
            raise BadBatch(f"objective.class_weights gives all targets of the batch the weight 0; {hint}")
        return {**batch, "weights": weights}

    def _weights_by_class(self, count: int) -> np.ndarray:
        """Return the weights of at least `count` classes."""
        weights = np.ones(max(count, *self.class_weights) + 1, np.float32)
        weights[[*self.class_weights]] = [*self.class_weights.values()]
        return weights

    def tensors(self, plan: Any) -> Sequence[TensorSpec]:
        """Return the class weights as a table [V, 1] if the loss reads them: only with smoothing."""
        if not (self.smoothing and self.class_weights):
            return ()
        sizes = [getattr(plan.model, name, 0) for name in ("vocab", "classes")]
        count = max(plan.inputs["targets"].below or 0, *sizes)
        values = ArrayValues(self._weights_by_class(count)[:count, None])
        return [TensorSpec(CLASS_WEIGHTS, (count, 1), values)]

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of (1 - s) * -log p[target] + s * mean(-log p) + z * log(sum(exp(logits)))^2.

        Label smoothing s is that of Szegedy et al. 2016, the z-loss that of Chowdhery et al. 2022 (PaLM). Evaluations
        report the plain cross-entropy, so that runs with other settings can be compared. With class weights,
        s * mean(-log p) is weighted by class, and not by the target's class, as in torch.nn.CrossEntropyLoss. With
        mixup, a row has the loss (1 - m) * L(targets) + m * L(second_targets), with m from second_shares.
        """
        logits, targets, weights, s = model.forward(ops, p, batch), batch["targets"], batch["weights"], self.smoothing
        if "second_targets" in batch:
            second = ops.mul(weights, batch["second_shares"])
            first = ops.cross_entropy(logits, targets, ops.add(weights, ops.scale(second, -1.0)), s, self.z_loss)
            return ops.add(first, ops.cross_entropy(logits, batch["second_targets"], second, s, self.z_loss))
        if not (s and self.class_weights):
            return ops.cross_entropy(logits, targets, weights, s, self.z_loss)
        table, log_probs = p[CLASS_WEIGHTS], ops.log_softmax(logits)
        shares = ops.div(weights, ops.reshape(ops.embed(table, targets), weights.shape))
        spread = ops.sum(ops.mul(log_probs, ops.reshape(table, table.shape[:1])), len(log_probs.shape) - 1)
        soft = ops.scale(ops.sum(ops.mul(spread, shares)), -s / table.shape[0])
        hard = ops.cross_entropy(logits, targets, weights, z_loss=self.z_loss / (1 - s))
        return ops.add(ops.scale(hard, 1 - s), soft)

    def held_out_loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of -log p[target]."""
        return ops.cross_entropy(model.forward(ops, p, batch), batch["targets"], batch["weights"])
