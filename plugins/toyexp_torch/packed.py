"""Frozen matrices kept in the bytes of their GGUF file, and made into numbers where they are used.

So a quantised base takes the memory of its file. The backward pass makes the numbers a second time instead of keeping
them (Dettmers et al. 2023, "QLoRA").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toyexp import FromGGUF, PlanTensor
from toyexp.formats import in_place, opened
from toyexp_torch.unpack import KINDS, unpacked


class Packed:
    """A matrix [out, in] as bytes [out, bytes of a row] of a ggml type."""

    def __init__(self, raw: Tensor, kind: str, dtype: torch.dtype):
        self.raw, self.kind, self._dtype = raw, kind, dtype

    @classmethod
    def read(cls, tensor: PlanTensor, device: torch.device, dtype: torch.dtype) -> Packed | None:
        """Return the tensor in its file's bytes; None for a type that is not one of the `KINDS`, such as F32."""
        info = in_place(tensor)
        if info is None or info.type not in KINDS:
            return None
        assert isinstance(tensor.values, FromGGUF)
        raw = opened(tensor.values.path).read_raw(tensor.values.tensor, tensor.values.rows)
        return cls(torch.from_numpy(raw).to(device), info.type, dtype)

    def __len__(self) -> int:
        return len(self.raw)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All of it in that type, [out, in]."""
        return unpacked(self.raw, self.kind, dtype)

    def dense(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The chosen rows, [n, in]."""
        return unpacked(self.raw[rows], self.kind, self._dtype)

    def product(self, x: Tensor) -> Tensor:
        """x [.., in] times its transpose -> [.., out], in the precision that products have; only x has a gradient."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        numbers = partial(self.numbers, dtype)
        if torch.compiler.is_compiling():  # the compiler would keep the numbers, if this did not forbid it
            return F.linear(x, checkpoint(numbers, use_reentrant=False, preserve_rng_state=False))
        return PackedLinear.apply(x, numbers)


class PackedLinear(torch.autograd.Function):
    """x [.., in] times a matrix [out, in], transposed, that is made in both directions; only x has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Callable[[], Tensor]) -> Tensor:
        """See the class."""
        ctx.matrix, ctx.dtype = matrix, x.dtype
        return F.linear(x, matrix())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """dx = dy w."""
        return (dy @ ctx.matrix()).to(ctx.dtype), None
