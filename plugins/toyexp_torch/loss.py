"""Ops for computing a loss, which defer the product that gives the logits until the needed positions are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from toyexp import AdaptedWeight
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.ops import TorchOps

LARGE = 1 << 24  # from this many logits in a batch a GPU computes them in chunks


class DeferredLogits:
    """Logits x w^T that are not computed yet: x [..., d], w [V, d].

    If a model uses them in another operation, `compute()` computes all of them.
    """

    def __init__(self, ops: TorchOps, x: Tensor, w: Tensor | Packed | AdaptedWeight):
        self.ops, self.x, self.w = ops, x, w

    def compute(self) -> Tensor:
        """Compute all logits, [..., V]."""
        return self.ops.linear(self.x, self.w)

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
        """Replace deferred logits among the arguments of a torch function by computed ones."""
        args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return function(*args, **kwargs)


class LossOps(TorchOps):
    """Ops for a loss on the CPU, which computes logits only for positions whose targets have a weight."""

    def __init__(self, ops: TorchOps):
        super().__init__(ops.recompute, ops.activations)
        self.rotations = ops.rotations  # shared, so that the compiler finds its tables as constants

    def should_defer(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> bool:
        """Return True if the last product should be left to the loss."""
        masked = isinstance(w, AdaptedWeight) and w.low_rank is not None and w.low_rank.dropout is not None
        # The number of selected positions changes with every batch, which would recompile the step.
        return not (masked or torch.compiler.is_compiling())

    def compute_deferred(self, logits: DeferredLogits, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the cross-entropy of deferred logits; targets and weights [...]."""
        if bool(weights.all()) or logits.x.shape[:-1] != weights.shape:
            return super().cross_entropy(logits.compute(), targets, weights)
        x, rows = logits.x.flatten(0, -2), weights.flatten().nonzero()[:, 0]
        return super().cross_entropy(self.linear(x[rows], logits.w), targets.flatten()[rows], weights.flatten()[rows])

    def logits(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> Tensor | DeferredLogits:
        """Return the logits, or deferred logits; see Ops."""
        if not self.should_defer(x, w):
            return super().logits(x, w)
        return DeferredLogits(self, x, w)

    def cross_entropy(self, logits: Tensor | DeferredLogits, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the cross-entropy of logits or of deferred logits; see Ops."""
        if not isinstance(logits, DeferredLogits):
            return super().cross_entropy(logits, targets, weights)
        return self.compute_deferred(logits, targets, weights)


class ProjectedLossOps(LossOps):
    """Ops for a loss on a GPU with Triton, which never holds all logits of a large vocabulary in memory."""

    selected: Tensor | None = None  # positions to compute logits for, [n]; None: all

    def __init__(self, ops: TorchOps):
        super().__init__(ops)
        from toyexp_torch.kernels.head import projected_loss  # imported here because it needs Triton

        self._projected_loss = projected_loss

    def should_defer(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> bool:
        """Return True if there are many logits, and no adapter, which the kernel does not support."""
        return not isinstance(w, AdaptedWeight) and x.numel() // x.shape[-1] * len(w) >= LARGE

    @staticmethod
    def selects_positions(count: int) -> bool:
        """Return True if there are so many logits that it pays to compute only those of positions with a weight."""
        return count >= LARGE

    def compute_deferred(self, logits: DeferredLogits, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the loss from a kernel that computes the logits in chunks; see LossOps."""
        return self._projected_loss(logits.x, logits.w, targets, weights, self)


def make_loss_ops(ops: TorchOps, device: str) -> TorchOps:
    """Return ops for computing a loss on that device, where logits may be deferred."""
    if device == "cpu":
        return LossOps(ops)
    if device != "cuda":
        return ops
    try:
        return ProjectedLossOps(ops)
    except ImportError:  # Triton is not installed
        return ops
