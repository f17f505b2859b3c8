"""Unpack ggml's common types to numbers in torch's own ops, on any device.

The layouts are those of ggml (`ggml-common.h`, and `dequantize_row_*` of `ggml-quants.c`): blocks of 32 or 256 numbers,
most of them with scales for groups within the block. Below, `b` is [blocks, bytes of a block], and each function
returns float32 [blocks, numbers of a block].

A scale has 11 bits and its factor at most 13, so in float32 every product is exact and only the subtraction of a
minimum rounds. A compiler may fuse the two as it likes: the numbers stay the same to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from toyexp import FromGGUF, PlanTensor
from toyexp.formats import GGUF_TYPES, in_place, opened

CHUNK = 1 << 18  # numbers that the CPU makes at a time
WHOLE = {"F16": torch.float16, "BF16": torch.bfloat16}  # types without blocks
log = logging.getLogger("toyexp")
SIZES = {name: (per_block, block_bytes) for name, per_block, block_bytes in GGUF_TYPES.values()}


def unpacked(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return bytes [n, bytes of a row] of one of the `KINDS` as numbers [n, in], made in float32 and rounded once.

    On an NVIDIA GPU where torch has Triton, one kernel of `unpack.py` does it.
    """
    if kind in WHOLE:
        return raw.view(WHOLE[kind]).to(dtype)
    compiling = torch.compiler.is_compiling()
    of_blocks: Callable[[Tensor, str, torch.dtype], Tensor] = _unpacked
    if raw.is_cuda and compiling:
        # A kernel of its own in any case. A compiled step that looks into it takes five times as long to make.
        return as_one_op(raw, kind, dtype)
    if raw.is_cuda:
        of_blocks = _for_gpus()
    elif raw.device.type == "cpu" and kind != "Q8_0" and not compiling:  # its codes are bytes: nothing large is between
        of_blocks = _in_chunks
    return of_blocks(raw.reshape(-1), kind, dtype).view(raw.shape[0], -1)


