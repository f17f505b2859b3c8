"""Gemma 2 and 3 (Gemma Team 2024, 2025): sliding-window attention in some layers, norms before and after each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Ops, Rotary, Tensor
from toyexp.base import MAX_INT, require_range
from toyexp_models.gguf import Gemma2GGUF, Gemma3GGUF
from toyexp_models.huggingface import gemma2_layout, gemma3_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.llama import Gemma


@dataclass
class WindowedGemma(Gemma):
    """Base class of gemma2 and gemma3."""

    wide_layers: ClassVar[int]  # llama.cpp takes a model with this many layers for the 27B; see `score_scale`

    window: int = 32  # number of positions that most layers see; 0: all layers see all
    window_period: int = 6  # every so many layers, one sees all positions
    final_softcap: float = 0.0  # limit of the logits: cap * tanh(logit / cap); 0: none

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("window_period")
        require_range("model", self, window=f"[0,{MAX_INT}]", final_softcap="[0,inf)")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name."""
        return super().shapes() | dict.fromkeys(("post_attention_norm", "post_ffw_norm"), (self.d_model,))

    def layer(self, i: int) -> tuple[bool]:
        """Return (True,) if attention in layer `i` is limited to a sliding window, otherwise (False,)."""
        return (self.window > 0 and (i + 1) % self.window_period != 0,)

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *layer: Any) -> Tensor:
        """Apply RoPE to q [B, T, H, D] and k [B, T, Hkv, D]; return attention with v [B, T, Hkv, D] -> [B, T, H*D]."""
        (has_window,) = layer
        rotary, window = (self.window_rotary(), self.window) if has_window else (self.rotary(), 0)
        q, k = ops.rope(q, rotary), ops.rope(k, rotary)
        return ops.attention(
            q, k, v, window=window, scale=self.score_scale, softcap=getattr(self, "score_softcap", 0.0)
        )

    @property
    def score_scale(self) -> float:
        """Factor of attention scores: 1/sqrt(features per head), but in the 27B models 1/sqrt(d_model / n_heads)."""
        size = self.d_model // self.n_heads if self.n_layers == self.wide_layers else self.head_size
        return float(size**-0.5)

    def window_rotary(self) -> Rotary:
        """Return the rotary embedding for layers with sliding-window attention."""
        return self.rotary()


@dataclass
class Gemma2(WindowedGemma):
    """Gemma 2: Gemma with sliding windows in every second layer, norms after layers, soft-capped scores and logits."""

    name: ClassVar[str] = "gemma2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": Gemma2GGUF(), "hf": gemma2_layout, "config": read_config}
    wide_layers: ClassVar[int] = 46

    window_period: int = 2  # every so many layers, one sees all positions
    final_softcap: float = 30.0  # limit of the logits: cap * tanh(logit / cap)
    score_softcap: float = 50.0  # limit of the attention scores: cap * tanh(score / cap)

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("window", "final_softcap", "score_softcap")


@dataclass
class Gemma3(WindowedGemma):
    """Gemma 3: Gemma with sliding windows in most layers, norms after layers, and a norm on each head of q and k."""

    name: ClassVar[str] = "gemma3"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": Gemma3GGUF(), "hf": gemma3_layout, "config": read_config}
    head_norms: ClassVar[bool] = True
    wide_layers: ClassVar[int] = 62

    rope_base: float = 1e6  # base of the rotary frequencies in layers without a window
    window_rope_base: float = 10000.0  # base of the rotary frequencies in layers with a window

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("window_rope_base")

    def window_rotary(self) -> Rotary:
        """Return the rotary embedding for layers with sliding-window attention. It does not scale positions."""
        return Rotary(self.window_rope_base, halves=True)
