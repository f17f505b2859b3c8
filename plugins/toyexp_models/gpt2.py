"""GPT-2: LayerNorm, learned positions, tanh GELU, biases everywhere (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from toyexp import LORA, Normal, Ops, Params, Tensor, TensorSpec, keep_apart
from toyexp.base import require_range
from toyexp_models.gguf import GPT2GGUF
from toyexp_models.huggingface import gpt2_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.language import DROPPED, LanguageModel, layer_specs, linear, norm, require_shared_heads
from toyexp_models.mup import MuP


@dataclass
class GPT2(MuP, LanguageModel):
    """GPT-2 family: LayerNorm, learned positions, GELU, biases."""

    name: ClassVar[str] = "gpt2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": GPT2GGUF(), "hf": gpt2_layout, "config": read_config}
    optim_mode: ClassVar[str | None] = LORA

    d_ff: int = 256  # hidden size of the feed-forward layer
    dropout: float = 0.0  # probability of dropping a number after embedding, attention and feed-forward layer

    def check(self) -> None:
        """Raise UserError for invalid sizes."""
        super().check()
        self.require_positive("mup_base_width")
        require_range("model", self, dropout="[0,1)")
        require_shared_heads(self)

    def tensors(self) -> list[TensorSpec]:
        """Return the specs of all tensors. Matrices start from N(0, 0.02), norms from 1, biases from 0."""
        d, ff, small = self.d_model, self.d_ff, Normal(0.02)
        matrix = partial(layer_specs, init=small)
        specs = [
            TensorSpec("token_embd.weight", (self.vocab, d), small),
            TensorSpec("position_embd.weight", (self.context, d), small),
        ]
        for i in range(self.n_layers):
            specs += layer_specs(f"blk.{i}.attn_norm", d)
            specs += matrix(f"blk.{i}.attn_qkv", 3 * d, d) + matrix(f"blk.{i}.attn_output", d, d)
            specs += layer_specs(f"blk.{i}.ffn_norm", d)
            specs += matrix(f"blk.{i}.ffn_up", ff, d) + matrix(f"blk.{i}.ffn_down", d, ff)
        specs += layer_specs("output_norm", d)
        if not self.tied:
            specs.append(TensorSpec("output.weight", (self.vocab, d), small))
        return self.parametrise(specs)

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B, T, vocab] of tokens [B, T]."""
        ops, length = keep_apart(ops, batch), batch["tokens"].shape[-1]
        x = ops.embed(p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        x = ops.add(x, ops.first_rows(p["position_embd.weight"], length))
        if not self.dropout:
            batch = {}  # a batch for two models may have masks of the other one
        x = ops.dropout(x, batch, "token_embd.dropout")
        for i in range(self.n_layers):
            masks = {n: batch[f"blk.{i}.{n}.dropout"] for n in DROPPED if f"blk.{i}.{n}.dropout" in batch}
            x = ops.block(self.block, x, p.block(i), masks)
        x = norm(ops, x, p, "output_norm", self.norm_eps)
        return ops.logits(self.scale_output(ops, x), p["token_embd.weight" if self.tied else "output.weight"])

    def block(self, ops: Ops, x: Tensor, p: Params, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the output of one block for x [B, T, d]. `masks` has the dropout masks of its layers, if any."""
        qkv = linear(ops, norm(ops, x, p, "attn_norm", self.norm_eps), p, "attn_qkv")  # [B, T, 3 d]
        q, k, v = (ops.heads(t, self.n_heads) for t in ops.split(qkv, 3))  # [B, T, H, D]
        mixed = ops.attention(q, k, v, scale=self.score_factor(self.d_model // self.n_heads))
        x = ops.add(x, ops.dropout(linear(ops, mixed, p, "attn_output"), masks, "attn_output"))
        h = ops.gelu(linear(ops, norm(ops, x, p, "ffn_norm", self.norm_eps), p, "ffn_up"))  # [B, T, d_ff]
        return ops.add(x, ops.dropout(linear(ops, h, p, "ffn_down"), masks, "ffn_down"))
