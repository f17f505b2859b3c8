"""The numbers of every ggml type from its bytes, in torch's own ops, on any device.

The layouts are those of ggml (`ggml-common.h`, and `dequantize_row_*` of `ggml-quants.c`): blocks of 32, 64 or 256
numbers, most of them with scales for groups within the block. Below, `b` is [blocks, bytes of a block] and what is made
of it float32 [blocks, numbers of a block].

A scale has 11 bits and what it is multiplied with at most 13 more, so that in float32 every product is exact, and only
taking a minimum off rounds. So a compiler may fuse the two as it likes: the numbers stay the same to the bit.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from toyexp.formats import GGUF_TYPES

CHUNK = 1 << 18  # numbers that the CPU makes at a time
WHOLE = {"F16": torch.float16, "BF16": torch.bfloat16}  # types without blocks
SIZES = {name: (per_block, block_bytes) for name, per_block, block_bytes in GGUF_TYPES.values()}
log = logging.getLogger("toyexp")


def unpacked(raw: Tensor, kind: str, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Bytes [n, bytes of a row] of a ggml type as numbers [n, in], made in float32 and rounded once.

    `table` is `table_of(kind)`, on the device of the bytes. On an NVIDIA GPU one kernel does it, where torch has
    Triton: that of `unpack_kernels`, or what the compiler makes of the ops below, which makes 0 of what is smaller than
    float32's normal numbers (MXFP4 alone has such).
    """
    if kind in WHOLE:
        return raw.view(WHOLE[kind]).to(dtype)
    if torch.compiler.is_compiling():
        # On a GPU a kernel of its own in any case. A compiled step that looks into it takes five times as long to make.
        return as_one_op(raw, kind, table, dtype) if raw.is_cuda else _of_rows(_unpacked, raw, kind, table, dtype)
    if raw.is_cuda:
        return _of_rows(_in_one_kernel(kind, dtype, raw.device), raw, kind, table, dtype)
    chunks = raw.device.type == "cpu" and kind != "Q8_0"  # whose codes are bytes: nothing large is between
    return _of_rows(_in_chunks if chunks else _unpacked, raw, kind, table, dtype)


