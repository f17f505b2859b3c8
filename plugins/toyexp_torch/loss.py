"""Ops for computing a loss without the logits of positions that do not count in it, or a few positions at a time.

The ops defer the last matrix product until `cross_entropy` knows which positions have a target with a non-zero weight,
or until `token_log_probs` knows the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from toyexp import AdaptedWeight
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.ops import TorchOps, recompute_in_backward

LARGE = 1 << 24  # from this many logits in a batch a GPU computes them in chunks


class DeferredLogits:
    """Logits x w^T that are not computed yet, with x [..., d] and w [V, d].

    If a model passes them to any operation but `cross_entropy` and `token_log_probs`, all logits are computed first.
    """

    def __init__(self, ops: TorchOps, x: Tensor, w: Tensor | Packed | AdaptedWeight):
        self.ops, self.x, self.w = ops, x, w
        self.computed: Tensor | None = None

    def compute(self) -> Tensor:
        """Return all logits, [..., V], which are computed at the first call."""
        if self.computed is None:
            self.computed = self.ops.linear(self.x, self.w)
        return self.computed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute(), name)

    def __add__(self, other: Any) -> Tensor:
        return self.compute() + other

    def __sub__(self, other: Any) -> Tensor:
        return self.compute() - other

    def __mul__(self, other: Any) -> Tensor:
        return self.compute() * other

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with computed logits in place of the deferred logits among its arguments."""
        args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return function(*args, **kwargs)


class LossOps(TorchOps):
    """Ops for a loss on the CPU; logits are computed only for positions whose target has a non-zero weight."""

    chunk = 1 << 22  # logits that `token_log_probs` holds in memory at a time

    def __init__(self, ops: TorchOps):
        super().__init__(ops.recompute, ops.activations, ops.attention_dtype)
        self.rotations = ops.rotations  # shared, so that the compiler treats the tables as constants

    def should_defer(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> bool:
        """Return True if the product of x and w, which gives the logits, should be deferred to `cross_entropy`."""
        return not (isinstance(w, AdaptedWeight) and w.low_rank is not None and w.low_rank.dropout is not None)

    def compute_deferred(
        self, logits: DeferredLogits, targets: Tensor, weights: Tensor, smoothing: float, z_loss: float
    ) -> Tensor:
        """Compute the logits only where the weight is not zero, and return the sum of weight times cross-entropy.

        `targets` and `weights` have the shape of the logits without the last axis.
        """
        # The number of selected positions changes with every batch, which would recompile a compiled step.
        if torch.compiler.is_compiling() or bool(weights.all()) or logits.x.shape[:-1] != weights.shape:
            return super().cross_entropy(logits.compute(), targets, weights, smoothing, z_loss)
        rows = weights.flatten().nonzero()[:, 0]
        chosen = self.linear(logits.x.flatten(0, -2)[rows], logits.w)
        return super().cross_entropy(chosen, targets.flatten()[rows], weights.flatten()[rows], smoothing, z_loss)

    def logits(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> Tensor | DeferredLogits:
        """Return the logits, or DeferredLogits if `should_defer` returns True; see Ops."""
        w = w.base if isinstance(w, AdaptedWeight) and w.low_rank is None else w  # a tied embedding with noise
        if not self.should_defer(x, w):
            return super().logits(x, w)
        return DeferredLogits(self, x, w)

    def cross_entropy(
        self, logits: Tensor | DeferredLogits, targets: Tensor, weights: Tensor, smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return the cross-entropy of logits or of deferred logits; see Ops."""
        if isinstance(logits, DeferredLogits):
            if logits.computed is None:
                return self.compute_deferred(logits, targets, weights, smoothing, z_loss)
            logits = logits.computed
        return super().cross_entropy(logits, targets, weights, smoothing, z_loss)

    def token_log_probs(self, logits: Tensor | DeferredLogits, targets: Tensor) -> Tensor:
        """Return the log-probabilities of the targets; see Ops.

        Deferred logits are computed a chunk of positions at a time, and again in the backward pass.
        """
        if not isinstance(logits, DeferredLogits) or logits.computed is not None:
            return super().token_log_probs(logits, targets)
        x, w, ids, start = logits.x.flatten(0, -2), logits.w, targets.flatten(), 0
        size, parts = max(self.chunk // len(w.base if isinstance(w, AdaptedWeight) else w), 1), []
        for rows in x.split(size):
            chosen = ids[start : start + len(rows)]
            function = partial(self._log_probs, w=w, targets=chosen)
            parts.append(function(rows) if len(rows) == len(x) else recompute_in_backward(function, rows))
            start += len(rows)
        return torch.cat(parts).view(targets.shape)

    def _log_probs(self, x: Tensor, w: Tensor | Packed | AdaptedWeight, targets: Tensor) -> Tensor:
        """Return log softmax(x w^T) at the targets [n], for x [n, d]."""
        return super().token_log_probs(self.linear(x, w), targets)


class ProjectedLossOps(LossOps):
    """Ops for computing a loss on a GPU with Triton, which never hold all logits of a large vocabulary in memory."""

    chunk = 1 << 25
    selected: Tensor | None = None  # positions to compute logits for, [n]; None: all

    def __init__(self, ops: TorchOps, compiled: bool):
        super().__init__(ops)
        self._projected_loss: Callable[..., Tensor]
        from toyexp_torch.kernels.head import projected_loss  # imported here because it needs Triton

        # It calls kernels directly, and a compiler would compile it again for each number of positions. Without a
        # compiled step nothing is disabled, because `disable` imports the whole compiler, which takes a second.
        self._projected_loss = torch.compiler.disable(projected_loss) if compiled else projected_loss

    def should_defer(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> bool:
        """Return True if there are many logits and w has no adapter. The kernel does not support adapters."""
        return not isinstance(w, AdaptedWeight) and x.numel() // x.shape[-1] * len(w) >= LARGE

    @staticmethod
    def selects_positions(count: int) -> bool:
        """Return True if `count` logits are so many that leaving out positions of weight 0 saves time."""
        return count >= LARGE

    def compute_deferred(
        self, logits: DeferredLogits, targets: Tensor, weights: Tensor, smoothing: float, z_loss: float
    ) -> Tensor:
        """Return the loss from `projected_loss`, which holds only a chunk of the logits in memory; see LossOps."""
        if smoothing or z_loss:
            return TorchOps.cross_entropy(self, logits.compute(), targets, weights, smoothing, z_loss)
        return self._projected_loss(logits.x, logits.w, targets, weights, self)


def make_loss_ops(ops: TorchOps, device: str, compiled: bool) -> TorchOps:
    """Return the ops with which a loss, perhaps compiled, is computed on a device: "cpu", "cuda" or "mps".

    On cpu, and on cuda with Triton, they are variants of `ops` that defer the logits. Otherwise they are `ops` itself.
    """
    if device == "cpu":
        return LossOps(ops)
    if device != "cuda":
        return ops
    try:
        return ProjectedLossOps(ops, compiled)
    except ImportError:  # Triton is not installed
        return ops
