"""AdamW as one Triton kernel. It reads even the scalars from GPU memory, so that a CUDA graph can record it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # weights per Triton program


def step(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor, divisor: Tensor | None, skip: Tensor,
    rounded: Tensor | None = None, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Apply one step of the formula of toyexp.AdamW in place to the float32 vectors w, m and v [n].

    `numbers` are the formula's seven scalars, float64. The gradient g is divided by `divisor`, if that is given. If
    `skip` is 1, nothing changes. `rounded` receives a copy of the new weights in its own dtype.

    To update several runs at once, pass matrices w, m and v [K, n] with a row for each run. Only the k rows that `rows`
    lists (None: all rows) change. Then g is [k, n], numbers [k, 7] and divisor [k]; skip is [k], or one number for all
    runs. The last axis of each matrix must be contiguous.
    """
    count, length = numbers.numel() // 7, w.shape[-1]
    _step[(triton.cdiv(length, BLOCK), count)](
        w, g, m, v, numbers, divisor, skip, rounded, rows, length, w.stride(0), g.stride(0), m.stride(0), skip.ndim,
        divisor is not None, rounded is not None, rows is not None, BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _step(  # type: ignore[no-untyped-def]  # noqa: ANN202 - Triton's own types
    w_ptr, g_ptr, m_ptr, v_ptr, numbers, divisor, skip, rounded, rows, count, w_stride, g_stride, state_stride,
    skip_stride, has_divisor: tl.constexpr, has_rounded: tl.constexpr, has_rows: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(1).to(tl.int64)
    if tl.load(skip + run * skip_stride) > 0:
        return
    numbers += run * 7
    wide_beta1, wide_beta2 = tl.load(numbers + 1), tl.load(numbers + 2)  # 1 - beta loses digits in float32
    beta1, rest1 = wide_beta1.to(tl.float32), (1 - wide_beta1).to(tl.float32)
    beta2, rest2 = wide_beta2.to(tl.float32), (1 - wide_beta2).to(tl.float32)
    lr, eps, decay = tl.load(numbers).to(tl.float32), tl.load(numbers + 3).to(tl.float32), tl.load(numbers + 4)
    slot5, slot6 = tl.load(numbers + 5).to(tl.float32), tl.load(numbers + 6).to(tl.float32)
    decay = decay.to(tl.float32)
    row = run
    if has_rows:
        row = tl.load(rows + run)
    w_ptr, g_ptr = w_ptr + row * w_stride, g_ptr + run * g_stride
    m_ptr, v_ptr = m_ptr + row * state_stride, v_ptr + row * state_stride
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < count
    w, g = tl.load(w_ptr + i, mask=inside), tl.load(g_ptr + i, mask=inside)
    m, v = tl.load(m_ptr + i, mask=inside), tl.load(v_ptr + i, mask=inside)
    if has_divisor:
        g = g / tl.load(divisor + run)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w - lr * (decay * w + m * slot5 / (tl.sqrt(v * slot6) + eps))
    tl.store(w_ptr + i, w, mask=inside)
    tl.store(m_ptr + i, m, mask=inside)
    tl.store(v_ptr + i, v, mask=inside)
    if has_rounded:
        tl.store(rounded + i, w.to(rounded.dtype.element_ty), mask=inside)
