"""Output projection and cross-entropy loss in one function, on a GPU with Triton, a chunk of positions at a time.

With a large vocabulary, the logits are by far the largest tensor of a language model's step. Here, only the logits of a
few thousand positions are in memory at a time. The forward pass computes a chunk of logits, overwrites it with the
gradient of the loss, and adds the chunk's part to the gradients of the input and the weight (Hsu et al. 2024, "Liger
Kernel").
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from toyexp_torch.kernels.packed import Packed

CHUNK_BYTES = 512 << 20  # bytes of logits in memory at a time
ROWS, COLUMNS = 128, 64  # matrix products are fastest if rows and columns are multiples of these
BLOCK = 8192  # logits that a program loads at a time


class Choice(Protocol):
    """Selection of the positions whose logits are computed."""

    selected: Tensor | None  # [n] distinct positions, including all of non-zero weight; None: all positions


def projected_loss(
    x: Tensor, w: Tensor | Packed, targets: Tensor, weights: Tensor, choice: Choice | None = None
) -> Tensor:
    """Return the sum over positions of weight times cross-entropy, for logits x w^T, as TorchOps.cross_entropy does.

    x is [..., d], w [V, d], targets and weights [...]. Positions that `choice` does not select must have weight 0. A
    packed w is dequantised only once, because the forward pass also computes the gradients.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    numbers = w.numbers(dtype) if isinstance(w, Packed) else w
    selected = choice and choice.selected
    loss: Tensor = ProjectedLoss.apply(x.flatten(0, -2), numbers, targets.flatten(), weights.flatten(), dtype, selected)
    return loss


class ProjectedLoss(torch.autograd.Function):
    """Autograd function: the sum over n of weights[n] * -log softmax(x[n] w^T)[targets[n]], for x [N, d] and w [V, d].

    The forward pass already computes the gradients, and backward() returns them without multiplying them by the
    incoming gradient. Therefore a backward pass must begin at this loss, where the incoming gradient is 1.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype,
        selected: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the gradients and return the loss.

        Matrix products are computed in `dtype`; softmax, loss and the weight's gradient in float32.
        """
        wants_x, wants_w = ctx.needs_input_grad[:2]
        inputs = x.to(dtype)
        if selected is not None:
            inputs, targets, weights = (t.index_select(0, selected) for t in (inputs, targets, weights))
        count, vocab = len(inputs), len(w)
        width = _round_up(vocab, COLUMNS)
        table = w.to(dtype) if width == vocab else w.new_zeros((width, w.shape[1]), dtype=dtype)
        if width != vocab:
            table[:vocab].copy_(w)
        losses = torch.empty(count, dtype=torch.float32, device=x.device)
        dx = torch.empty_like(inputs) if wants_x else None
        dw = torch.zeros(table.shape, dtype=torch.float32, device=x.device) if wants_w else None
        chunk = _round_up(-(-count // -(-count * width * inputs.element_size() // CHUNK_BYTES)), ROWS)
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            logits = inputs[rows] @ table.T
            _softmax[(len(logits),)](
                logits, targets[rows], weights[rows], losses[rows], vocab, width, wants_x or wants_w, BLOCK,
                num_warps=16,  # with many warps, few rows run at a time, so each is still cached for its second read
            )  # fmt: skip
            if dx is not None:
                torch.mm(logits, table, out=dx[rows])
            if dw is not None:
                _add_product(dw, logits.T, inputs[rows])
        if dx is not None and selected is not None:
            dx = dx.new_zeros(x.shape).index_copy_(0, selected, dx)
        ctx.save_for_backward(dx, dw if dw is None else dw[:vocab])
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and w that the forward pass computed."""
        return (*ctx.saved_tensors, None, None, None, None)


@triton.jit
def _softmax(  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton's own types
    logits, targets, weights, losses, vocab, width, gradient: tl.constexpr, block: tl.constexpr
):
    """Compute the loss of one row of logits.

    If `gradient` is True, also overwrite the row with the loss's gradient, weight * (softmax - one-hot), with 0 in the
    padding columns from `vocab` on.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target, weight = tl.load(targets + row), tl.load(weights + row)
    highest, total = -float("inf"), 0.0
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    log_sum = highest + tl.log(total)
    tl.store(losses + row, weight * (log_sum - tl.load(logits + target).to(tl.float32)))
    if gradient:
        tl.debug_barrier()  # all threads must have read the target's logit before it is overwritten
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
            share = tl.exp(x - log_sum)
            share = weight * tl.where(columns == target, share - 1.0, share)
            tl.store(logits + columns, share.to(logits.dtype.element_ty), mask=columns < width)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product a b to `total` in place, accumulating in the dtype of `total` (float32)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
