"""GPT-2: LayerNorm, learned positions, tanh GELU, biases everywhere (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from toyexp import Constant, Normal, Ops, Params, TensorSpec
from toyexp.contract.format import Conversion, Layout, Place, unchanged
from toyexp.contract.ops import Tensor
from toyexp.contract.optimiser import LORA
from toyexp_models.language import Keys, LanguageModel

# Where tensors stand in transformers.
NAMES = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip


@dataclass
class GPT2(LanguageModel):
    """GPT-2 family: LayerNorm, learned positions, GELU, biases."""

    name: ClassVar[str] = "gpt2"
    optim_mode: ClassVar[str | None] = LORA

    d_ff: int = 256  # width inside the feed-forward layer

    def check(self) -> None:
        """Raises UserError for sizes that cannot work."""
        super().check()
        self.require_shared_heads()

    @classmethod
    def sizes(cls, keys: Keys) -> dict[str, Any]:
        """What llama.cpp reads."""
        return super().sizes(keys) | {"norm_eps": keys.number("attention.layer_norm_epsilon")}

    def tensors(self) -> list[TensorSpec]:
        """Matrices N(0, 0.02), norms 1, biases 0."""
        d, ff, small = self.d_model, self.d_ff, Normal(0.02)

        def linear(name: str, outputs: int, inputs: int) -> list[TensorSpec]:
            return [
                TensorSpec(f"{name}.weight", (outputs, inputs), small),
                TensorSpec(f"{name}.bias", (outputs,), Constant(0)),
            ]

        def norm(name: str) -> list[TensorSpec]:
            return [TensorSpec(f"{name}.weight", (d,), Constant(1)), TensorSpec(f"{name}.bias", (d,), Constant(0))]

        specs = [
            TensorSpec("token_embd.weight", (self.vocab, d), small),
            TensorSpec("position_embd.weight", (self.context, d), small),
        ]
        for i in range(self.n_layers):
            specs += norm(f"blk.{i}.attn_norm")
            specs += linear(f"blk.{i}.attn_qkv", 3 * d, d)
            specs += linear(f"blk.{i}.attn_output", d, d)
            specs += norm(f"blk.{i}.ffn_norm")
            specs += linear(f"blk.{i}.ffn_up", ff, d)
            specs += linear(f"blk.{i}.ffn_down", d, ff)
        specs += norm("output_norm")
        if not self.tied:
            specs.append(TensorSpec("output.weight", (self.vocab, d), small))
        return specs

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, T, vocab] of tokens [B, T]."""
        length = batch["tokens"].shape[-1]
        x = ops.embed(p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        x = ops.add(x, ops.first_rows(p["position_embd.weight"], length))
        for i in range(self.n_layers):
            x = ops.block(self.block, x, p.block(i))
        x = ops.layer_norm(x, p["output_norm.weight"], p["output_norm.bias"], self.norm_eps)
        return ops.linear(x, p["token_embd.weight" if self.tied else "output.weight"])

    def block(self, ops: Ops, x: Tensor, p: Params) -> Tensor:
        """What attention and the feed-forward layer make of x [B, T, d]."""

        def linear(x: Tensor, name: str) -> Tensor:
            return ops.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return ops.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], self.norm_eps)

        qkv = ops.split(linear(norm(x, "attn_norm"), "attn_qkv"), 3)  # 3 times [B, T, d]
        q, k, v = (ops.heads(t, self.n_heads) for t in qkv)  # [B, T, H, D]
        x = ops.add(x, linear(ops.attention(q, k, v), "attn_output"))
        h = ops.gelu(linear(norm(x, "ffn_norm"), "ffn_up"))  # [B, T, d_ff]
        return ops.add(x, linear(h, "ffn_down"))

    def gguf_metadata(self) -> dict[str, Any]:
        """The keys llama.cpp reads for architecture gpt2."""
        return {**super().gguf_metadata(), "attention.layer_norm_epsilon": self.norm_eps}

    def huggingface(self, data: Mapping[str, Any]) -> Layout:
        """GPT2LMHeadModel, whose linears are [in, out]."""
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab,
            "n_positions": self.context,
            "n_ctx": self.context,  # its name of old, which llama.cpp's converter reads
            "n_embd": self.d_model,
            "n_layer": self.n_layers,
            "n_head": self.n_heads,
            "n_inner": self.d_ff,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.norm_eps,
            "tie_word_embeddings": self.tied,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }
        places = {}
        for spec in self.tensors():
            *block, name, kind = spec.name.split(".")
            at = f"transformer.h.{block[1]}." if block else ""
            is_linear = block and len(spec.shape) == 2
            places[spec.name] = Place(f"{at}{NAMES[name]}.{kind}", form=np.transpose if is_linear else unchanged)
        lost = "" if self.d_ff == 4 * self.d_model else f"it takes d_ff=4*d_model, and here it is {self.d_ff}"
        return Layout(config, places, conversion=Conversion(("bpe",), lost=lost))