@torch.library.custom_op(
    "toyexp::unpacked", mutates_args=(), schema="(Tensor raw, str kind, ScalarType dtype) -> Tensor"
)
def as_one_op(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Unpack a type with blocks as one op of a compiled step."""
    return unpacked(raw, kind, dtype)


@as_one_op.register_fake
def _(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    per_block, block_bytes = SIZES[kind]
    return raw.new_empty(raw.shape[0], raw.shape[1] // block_bytes * per_block, dtype=dtype)


def _unpacked(flat: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return blocks of bytes, one after the other, as numbers."""
    return _OF_BLOCKS[kind](flat.view(-1, SIZES[kind][1])).flatten().to(dtype)


def _in_chunks(flat: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Do the same `CHUNK` numbers at a time, so that intermediate results stay in the processor's cache."""
    per_block, block_bytes = SIZES[kind]
    numbers = torch.empty(flat.numel() // block_bytes * per_block, dtype=dtype)
    for part, made in zip(flat.split(CHUNK // per_block * block_bytes), numbers.split(CHUNK), strict=True):
        made.copy_(_unpacked(part, kind, torch.float32))
    return numbers


@cache
def _for_gpus() -> Callable[[Tensor, str, torch.dtype], Tensor]:
    """Return the kernels in Triton, tried on a few zeros, or the ops where Triton is missing or fails."""
    try:
        from toyexp_torch.kernels import unpack

        unpack.unpacked(torch.zeros(4 * SIZES["Q8_0"][1], dtype=torch.uint8, device="cuda"), "Q8_0", torch.float32)
    except Exception as error:  # of no one kind: no C compiler, a driver that Triton does not know
        log.info("types are unpacked op by op, which is slower: %s", str(error).strip().partition("\n")[0])
        return _unpacked
    return unpack.unpacked


# -- parts of the layouts ---------------------------------------------------------------------------------------------


def _half(b: Tensor, at: int) -> Tensor:
    """Return the float16 at an even byte of each block, [blocks, 1]."""
    pair = b[:, at : at + 2]
    if torch.compiler.is_compiling():  # which makes no kernel of a view that changes the size
        low, high = pair.int().unbind(-1)
        return (low | high << 8).to(torch.int16)[:, None].view(torch.float16).to(torch.float32)
    return pair.view(torch.float16).to(torch.float32)


def _fields(b: Tensor, bits: int, group: int) -> Tensor:
    """Return fields of `bits` bits, uint8 [blocks, numbers]: the lowest of all bytes of a group first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)
    return (b.unflatten(1, (-1, 1, group)) >> shifts[:, None] & (1 << bits) - 1).flatten(1)


def _signed(codes: Tensor, middle: int) -> Tensor:
    """Return codes less the code of 0, int8."""
    return codes.view(torch.int8) - middle


def _scaled(numbers: Tensor, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """Return numbers times the scale [blocks, groups] of their group, less its minimum [blocks, groups]."""
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
    """Return those of Q4_K and Q5_K, [blocks, 8] each.

    They have 6 bits in 12 bytes; the upper two bits of the last four stand above those of the first four.
    """
    scale, minimum, rest = b[:, 4:16].unflatten(1, (3, 1, 4)).unbind(1)
    last = torch.arange(2, device=b.device)[:, None] > 0
    scale = torch.where(last, rest & 15 | scale >> 2 & 48, scale & 63)
    minimum = torch.where(last, rest >> 4 | minimum >> 2 & 48, minimum & 63)
    return _half(b, 0) * scale.flatten(1), _half(b, 2) * minimum.flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    return _scaled(_signed(codes, 32), _half(b, 208) * b[:, 192:208].view(torch.int8))


_OF_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
KINDS = (*WHOLE, *_OF_BLOCKS)


# -- matrices that are kept so, and made into numbers where they are used ----------------------------------------------


class Packed:
    """A frozen matrix [out, in] as bytes [out, bytes of a row] of a ggml type, so that it takes the memory of its file.

    The backward pass makes the numbers a second time instead of keeping them (Dettmers et al. 2023, "QLoRA").
    """

    def __init__(self, raw: Tensor, kind: str, dtype: torch.dtype):
        self.raw, self.kind, self._dtype = raw, kind, dtype

    @classmethod
    def read(cls, tensor: PlanTensor, device: torch.device, dtype: torch.dtype) -> Packed | None:
        """Return the tensor in its file's bytes; None for a type that is not one of the `KINDS`, such as F32."""
        info = in_place(tensor)
        if info is None or info.type not in KINDS:
            return None
        assert isinstance(tensor.values, FromGGUF)
        raw = opened(tensor.values.path).read_raw(tensor.values.tensor, tensor.values.rows)
        return cls(torch.from_numpy(raw).to(device), info.type, dtype)

    def __len__(self) -> int:
        return len(self.raw)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All of it in that type, [out, in]."""
        return unpacked(self.raw, self.kind, dtype)

    def dense(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The chosen rows, [n, in]."""
        return unpacked(self.raw[rows], self.kind, self._dtype)

    def product(self, x: Tensor) -> Tensor:
        """x [.., in] times its transpose -> [.., out], in the precision that products have; only x has a gradient."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        numbers = partial(self.numbers, dtype)
        if torch.compiler.is_compiling():  # the compiler would keep the numbers, if this did not forbid it
            return F.linear(x, checkpoint(numbers, use_reentrant=False, preserve_rng_state=False))
        return PackedLinear.apply(x, numbers)


class PackedLinear(torch.autograd.Function):
    """x [.., in] times a matrix [out, in], transposed, that is made in both directions; only x has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Callable[[], Tensor]) -> Tensor:
        """See the class."""
        ctx.matrix, ctx.dtype = matrix, x.dtype
        return F.linear(x, matrix())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """dx = dy w."""
        return (dy @ ctx.matrix()).to(ctx.dtype), None
