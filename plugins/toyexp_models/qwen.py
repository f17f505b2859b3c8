"""Qwen 2, 2.5 and 3 (Yang et al. 2024, 2025): llama with other biases and norms; rope turns halves of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import UserError
from toyexp_models.gguf import RotaryGGUF
from toyexp_models.huggingface import qwen2_layout, qwen3_layout
from toyexp_models.rotary import RotaryModel


@dataclass
class Qwen2(RotaryModel):
    """Qwen 2 and 2.5: as llama, with biases on q, k and v."""

    name: ClassVar[str] = "qwen2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": qwen2_layout}

    qkv_bias: bool = True  # biases on the query, key and value projections
    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 1e6  # base of the rotary frequencies

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        super().check()
        if self.head_size * self.n_heads != self.d_model:
            raise UserError(
                f"model.head_dim={self.head_dim}: in llama.cpp's qwen2 heads have d_model / n_heads features; "
                "leave it at 0, or use model=qwen3"
            )


@dataclass
class Qwen3(RotaryModel):
    """Qwen 3: as llama, with a norm on each head of q and k."""

    name: ClassVar[str] = "qwen3"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": qwen3_layout}
    head_norms: ClassVar[bool] = True

    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 1e6  # base of the rotary frequencies
