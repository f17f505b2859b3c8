"""Gemma, the first one (Mesnard et al. 2024): llama with scaled embeddings and GeGLU; rope turns halves of a head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toyexp import Ops, UserError
from toyexp.contract.format import Conversion, Layout
from toyexp.contract.ops import Tensor
from toyexp_models.rotary import RotaryModel


@dataclass
class Gemma(RotaryModel):
    """Gemma 1: as llama, with scaled embeddings, GeGLU, and its embedding as output layer."""

    name: ClassVar[str] = "gemma"

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

    def huggingface(self, data: Mapping[str, Any]) -> Layout:
        """GemmaForCausalLM, which adds 1 to the weights of its norms."""
        layout = super().huggingface(data)
        activation = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")  # its name changed
        norms = {
            name: replace(place, form=lambda weight: weight - 1)
            for name, place in layout.tensors.items()
            if name.endswith("_norm.weight")
        }
        # Where no token that ends a turn is named, llama.cpp's converter names token 107, which it is in Google's.
        config = {**layout.config, **activation, "eot_token_id": None}
        is_usual = (self.rope_base, self.rope_scale) == (10000.0, 1.0)
        lost = "" if is_usual else "it reads neither rope_base nor rope_scale of gemma"
        return replace(
            layout,
            config=config,
            tensors={**layout.tensors, **norms},
            conversion=Conversion(("spm",), prefix=False, lost=lost),
        )
