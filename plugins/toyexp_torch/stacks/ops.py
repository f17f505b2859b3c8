"""Ops for a forward pass that `torch.vmap` runs for several runs at once, each with its own weights."""

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
    """Ops that treat the rows of all runs as one longer batch, and products as one matrix product per run."""

    def __init__(self, rounds: torch.dtype | None = None, activations: torch.dtype | None = None) -> None:
        super().__init__(activations=activations)
        self._rounds = rounds  # dtype of a product's factors; autocast does not reach products by run
        self._complex_rotations: dict[Any, Tensor] = {}  # rope's tables as complex numbers

    def matmul(self, x: Tensor, w: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
        product: Tensor = _Product.apply(x.flatten(0, -2), w, self._rounds)
        y = product.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        return _apply_to_rows(partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=eps), x.to(w.dtype)) * w

    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate neighbours as complex numbers, with one product; see Ops."""
        if rotary.halves or x.dtype != torch.float32 or x.device.type == "mps":
            return super().rope(x, rotary)
        key = (*x.shape[1:], rotary)
        if key not in self._complex_rotations:
            super().rope(torch.zeros((1, *x.shape[1:]), device=x.device), rotary)  # fills self.rotations
            self._complex_rotations[key] = torch.complex(*self.rotations[x.shape[1], x.shape[3], rotary, False])
        return _apply_to_rows(partial(_rotate, by=self._complex_rotations[key]), x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        return _apply_to_rows(partial(super().attention, causal=causal), q, k, v)

    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (_apply_to_rows(_position_losses, logits, targets) * weights).sum()


def _rotate(x: Tensor, by: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * by).flatten(-2)


def _position_losses(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), reduction="none")
    return losses.view(targets.shape)


def _apply_to_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply `function`, which treats each row of the first axis on its own, to the rows of all runs at once."""
    result: Tensor = _RowsFunction.apply(function, *tensors)
    return result


class _RowsFunction(torch.autograd.Function):
    """A function of the rows of all runs as one batch. Autograd records what `vmap` calls: nothing is saved."""

    generate_vmap_rule = False

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call the function, if no argument differs between the runs."""
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, int]:
        """Call the function on tensors [K, B, ...] as [K B, ...]; return [K, B, ...]."""
        count, axes = info.batch_size, in_dims[1:]
        rows = [_with_run_axis(x, axis, count).flatten(0, 1) for x, axis in zip(tensors, axes, strict=True)]
        return function(*rows).unflatten(0, (count, -1)), 0


class _Product(torch.autograd.Function):
    """Product x w^T for all runs at once. Autograd records the operations inside `vmap`."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, w: Tensor, rounds: torch.dtype | None) -> Tensor:
        """Return the product, if no argument differs between the runs."""
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, rounds: torch.dtype | None) -> tuple[Tensor, int]:
        """Multiply x [K, M, in] by w [K, out, in] -> [K, M, out], or by one w [out, in] that all runs share."""
        x = _with_run_axis(x, in_dims[0], info.batch_size)
        if in_dims[1] is None:
            return F.linear(x, w), 0
        w = w.movedim(in_dims[1], 0)
        product: Tensor = _Products.apply(*((x, w) if rounds is None else (x.to(rounds), w.to(rounds))))
        return product, 0


class _Products(torch.autograd.Function):
    """Product of x [K, M, in] with each run's w [K, out, in], transposed -> [K, M, out].

    torch's own gradient of w would be a transposed view, which would have to be copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        dx = torch.bmm(gradient, w) if ctx.needs_input_grad[0] else None
        dw = torch.bmm(gradient.transpose(1, 2), x) if ctx.needs_input_grad[1] else None
        return dx, dw


def _with_run_axis(x: Tensor, axis: int | None, count: int) -> Tensor:
    """Return x with the runs' axis first, [K, ...]; a tensor that all runs share is expanded."""
    return x.expand(count, *x.shape) if axis is None else x.movedim(axis, 0)
