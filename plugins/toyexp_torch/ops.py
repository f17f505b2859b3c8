"""The op vocabulary in PyTorch; autograd supplies the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toyexp import Ops, Params, Rotary
from toyexp_torch.packed import Packed
from toyexp_torch.recompute import computed_twice


class TorchOps(Ops):
    """Every op on torch tensors of one device."""

    start = 0  # the position that rope counts from
    longest = 0  # positions that rope's tables are made for, where it is to be asked for more and more

    def __init__(self, recompute: bool = False, activations: torch.dtype | None = None) -> None:
        self.recompute = recompute  # the activations of a block are not kept for the backward pass
        self.activations = activations  # the type of what passes from block to block; None: that of the weights
        self.rotations: dict[tuple, tuple[Tensor, Tensor]] = {}  # rope's tables, worked out once

    def block(self, function: Callable[..., Tensor], x: Tensor, p: Params, *rest: Any) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return super().block(function, x, p, *rest)
        return computed_twice(lambda x: function(self, x, p, *rest), x)

    def rows(self, table: Tensor | Packed, ids: Tensor) -> Tensor:
        if isinstance(table, Packed):
            rows = table.dense(ids.flatten()).unflatten(0, ids.shape)
        else:
            rows = F.embedding(ids, table)
        return rows if self.activations is None else rows.to(self.activations)

    def first_rows(self, table: Tensor | Packed, n: int) -> Tensor:
        return table.dense(slice(n)) if isinstance(table, Packed) else table[:n]

    def matmul(self, x: Tensor, w: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
        if isinstance(w, Packed):
            y = w.product(x)
            return y if bias is None else y + bias
        return F.linear(x, w, bias)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b if self.activations is None else a + b.to(a.dtype)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.to(w.dtype), (x.shape[-1],), w, eps)

    def layer_norm(self, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x.to(w.dtype), (x.shape[-1],), w, b, eps)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(tuple(shape))

    def part(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        return x.narrow(axis, start, stop - start)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(tuple(parts), axis)

    def split(self, x: Tensor, n: int) -> tuple[Tensor, ...]:
        return x.chunk(n, dim=-1)

    def prepend(self, x: Tensor, token: Tensor) -> Tensor:
        return torch.cat((token.to(x.dtype).expand(x.shape[0], 1, -1), x), dim=1)

    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        end = self.start + x.shape[1]
        length = max(end, self.longest)
        key = (length, x.shape[3], rotary, x.dtype == torch.float64)
        if key not in self.rotations:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            self.rotations[key] = _rotations(length, rotary.frequencies(x.shape[3]), x.device, dtype)
        cos, sin = (table[self.start : end] for table in self.rotations[key])
        if rotary.halves:
            a, b = x.chunk(2, dim=-1)  # [B, T, H, D/2] each
            return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, D]
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(-2)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), reduction="none")
        return (losses * weights.flatten()).sum()


def _rotations(
    length: int, frequencies: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cos and sin [T, 1, D/2] of position * frequency, worked out in float64."""
    wide = torch.tensor(frequencies, dtype=torch.float64)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), wide)[:, None]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)
