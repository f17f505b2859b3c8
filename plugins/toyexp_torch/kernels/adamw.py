"""AdamW as one pass over a GPU's memory, whose numbers are all read there; it needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # weights to a program


def step(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor, divisor: Tensor | None, skip: Tensor,
    rounded: Tensor | None = None, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """The formula of toyexp.AdamW in place on float32 vectors, from its seven `numbers`, float64.

    The gradient is divided by `divisor`; where `skip` is 1 nothing changes. `rounded` gets the new weights.
    Of several runs w, m and v are matrices [K, n], of which `rows` change, or all; g [k, n], numbers [k, 7], divisor
    and skip [k] are theirs, and a skip without axes is that of each. Along a matrix's last axis its numbers stand side
    by side.
    """
    count, length = numbers.numel() // 7, w.shape[-1]
    _step[(triton.cdiv(length, BLOCK), count)](
        w, g, m, v, numbers, divisor, skip, rounded, rows, length, w.stride(0), g.stride(0), m.stride(0), skip.ndim,
        divisor is not None, rounded is not None, rows is not None, BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _step(  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton's own types
    w_at, g_at, m_at, v_at, numbers, divisor, skip, rounded, rows, count, w_stride, g_stride, state_stride, skip_stride,
    divides: tl.constexpr, rounds: tl.constexpr, picks: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(1).to(tl.int64)  # of several
    if tl.load(skip + run * skip_stride) > 0:
        return
    numbers += run * 7
    exact1, exact2 = tl.load(numbers + 1), tl.load(numbers + 2)  # 1 - beta loses digits in float32
    beta1, rest1 = exact1.to(tl.float32), (1 - exact1).to(tl.float32)
    beta2, rest2 = exact2.to(tl.float32), (1 - exact2).to(tl.float32)
    lr, eps, decay = tl.load(numbers).to(tl.float32), tl.load(numbers + 3).to(tl.float32), tl.load(numbers + 4)
    slot5, slot6 = tl.load(numbers + 5).to(tl.float32), tl.load(numbers + 6).to(tl.float32)
    decay = decay.to(tl.float32)
    row = run
    if picks:
        row = tl.load(rows + run)
    w_at, g_at = w_at + row * w_stride, g_at + run * g_stride
    m_at, v_at = m_at + row * state_stride, v_at + row * state_stride
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < count
    w, g = tl.load(w_at + i, mask=inside), tl.load(g_at + i, mask=inside)
    m, v = tl.load(m_at + i, mask=inside), tl.load(v_at + i, mask=inside)
    if divides:
        g = g / tl.load(divisor + run)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w - lr * (decay * w + m * slot5 / (tl.sqrt(v * slot6) + eps))
    tl.store(w_at + i, w, mask=inside)
    tl.store(m_at + i, m, mask=inside)
    tl.store(v_at + i, v, mask=inside)
    if rounds:
        tl.store(rounded + i, w.to(rounded.dtype.element_ty), mask=inside)
