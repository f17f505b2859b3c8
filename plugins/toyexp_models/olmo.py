"""OLMo 2 (OLMo team 2024): Llama with norms after attention and feed-forward layer, and on q and k across heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp_models.gguf import RotaryGGUF
from toyexp_models.huggingface import olmo2_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.rotary import RotaryModel


@dataclass
class Olmo2(RotaryModel):
    """OLMo 2: Llama with norms after attention and feed-forward layer, and on q and k across all heads."""

    name: ClassVar[str] = "olmo2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": olmo2_layout, "config": read_config}
    width_norms: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, Any]] = {"tied": False, "qkv_bias": False, "head_dim": 0}

    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 500000.0  # base of the rotary frequencies

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name."""
        new_names = {"attn_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}
        return {new_names.get(name, name): shape for name, shape in super().shapes().items()}
