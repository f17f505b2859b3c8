"""Base class of objectives, which say what a training step minimises, and the default: cross-entropy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toyexp.base.errors import UserError
from toyexp.base.validators import require_range
from toyexp.interfaces.ops import Ops, Params, Tensor

if TYPE_CHECKING:
    import numpy as np

    from toyexp.interfaces.dataset import Batch, InputSpec
    from toyexp.interfaces.model import Model


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

    second_model: ClassVar[Any] = None  # the Model in `model_file()`, which toyexp loads

    def model_file(self) -> Path | None:
        """Return the GGUF file of a second model that the objective runs, such as a teacher; None if it has none."""
        return None

    def check(self) -> None:  # noqa: B027 - optional on purpose: many objectives have nothing to check
        """Raise UserError for invalid settings."""

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:  # noqa: B027 - optional
        """Raise UserError if the arrays of a batch do not suit the objective. `weights` is always one of them."""

    def tensors(self, plan: Any) -> Sequence[Any]:
        """Return frozen tensors that the objective reads besides those of the recipe's `plan`.

        `plan` is a Plan, and the result a list of PlanTensors. Their names begin with a prefix of their own, such as
        `teacher.blk.0.attn_q.weight`.
        """
        return ()

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
    """Raise UserError unless the targets of a batch are integers: class numbers or token ids."""
    targets = inputs.get("targets")
    if targets is None or not targets.dtype.startswith("int"):
        found = "no targets" if targets is None else f"{targets.dtype} targets"
        raise UserError(f"objective={objective}: needs integer targets, but the data has {found}; try objective=mse")


@dataclass
class CrossEntropy(Objective):
    """Cross-entropy of integer targets, with label smoothing and z-loss."""

    name: ClassVar[str] = "cross_entropy"
    in_nats: ClassVar[bool] = True

    smoothing: float = 0.0  # label smoothing: share of a target's probability that all classes get in equal parts
    z_loss: float = 0.0  # coefficient of log(sum(exp(logits)))^2, which keeps logits small; PaLM: 0.0001

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_range("objective", self, smoothing="[0,1)", z_loss="[0,inf)")

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError if targets are not integers."""
        require_class_targets(self.name, inputs)

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of (1 - s) * -log p[target] + s * mean(-log p) + z * log(sum(exp(logits)))^2.

        Label smoothing s is that of Szegedy et al. 2016, the z-loss that of Chowdhery et al. 2022 (PaLM). Evaluations
        report the plain cross-entropy, so that runs with other settings can be compared.
        """
        logits = model.forward(ops, p, batch)
        return ops.cross_entropy(logits, batch["targets"], batch["weights"], self.smoothing, self.z_loss)

    def held_out_loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of -log p[target]."""
        return ops.cross_entropy(model.forward(ops, p, batch), batch["targets"], batch["weights"])
