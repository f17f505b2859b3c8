"""What llama and its relatives share: RMSNorm, rope, grouped-query attention, a gated feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Constant, Normal, Ops, Params, Rotary, TensorSpec, UserError
from toyexp.base.bounds import MOST
from toyexp.contract.format import Layout, Numbers, Place, unchanged
from toyexp.contract.ops import Tensor
from toyexp_models.language import Keys, LanguageModel
from toyexp_models.scaling import rope_scaling

# Where tensors stand in transformers.
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ATTENTION, FEED_FORWARD = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")


@dataclass
class RotaryModel(LanguageModel):
    """The transformer of llama, qwen2, qwen3 and gemma; each says what it does otherwise."""

    halves: ClassVar[bool] = True  # rope turns (x[i], x[i + D/2]), which llama alone does not
    head_norms: ClassVar[bool] = False  # each head of q and k is normed before it is turned

    n_kv_heads: int = 2  # key/value heads, each shared by n_heads / n_kv_heads query heads
    head_dim: int = 0  # features of a head; 0: d_model / n_heads
    tied: bool = False  # the output layer is the embedding table
    qkv_bias: bool = False  # biases on the query, key and value projections
    rope_base: float = 10000.0  # base of the rotary frequencies
    rope_scale: float = 1.0  # positions are divided by it (linear rope scaling)

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.head_dim or self.d_model // self.n_heads

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        super().check()
        self.require_positive("n_kv_heads", "rope_base", "rope_scale")
        self.require_counts("head_dim")
        given = f"model.head_dim={self.head_dim}"
        if self.head_dim < 0:
            raise UserError(f"{given}: must be 0 (d_model / n_heads) or above")
        if not self.head_dim:
            self.require_shared_heads()
            given = f"model.d_model={self.d_model} over model.n_heads={self.n_heads} gives heads of {self.head_size}"
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"model.n_kv_heads={self.n_kv_heads} does not divide model.n_heads={self.n_heads}")
        if self.head_size % 2:
            raise UserError(f"{given}: rope rotates pairs, so the size of a head must be even")
        self._check_turns()

    def _check_turns(self, factors: Sequence[float] = ()) -> None:
        """Raises UserError where the last position turns a pair by more radians than float32 can tell apart at all."""
        slope = -2 / self.head_size * math.log10(self.rope_base)  # of the pairs' speeds, from 1 for the first
        fastest = [slope * i - math.log10(factor) for i, factor in enumerate(factors)]
        fastest = fastest or [0, slope * (self.head_size // 2 - 1)]
        if max(fastest) + math.log10(self.context / self.rope_scale) > math.log10(MOST):
            raise UserError(
                f"model.rope_base={self.rope_base}, model.rope_scale={self.rope_scale}: position {self.context} would "
                f"turn by more than {MOST} radians; a rope_base above 1, a rope_scale and factors of about 1 do not"
            )

    @classmethod
    def sizes(cls, keys: Keys) -> dict[str, Any]:
        """What llama.cpp reads, with its defaults; of rope's scalings the linear one."""
        common = super().sizes(keys)
        usual = common["d_model"] // common["n_heads"]
        size, value = (keys.whole(f"attention.{kind}_length", usual or None) for kind in ("key", "value"))
        if size != value:
            raise keys.file.error(f"its heads have keys of {size} features and values of {value}, toyexp's are equal")
        keys.expect("rope.dimension_count", size)
        return common | {
            "n_kv_heads": keys.whole("attention.head_count_kv", common["n_heads"]),
            "head_dim": 0 if size * common["n_heads"] == common["d_model"] else size,
            "qkv_bias": "blk.0.attn_q.bias" in keys.file.tensors,
            "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_base": keys.number("rope.freq_base", 10000.0),
            "rope_scale": _linear_scaling(keys),
        }

    def tensors(self) -> list[TensorSpec]:
        """Embeddings N(0, 0.02), linears N(0, 1/sqrt(inputs)), norms 1, biases 0 (the seed's initialiser)."""
        d, ff, q, kv = self.d_model, self.d_ff, self.n_heads * self.head_size, self.n_kv_heads * self.head_size

        def linear(name: str, outputs: int, inputs: int) -> TensorSpec:
            return TensorSpec(f"{name}.weight", (outputs, inputs), Normal(1 / math.sqrt(inputs)))

        def norm(name: str, size: int = d) -> TensorSpec:
            return TensorSpec(f"{name}.weight", (size,), Constant(1))

        specs = [TensorSpec("token_embd.weight", (self.vocab, d), Normal(0.02))]
        for i in range(self.n_layers):
            at = f"blk.{i}."
            specs += [norm(f"{at}attn_norm"), linear(f"{at}attn_q", q, d), linear(f"{at}attn_k", kv, d)]
            specs += [linear(f"{at}attn_v", kv, d), linear(f"{at}attn_output", d, q), norm(f"{at}ffn_norm")]
            specs += [linear(f"{at}ffn_gate", ff, d), linear(f"{at}ffn_up", ff, d), linear(f"{at}ffn_down", d, ff)]
            if self.head_norms:
                specs += [norm(f"{at}attn_{x}_norm", self.head_size) for x in "qk"]
            specs += [TensorSpec(f"{at}{name}.bias", (size,), Constant(0)) for name, size in self.biases().items()]
        specs.append(norm("output_norm"))
        if not self.tied:
            specs.append(TensorSpec("output.weight", (self.vocab, d), Normal(0.02)))
        return specs

    def biases(self) -> dict[str, int]:
        """The linears of a block that have a bias, and its size."""
        kv = self.n_kv_heads * self.head_size
        return {"attn_q": self.n_heads * self.head_size, "attn_k": kv, "attn_v": kv} if self.qkv_bias else {}

    def rotary(self) -> Rotary:
        """How q and k are turned."""
        return Rotary(self.rope_base, self.rope_scale, halves=self.halves)

    def embed(self, ops: Ops, table: Tensor, tokens: Tensor) -> Tensor:
        """What the first block reads [B, T, d]."""
        return ops.embed(table, tokens)

    def gated(self, ops: Ops, gate: Tensor, up: Tensor) -> Tensor:
        """The middle of the feed-forward layer [B, T, d_ff]."""
        return ops.swiglu(gate, up)

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        x = self.embed(ops, p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        for i in range(self.n_layers):
            x = ops.block(self.block, x, p.block(i))
        x = ops.rms_norm(x, p["output_norm.weight"], self.norm_eps)
        return ops.linear(x, p["token_embd.weight" if self.tied else "output.weight"])

    def block(self, ops: Ops, x: Tensor, p: Params) -> Tensor:
        """What attention and the feed-forward layer make of x [B, T, d]."""

        def norm(x: Tensor, name: str) -> Tensor:
            return ops.rms_norm(x, p[f"{name}.weight"], self.norm_eps)

        def linear(x: Tensor, name: str) -> Tensor:
            return ops.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

        rotary = self.rotary()
        h = norm(x, "attn_norm")
        q = ops.heads(linear(h, "attn_q"), self.n_heads)  # [B, T, H, D]
        k, v = (ops.heads(linear(h, f"attn_{n}"), self.n_kv_heads) for n in "kv")  # [B, T, Hkv, D]
        if self.head_norms:
            q, k = norm(q, "attn_q_norm"), norm(k, "attn_k_norm")
        h = ops.attention(ops.rope(q, rotary), ops.rope(k, rotary), v)  # [B, T, H*D]
        x = ops.add(x, linear(h, "attn_output"))
        h = norm(x, "ffn_norm")
        h = self.gated(ops, linear(h, "ffn_gate"), linear(h, "ffn_up"))  # [B, T, d_ff]
        return ops.add(x, linear(h, "ffn_down"))

    def gguf_metadata(self) -> dict[str, Any]:
        """The keys llama.cpp reads for these architectures."""
        keys = {
            **super().gguf_metadata(),
            "attention.head_count_kv": self.n_kv_heads,
            "attention.layer_norm_rms_epsilon": self.norm_eps,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": self.rope_base,
        }
        if self.head_size * self.n_heads != self.d_model:
            keys |= {"attention.key_length": self.head_size, "attention.value_length": self.head_size}
        if self.rope_scale != 1:
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.rope_scale}
        return keys

    def huggingface(self, data: Mapping[str, Any]) -> Layout:
        """The same model there: LlamaForCausalLM and so on, whose rope turns halves of a head."""
        biases, there = self.biases(), self.huggingface_biases()
        config = {
            "architectures": [f"{self.name.capitalize()}ForCausalLM"],
            "model_type": self.name,
            "vocab_size": self.vocab,
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_base,
            "rope_scaling": rope_scaling(self.rotary(), self.head_size, self.context),
            "tie_word_embeddings": self.tied,
            "attention_bias": ATTENTION[0] in there,
            "mlp_bias": FEED_FORWARD[0] in there,
        }
        places, zeros = {}, {}
        for spec in self.tensors():
            *block, name, kind = spec.name.split(".")
            at = f"model.layers.{block[1]}." if block else ""
            places[spec.name] = Place(f"{at}{NAMES[name]}.{kind}", self._row_order(name))
            if kind == "weight" and name in there and name not in biases:
                zeros[f"{at}{NAMES[name]}.bias"] = spec.shape[:1]
        return Layout(config, places, zeros)

    def huggingface_biases(self) -> tuple[str, ...]:
        """The linears of a block that have a bias in transformers: all those of a layer, or none."""
        return tuple(
            n for layer in (ATTENTION, FEED_FORWARD) for n in layer if not self.biases().keys().isdisjoint(layer)
        )

    def _row_order(self, name: str) -> Numbers:
        """How the outputs of a linear stand where rope turns halves of a head."""
        heads = {"attn_q": self.n_heads, "attn_k": self.n_kv_heads}.get(name)
        if self.halves or heads is None:
            return unchanged
        return lambda rows: rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _linear_scaling(keys: Keys) -> float:
    """By what positions are divided: as in llama.cpp a factor without a type is linear, and 0 or type none is 1."""
    kind = keys.expect("rope.scaling.type", "linear", "none")
    old = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", old)
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")  # only YaRN and LongRoPE read them
    return factor if factor and kind == "linear" else 1.0
