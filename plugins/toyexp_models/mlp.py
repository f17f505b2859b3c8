"""MLP: linear layers with an activation between them, for vectors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from toyexp import VECTORS, Dataset, Kind, Model, Normal, Ops, Params, Tensor, TensorSpec, UserError, suggest
from toyexp_models.language import layer_specs, linear

ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "none")


@dataclass
class MLP(Model):
    """Multi-layer perceptron: vectors [B, d_in] to predictions or embeddings [B, d_out]."""

    name: ClassVar[str] = "mlp"
    reads: ClassVar[Kind] = VECTORS

    d_in: int = 0  # size of a vector; 0: that of the data
    d_hidden: int = 64  # size of the hidden layers
    d_out: int = 0  # size of the result; 0: that of the data's targets
    n_layers: int = 2  # number of linear layers
    activation: str = "relu"  # between the layers: relu | gelu | silu | tanh | none
    bias: bool = True  # add a bias in each layer

    def check(self) -> None:
        """Raise UserError for invalid sizes and for an unknown activation."""
        self.require_positive("d_hidden", "n_layers")
        for name in ("d_in", "d_out"):
            if getattr(self, name) < 0:
                raise UserError(f"model.{name}={getattr(self, name)}: must be at least 0")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"model.activation={self.activation}: {suggest(self.activation, ACTIVATIONS)}")

    def fit(self, dataset: Dataset) -> MLP:
        """Return the model with sizes of 0 replaced by those of the data."""
        if not (self.d_in and self.d_out):
            sizes = {name: spec.shape[-1] for name, spec in dataset.batches(0, 1, 0).inputs.items() if spec.shape}
            return replace(self, d_in=self.d_in or sizes["vectors"], d_out=self.d_out or sizes["targets"])
        return self

    def inputs(self) -> dict[str, tuple[int | str, ...]]:
        """Return the shape of a vector."""
        return {"vectors": (self.d_in,)}

    def tensors(self) -> list[TensorSpec]:
        """Return a weight, drawn with variance 2 / fan-in (He et al. 2015), and a bias of zeros for each layer."""
        sizes = [self.d_in, *[self.d_hidden] * (self.n_layers - 1), self.d_out]
        specs: list[TensorSpec] = []
        for i, (n, m) in enumerate(itertools.pairwise(sizes)):
            specs += layer_specs(f"layer.{i}", m, n, init=Normal((2 / max(n, 1)) ** 0.5), biased=self.bias)
        return specs

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the result of the last layer [B, d_out]."""
        x = batch["vectors"]
        for i in range(self.n_layers):
            x = linear(ops, x, p, f"layer.{i}")
            if i < self.n_layers - 1 and self.activation != "none":
                x = getattr(ops, self.activation)(x)
        return x
