"""Frozen matrices kept in the bytes of their GGUF file, and made into numbers where they are used.

So a quantised base takes the memory of its file. The backward pass makes the numbers a second time instead of keeping
them (Dettmers et al. 2023, "QLoRA").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toyexp import FromGGUF, PlanTensor
from toyexp.formats import GGUF_TYPES, dequantise, in_place, opened


class Packed:
    """A matrix [out, in] as bytes [out, bytes of a row] of a ggml type."""

    def __init__(self, raw: Tensor, type_id: int, dtype: torch.dtype):
        self._raw, self._type_id, self._dtype = raw, type_id, dtype

    @classmethod
    def read(cls, tensor: PlanTensor, device: torch.device, dtype: torch.dtype) -> Packed | None:
        """The tensor as it stands in its file; None for F32, where there is nothing to gain, and for what cannot be."""
        info = in_place(tensor)
        if info is None or info.type == "F32":
            return None
        assert isinstance(tensor.values, FromGGUF)
        raw = opened(tensor.values.path).read_raw(tensor.values.tensor, tensor.values.rows)
        return cls(torch.from_numpy(raw).to(device), info.type_id, dtype)

    def dense(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The chosen rows, [n, in]."""
        raw, kind = self._raw[rows], GGUF_TYPES[self._type_id][0]
        if kind in ("F16", "BF16"):
            return raw.view(torch.float16 if kind == "F16" else torch.bfloat16).to(self._dtype)
        if kind == "Q8_0":  # blocks of a float16 scale and 32 signed bytes
            blocks = raw.unflatten(-1, (-1, 34))
            scales = blocks[..., :2].contiguous().view(torch.float16).to(self._dtype)
            return (blocks[..., 2:].view(torch.int8).to(self._dtype) * scales).flatten(-2)
        host = dequantise(raw.cpu().numpy(), self._type_id)
        return torch.from_numpy(host).to(self._raw.device, self._dtype)


class PackedLinear(torch.autograd.Function):
    """x [.., in] times a Packed [out, in] transposed -> [.., out]; only x has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Packed) -> Tensor:
        """See the class."""
        ctx.w, ctx.dtype = w, x.dtype
        return F.linear(x, w.dense())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """dx = dy w."""
        return (dy @ ctx.w.dense().to(dy.dtype)).to(ctx.dtype), None
