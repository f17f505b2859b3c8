"""Llama (Touvron et al. 2023), and what goes by its name in GGUF: Llama 2 and 3, Mistral, SmolLM, TinyLlama."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toyexp import UserError
from toyexp.base import require_float32
from toyexp_models.gguf import LlamaGGUF
from toyexp_models.huggingface import llama_layout
from toyexp_models.rotary import RotaryModel


@dataclass
class Llama(RotaryModel):
    """Llama family: RMSNorm, rope, grouped-query attention, SwiGLU."""

    name: ClassVar[str] = "llama"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": LlamaGGUF(), "hf": llama_layout}
    halves: ClassVar[bool] = False

    o_bias: bool = False  # a bias on the attention's output projection
    ffn_bias: bool = False  # biases in the feed-forward layer
    rope_factors: list[float] = field(default_factory=list)  # Llama 3's: a pair of features turns so much slower

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        super().check()
        if len(self.rope_factors) not in (0, self.head_size // 2):
            raise UserError(
                f"model.rope_factors holds {len(self.rope_factors)} numbers: heads of {self.head_size} features have "
                f"{self.head_size // 2} pairs, each with its own"
            )
        for factor in self.rope_factors:
            if not 0 < factor < math.inf:
                raise UserError(f"model.rope_factors: {factor} must be a finite number above 0")
            require_float32("model.rope_factors", factor)
        self._check_turns(self.rope_factors)

    def biases(self) -> dict[str, int]:
        """The linears of a block that have a bias, and its size."""
        feed_forward = {"ffn_gate": self.d_ff, "ffn_up": self.d_ff, "ffn_down": self.d_model}
        output = {"attn_output": self.d_model}
        return super().biases() | (output if self.o_bias else {}) | (feed_forward if self.ffn_bias else {})

    def factors(self) -> Sequence[float]:
        """Llama 3's."""
        return self.rope_factors