@torch.library.custom_op(
    "toyexp::unpacked", mutates_args=(), schema="(Tensor raw, str kind, Tensor? table, ScalarType dtype) -> Tensor"
)
def as_one_op(raw: Tensor, kind: str, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`unpacked`, of types with blocks, as one op of a compiled step."""
    return unpacked(raw, kind, table, dtype)


@as_one_op.register_fake
def _(raw: Tensor, kind: str, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    per_block, block_bytes = SIZES[kind]
    return raw.new_empty(raw.shape[0], raw.shape[1] // block_bytes * per_block, dtype=dtype)


def table_of(kind: str) -> Tensor | None:
    """The numbers that a type's codes stand for, float32 [codes] or [codes, numbers of a code]; None without."""
    if kind not in WITH_TABLE:
        return None
    from gguf import quants  # deferred: few files need it

    made = getattr(quants, "IQ4_NL" if kind == "IQ4_XS" else kind)  # these two share one
    made.init_grid()
    return torch.tensor(made.kvalues if made.grid is None else made.grid[0, 0], dtype=torch.float32)


def _of_rows(of_blocks: Callable[..., Tensor], raw: Tensor, *how: Any) -> Tensor:
    return of_blocks(raw.reshape(-1), *how).view(raw.shape[0], -1)


def _unpacked(flat: Tensor, kind: str, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Blocks of bytes, one after the other, as numbers."""
    blocks = flat.view(-1, SIZES[kind][1])
    numbers = WITHOUT_TABLE[kind](blocks) if table is None else WITH_TABLE[kind](blocks, table)
    return numbers.flatten().to(dtype)


def _in_chunks(flat: Tensor, kind: str, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`_unpacked`, so many numbers at a time that what is between stays in the processor's cache."""
    per_block, block_bytes = SIZES[kind]
    numbers = torch.empty(flat.numel() // block_bytes * per_block, dtype=dtype)
    for part, made in zip(flat.split(CHUNK // per_block * block_bytes), numbers.split(CHUNK), strict=True):
        made.copy_(_unpacked(part, kind, table, torch.float32))
    return numbers


@cache
def _in_one_kernel(kind: str, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """`_unpacked` as one kernel for any number of blocks, or as it is where none works on a few of zeros."""
    table, zeros = table_of(kind), torch.zeros(4 * SIZES[kind][1], dtype=torch.uint8, device=device)
    instead = {_written: "by a kernel that the compiler makes", _compiled: "op by op"}
    for made, otherwise in instead.items():
        try:
            if kernel := made(kind, device):
                kernel(zeros, kind, None if table is None else table.to(device), dtype)
                return kernel
        except Exception as error:  # of no one kind: no compiler, no Triton, a driver that it does not know
            log.info("%s is unpacked %s, which is slower: %s", kind, otherwise, str(error).strip().partition("\n")[0])
    return _unpacked


def _written(kind: str, device: torch.device) -> Callable[..., Tensor] | None:
    """The kernel that stands in `unpack_kernels`, where that can be."""
    if device.type != "cuda" or not importlib.util.find_spec("triton"):
        return None
    from toyexp_torch import unpack_kernels  # deferred: it needs Triton

    def called(flat: Tensor, kind: str, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        return unpack_kernels.unpacked(flat, kind, SIZES[kind], dtype)

    return called if kind in unpack_kernels.KERNELS else None


def _compiled(kind: str, device: torch.device) -> Callable[..., Tensor]:
    """What the compiler makes of `_unpacked`."""
    # A copy of the code for each, for torch no longer compiles code that it has compiled for many cases.
    code = _unpacked.__code__.replace(co_name=f"unpacked_{kind.lower()}")
    compiled = torch.compile(FunctionType(code, globals()), dynamic=True)

    def called(*args: Any) -> Tensor:
        # Forwards and backwards alike, for otherwise it is compiled once for each.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return compiled(*args)

    return called


# -- what the layouts have in common ----------------------------------------------------------------------------------


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at an even byte of each block, [blocks, 1]."""
    pair = b[:, at : at + 2]
    if torch.compiler.is_compiling():  # which makes no kernel of a view that changes the size
        return _float16(_words(pair))
    return pair.view(torch.float16).to(torch.float32)


def _float16(words: Tensor) -> Tensor:
    return words.to(torch.int16).view(torch.float16).to(torch.float32)


def _words(b: Tensor, size: int = 2) -> Tensor:
    """Little-endian numbers of `size` bytes, [.., bytes] -> int32 [.., numbers]."""
    parts = b.unflatten(-1, (-1, size)).int().unbind(-1)
    word = parts[0]
    for i in range(1, size):
        word = word | parts[i] << 8 * i
    return word


def _fields(b: Tensor, bits: int, group: int) -> Tensor:
    """Fields of `bits` bits, uint8 [blocks, numbers]: the lowest of all bytes of a group, then the next, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)
    return (b.unflatten(1, (-1, 1, group)) >> shifts[:, None] & (1 << bits) - 1).flatten(1)


def _signed(codes: Tensor, middle: int) -> Tensor:
    """Codes less what stands for 0, int8."""
    return codes.view(torch.int8) - middle


def _scaled(numbers: Tensor, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """Numbers times the scale [blocks, groups] of their group, less its minimum [blocks, groups]."""
    made = numbers.to(torch.float32).unflatten(1, (scale.shape[1], -1)) * scale[..., None]
    return (made if low is None else made - low[..., None]).flatten(1)


# -- blocks of 32 -----------------------------------------------------------------------------------------------------


def _q4_0(b: Tensor) -> Tensor:
    return _scaled(_signed(_fields(b[:, 2:], 4, 16), 8), _half(b, 0))


def _q4_1(b: Tensor) -> Tensor:
    return _scaled(_fields(b[:, 4:], 4, 16), _half(b, 0), -_half(b, 2))


def _q5_0(b: Tensor) -> Tensor:
    codes = _fields(b[:, 6:], 4, 16) | _fields(b[:, 2:6], 1, 1) << 4
    return _scaled(_signed(codes, 16), _half(b, 0))


def _q5_1(b: Tensor) -> Tensor:
    codes = _fields(b[:, 8:], 4, 16) | _fields(b[:, 4:8], 1, 1) << 4
    return _scaled(codes, _half(b, 0), -_half(b, 2))


def _q8_0(b: Tensor) -> Tensor:
    return _scaled(b[:, 2:].view(torch.int8), _half(b, 0))


def _iq4_nl(b: Tensor, table: Tensor) -> Tensor:
    return _scaled(table[_fields(b[:, 2:], 4, 16).int()], _half(b, 0))


def _mxfp4(b: Tensor, table: Tensor) -> Tensor:
    """Scales are half of 2 ** (byte - 127): the exponent of a float32, but for two below its normal numbers."""
    byte = b[:, :1].int()
    scale = torch.where(byte < 2, byte + 1 << 21, byte - 1 << 23).view(torch.float32)
    return _scaled(table[_fields(b[:, 1:], 4, 16).int()], scale)


def _nvfp4(b: Tensor, table: Tensor) -> Tensor:
    """Blocks of 64. Scales are half of floats with 4 bits of exponent, whose bias is 7, and 3 of mantissa."""
    byte = b[:, :4].int()
    normal = ((byte >> 3 & 15) + 119 << 23 | (byte & 7) << 20).view(torch.float32)
    scale = torch.where(byte >> 3 & 15 == 0, (byte & 7) * 2.0**-10, normal)
    return _scaled(table[_fields(b[:, 4:], 4, 8).int()], torch.where(byte == 0x7F, 0.0, scale))


# -- blocks of 256 ----------------------------------------------------------------------------------------------------


def _q2_k(b: Tensor) -> Tensor:
    return _scaled(_fields(b[:, 16:80], 2, 32), _half(b, 80) * (b[:, :16] & 15), _half(b, 82) * (b[:, :16] >> 4))


def _q3_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2
    scales = _fields(b[:, 96:104], 4, 8) | _fields(b[:, 104:108], 2, 4) << 4
    return _scaled(_signed(codes, 4), _half(b, 108) * _signed(scales, 32))


def _q4_k(b: Tensor) -> Tensor:
    return _scaled(_fields(b[:, 16:], 4, 32), *_scale_and_minimum(b))


def _q5_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4
    return _scaled(codes, *_scale_and_minimum(b))


def _scale_and_minimum(b: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K, [blocks, 8] each: 6 bits in 12 bytes, the last four's upper two bits above the first four's."""
    scale, minimum, rest = b[:, 4:16].unflatten(1, (3, 1, 4)).unbind(1)
    last = torch.arange(2, device=b.device)[:, None] > 0
    scale = torch.where(last, rest & 15 | scale >> 2 & 48, scale & 63)
    minimum = torch.where(last, rest >> 4 | minimum >> 2 & 48, minimum & 63)
    return _half(b, 0) * scale.flatten(1), _half(b, 2) * minimum.flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    return _scaled(_signed(codes, 32), _half(b, 208) * b[:, 192:208].view(torch.int8))


def _tq1_0(b: Tensor) -> Tensor:
    """Five numbers -1, 0, 1 in a byte, as digits of base 3 behind the point: times 3 brings the next before it."""

    def digits(part: Tensor, count: int) -> Tensor:
        moved = torch.stack([part.int() * 3**i & 255 for i in range(count)], 1)
        return (moved * 3 >> 8).flatten(1)

    codes = torch.cat((digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4)), 1)
    return _scaled(codes - 1, _half(b, 52))


def _tq2_0(b: Tensor) -> Tensor:
    return _scaled(_signed(_fields(b[:, :64], 2, 32), 1), _half(b, 64))


def _iq4_xs(b: Tensor, table: Tensor) -> Tensor:
    scales = _fields(b[:, 4:8], 4, 1) | _fields(b[:, 2:4], 2, 1) << 4
    return _scaled(table[_fields(b[:, 8:], 4, 16).int()], _half(b, 0) * _signed(scales, 32))


# -- blocks of 256 whose codes stand for several numbers at once, from a table ----------------------------------------


def _signs(bits: Tensor) -> Tensor:
    """-1 where a bit of [blocks, bytes] is set, else 1: int8 [blocks, 8 * bytes]."""
    return 1 - 2 * _fields(bits, 1, 1).view(torch.int8)


def _even(seven: Tensor) -> Tensor:
    """Seven bits with an eighth that makes the number of set ones even, uint8."""
    odd = 0x6996 >> ((seven ^ seven >> 4) & 15) & 1  # whose bit i is set where i has an odd number of them
    return (seven | odd << 7).to(torch.uint8)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return table[codes].flatten(1)


def _above(low: Tensor, high: Tensor) -> Tensor:
    """Codes of more than 8 bits."""
    return low.int() | high.int() << 8


def _iq2_xxs(b: Tensor, table: Tensor) -> Tensor:
    parts = b[:, 2:].unflatten(1, (8, 8))
    signs, scales = _signs_and_scale(parts[..., 4:].flatten(1))
    return _scaled(_looked_up(table, parts[..., :4].flatten(1).int()) * signs, _half(b, 0) * (0.5 + scales) * 0.25)


def _signs_and_scale(b: Tensor) -> tuple[Tensor, Tensor]:
    """Of IQ2_XXS and IQ3_XXS, [blocks, 256] and [blocks, 8]: words of four times 7 bits, and 4 of the scale."""
    words = _words(b, 4)
    seven = words[..., None] >> torch.arange(0, 28, 7, dtype=torch.int32, device=b.device) & 127
    return _signs(_even(seven).flatten(1)), words >> 28 & 15


def _iq2_xs(b: Tensor, table: Tensor) -> Tensor:
    words = _words(b[:, 2:66])
    scale = _half(b, 0) * (0.5 + _fields(b[:, 66:], 4, 1)) * 0.25
    return _scaled(_looked_up(table, words & 511) * _signs(_even(words >> 9)), scale)


def _iq2_s(b: Tensor, table: Tensor) -> Tensor:
    codes = _above(b[:, 2:34], _fields(b[:, 66:74], 2, 1))
    scale = _half(b, 0) * (0.5 + _fields(b[:, 74:], 4, 1)) * 0.25
    return _scaled(_looked_up(table, codes) * _signs(b[:, 34:66]), scale)


def _iq3_xxs(b: Tensor, table: Tensor) -> Tensor:
    signs, scales = _signs_and_scale(b[:, 66:])
    return _scaled(_looked_up(table, b[:, 2:66].int()) * signs, _half(b, 0) * (0.5 + scales) * 0.5)


def _iq3_s(b: Tensor, table: Tensor) -> Tensor:
    codes = _above(b[:, 2:66], _fields(b[:, 66:74], 1, 1))
    scale = _half(b, 0) * (1 + 2 * _fields(b[:, 106:], 4, 1))
    return _scaled(_looked_up(table, codes) * _signs(b[:, 74:106]), scale)


def _iq1_s(b: Tensor, table: Tensor) -> Tensor:
    words = _words(b[:, 34:])
    shift = 0.125 - 0.25 * (words >> 15)
    numbers = table[_above(b[:, 2:34], _threes(words))].unflatten(1, (8, 4)) + shift[..., None, None]
    return _scaled(numbers.flatten(1), _half(b, 0) * (2 * (words >> 12 & 7) + 1))


def _iq1_m(b: Tensor, table: Tensor) -> Tensor:
    words, fours = _words(b[:, 48:]), _fields(b[:, 32:48], 4, 1)
    top = (words >> 12).unbind(1)
    scale = _float16(top[0] | top[1] << 4 | top[2] << 8 | top[3] << 12)[:, None] * (2 * _threes(words) + 1)
    shift = 0.125 - 0.25 * (fours >> 3)
    numbers = table[_above(b[:, :32], fours & 7)] + shift[..., None]
    return _scaled(numbers.flatten(1), scale)


def _threes(words: Tensor) -> Tensor:
    """The lowest four times 3 bits of each, [blocks, 4 * words]."""
    return (words[..., None] >> torch.arange(0, 12, 3, dtype=torch.int32, device=words.device) & 7).flatten(1)


WITHOUT_TABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip
WITH_TABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip
