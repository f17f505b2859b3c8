"""The ops of a loss: a model's last product waits until it is known which of its logits are needed, and for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from toyexp import AdaptedWeight
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.ops import TorchOps

LARGE = 1 << 24  # logits in a batch from which on a GPU never holds all of them


class Unprojected:
    """Logits x w^T that are still to be computed: x [..., d], w [V, d].

    A model that goes on with them has them as they are: `whole()` computes all.
    """

    def __init__(self, ops: TorchOps, x: Tensor, w: Tensor | Packed | AdaptedWeight):
        self.ops, self.x, self.w = ops, x, w

    def whole(self) -> Tensor:
        """All of them, [..., V]."""
        return self.ops.linear(self.x, self.w)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def __add__(self, other: Any) -> Tensor:
        return self.whole() + other

    def __sub__(self, other: Any) -> Tensor:
        return self.whole() - other

    def __mul__(self, other: Any) -> Tensor:
        return self.whole() * other

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls in place of a function of its own that such logits are given to."""
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


class LossOps(TorchOps):
    """Of a loss on the CPU: only the logits of positions whose targets weigh something are computed."""

    def __init__(self, ops: TorchOps):
        super().__init__(ops.recompute, ops.activations)
        self.rotations = ops.rotations  # which the compiler is to find as constants

    def waits(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> bool:
        """Whether a last product is left to the loss."""
        masked = isinstance(w, AdaptedWeight) and w.low_rank is not None and w.low_rank.dropout is not None
        # How many positions weigh something is another number every time, which the compiler has no use for.
        return not (masked or torch.compiler.is_compiling())

    def joined(self, logits: Unprojected, targets: Tensor, weights: Tensor) -> Tensor:
        """The cross-entropy of such logits; targets and weights [...]."""
        if bool(weights.all()) or logits.x.shape[:-1] != weights.shape:
            return super().cross_entropy(logits.whole(), targets, weights)
        x, kept = logits.x.flatten(0, -2), weights.flatten().nonzero()[:, 0]
        return super().cross_entropy(self.linear(x[kept], logits.w), targets.flatten()[kept], weights.flatten()[kept])

    def logits(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> Tensor | Unprojected:
        """See Ops; all of them, or what they are to be made of."""
        if not self.waits(x, w):
            return super().logits(x, w)
        return Unprojected(self, x, w)

    def cross_entropy(self, logits: Tensor | Unprojected, targets: Tensor, weights: Tensor) -> Tensor:
        """See Ops; of either."""
        if not isinstance(logits, Unprojected):
            return super().cross_entropy(logits, targets, weights)
        return self.joined(logits, targets, weights)


class ProjectedLossOps(LossOps):
    """Of a loss on a GPU with Triton: the logits of a large vocabulary never stand in memory."""

    kept: Tensor | None = None  # the positions of whose logits the loss is made, [n]; None: of all

    def __init__(self, ops: TorchOps):
        super().__init__(ops)
        from toyexp_torch.kernels.head import projected_loss  # deferred: it needs Triton

        self._projected_loss = projected_loss

    def waits(self, x: Tensor, w: Tensor | Packed | AdaptedWeight) -> bool:
        """See LossOps; an adapter's product stands beside another one."""
        return not isinstance(w, AdaptedWeight) and x.numel() // x.shape[-1] * len(w) >= LARGE

    @staticmethod
    def selects(count: int) -> bool:
        """Whether it is worth to be told of so many logits which ones are kept."""
        return count >= LARGE

    def joined(self, logits: Unprojected, targets: Tensor, weights: Tensor) -> Tensor:
        """See LossOps."""
        return self._projected_loss(logits.x, logits.w, targets, weights, self)


def ops_of_loss(ops: TorchOps, device: str) -> TorchOps:
    """The same ops for a loss on that device, where logits are not wanted for themselves."""
    if device == "cpu":
        return LossOps(ops)
    if device != "cuda":
        return ops
    try:
        return ProjectedLossOps(ops)
    except ImportError:  # of Triton
        return ops
