"""Maximal update parametrisation: initial values, learning rates and factors that suit every width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toyexp import Model, Normal, TensorSpec
from toyexp.base import numpy as np


@dataclass
class MuP:
    """Settings of a LanguageModel with muP for Adam (Yang et al. 2021, "Tensor Programs V", table 8).

    The best learning rate of such a model is about the same for every d_model. Embeddings, norms and biases are
    parametrised as usual.
    """

    mup: bool = False  # maximal update parametrisation: the best lr of adamw is the same for every d_model
    mup_base_width: int = 64  # the d_model at which mup changes neither learning rates nor logits

    @property
    def logit_factor(self: Any) -> float:
        """Number by which the logits are multiplied: mup_base_width / d_model with muP, otherwise 1."""
        return float(self.mup_base_width / self.d_model) if self.mup else 1.0

    def score_factor(self, head_size: int) -> float | None:
        """Return 1 / head_size, the factor of attention scores with muP.

        Without muP return None, which stands for the usual factor 1 / sqrt(head_size).
        """
        return 1 / head_size if self.mup else None

    def parametrise(self: Any, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return `specs`; with muP, change the matrices of blocks.

        They get initial values with a variance of 1 / inputs, and a learning rate multiplied by `logit_factor`.
        """

        def hidden(spec: TensorSpec) -> TensorSpec:
            return replace(spec, init=Normal(1 / math.sqrt(spec.shape[1])), lr_scale=self.logit_factor)

        is_hidden = [self.mup and t.name.startswith("blk.") and len(t.shape) == 2 for t in specs]
        return [hidden(t) if is_matrix else t for t, is_matrix in zip(specs, is_hidden, strict=True)]

    def fold(self: Any, tensors: Mapping[str, np.ndarray]) -> tuple[Model, Mapping[str, np.ndarray]]:
        """Return an equal model without muP, and its tensors.

        The weights of the last norm are multiplied by the factor of the logits. Those of the query projections are
        multiplied by 1 / sqrt(head_size), because without muP the factor of attention scores is larger.
        """
        if not self.mup:
            return self, tensors
        return replace(self, mup=False), {name: self._fold(name, values) for name, values in tensors.items()}

    def _fold(self: Any, name: str, values: np.ndarray) -> np.ndarray:
        layer = name.split(".")[-2]
        if layer == "output_norm":
            return values * values.dtype.type(self.logit_factor)
        if layer not in ("attn_q", "attn_qkv"):
            return values
        count = len(values) if layer == "attn_q" else len(values) // 3  # the first third of attn_qkv is the query
        head_size = count // self.n_heads
        scaled = values.copy()
        scaled[:count] *= 1 / math.sqrt(head_size)  # a model without muP multiplies scores by this once more
        return scaled
