"""Mamba 2 (Dao and Gu 2024): short convolutions, and linear attention with a decay that depends on the token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Constant, Model, Normal, Ops, Params, Tensor, TensorSpec, UserError, Values
from toyexp.base import numpy as np
from toyexp.base import require_range
from toyexp.formats import Keys
from toyexp_models.gguf import LanguageGGUF
from toyexp_models.huggingface import mamba2_layout
from toyexp_models.huggingface_config import read_mamba2_config
from toyexp_models.language import LanguageModel, layer_specs, linear, norm
from toyexp_models.lfm2 import LENGTHS, convolve


class Mamba2GGUF(LanguageGGUF[Any]):
    """GGUF form of mamba2. llama.cpp also reads the keys of a feed-forward layer and of attention, which are 0."""

    names: Mapping[str, str] = {
        "context": "context_length", "d_model": "embedding_length", "n_layers": "block_count",
        "d_ff": "ssm.inner_size", "n_heads": "ssm.time_step_rank", "n_groups": "ssm.group_count",
        "state": "ssm.state_size", "conv_length": "ssm.conv_kernel",
    }  # fmt: skip
    numbers = {"norm_eps": ("attention.layer_norm_rms_epsilon", None)}
    absent = ("feed_forward_length", "attention.head_count")

    def metadata(self, model: Any) -> dict[str, Any]:
        """Return the GGUF keys and values of the model's numbers, and 0 for the absent layers."""
        return super().metadata(model) | dict.fromkeys(self.absent, 0)

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields as a dict from field name to value, read from the file's metadata `keys`."""
        for key in self.absent:
            keys.expect(key, 0)
        return super().sizes(keys)


