"""LFM 2 (Liquid AI 2025): as qwen3, with short gated convolutions instead of attention in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toyexp import Ops, Params, Tensor, TensorSpec, UserError
from toyexp.base import numpy as np
from toyexp.base import require_range
from toyexp.formats import Keys
from toyexp_models.gguf import SIZES, RotaryGGUF
from toyexp_models.huggingface import lfm2_layout
from toyexp_models.huggingface_config import read_config
from toyexp_models.language import linear
from toyexp_models.rotary import RotaryModel

LENGTHS = "[2,64]"  # of a convolution, which is computed from as many shifted copies of its input
KV_HEADS = "attention.head_count_kv"  # in GGUF an array; layers without key/value heads are convolutions


class Lfm2GGUF(RotaryGGUF):
    """GGUF form of lfm2: the number of key/value heads of each layer, and the length of the convolutions."""

    names = {**SIZES, "conv_length": "shortconv.l_cache"}

    def metadata(self, model: Any) -> dict[str, Any]:
        """Return the GGUF keys and values of rotary models and of the convolutions."""
        heads = [model.n_kv_heads * (i in model.attention_layers) for i in range(model.n_layers)]
        return super().metadata(model) | {KV_HEADS: heads}

    def sizes(self, keys: Keys) -> dict[str, Any]:
        """Return the model's fields, read from the file. Raise UserError if attention layers differ in heads."""
        heads = np.array(keys.file.metadata.get(f"{keys.file.architecture}.{KV_HEADS}", 0)).reshape(-1)
        keys.ignore(KV_HEADS)
        common = super().sizes(keys)
        layers = np.flatnonzero(heads)
        is_count = heads.dtype.kind in "iu" and len(heads) == common["n_layers"]
        if not is_count or len({*heads[layers].tolist()}) != 1:
            raise keys.file.error(f"{KV_HEADS} is {heads.tolist()}, expected one number per layer, equal or 0")
        return common | {"n_kv_heads": int(heads.max()), "attention_layers": layers.tolist()}


@dataclass
class Lfm2(RotaryModel):
    """LFM 2: as qwen3, with attention in some layers and short gated convolutions in the others."""

    name: ClassVar[str] = "lfm2"
    forms: ClassVar[Mapping[str, Any]] = {"gguf": Lfm2GGUF(), "hf": lfm2_layout, "config": read_config}
    head_norms: ClassVar[bool] = True
    last_norm: ClassVar[str] = "token_embd_norm"
    fixed: ClassVar[Mapping[str, Any]] = {"qkv_bias": False, "head_dim": 0}

    tied: bool = True  # tie the output layer to the embedding table
    rope_base: float = 1e6  # base of the rotary frequencies
    conv_length: int = 3  # positions that a convolution reads: the current one and those before it
    attention_layers: list[int] = field(default_factory=lambda: [0])  # numbers of the layers with attention, from 0

    def check(self) -> None:
        """Raise UserError for sizes that cannot work."""
        super().check()
        require_range("model", self, conv_length=LENGTHS)
        known = sorted({*self.attention_layers} & {*range(self.n_layers)})
        if not known or known != self.attention_layers:
            rule = f"must be some of 0 to {self.n_layers - 1}, in order"
            raise UserError(f"model.attention_layers={self.attention_layers}: {rule}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a block, by name, for attention and for a convolution."""
        d = self.d_model
        convolution = {"in_proj": (3 * d, d), "conv": (d, self.conv_length), "out_proj": (d, d)}
        return super().shapes() | {f"shortconv.{name}": shape for name, shape in convolution.items()}

    def tensors(self) -> list[TensorSpec]:
        """Return the specs of all tensors; a block has those of attention or of a convolution."""

        def is_used(name: str) -> bool:
            layer, part = name.split(".")[1:3]
            return part not in ({"shortconv"} if self.layer(int(layer))[0] else ATTENTION)

        return [t for t in super().tensors() if not t.name.startswith("blk.") or is_used(t.name)]

    def layer(self, i: int) -> tuple[bool]:
        """Return True if layer `i` has attention."""
        return (i in self.attention_layers,)

    def mix(self, ops: Ops, h: Tensor, p: Params, *layer: Any) -> Tensor:
        """Return the output [B, T, d] of attention or of a convolution with its gates, for h [B, T, d]."""
        if layer[0]:
            return super().mix(ops, h, p)
        before, after, x = ops.split(linear(ops, h, p, "shortconv.in_proj"), 3)
        mixed = convolve(ops, ops.mul(before, x), p["shortconv.conv.weight"])
        return linear(ops, ops.mul(after, mixed), p, "shortconv.out_proj")


ATTENTION = {"attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"}


def convolve(ops: Ops, x: Tensor, w: Tensor) -> Tensor:
    """Return the causal convolution of each feature of x [B, T, d] over T with its filter in w [d, length].

    The last number of a filter is the factor of the current position.
    """
    rows, positions, d = x.shape
    length = w.shape[1]
    inputs = ops.concat([*(ops.shift(x, length - 1 - i) for i in range(length - 1)), x], 2)
    by_feature = ops.permute(ops.reshape(inputs, (rows, positions, length, d)), (0, 1, 3, 2))
    return ops.sum(ops.mul(by_feature, w), 3)
