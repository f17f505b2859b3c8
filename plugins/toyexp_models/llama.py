"""Llama (Touvron et al. 2023), and what goes by its name in GGUF: Llama 2 and 3, Mistral, SmolLM, TinyLlama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from toyexp import Rotary, UserError
from toyexp.base.bounds import require_float32
from toyexp.contract.format import Conversion, Layout
from toyexp_models.language import Keys, decimal
from toyexp_models.rotary import RotaryModel

FREQS = "rope_freqs.weight"


@dataclass
class Llama(RotaryModel):
    """Llama family: RMSNorm, rope, grouped-query attention, SwiGLU."""

    name: ClassVar[str] = "llama"
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

    @classmethod
    def sizes(cls, keys: Keys) -> dict[str, Any]:
        """What llama.cpp reads, with its defaults."""
        common = super().sizes(keys)
        keys.expect("tensor_data_layout", "Meta AI original pth")  # older converters; says nothing about GGUF
        file, pairs = keys.file, (common["head_dim"] or common["d_model"] // common["n_heads"]) // 2
        info = file.tensors.get(FREQS)
        if info is not None and info.shape != (pairs,):
            raise file.error(f"{FREQS} has the shape {list(info.shape)}, heads of {2 * pairs} take {pairs} numbers")
        return common | {
            "o_bias": "blk.0.attn_output.bias" in file.tensors,
            "ffn_bias": "blk.0.ffn_up.bias" in file.tensors,
            "rope_factors": [] if info is None else [decimal(f) for f in file.read(FREQS)],
        }

    def biases(self) -> dict[str, int]:
        """The linears of a block that have a bias, and its size."""
        feed_forward = {"ffn_gate": self.d_ff, "ffn_up": self.d_ff, "ffn_down": self.d_model}
        output = {"attn_output": self.d_model}
        return super().biases() | (output if self.o_bias else {}) | (feed_forward if self.ffn_bias else {})

    def rotary(self) -> Rotary:
        """How q and k are turned."""
        return Rotary(self.rope_base, self.rope_scale, tuple(self.rope_factors), self.halves)

    def constants(self) -> Mapping[str, np.ndarray]:
        """Llama 3's frequency factors."""
        return {FREQS: np.array(self.rope_factors, np.float32)} if self.rope_factors else {}

    def huggingface(self, data: Mapping[str, Any]) -> Layout:
        """LlamaForCausalLM; UserError for heads that it does not take."""
        if self.d_model % self.n_heads:
            raise UserError(
                f"transformers' llama takes a number of heads that divides d_model; {self.n_heads} do not divide "
                f"{self.d_model}"
            )
        return replace(super().huggingface(data), conversion=Conversion(prefix=None))
