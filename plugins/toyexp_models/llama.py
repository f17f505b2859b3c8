"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Constant, Normal, Ops, Params, Rotary, TensorSpec, UserError
from toyexp.ops import Tensor
from toyexp_models.language import Keys, LanguageModel


@dataclass
class Llama(LanguageModel):
    """Llama family: RMSNorm, rope, grouped-query attention, SwiGLU."""

    name: ClassVar[str] = "llama"

    n_kv_heads: int = 2  # key/value heads, each shared by n_heads / n_kv_heads query heads
    tied: bool = False  # the output layer is the embedding table
    qkv_bias: bool = False  # biases on the query, key and value projections
    rope_base: float = 10000.0  # base of the rotary frequencies

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        super().check()
        self.require_positive("n_kv_heads", "rope_base")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"model.n_kv_heads={self.n_kv_heads} does not divide model.n_heads={self.n_heads}")
        if self.head_size % 2:
            raise UserError(
                f"model.d_model={self.d_model} over model.n_heads={self.n_heads} gives heads of {self.head_size}: "
                "rope rotates pairs, so the size of a head must be even"
            )

    @classmethod
    def sizes(cls, keys: Keys) -> dict[str, Any]:
        """What llama.cpp reads, with its defaults; no rope scaling."""
        common = super().sizes(keys)
        keys.expect("rope.dimension_count", common["d_model"] // common["n_heads"])
        keys.expect("rope.scaling.type", "none")
        keys.expect("rope.scaling.factor", 1.0)
        keys.expect("tensor_data_layout", "Meta AI original pth")  # older converters; says nothing about GGUF
        return common | {
            "n_kv_heads": keys.whole("attention.head_count_kv", common["n_heads"]),
            "qkv_bias": "blk.0.attn_q.bias" in keys.file.tensors,
            "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_base": keys.number("rope.freq_base", 10000.0),
        }

    def tensors(self) -> list[TensorSpec]:
        """Embeddings N(0, 0.02), linears N(0, 1/sqrt(inputs)), norms 1, biases 0 (the seed's initialiser)."""
        d, ff, kv = self.d_model, self.d_ff, self.n_kv_heads * self.head_size
        inner, outer = Normal(1 / math.sqrt(d)), Normal(1 / math.sqrt(ff))
        specs = [TensorSpec("token_embd.weight", (self.vocab, d), Normal(0.02))]
        for i in range(self.n_layers):
            specs += [
                TensorSpec(f"blk.{i}.attn_norm.weight", (d,), Constant(1)),
                TensorSpec(f"blk.{i}.attn_q.weight", (d, d), inner),
                TensorSpec(f"blk.{i}.attn_k.weight", (kv, d), inner),
                TensorSpec(f"blk.{i}.attn_v.weight", (kv, d), inner),
                TensorSpec(f"blk.{i}.attn_output.weight", (d, d), inner),
                TensorSpec(f"blk.{i}.ffn_norm.weight", (d,), Constant(1)),
                TensorSpec(f"blk.{i}.ffn_gate.weight", (ff, d), inner),
                TensorSpec(f"blk.{i}.ffn_up.weight", (ff, d), inner),
                TensorSpec(f"blk.{i}.ffn_down.weight", (d, ff), outer),
            ]
            if self.qkv_bias:
                sizes = {"q": d, "k": kv, "v": kv}
                specs += [TensorSpec(f"blk.{i}.attn_{x}.bias", (n,), Constant(0)) for x, n in sizes.items()]
        specs.append(TensorSpec("output_norm.weight", (d,), Constant(1)))
        if not self.tied:
            specs.append(TensorSpec("output.weight", (self.vocab, d), Normal(0.02)))
        return specs

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        rotary = Rotary(self.rope_base)
        x = ops.embed(p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        for i in range(self.n_layers):
            b = p.block(i)
            h = ops.rms_norm(x, b["attn_norm.weight"], self.norm_eps)
            q, k, v = (ops.linear(h, b[f"attn_{n}.weight"], b.get(f"attn_{n}.bias")) for n in "qkv")
            q = ops.rope(ops.heads(q, self.n_heads), rotary)  # [B, T, H, D]
            k = ops.rope(ops.heads(k, self.n_kv_heads), rotary)  # [B, T, Hkv, D]
            v = ops.heads(v, self.n_kv_heads)  # [B, T, Hkv, D]
            x = ops.add(x, ops.linear(ops.attention(q, k, v), b["attn_output.weight"]))
            h = ops.rms_norm(x, b["ffn_norm.weight"], self.norm_eps)
            h = ops.swiglu(ops.linear(h, b["ffn_gate.weight"]), ops.linear(h, b["ffn_up.weight"]))  # [B, T, d_ff]
            x = ops.add(x, ops.linear(h, b["ffn_down.weight"]))
        x = ops.rms_norm(x, p["output_norm.weight"], self.norm_eps)
        return ops.linear(x, p["token_embd.weight" if self.tied else "output.weight"])

    def gguf_metadata(self) -> dict[str, Any]:
        """The keys llama.cpp reads for architecture llama."""
        return {
            **super().gguf_metadata(),
            "attention.head_count_kv": self.n_kv_heads,
            "attention.layer_norm_rms_epsilon": self.norm_eps,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": self.rope_base,
        }