@dataclass(frozen=True)
class Spaced(Values):
    """Evenly spaced values from `first` to `last`."""

    first: float
    last: float

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return the values, which do not depend on the seed."""
        return np.linspace(self.first, self.last, math.prod(shape), dtype=np.float32).reshape(shape)


@dataclass
class Mamba2(LanguageModel):
    """Mamba 2: linear attention with a decay per head and token, behind a short convolution; no other layers.

    It is computed as masked products of queries (C), keys (B) and values, as attention without softmax.
    """

    name: ClassVar[str] = "mamba2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": Mamba2GGUF(), "hf": mamba2_layout, "config": read_mamba2_config}

    d_ff: int = 128  # features of all heads together; a multiple of d_model * n_groups
    n_groups: int = 1  # number of query/key heads, each shared by n_heads / n_groups heads
    state: int = 32  # features of a query and of a key
    conv_length: int = 4  # positions that a convolution reads: the current one and those before it

    def check(self) -> None:
        """Raise UserError for sizes that cannot work. Some of the limits are those of llama.cpp."""
        super().check()
        self.require_positive("n_groups", "state")
        require_range("model", self, conv_length=LENGTHS)
        for part, whole in (("n_heads", "d_ff"), ("n_groups", "n_heads")):
            if (size := getattr(self, whole)) % getattr(self, part):
                raise UserError(f"model.{part}={getattr(self, part)} does not divide model.{whole}={size}")
        if self.d_ff % (least := self.d_model * self.n_groups):
            rule = f"must be a multiple of model.d_model * model.n_groups; try model.d_ff={2 * least}"
            raise UserError(f"model.d_ff={self.d_ff}: {rule}")

    def tensors(self) -> list[TensorSpec]:
        """Return the specs of all tensors.

        Embeddings start from N(0, 0.02), other matrices from N(0, 1/sqrt(inputs)). The time steps start between 0.001
        and 0.1, and the decays per unit of time between exp(-1) and exp(-16).
        """
        d, inner, heads = self.d_model, self.d_ff, self.n_heads
        mixed = inner + 2 * self.n_groups * self.state  # features that the convolution reads

        def matrix(name: str, outputs: int, inputs: int, biased: bool = False) -> list[TensorSpec]:
            return layer_specs(name, outputs, inputs, init=Normal(1 / math.sqrt(inputs)), biased=biased)

        specs = [TensorSpec("token_embd.weight", (self.vocab, d), Normal(0.02))]
        for block in (f"blk.{i}." for i in range(self.n_layers)):
            specs += layer_specs(f"{block}attn_norm", d, biased=False)
            specs += matrix(f"{block}ssm_in", inner + mixed + heads, d)
            specs += matrix(f"{block}ssm_conv1d", mixed, self.conv_length, biased=True)
            specs += [
                TensorSpec(f"{block}ssm_dt.bias", (heads,), Spaced(*(math.log(math.expm1(dt)) for dt in (0.001, 0.1)))),
                TensorSpec(f"{block}ssm_a", (heads, 1), Spaced(-1.0, -16.0)),
                TensorSpec(f"{block}ssm_d", (heads, 1), Constant(1)),
                TensorSpec(f"{block}ssm_norm.weight", (self.n_groups, inner // self.n_groups), Constant(1)),
            ]
            specs += matrix(f"{block}ssm_out", d, inner)
        specs += layer_specs("output_norm", d, biased=False)
        return specs if self.tied else [*specs, TensorSpec("output.weight", (self.vocab, d), Normal(0.02))]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [B, T, vocab] of tokens [B, T]."""
        x = ops.embed(p["token_embd.weight"], batch["tokens"])  # [B, T, d]
        for i in range(self.n_layers):
            x = ops.block(self.block, x, p.block(i))
        x = norm(ops, x, p, "output_norm", self.norm_eps)
        return ops.logits(x, p["token_embd.weight" if self.tied else "output.weight"])

    def block(self, ops: Ops, x: Tensor, p: Params) -> Tensor:
        """Return the output of one block for x [B, T, d]."""
        inner, shared = self.d_ff, self.n_groups * self.state
        h = linear(ops, norm(ops, x, p, "attn_norm", self.norm_eps), p, "ssm_in")
        gate, mixed, dt = (
            ops.part(h, 2, start, stop)
            for start, stop in ((0, inner), (inner, 2 * inner + 2 * shared), (2 * inner + 2 * shared, h.shape[2]))
        )
        mixed = ops.silu(ops.add(convolve(ops, mixed, p["ssm_conv1d.weight"]), p["ssm_conv1d.bias"]))
        v = ops.heads(ops.part(mixed, 2, 0, inner), self.n_heads)  # [B, T, H, D]
        k, q = (
            ops.heads(ops.part(mixed, 2, start, start + shared), self.n_groups) for start in (inner, inner + shared)
        )
        dt = ops.softplus(ops.add(dt, p["ssm_dt.bias"]))  # [B, T, H]
        column = ops.reshape(dt, (*dt.shape, 1))
        a = p["ssm_a"]
        a = ops.mul(a, ops.scale(ops.step(a), -2.0, 1.0))  # -|a|, so that training cannot make a state grow
        log_decay = ops.reshape(ops.mul(column, a), dt.shape)
        y = ops.linear_attention(q, k, ops.mul(v, column), log_decay)  # [B, T, H*D]
        y = ops.swiglu(gate, ops.add(y, ops.reshape(ops.mul(v, p["ssm_d"]), y.shape)))
        by_group = ops.heads(y, self.n_groups)
        mean = ops.mean(ops.mul(by_group, by_group), 3, keep=True)
        root = ops.exp(ops.scale(ops.log(ops.scale(mean, 1.0, self.norm_eps)), 0.5))
        y = ops.reshape(ops.mul(ops.div(by_group, root), p["ssm_norm.weight"]), y.shape)
        return ops.add(x, linear(ops, y, p, "ssm_out"))

    def fold(self, tensors: Mapping[str, np.ndarray]) -> tuple[Model, Mapping[str, np.ndarray]]:
        """Return this model and its tensors, with the numbers -|a| in place of each a, as `block` computes them."""
        return self, {name: -abs(t) if name.endswith(".ssm_a") else t for name, t in tensors.items()}
