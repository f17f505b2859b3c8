"""The loss from what stands before the last product, a chunk of positions at a time, on a GPU with Triton.

The logits of a large vocabulary are by far the largest tensor of a language model's step. Here those of a few thousand
positions stand in memory at once: each chunk is computed, turned in place into the loss's gradient, and multiplied
into the gradients of the input and the weight, all in the forward pass (Hsu et al. 2024, "Liger Kernel").
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from toyexp_torch.kernels.packed import Packed

CHUNK_BYTES = 512 << 20  # of logits that stand in memory at once
ROWS, COLUMNS = 128, 64  # multiples in which a matrix product works best
BLOCK = 8192  # logits that a kernel looks at together


class Choice(Protocol):
    """Which positions a loss is made of."""

    kept: Tensor | None  # [n], none of them twice, all that weigh something among them; None: all


@torch.compiler.disable  # its kernels are written out, and a compiler would make another program for each `n`
def projected_loss(
    x: Tensor, w: Tensor | Packed, targets: Tensor, weights: Tensor, choice: Choice | None = None
) -> Tensor:
    """The cross-entropy of logits x w^T, as TorchOps has it: x [..., d], w [V, d], targets and weights [...].

    The numbers of a packed w are made once: the gradient needs them no second time.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    numbers = w.numbers(dtype) if isinstance(w, Packed) else w
    kept = choice and choice.kept
    loss: Tensor = ProjectedLoss.apply(x.flatten(0, -2), numbers, targets.flatten(), weights.flatten(), dtype, kept)
    return loss


class ProjectedLoss(torch.autograd.Function):
    """Sum over n of weights[n] * -log softmax(x[n] w^T)[targets[n]], for x [N, d] and w [V, d].

    Its gradients are worked out in the forward pass, for a loss that the backward pass starts from: they are not scaled
    by a gradient of it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype, kept: Tensor | None = None
    ) -> Tensor:
        """See the class; products are in `dtype`, softmax, loss and the weight's gradient in float32."""
        wants_x, wants_w = ctx.needs_input_grad[:2]
        near = x.to(dtype)
        if kept is not None:
            near, targets, weights = (t.index_select(0, kept) for t in (near, targets, weights))
        count, vocab = len(near), len(w)
        width = _rounded_up(vocab, COLUMNS)
        table = w.to(dtype) if width == vocab else w.new_zeros((width, w.shape[1]), dtype=dtype)
        if width != vocab:
            table[:vocab].copy_(w)
        losses = torch.empty(count, dtype=torch.float32, device=x.device)
        dx = torch.empty_like(near) if wants_x else None
        dw = torch.zeros(table.shape, dtype=torch.float32, device=x.device) if wants_w else None
        chunk = _rounded_up(-(-count // -(-count * width * near.element_size() // CHUNK_BYTES)), ROWS)
        for start in range(0, count, chunk):
            here = slice(start, min(start + chunk, count))
            logits = near[here] @ table.T
            _softmax[(len(logits),)](
                logits, targets[here], weights[here], losses[here], vocab, width, wants_x or wants_w, BLOCK,
                num_warps=16,  # so many that the rows in work, which are read twice, stay in the cache
            )  # fmt: skip
            if dx is not None:
                torch.mm(logits, table, out=dx[here])
            if dw is not None:
                _add_product(dw, logits.T, near[here])
        if dx is not None and kept is not None:
            dx = dx.new_zeros(x.shape).index_copy_(0, kept, dx)
        ctx.save_for_backward(dx, dw if dw is None else dw[:vocab])
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """What the forward pass found."""
        return (*ctx.saved_tensors, None, None, None, None)


@triton.jit
def _softmax(  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton's own types
    logits, targets, weights, losses, vocab, width, gradient: tl.constexpr, block: tl.constexpr
):
    """One row's loss; with `gradient` its logits become weight * (softmax - one-hot), beyond `vocab` 0."""
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
        tl.debug_barrier()  # every thread has read the target's logit
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
            share = tl.exp(x - log_sum)
            share = weight * tl.where(columns == target, share - 1.0, share)
            tl.store(logits + columns, share.to(logits.dtype.element_ty), mask=columns < width)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in float32 whatever the type of a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
