"""Dequantisation of the commonest ggml types as one pass over GPU memory, in Triton.

`packed.py` defines the types, and the kernels' results are bit-identical to those of its torch ops. A Triton program
computes a tile [groups, numbers of a group] of whole blocks, where a group consists of the numbers that share a scale.
Neighbouring numbers come from neighbouring bytes and are stored side by side. Each thread therefore computes eight
numbers: it loads two to sixteen bytes at once (as the alignment of blocks allows) and stores sixteen. Bytes that
several numbers share are read from the cache.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN202 - Triton's own types

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toyexp.formats import GGUF_TYPES

SIZES = {name: (per_block, block_bytes) for name, per_block, block_bytes in GGUF_TYPES.values()}

# Numbers and warps of a Triton program: 32 numbers per thread. This was the fastest of nine choices on an H200, by 5 to
# 13 % on a large matrix of Q8_0, Q4_K or Q6_K, and even a small matrix is divided among many programs.
NUMBERS, WARPS = 2048, 2
EXACT = tl.constexpr(1 << 23)  # from here on float32 has no fractional bits
EXACT_BITS = tl.constexpr(0x4B000000)  # bit pattern of EXACT as float32


def unpack_blocks(flat: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise consecutive blocks of a type in `KERNELS` on a GPU: uint8 [bytes] -> [numbers] of `dtype`."""
    (unpack_tile, group), (per_block, block_bytes) = KERNELS[kind], SIZES[kind]
    count, blocks = flat.numel() // block_bytes, NUMBERS // per_block
    out = torch.empty(count * per_block, dtype=dtype, device=flat.device)
    _unpack[(triton.cdiv(count, blocks),)](
        flat, out, count, unpack_tile, blocks, per_block, block_bytes, group, num_warps=WARPS
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _unpack(
    raw, out, count, unpack_tile: tl.constexpr, blocks: tl.constexpr, per_block: tl.constexpr,
    block_bytes: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * blocks
    block_count = tl.minimum(count - first, blocks).to(tl.int32)
    groups: tl.constexpr = per_block // group
    row = tl.arange(0, blocks * groups)
    i = tl.arange(0, group)[None, :]
    # Groups beyond the end read the last block again and are not stored.
    block = raw + first * block_bytes + tl.minimum(row // groups, block_count - 1) * block_bytes
    numbers = unpack_tile(block, row % groups, i)
    to = out + first * per_block + (row[:, None] * group + i)
    tl.store(to, numbers.to(out.dtype.element_ty), mask=row[:, None] < block_count * groups)


# -- parts of block layouts --------------------------------------------------------------------------------------------
# `b` [groups] points to the first byte of a group's block, `g` [groups] is the group's index in the block, and
# `i` [1, numbers of a group] are the indices in a group.


@triton.jit
def _byte(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def _signed_byte(at):
    return tl.load(at).to(tl.int8, bitcast=True)


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)


@triton.jit
def _word(at):
    """Load 32 bits from an address that is even, but need not be a multiple of 4."""
    halves = at.to(tl.pointer_type(tl.uint16), bitcast=True)
    return tl.load(halves).to(tl.int32) | tl.load(halves + 1).to(tl.int32) << 16


@triton.jit
def _nibbles(at, i):
    """Return the 4-bit fields of 16 bytes: first the lower halves of all bytes, then the upper halves."""
    return _byte(at[:, None] + i % 16) >> i // 16 * 4 & 15


@triton.jit
def _scale(codes, middle: tl.constexpr, scale):
    """Return (codes - middle) * scale, for codes of at most 23 bits.

    The codes are written into the last bits of a float32, because the instruction that converts integers is slow.
    """
    return ((codes | EXACT_BITS).to(tl.float32, bitcast=True) - (EXACT + middle)) * scale[:, None]


# -- blocks of 32 ------------------------------------------------------------------------------------------------------


@triton.jit
def _q4_0(b, g, i):
    return _scale(_nibbles(b + 2, i), 8, _half(b))


@triton.jit
def _q4_1(b, g, i):
    return _scale(_nibbles(b + 4, i), 0, _half(b)) + _half(b + 2)[:, None]


@triton.jit
def _q5_0(b, g, i):
    codes = _nibbles(b + 6, i) | (_word(b + 2)[:, None] >> i & 1) << 4
    return _scale(codes, 16, _half(b))


@triton.jit
def _q5_1(b, g, i):
    codes = _nibbles(b + 8, i) | (_word(b + 4)[:, None] >> i & 1) << 4
    return _scale(codes, 0, _half(b)) + _half(b + 2)[:, None]


@triton.jit
def _q8_0(b, g, i):
    return _scale(_byte(b[:, None] + 2 + i) ^ 128, 128, _half(b))


# -- blocks of 256 -----------------------------------------------------------------------------------------------------


@triton.jit
def _q2_k(b, g, i):
    packed_scales = _byte(b + g)
    codes = _pairs(b + 16, g, i)
    return _scale(codes, 0, _half(b + 80) * (packed_scales & 15)) - (_half(b + 82) * (packed_scales >> 4))[:, None]


@triton.jit
def _q3_k(b, g, i):
    high = _byte((b + g % 2 * 16)[:, None] + i) >> (g // 2)[:, None] & 1
    scale = _byte(b + 96 + g % 8) >> g // 8 * 4 & 15 | (_byte(b + 104 + g % 4) >> g // 4 * 2 & 3) << 4
    return _scale(_pairs(b + 32, g, i) | high << 2, 4, _half(b + 108) * (scale - 32))


@triton.jit
def _pairs(at, g, i):
    """Return field `i` of each group `g` of 16 fields, for the 256 fields of 2 bits in the 64 bytes from `at` on.

    Groups 0 to 7 are the fields of the first 32 bytes: the lowest field of each byte, then the next field of each byte,
    and so on. Groups 8 to 15 are the fields of the other 32 bytes in the same order.
    """
    return _byte((at + g // 8 * 32 + g % 2 * 16)[:, None] + i) >> (g % 8 // 2 * 2)[:, None] & 3


@triton.jit
def _q4_k(b, g, i):
    codes = _byte((b + 16 + g // 2 * 32)[:, None] + i) >> (g % 2 * 4)[:, None] & 15
    return _scale_with_minimum(codes, b, g)


@triton.jit
def _q5_k(b, g, i):
    codes = _byte((b + 48 + g // 2 * 32)[:, None] + i) >> (g % 2 * 4)[:, None] & 15
    high = _byte(b[:, None] + 16 + i) >> g[:, None] & 1
    return _scale_with_minimum(codes | high << 4, b, g)


@triton.jit
def _scale_with_minimum(codes, b, g):
    """Scale the codes and subtract the minimum of their group, as Q4_K and Q5_K do.

    `_scale_and_minimum` in packed.py describes the 6-bit fields that hold scales and minimums.
    """
    j, last = g % 4, g > 3
    scale, minimum, rest = _byte(b + 4 + j), _byte(b + 8 + j), _byte(b + 12 + j)
    scale = tl.where(last, rest & 15 | scale >> 2 & 48, scale & 63)
    minimum = tl.where(last, rest >> 4 | minimum >> 2 & 48, minimum & 63)
    return _scale(codes, 0, _half(b) * scale) - (_half(b + 2) * minimum)[:, None]


@triton.jit
def _q6_k(b, g, i):
    half, quarter, odd = g // 8, g % 8 // 2, g % 2 * 16
    low = _byte((b + half * 64 + quarter % 2 * 32 + odd)[:, None] + i) >> (quarter // 2 * 4)[:, None] & 15
    return _scale(low | _pairs(b + 128, g, i) << 4, 32, _half(b + 208) * _signed_byte(b + 192 + g))


KERNELS = {  # by type: the function that computes a tile, and the numbers of a group
    "Q4_0": (_q4_0, 32), "Q4_1": (_q4_1, 32), "Q5_0": (_q5_0, 32), "Q5_1": (_q5_1, 32), "Q8_0": (_q8_0, 32),
    "Q2_K": (_q2_k, 16), "Q3_K": (_q3_k, 16), "Q4_K": (_q4_k, 32), "Q5_K": (_q5_k, 32), "Q6_K": (_q6_k, 16),
}  # fmt: skip
