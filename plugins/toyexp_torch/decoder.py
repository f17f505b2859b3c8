"""A model's own forward pass on new positions alone, with the keys and values of the earlier ones kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toyexp import Decoder, Piecewise, Session, SessionError
from toyexp_torch.ops import TorchOps
from toyexp_torch.packed import Packed

CHUNK = 256  # ids read at a time: the logits of each of them are computed, which for a long prompt is much memory


class CachedOps(Piecewise, TorchOps):
    """The ops for the positions from `start` on of one sequence [1, T]; attention also sees those before."""

    keeps = frozenset({"rope"})  # which counts from `start`

    def __init__(self, context: int):
        super().__init__()
        self.longest = context
        self._caches: list[tuple[Tensor, Tensor]] = []  # keys and values [1, Hkv, context, D] of each attention
        self._calls = 0

    def begin(self, start: int) -> None:
        """A forward pass follows, whose first position is `start`."""
        self.start, self._calls = start, 0

    def first_rows(self, table: Tensor | Packed, n: int) -> Tensor:
        """See Ops; from `start` on."""
        rows = slice(self.start, self.start + n)
        return table.dense(rows) if isinstance(table, Packed) else table[rows]

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """See Ops; not of what stands for the positions of a whole sequence."""
        return super().add(a, self._ending("add", b, a))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """See Ops; likewise."""
        return super().mul(a, self._ending("mul", b, a))

    def _ending(self, op: str, b: Tensor, a: Tensor) -> Tensor:
        if a.shape[a.ndim - b.ndim :] != b.shape:
            raise self.unkept(op)
        return b

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """See Ops; of what belongs to one position."""
        if tuple(shape[:2]) != x.shape[:2]:
            raise self.unkept("reshape")
        return super().reshape(x, shape)

    def part(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """See Ops; of what belongs to one position."""
        if axis < 2:
            raise self.unkept("part")
        return super().part(x, axis, start, stop)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """See Ops; of what belongs to one position."""
        if axis < 2:
            raise self.unkept("concat")
        return super().concat(parts, axis)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        """See Ops; keeps k and v, and sees those kept before."""
        if not causal:
            raise SessionError("decoder(): this model's attention looks ahead, so that no position can be kept")
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [1, H, T, D]
        if self._calls == len(self._caches):
            self._caches.append((self._room(k), self._room(v)))
        keys, values = self._caches[self._calls]  # a model asks for its layers in the same order every time
        self._calls += 1
        new, end = q.shape[2], self.start + q.shape[2]
        keys[:, :, self.start : end], values[:, :, self.start : end] = k, v
        mask = torch.ones(new, end, dtype=torch.bool, device=q.device).tril(self.start) if new > 1 else None
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], mask, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(-2)

    def _room(self, x: Tensor) -> Tensor:
        return x.new_empty((1, x.shape[1], self.longest, x.shape[3]))


class CachedDecoder(Decoder):
    """Computes each position once; `forward` gives the logits [V] after the last of some ids [1, T]."""

    def __init__(self, session: Session, forward: Callable[[TorchOps, np.ndarray], np.ndarray]):
        super().__init__(session)
        self._ops = CachedOps(self.context)
        self._forward = forward

    def do_feed(self, ids: np.ndarray) -> np.ndarray:
        """See Decoder."""
        for first in range(0, len(ids), CHUNK):
            self._ops.begin(self.position + first)
            logits = self._forward(self._ops, ids[None, first : first + CHUNK])
        return logits
