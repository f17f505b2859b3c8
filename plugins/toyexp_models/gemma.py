"""Gemma, the first one (Mesnard et al. 2024): llama with scaled embeddings and GeGLU; rope turns halves of a head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Ops, Tensor, UserError
from toyexp_models.gguf import RotaryGGUF
from toyexp_models.huggingface import gemma_layout
from toyexp_models.rotary import RotaryModel


@dataclass
class Gemma(RotaryModel):
    """Gemma 1: as llama, with scaled embeddings, GeGLU, and its embedding as output layer."""

    name: ClassVar[str] = "gemma"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": gemma_layout}

    tied: bool = True  # the output layer is the embedding table, and has to be
    norm_eps: float = 1e-6  # added to the variance inside the norms

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        super().check()
        if not self.tied:
            raise UserError("model.tied=false: gemma has no output layer but its embedding")

    def embed(self, ops: Ops, table: Tensor, tokens: Tensor) -> Tensor:
        """Rows of the table times sqrt(d)."""
        return ops.scale(ops.embed(table, tokens), math.sqrt(self.d_model))

    def gated(self, ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up (Shazeer 2020)."""
        return ops.mul(ops.gelu(gate), up)
