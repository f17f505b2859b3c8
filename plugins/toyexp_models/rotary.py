"""Base class of llama and its relatives: RMSNorm, rope, grouped-query attention, a gated feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Constant, Normal, Ops, Params, Rotary, Tensor, TensorSpec, UserError, keep_apart
from toyexp.base import MAX_INT, require_range
from toyexp_models.language import LanguageModel, linear, norm, require_shared_heads


@dataclass
class RotaryModel(LanguageModel):
    """Transformer of llama and its relatives; subclasses override the differences."""

    halves: ClassVar[bool] = True  # rope rotates pairs (x[i], x[i + D/2]); False in llama
    head_norms: ClassVar[bool] = False  # RMSNorm on each head of q and k before rope
    width_norms: ClassVar[bool] = False  # RMSNorm on all of q and all of k, before heads are cut
    rotates: ClassVar[bool] = True  # False: no layer has RoPE
    last_norm: ClassVar[str] = "output_norm"  # name of the norm before the output layer
    fixed: ClassVar[Mapping[str, Any]] = {}  # settings that can have only this value

    n_kv_heads: int = 2  # number of key/value heads, each shared by n_heads / n_kv_heads query heads
    head_dim: int = 0  # features per head; 0: d_model / n_heads
    tied: bool = False  # tie the output layer to the embedding table
    qkv_bias: bool = False  # biases of the query, key and value projections
    rope_base: float = 10000.0  # base of the RoPE frequencies (rope_theta)
    rope_scale: float = 1.0  # divisor of positions (linear RoPE scaling)

    @property
    def head_size(self) -> int:
        """Features per attention head."""
        return self.head_dim or self.d_model // self.n_heads

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        for name, value in self.fixed.items():
            if (given := getattr(self, name)) != value:
                own, required = (str(v).lower() for v in (given, value))
                raise UserError(f"model.{name}={own}: {self.name} requires model.{name}={required}")
        self.require_positive("n_kv_heads", "rope_base", "rope_scale")
        require_range("model", self, head_dim=f"[0,{MAX_INT}]")
        setting = f"model.head_dim={self.head_dim}"
        if not self.head_dim:
            require_shared_heads(self)
            setting = f"model.d_model={self.d_model} over model.n_heads={self.n_heads} gives heads of {self.head_size}"
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"model.n_kv_heads={self.n_kv_heads} does not divide model.n_heads={self.n_heads}")
        if self.rotates and self.head_size % 2:
            raise UserError(f"{setting}: RoPE rotates pairs of features, so the size must be even")
        if self.rotates:
            self._check_angles()

    def _check_angles(self, factors: Sequence[float] = ()) -> None:
        """Raise UserError if RoPE's largest angle, at the last position, is too large for float32.

        `factors` are the divisors of the frequencies, if any.
        """
        # Slope of log10(speed) from pair to pair; the first pair has speed 1.
        slope = -2 / self.head_size * math.log10(self.rope_base)
        fastest = [slope * i - math.log10(factor) for i, factor in enumerate(factors)]
        fastest = fastest or [0, slope * (self.head_size // 2 - 1)]
        if max(fastest) + math.log10(self.context / self.rope_scale) > math.log10(MAX_INT):
            settings = f"model.rope_base={self.rope_base}, model.rope_scale={self.rope_scale}"
            raise UserError(f"{settings}: RoPE would rotate position {self.context} by more than {MAX_INT} radians")

    def tensors(self) -> list[TensorSpec]:
        """Return the specs of all tensors.

        Embeddings start from N(0, 0.02), linear layers from N(0, 1/sqrt(inputs)), norms from 1, biases from 0.
        """

        def weight(name: str, shape: tuple[int, ...]) -> TensorSpec:
            init = Constant(1) if len(shape) == 1 else Normal(1 / math.sqrt(shape[-1]))
            return TensorSpec(f"{name}.weight", shape, init)

        specs = [TensorSpec("token_embd.weight", (self.vocab, self.d_model), Normal(0.02))]
        for i in range(self.n_layers):
            specs += [weight(f"blk.{i}.{name}", shape) for name, shape in self.shapes().items()]
            specs += [TensorSpec(f"blk.{i}.{name}.bias", (size,), Constant(0)) for name, size in self.biases().items()]
        specs.append(weight(self.last_norm, (self.d_model,)))
        if not self.tied:
            specs.append(TensorSpec("output.weight", (self.vocab, self.d_model), Normal(0.02)))
        return specs

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name. Those with one axis are norms."""
        d, ff, q, kv = self.d_model, self.d_ff, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        attention = {"attn_norm": (d,), "attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q)}
        feed_forward = {"ffn_norm": (d,), "ffn_gate": (ff, d), "ffn_up": (ff, d), "ffn_down": (d, ff)}
        widths = (self.head_size, self.head_size) if self.head_norms else (q, kv) if self.width_norms else ()
        norms = {name: (width,) for name, width in zip(("attn_q_norm", "attn_k_norm"), widths, strict=False)}
        return attention | feed_forward | norms

    def biases(self) -> dict[str, int]:
        """Return the size of each bias in a block, by the name of its linear layer."""
        kv = self.n_kv_heads * self.head_size
        return {"attn_q": self.n_heads * self.head_size, "attn_k": kv, "attn_v": kv} if self.qkv_bias else {}

    def factors(self) -> Sequence[float]:
        """Return the divisor of each RoPE frequency, or an empty sequence if there are none."""
        return ()

    def rotary(self) -> Rotary:
        """Return the rotary embedding of q and k."""
        return Rotary(self.rope_base, self.rope_scale, tuple(self.factors()), self.halves)

    def embed(self, ops: Ops, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of the first block, [B, T, d]."""
        return ops.embed(table, tokens)

    def gated(self, ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
        """Return the gated activations of the feed-forward layer, [B, T, d_ff]; here SwiGLU."""
        return ops.swiglu(gate, up)

    def layer(self, i: int) -> tuple[Any, ...]:
        """Return additional arguments with which `forward` calls `block` for layer `i`.

        This base class returns none. A subclass whose layers differ from each other overrides this method.
        """
        return ()

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B, T, vocab] of tokens [B, T]."""
        ops = keep_apart(ops, batch)
        x = self.blocks(ops, self.embed(ops, p["token_embd.weight"], batch["tokens"]), p, batch)  # [B, T, d]
        x = norm(ops, x, p, self.last_norm, self.norm_eps)
        return self.logits(ops, x, p["token_embd.weight" if self.tied else "output.weight"])

    def blocks(self, ops: Ops, x: Tensor, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the output of the last block, for the input x [B, T, d] of the first one."""
        for i in range(self.n_layers):
            x = self.run_block(ops, x, p, i, *self.layer(i))
        return x

    def run_block(self, ops: Ops, x: Tensor, p: Params, i: int, *layer: Any) -> Tensor:
        """Return the output of block `i` for x [B, T, d], by `ops.block`; `layer` are further arguments of `block`."""
        return ops.block(self.block, x, p.block(i), *layer)

    def logits(self, ops: Ops, x: Tensor, table: Tensor) -> Tensor:
        """Return the logits [B, T, vocab] of x [B, T, d], the output of the last norm, limited by any final_softcap."""
        logits, cap = ops.logits(self.scale_output(ops, x), table), getattr(self, "final_softcap", 0.0)
        return ops.softcap(logits, cap) if cap else logits

    def block(self, ops: Ops, x: Tensor, p: Params, *layer: Any) -> Tensor:
        """Return the output of one block for x [B, T, d]; `layer` are the arguments that the method `layer` returns."""
        h = self.mix(ops, norm(ops, x, p, "attn_norm", self.norm_eps), p, *layer)
        x = self.join(ops, x, norm(ops, h, p, "post_attention_norm", self.norm_eps))
        h = self.feed_forward(ops, norm(ops, x, p, "ffn_norm", self.norm_eps), p)
        return self.join(ops, x, norm(ops, h, p, "post_ffw_norm", self.norm_eps))

    def join(self, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
        """Return the residual stream x plus y, the output of attention or of the feed-forward layer."""
        return ops.add(x, y)

    def mix(self, ops: Ops, h: Tensor, p: Params, *layer: Any) -> Tensor:
        """Return the output [B, T, d] of attention with its projections, for h [B, T, d]."""

        def project(name: str, heads: int) -> Tensor:  # [B, T, heads, D]
            x = linear(ops, h, p, name)
            return ops.heads(norm(ops, x, p, f"{name}_norm", self.norm_eps) if self.width_norms else x, heads)

        counts = {"attn_q": self.n_heads, "attn_k": self.n_kv_heads, "attn_v": self.n_kv_heads}
        q, k, v = (project(name, heads) for name, heads in counts.items())
        if self.head_norms:
            q, k = (norm(ops, x, p, f"attn_{n}_norm", self.norm_eps) for n, x in (("q", q), ("k", k)))
        return linear(ops, self.attend(ops, q, k, v, *layer), p, "attn_output")

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *layer: Any) -> Tensor:
        """Apply RoPE to q [B, T, H, D] and k [B, T, Hkv, D]; return attention with v [B, T, Hkv, D] -> [B, T, H*D]."""
        rotary = self.rotary()
        q, k = ops.rope(q, rotary), ops.rope(k, rotary)
        return ops.attention(q, k, v, scale=self.score_factor(self.head_size))

    def feed_forward(self, ops: Ops, h: Tensor, p: Params) -> Tensor:
        """Return the output [B, T, d] of the feed-forward layer for h [B, T, d]."""
        hidden = self.gated(ops, linear(ops, h, p, "ffn_gate"), linear(ops, h, p, "ffn_up"))  # [B, T, d_ff]
        return linear(ops, hidden, p, "ffn_down")
