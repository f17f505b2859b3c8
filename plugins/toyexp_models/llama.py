"""Llama (Touvron et al. 2023), Qwen 2, 2.5 and 3 (Yang et al. 2024, 2025) and Gemma (Mesnard et al. 2024).

In GGUF, Llama 2 and 3, Mistral, SmolLM and TinyLlama have the architecture `llama`. In Qwen and Gemma, RoPE rotates the
pairs (x[i], x[i + D/2]) of a head's D features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toyexp import Ops, Tensor, TensorSpec, UserError
from toyexp.base import require_positive
from toyexp_models.gguf import LlamaGGUF, RotaryGGUF
from toyexp_models.huggingface import gemma_layout, llama_layout, qwen2_layout, qwen3_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.mup import MuP
from toyexp_models.rotary import RotaryModel


@dataclass
class Llama(MuP, RotaryModel):
    """Llama family: RMSNorm, rope, grouped-query attention, SwiGLU."""

    name: ClassVar[str] = "llama"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": LlamaGGUF(), "hf": llama_layout, "config": read_config}
    halves: ClassVar[bool] = False

    o_bias: bool = False  # bias of the attention's output projection
    ffn_bias: bool = False  # biases of the feed-forward layer
    rope_factors: list[float] = field(default_factory=list)  # per-frequency RoPE divisors (Llama 3)

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("mup_base_width")
        if len(self.rope_factors) not in (0, self.head_size // 2):
            count, pairs = len(self.rope_factors), self.head_size // 2
            raise UserError(
                f"model.rope_factors has {count} numbers; heads of {self.head_size} features need {pairs}, one per pair"
            )
        for factor in self.rope_factors:
            require_positive("model.rope_factors", factor)
        self._check_angles(self.rope_factors)

    def tensors(self) -> list[TensorSpec]:
        """Return the specs of all tensors."""
        return self.parametrise(super().tensors())

    def biases(self) -> dict[str, int]:
        """Return the size of each bias in a block, by the name of its linear layer."""
        feed_forward = {"ffn_gate": self.d_ff, "ffn_up": self.d_ff, "ffn_down": self.d_model}
        output = {"attn_output": self.d_model}
        return super().biases() | (output if self.o_bias else {}) | (feed_forward if self.ffn_bias else {})

    def factors(self) -> Sequence[float]:
        """Return the divisor of each RoPE frequency (Llama 3), or an empty list if there are none."""
        return self.rope_factors


@dataclass
class Qwen2(RotaryModel):
    """Qwen 2 and 2.5: Llama with biases on q, k and v."""

    name: ClassVar[str] = "qwen2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": qwen2_layout, "config": read_config}

    qkv_bias: bool = True  # biases on the query, key and value projections
    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 1e6  # base of the rotary frequencies

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        if self.head_size * self.n_heads != self.d_model:
            rule = "in llama.cpp's qwen2 heads have d_model / n_heads features"
            raise UserError(f"model.head_dim={self.head_dim}: {rule}; leave it at 0, or use model=qwen3")


@dataclass
class Qwen3(RotaryModel):
    """Qwen 3: Llama with a norm on each head of q and k."""

    name: ClassVar[str] = "qwen3"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": qwen3_layout, "config": read_config}
    head_norms: ClassVar[bool] = True

    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 1e6  # base of the rotary frequencies


@dataclass
class Gemma(RotaryModel):
    """Gemma 1: Llama with scaled embeddings, GeGLU, and a tied output layer."""

    name: ClassVar[str] = "gemma"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": gemma_layout, "config": read_config}
    fixed: ClassVar[Mapping[str, Any]] = {"tied": True}

    tied: bool = True  # tie the output layer to the embedding table; must be true
    norm_eps: float = 1e-6  # added to the variance inside the norms

    def embed(self, ops: Ops, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows of the embedding table at `tokens`, multiplied by sqrt(d_model)."""
        return ops.scale(ops.embed(table, tokens), math.sqrt(self.d_model))

    def gated(self, ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
        """Return the hidden layer of GeGLU, gelu(gate) * up (Shazeer 2020)."""
        return ops.mul(ops.gelu(gate), up)
