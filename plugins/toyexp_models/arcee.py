"""AFM (Arcee AI 2025): Llama with squared ReLU (So et al. 2021) instead of a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Ops, Params, Tensor
from toyexp_models.gguf import RotaryGGUF
from toyexp_models.huggingface import arcee_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.language import linear
from toyexp_models.rotary import RotaryModel


@dataclass
class Arcee(RotaryModel):
    """Arcee's AFM: Llama with squared ReLU and no gate in the feed-forward layer."""

    name: ClassVar[str] = "arcee"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": RotaryGGUF(), "hf": arcee_layout, "config": read_config}
    halves: ClassVar[bool] = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name."""
        return {name: shape for name, shape in super().shapes().items() if name != "ffn_gate"}

    def feed_forward(self, ops: Ops, h: Tensor, p: Params) -> Tensor:
        """Return the output [B, T, d] of the feed-forward layer for h [B, T, d]."""
        hidden = ops.relu(linear(ops, h, p, "ffn_up"))  # [B, T, d_ff]
        return linear(ops, ops.mul(hidden, hidden), p, "ffn_down")
