"""The ops of a forward pass that `torch.vmap` runs for several runs at once, each with weights of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toyexp import Rotary
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.ops import TorchOps


class StackedOps(TorchOps):
    """Kernels that know no stack see one longer batch, and a product has a matrix for each run."""

    def __init__(self, rounds: torch.dtype | None = None, activations: torch.dtype | None = None) -> None:
        super().__init__(activations=activations)
        self._rounds = rounds  # the type of a product's factors under autocast, which sees none of a product by runs
        self._turns: dict[Any, Tensor] = {}  # rope's tables as complex numbers

    def matmul(self, x: Tensor, w: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
        product: Tensor = _Product.apply(x.flatten(0, -2), w, self._rounds)
        y = product.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        return _by_rows(partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=eps), x.to(w.dtype)) * w

    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        """See Ops; neighbours are a complex number, which one product turns."""
        if rotary.halves or x.dtype != torch.float32 or x.device.type == "mps":
            return super().rope(x, rotary)
        key = (*x.shape[1:], rotary)
        if key not in self._turns:
            super().rope(torch.zeros((1, *x.shape[1:]), device=x.device), rotary)  # which keeps its tables
            self._turns[key] = torch.complex(*self.rotations[x.shape[1], x.shape[3], rotary, False])
        return _by_rows(partial(_turned, by=self._turns[key]), x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        return _by_rows(partial(super().attention, causal=causal), q, k, v)

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (_by_rows(_losses, logits, targets) * weights).sum()


def _turned(x: Tensor, by: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * by).flatten(-2)


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each position."""
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), reduction="none")
    return losses.view(targets.shape)


def _by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function` of tensors whose rows, along the first axis, it takes each by itself."""
    result: Tensor = _ByRows.apply(function, *tensors)
    return result


class _ByRows(torch.autograd.Function):
    """The rows of several runs are one longer batch. Autograd sees what `vmap` calls, so that nothing is kept here."""

    generate_vmap_rule = False

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Where nothing differs between the runs."""
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """See the class."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, int]:
        """Tensors [K, B, ...] -> [K, B, ...]."""
        long = [_stacked(x, axis, info.batch_size).flatten(0, 1) for x, axis in zip(tensors, in_dims[1:], strict=True)]
        return function(*long).unflatten(0, (info.batch_size, -1)), 0


class _Product(torch.autograd.Function):
    """x w^T, likewise."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, w: Tensor, rounds: torch.dtype | None) -> Tensor:
        """Where nothing differs between the runs."""
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """See the class."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, rounds: torch.dtype | None) -> tuple[Tensor, int]:
        """x [K, M, in] and w [K, out, in] -> [K, M, out]; a weight that all have alike sees one longer x."""
        x = _stacked(x, in_dims[0], info.batch_size)
        if in_dims[1] is None:
            return F.linear(x, w), 0
        w = w.movedim(in_dims[1], 0)
        product: Tensor = _Products.apply(*((x, w) if rounds is None else (x.to(rounds), w.to(rounds))))
        return product, 0


class _Products(torch.autograd.Function):
    """x [K, M, in] times each run's w [K, out, in] transposed -> [K, M, out].

    torch's own gradient of w is a transposed one, which would have to be copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Keeps both."""
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of x and w."""
        x, w = ctx.saved_tensors
        of_x = torch.bmm(gradient, w) if ctx.needs_input_grad[0] else None
        of_w = torch.bmm(gradient.transpose(1, 2), x) if ctx.needs_input_grad[1] else None
        return of_x, of_w


def _stacked(x: Tensor, axis: int | None, count: int) -> Tensor:
    """[K, ...], also of what all runs have alike."""
    return x.expand(count, *x.shape) if axis is None else x.movedim(axis, 0)
