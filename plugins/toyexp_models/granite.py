"""Granite (Mishra et al. 2024): Llama with four multipliers, such as muP requires, and optionally without RoPE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from toyexp import Model, Ops, Tensor, is_changed
from toyexp_models.gguf import GraniteGGUF
from toyexp_models.huggingface import granite_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.llama import Llama


@dataclass
class Granite(Llama):
    """Granite 3: Llama with multipliers of embeddings, residuals, scores and logits; RoPE is optional."""

    name: ClassVar[str] = "granite"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": GraniteGGUF(), "hf": granite_layout, "config": read_config}

    embedding_scale: float = 1.0  # factor of the embeddings
    residual_scale: float = 1.0  # factor of each output of attention and feed-forward, before it is added
    attention_scale: float = 0.0  # factor of the scores q k; 0: 1/sqrt(features per head), with mup 1/features
    logit_scale: float = 1.0  # divisor of the logits
    rope: bool = True  # rotate q and k by their positions; false: no position embedding (NoPE)

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("embedding_scale", "residual_scale", "logit_scale")
        if self.attention_scale:
            self.require_positive("attention_scale")

    def warnings(self) -> Iterable[str]:
        """Warn of settings of RoPE if no layer has it."""
        for name in ("rope_base", "rope_scale", "rope_factors"):
            if is_changed(self, name) and not self.rope:
                yield f"model.{name}={getattr(self, name)}: has no effect with model.rope=false"

    def embed(self, ops: Ops, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens' rows of the embedding table, times embedding_scale."""
        return ops.scale(ops.embed(table, tokens), self.embedding_scale)

    def join(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """Return the residual stream x plus y times residual_scale."""
        return ops.add(x, ops.scale(y, self.residual_scale))

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *layer: Any) -> Tensor:
        """Return attention [B, T, H*D] of q, k and v. Apply RoPE to q and k if the setting `rope` is true."""
        if self.rope:
            q, k = ops.rope(q, self.rotary()), ops.rope(k, self.rotary())
        return ops.attention(q, k, v, scale=self.attention_scale or self.score_factor(self.head_size))

    def logits(self, ops: Ops, x: Tensor, table: Tensor) -> Tensor:
        """Return the logits divided by logit_scale."""
        return ops.logits(ops.scale(x, self.logit_factor / self.logit_scale), table)

    def fold(self, tensors: Mapping[str, Any]) -> tuple[Model, Mapping[str, Any]]:
        """Return an equal model without muP, whose multipliers include muP's factors, and the unchanged tensors."""
        if not self.mup:
            return self, tensors
        scores, divisor = self.attention_scale or 1 / self.head_size, self.logit_scale / self.logit_factor
        return replace(self, mup=False, attention_scale=scores, logit_scale=divisor), tensors
