"""Mixtures of experts: Qwen 3 MoE (Yang et al. 2025) and OLMoE (Muennighoff et al. 2024).

Every expert is computed at every position; those that the router does not choose have the weight 0. This is exact, and
for E experts of which k are used it costs E/k times the operations. An auxiliary loss can balance the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from toyexp import Ops, Params, Tensor, UserError
from toyexp.base import require_range
from toyexp_models.gguf import ExpertsGGUF
from toyexp_models.huggingface import olmoe_layout, qwen3moe_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.language import linear
from toyexp_models.rotary import RotaryModel


@dataclass
class ExpertsModel(RotaryModel):
    """Base class of qwen3moe and olmoe."""

    has_auxiliary: ClassVar[bool] = True
    normalised: ClassVar[bool]  # whether the weights of a position's experts sum to 1

    d_ff: int = 96  # hidden size of each expert
    experts: int = 4  # number of experts per layer
    experts_used: int = 2  # number of experts that the router chooses at each position

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("experts")
        require_range("model", self, experts_used=f"[1,{self.experts}]")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name. The weights of experts have three axes."""
        shapes = {n: shape for n, shape in super().shapes().items() if n not in ("ffn_gate", "ffn_up", "ffn_down")}
        inner, outer = (self.experts, self.d_ff, self.d_model), (self.experts, self.d_model, self.d_ff)
        experts = {"ffn_gate_exps": inner, "ffn_up_exps": inner, "ffn_down_exps": outer}
        return {**shapes, "ffn_gate_inp": (self.experts, self.d_model), **experts}

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B, T, vocab] of tokens [B, T].

        If `p.auxiliary` is a list, append the load balance of the experts to it, a mean over rows and layers.
        """
        if p.auxiliary is None:
            return super().forward(ops, p, batch)
        inner = p.below("")
        by_layer: list[Tensor] = []
        inner.auxiliary = by_layer
        logits = super().forward(ops, inner, batch)
        weights = batch["weights"]  # they sum to 1 over a step
        by_row = weights if len(weights.shape) == 1 else ops.sum(weights, 1)
        total = ops.sum(ops.mul(reduce(ops.add, by_layer), by_row))
        p.auxiliary.append(ops.scale(total, 1 / self.n_layers))
        return logits

    def run_block(self, ops: Ops, x: Tensor, p: Params, i: int, *layer: Any) -> Tensor:
        """Return the output of block `i` for x [B, T, d]. If `p.auxiliary` is a list, append the block's balance."""

        def block(ops: Ops, x: Tensor, p: Params, *layer: Any) -> tuple[Tensor, ...]:
            inner = p.below("")
            inner.auxiliary = []
            y = self.block(ops, x, inner, *layer)
            return (y, *inner.auxiliary)

        if p.auxiliary is None:
            return super().run_block(ops, x, p, i, *layer)
        x, balance = ops.block(block, x, p.block(i), *layer)
        p.auxiliary.append(balance)
        return x

    def balance(self, ops: Ops, scores: Tensor) -> Tensor:
        """Return the load balance of the experts in each row, [B], for the router's scores [B, T, E].

        It is E * sum over experts of f * P, where f is the share of the row's positions that use the expert, and P the
        mean of its router probabilities (Fedus et al. 2021, Switch Transformer). It is least, the number of experts per
        position, if all experts are used equally.
        """
        used, shares = ops.mean(ops.top_k(scores, self.experts_used), 1), ops.mean(ops.softmax(scores), 1)
        return ops.scale(ops.sum(ops.mul(used, shares), 1), float(self.experts))

    def feed_forward(self, ops: Ops, h: Tensor, p: Params) -> Tensor:
        """Return the weighted sum [B, T, d] of the experts' outputs for h [B, T, d]."""
        scores = linear(ops, h, p, "ffn_gate_inp")  # [B, T, E]
        if p.auxiliary is not None:
            p.auxiliary.append(self.balance(ops, scores))
        weights = ops.route(scores, self.experts_used, self.normalised)
        gate, up = (ops.experts(h, p[f"ffn_{name}_exps.weight"]) for name in ("gate", "up"))  # [B, T, E, d_ff]
        hidden = ops.mul(self.gated(ops, gate, up), ops.reshape(weights, (*weights.shape, 1)))
        return ops.sum(ops.experts(hidden, p["ffn_down_exps.weight"]), 2)


@dataclass
class Qwen3Moe(ExpertsModel):
    """Qwen 3 MoE: Qwen 3 with experts in each layer. The weights of the chosen experts sum to 1."""

    name: ClassVar[str] = "qwen3moe"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": ExpertsGGUF(), "hf": qwen3moe_layout, "config": read_config}
    head_norms: ClassVar[bool] = True
    normalised: ClassVar[bool] = True

    norm_eps: float = 1e-6  # added to the variance inside the norms
    rope_base: float = 1e6  # base of the rotary frequencies


@dataclass
class Olmoe(ExpertsModel):
    """OLMoE: Llama with experts in each layer, and with norms on q and k across all heads."""

    name: ClassVar[str] = "olmoe"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": ExpertsGGUF(), "hf": olmoe_layout, "config": read_config}
    width_norms: ClassVar[bool] = True
    normalised: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, Any]] = {"tied": False, "qkv_bias": False, "head_dim": 0}

    n_kv_heads: int = 4  # number of key/value heads; must be n_heads

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        if self.n_kv_heads != self.n_heads:
            raise UserError(f"model.n_kv_heads={self.n_kv_heads}: olmoe requires model.n_kv_heads={self.n_heads}")
