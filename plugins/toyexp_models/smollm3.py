"""SmolLM 3 (Hugging Face 2025): Llama without RoPE in every fourth layer (Yang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Ops, Tensor
from toyexp_models.gguf import RotaryGGUF
from toyexp_models.huggingface import smollm3_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.rotary import RotaryModel

PERIOD = 4  # each fourth layer has no RoPE; in llama.cpp this number is fixed


@dataclass
class SmolLM3(RotaryModel):
    """SmolLM 3: Llama without position embedding in every fourth layer."""

    name: ClassVar[str] = "smollm3"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": smollm3_layout, "config": read_config}
    halves: ClassVar[bool] = False

    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 2e6  # base of the rotary frequencies

    def layer(self, i: int) -> tuple[bool]:
        """Return (True,) if layer `i` has RoPE, otherwise (False,)."""
        return ((i + 1) % PERIOD != 0,)

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *layer: Any) -> Tensor:
        """Return attention [B, T, H*D] of q, k and v. Apply RoPE to q and k unless `layer` is (False,)."""
        (has_rope,) = layer
        return super().attend(ops, q, k, v) if has_rope else ops.attention(q, k, v)
