"""Ops of models in PyTorch, with gradients by autograd, and a decoder with a key-value cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from toyexp import Decoder, IncrementalOps, Ops, Params, Rotary, Session, SessionError
from toyexp_torch.kernels.packed import Packed

CHUNK = 256  # prompt ids per forward pass, which computes logits for each of them; limits the memory of long prompts


class TorchOps(Ops):
    """Implementation of `toyexp.Ops` on torch tensors of one device."""

    start = 0  # position in the sequence of the first element of x's position axis, for rope
    table_length = 0  # minimum number of positions in rope's tables; a decoder sets it, since its positions grow

    def __init__(
        self,
        recompute: bool = False,
        activations: torch.dtype | None = None,
        attention_dtype: torch.dtype | None = None,
    ) -> None:
        self.recompute = recompute  # compute a block again in the backward pass instead of keeping its activations
        self.activations = activations  # dtype of the residual stream; None: dtype of the weights
        self.attention_dtype = attention_dtype  # dtype to which PyTorch's attention rounds q, k, v; None: no rounding
        self.rotations: dict[tuple, tuple[Tensor, Tensor]] = {}  # rope's cos and sin tables

    def block(self, function: Callable[..., Any], x: Tensor, p: Params, *rest: Any) -> Any:
        if not (self.recompute and torch.is_grad_enabled()):
            return super().block(function, x, p, *rest)
        return recompute_in_backward(lambda x: function(self, x, p, *rest), x)

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

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b

    def scale(self, x: Tensor, factor: float, offset: float = 0.0) -> Tensor:
        return x * factor + offset if offset else x * factor

    def step(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def tanh(self, x: Tensor) -> Tensor:
        return x.tanh()

    def softplus(self, x: Tensor) -> Tensor:
        return F.softplus(x, threshold=1e9)  # below torch's default threshold of 20 it is exact

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

    def permute(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.permute(tuple(axes))

    def product(self, a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
        return a @ (b.transpose(-1, -2) if transposed else b)

    def sum(self, x: Tensor, axis: int | None = None, keep: bool = False) -> Tensor:
        return x.sum() if axis is None else x.sum(axis, keepdim=keep)

    def top_k(self, x: Tensor, k: int) -> Tensor:
        order = x.argsort(dim=-1, descending=True, stable=True)
        return (order.argsort(-1) < k).to(x.dtype)

    def experts(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bti,eoi->bteo" if x.ndim == 3 else "btei,eoi->bteo", x, w)

    def cumsum(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    def softmax(self, x: Tensor) -> Tensor:
        return x.softmax(-1)

    def log_softmax(self, x: Tensor) -> Tensor:
        return x.log_softmax(-1)

    def take(self, x: Tensor, ids: Tensor) -> Tensor:
        if ids.ndim == x.ndim:
            return x.gather(-1, ids.long())
        return x.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)

    def causal(self, x: Tensor, window: int = 0, fill: float = -math.inf) -> Tensor:
        return x.masked_fill(~visible(x.shape[-2], x.shape[-1], window, x.device), fill)

    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        end = self.start + x.shape[1]
        length = max(end, self.table_length)
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

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        by_row = bias is not None and bias.ndim == 4 and not bias.requires_grad  # such as `keep_apart` makes
        if softcap or sinks is not None or (bias is not None and not by_row):
            rest = {"sinks": sinks, "bias": bias}
            return self.compose_attention(q, k, v, causal, window=window, scale=scale, softcap=softcap, **rest)
        dtype = q.dtype
        q, k, v = (t.transpose(1, 2).to(self.attention_dtype or dtype) for t in (q, k, v))  # [B, H, T, D]
        grouped, mask = q.shape[1] != k.shape[1], None
        if bias is not None:
            causal, mask = False, (self.causal(bias, window) if causal else bias).to(q.dtype)
        elif causal and 0 < window < q.shape[2]:
            causal, mask = False, visible(q.shape[2], k.shape[2], window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.to(dtype).transpose(1, 2).flatten(-2)

    def gelu(self, x: Tensor, exact: bool = False) -> Tensor:
        return F.gelu(x, approximate="none" if exact else "tanh")

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Tensor:
        return (position_losses(logits, targets, smoothing, z_loss) * weights).sum()


def position_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Return the cross-entropy of each target [...], for logits [..., V]; see Ops.cross_entropy."""
    flat = logits.flatten(0, -2)
    losses = F.cross_entropy(flat, targets.flatten().long(), reduction="none", label_smoothing=smoothing)
    if z_loss:
        losses = losses + z_loss * flat.logsumexp(-1).square()
    return losses.view(targets.shape)


def visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return a mask, bool [queries, keys], that is True where a query attends to a key.

    The queries are the last `queries` of `keys` positions. Each attends to its own position and to earlier ones; if
    `window` is above 0, only to the last `window` of these.
    """
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return ones.triu(keys - queries - window + 1) if window else ones


def _rotations(
    length: int, frequencies: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return RoPE's tables for positions 0 to `length` - 1: cos and sin of position * frequency, [T, 1, D/2] each.

    The angles are computed in float64.
    """
    wide = torch.tensor(frequencies, dtype=torch.float64)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), wide)[:, None]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def recompute_in_backward(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return function(x), and compute it again in the backward pass instead of keeping its activations.

    The result is a tensor or a tuple of tensors.

    This is activation checkpointing (Chen et al. 2016), as torch.utils.checkpoint does it with use_reentrant=False, but
    at half the cost. In return, `function` must draw no random numbers, and must save the same tensors for its backward
    pass, in the same order, at every call.
    """
    if torch.compiler.is_compiling():  # the compiler supports only torch's own checkpoint
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    rounding = _autocast(x.device.type)
    shapes, saved = list[torch.Size](), dict[int, Tensor]()

    def forget(tensor: Tensor) -> Any:
        shapes.append(tensor.shape)
        return len(shapes) - 1

    def note(tensor: Tensor) -> None:
        saved[len(saved)] = tensor.detach()

    def find(index: Any) -> Tensor:
        if index not in saved:
            saved.clear()
            with torch.enable_grad(), rounding(), saved_tensors_hooks(note, saved.__getitem__):
                function(x.detach().requires_grad_(x.requires_grad))
            if [tensor.shape for tensor in saved.values()] != shapes:
                raise RuntimeError(
                    "engine.recompute=true: a block saved other tensors when it was computed again; use recompute=false"
                )
        return saved.pop(index)

    with saved_tensors_hooks(forget, find):
        return function(x)


def _autocast(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that opens a context in which autocast has its present setting.

    Autocast is off in the backward pass. A forward pass that is repeated there must run in this context.
    """
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), cache_enabled=False)


class CachedOps(IncrementalOps, TorchOps):
    """Ops for decoding with a cache. They compute only the new positions of one sequence, from `start` on.

    Attention also reads the keys and values of earlier positions from a cache.
    """

    incremental_ops = frozenset({"rope"})  # this inherited op begins at `start`

    def __init__(self, context: int):
        super().__init__()
        self.table_length = context
        self._caches: list[list[Tensor]] = []  # of each call that reads earlier positions
        self._calls = 0

    def begin(self, start: int) -> None:
        """Prepare for a forward pass whose first position is `start`."""
        self.start, self._calls = start, 0

    def _cache(self, like: Tensor, *shapes: Sequence[int]) -> list[Tensor]:
        """Return the cache of this call: tensors of these shapes, which the first forward pass fills with zeros."""
        self._calls += 1  # a model calls its layers in the same order every time
        if self._calls > len(self._caches):
            self._caches.append([like.new_zeros(shape) for shape in shapes])
        return self._caches[self._calls - 1]

    def first_rows(self, table: Tensor | Packed, n: int) -> Tensor:
        """Return the table's rows for the `n` new positions: rows `start` to `start` + n - 1; see Ops."""
        rows = slice(self.start, self.start + n)
        return table.dense(rows) if isinstance(table, Packed) else table[rows]

    def distance_bias(self, table: Tensor, length: int) -> Tensor:
        """Return the rows of the bias that belong to the new positions, [H, length, start + length]; see Ops."""
        ends = torch.arange(self.start, self.start + length, device=table.device)
        distance = ends[:, None] - torch.arange(self.start + length, device=table.device)
        return table[:, distance.clamp(min=0)]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add k and v to the cache, and return the attention of q to all cached positions; see Ops."""
        if not causal:
            raise SessionError("decoder(): this model's attention is not causal, so earlier positions cannot be cached")
        # Caches [1, Hkv, context, D] keep each head's positions together; the views have q's order of axes.
        caches = self._cache(k, *((1, t.shape[2], self.table_length, t.shape[3]) for t in (k, v)))
        new, end = q.shape[1], self.start + q.shape[1]
        keys, values = (cache.transpose(1, 2)[:, :end] for cache in caches)
        keys[:, self.start :], values[:, self.start :] = k, v
        if softcap or sinks is not None or bias is not None:
            rest: dict[str, Any] = {"sinks": sinks, "bias": bias}
            return TorchOps().compose_attention(q, keys, values, window=window, scale=scale, softcap=softcap, **rest)
        mask, grouped = visible(new, end, window, q.device) if new > 1 or window else None, q.shape[2] != k.shape[2]
        q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(-2)

    def shift(self, x: Tensor, n: int = 1) -> Tensor:
        """Add x to the cache, and return what the positions `n` before the new ones have; see Ops."""
        (earlier,) = self._cache(x, (1, n + self.table_length, *x.shape[2:]))
        earlier[:, self.start + n : self.start + n + x.shape[1]] = x
        return earlier[:, self.start : self.start + x.shape[1]]

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        """Return linear attention of the new positions, which reads earlier ones from its state; see Ops."""
        within = TorchOps().linear_attention(q, k, v, log_decay)
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        (state,) = self._cache(log_decay, (1, *q.shape[2:], v.shape[3]))  # sum of exp(decay since j) k[j] v[j]^T, j < i
        total = log_decay.cumsum(1).unsqueeze(-1)  # [1, n, H, 1]
        before = torch.einsum("bthd,bhde->bthe", q * total.exp(), state)
        added = torch.einsum("bthd,bthe->bhde", k * (total[:, -1:] - total).exp(), v)
        state.mul_(total[:, -1, :, :, None].exp()).add_(added)
        return within + before.flatten(2)


class CachedDecoder(Decoder):
    """Decoder with a key-value cache.

    `forward(ops, ids)` runs the model with the given ops on token ids [1, T], and returns the logits [V] after the last
    id.
    """

    def __init__(self, session: Session, forward: Callable[[TorchOps, np.ndarray], np.ndarray]):
        super().__init__(session)
        self._ops = CachedOps(self.context)
        self._forward = forward

    def do_feed(self, ids: np.ndarray) -> np.ndarray:
        """Run the model on the ids, `CHUNK` at a time; return the logits after the last one. See Decoder."""
        for first in range(0, len(ids), CHUNK):
            self._ops.begin(self.position + first)
            logits = self._forward(self._ops, ids[None, first : first + CHUNK])
        return logits
