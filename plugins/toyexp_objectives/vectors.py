"""Objectives for data of vectors: regression, and contrastive learning of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from toyexp import InputSpec, Model, Objective, Ops, Params, Tensor, UserError
from toyexp.base import require_range


def require_vector_targets(name: str, inputs: Mapping[str, InputSpec]) -> None:
    """Raise UserError unless the batch has float targets [n] and one weight per row."""
    targets = inputs.get("targets")
    if targets is None or targets.dtype != "float32" or len(targets.shape) != 1 or inputs["weights"].shape != ():
        found = "no targets" if targets is None else f"{targets.dtype} targets {list(targets.shape)} per row"
        raise UserError(f"objective={name}: needs float32 targets [n] per row, but the data has {found}")


@dataclass
class MSE(Objective):
    """Mean squared error of the model's predictions [B, n] for float targets [B, n]."""

    name: ClassVar[str] = "mse"

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError if targets are not vectors of floats."""
        require_vector_targets(self.name, inputs)

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum over rows of the mean over n of (prediction - target)^2."""
        error = ops.add(model.forward(ops, p, batch), ops.scale(batch["targets"], -1.0))
        return ops.sum(ops.mul(ops.mean(ops.mul(error, error), 1), batch["weights"]))


@dataclass
class Contrastive(Objective):
    """Symmetric InfoNCE: each of the two vectors of a row must find the other one among all rows of the batch."""

    name: ClassVar[str] = "contrastive"
    rows_together: ClassVar[int] = 0
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)

    temperature: float = 0.1  # divisor of the cosine similarities

    def check(self) -> None:
        """Raise UserError for an invalid temperature."""
        require_range("objective", self, temperature="[0.001,1000]")

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError if the two vectors of a row have different sizes."""
        require_vector_targets(self.name, inputs)
        sizes = {name: spec.shape for name, spec in inputs.items() if name != "weights"}
        if len({*sizes.values()}) > 1:
            raise UserError(f"objective={self.name}: the two vectors of a row must have the same size, not {sizes}")

    def _similarities(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a matrix [B, B] with cosine similarities divided by the temperature.

        Row i, column j compares the first vector of row i of the batch with the second vector of row j.
        """
        source = next(name for name in batch if name not in ("targets", "weights"))
        pairs = (batch, {**batch, source: batch["targets"]})
        first, second = (_normalise(ops, model.forward(ops, p, pair)) for pair in pairs)
        return ops.scale(ops.product(first, second, transposed=True), 1 / self.temperature)

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of two cross-entropies: to find the second vector of a row by the first, and vice versa.

        Each is a weighted sum over rows (van den Oord et al. 2018; symmetric as in CLIP, Radford et al. 2021).
        """
        scores = self._similarities(ops, model, p, batch)
        by_row = [_diagonal(ops, ops.log_softmax(x)) for x in (scores, ops.permute(scores, (1, 0)))]
        return ops.scale(ops.sum(ops.mul(ops.add(*by_row), batch["weights"])), -0.5)

    def metrics(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return accuracy: the weighted number of rows whose second vector is the most similar to the first."""
        best = ops.top_k(self._similarities(ops, model, p, batch), 1)
        return {"accuracy": ops.sum(ops.mul(_diagonal(ops, best), batch["weights"]))}


def _normalise(ops: Ops, x: Tensor) -> Tensor:
    """Return the vectors x [B, d] divided by their lengths."""
    squares = ops.scale(ops.sum(ops.mul(x, x), 1, keep=True), 1.0, 1e-12)
    return ops.div(x, ops.exp(ops.scale(ops.log(squares), 0.5)))


def _diagonal(ops: Ops, x: Tensor) -> Tensor:
    """Return the diagonal of a matrix [B, B] -> [B]."""
    return ops.sum(ops.causal(x, window=1, fill=0.0), 1)
