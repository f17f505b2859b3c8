"""Ops for a forward pass of several runs at once, inside `torch.vmap`. Each run has its own weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toyexp import Rotary
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.ops import TorchOps, position_losses


class StackedOps(TorchOps):
    """Ops for several runs at once, inside `torch.vmap`.

    Most ops join the batches of all runs to one longer batch. A product with weights is a batched product, which
    multiplies each run's batch by its own matrix.
    """

    def __init__(
        self, rounds: torch.dtype | None = None, activations: torch.dtype | None = None,
        attention_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(activations=activations, attention_dtype=attention_dtype)
        self._rounds = rounds  # dtype to which products round their factors, since autocast ignores batched products
        self._complex_rotations: dict[Any, Tensor] = {}  # rope's tables as complex numbers

    def matmul(self, x: Tensor, w: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
        product: Tensor = _Product.apply(x.flatten(0, -2), w, self._rounds)
        y = product.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)

    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        return _apply_to_rows(partial(F.rms_norm, normalized_shape=x.shape[-1:], eps=eps), x.to(w.dtype)) * w

    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate all pairs of neighbouring features by one product of complex numbers; see Ops."""
        if rotary.halves or x.dtype != torch.float32 or x.device.type == "mps":
            return super().rope(x, rotary)
        key = (*x.shape[1:], rotary)
        if key not in self._complex_rotations:
            super().rope(torch.zeros((1, *x.shape[1:]), device=x.device), rotary)  # fills self.rotations
            self._complex_rotations[key] = torch.complex(*self.rotations[x.shape[1], x.shape[3], rotary, False])
        return _apply_to_rows(partial(_rotate, by=self._complex_rotations[key]), x)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, bias: Any = None, **settings: Any
    ) -> Tensor:
        attend: Callable[..., Tensor] = partial(super().attention, causal=causal, **settings)
        by_row = [] if bias is None else [bias]
        if settings.get("sinks") is not None or (by_row and bias.ndim < 4):  # each run has its own
            return attend(q, k, v, bias=bias)
        return _apply_to_rows(lambda q, k, v, *bias: attend(q, k, v, bias=bias[0] if bias else None), q, k, v, *by_row)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Tensor:
        losses = _apply_to_rows(partial(position_losses, smoothing=smoothing, z_loss=z_loss), logits, targets)
        return (losses * weights).sum()


def _rotate(x: Tensor, by: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * by).flatten(-2)


def _apply_to_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Join the batches of all runs along their first axis, call `function` on them, and return the result.

    Inside `torch.vmap`, `tensors` are those of a single run. The result for one row must not depend on other rows.
    """
    result: Tensor = _RowsFunction.apply(function, *tensors)
    return result


class _RowsFunction(torch.autograd.Function):
    """Autograd function that applies a function to the batches of all runs, joined into one batch.

    Its method `vmap` calls ordinary torch operations, and autograd records these. This class therefore saves nothing
    for the backward pass.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return function(*tensors). torch calls this only if no argument differs between the runs."""
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for a backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, int]:
        """Apply the function to tensors [K, B, ...] of K runs with B rows each, reshaped to [K * B, ...].

        Return its result as [K, B, ...], and 0, which tells vmap that the first axis is that of the runs.
        """
        count, axes = info.batch_size, in_dims[1:]
        rows = [_with_run_axis(x, axis, count).flatten(0, 1) for x, axis in zip(tensors, axes, strict=True)]
        return function(*rows).unflatten(0, (count, -1)), 0


class _Product(torch.autograd.Function):
    """Autograd function for the product x w^T of all runs at once.

    It saves nothing for a backward pass, because autograd records the operations that `vmap` calls.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, w: Tensor, rounds: torch.dtype | None) -> Tensor:
        """Return x w^T. torch calls this only if no argument differs between the runs."""
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for a backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, rounds: torch.dtype | None) -> tuple[Tensor, int]:
        """Multiply x [K, M, in] of K runs by the transpose of w [K, out, in], or of a w [out, in] that all runs share.

        Factors of a batched product are rounded to the dtype `rounds`, unless that is None. Return the product
        [K, M, out], and 0, which tells vmap that the first axis is that of the runs.
        """
        x = _with_run_axis(x, in_dims[0], info.batch_size)
        if in_dims[1] is None:
            return F.linear(x, w), 0
        w = w.movedim(in_dims[1], 0)
        product: Tensor = _Products.apply(*((x, w) if rounds is None else (x.to(rounds), w.to(rounds))))
        return product, 0


class _Products(torch.autograd.Function):
    """Autograd function for K runs: x [K, M, in] times the transposes of w [K, out, in] -> [K, M, out].

    It has its own backward pass, because the gradient that torch computes for w is a transposed view, which would have
    to be copied.
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
    """Return x as [K, ...] with the runs' axis first.

    `axis` is the present position of this axis, or None for a tensor that all runs share. Such a tensor is expanded to
    `count` runs without a copy.
    """
    return x.expand(count, *x.shape) if axis is None else x.movedim(axis, 0)
