"""Dequantisation of ggml's common types with torch ops, on any device, and matrices that are kept packed.

The layouts are those of ggml (`ggml-common.h`, and `dequantize_row_*` of `ggml-quants.c`): blocks of 32 or 256 numbers,
most of them with scales for groups of numbers within the block. In the functions below, `b` is uint8 [blocks, bytes of
a block], and a function named after a type, such as `_q4_0`, returns float32 [blocks, numbers of a block].

A number is the product of its block's float16 scale (11 significant bits) and one or two integers (together at most 13
bits); some types then subtract a minimum. In float32 every product is therefore exact, and only the subtraction rounds.
Results are bit-identical whether or not a compiler fuses the two operations.
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
from toyexp.formats import GGUF_TYPES, mappable_tensor

CHUNK = 1 << 18  # numbers that the CPU dequantises at a time
UNBLOCKED = {"F16": torch.float16, "BF16": torch.bfloat16}  # types that are not packed in blocks
log = logging.getLogger("toyexp")
SIZES = {name: (per_block, block_bytes) for name, per_block, block_bytes in GGUF_TYPES.values()}


def unpack(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise n rows of a matrix: uint8 [n, bytes of a row] -> [n, in].

    `kind` is a type in `KINDS`. The numbers are computed in float32 and rounded once, to `dtype`. On an NVIDIA GPU with
    Triton, one kernel of `unpack.py` does all of this.
    """
    if kind in UNBLOCKED:
        return raw.view(UNBLOCKED[kind]).to(dtype)
    compiling = torch.compiler.is_compiling()
    unpack_flat: Callable[[Tensor, str, torch.dtype], Tensor] = _unpack_blocks
    if raw.is_cuda and compiling:
        # Hide the operations in one op: compiling them gives one kernel too, but takes five times as long.
        return unpack_op(raw, kind, dtype)
    if raw.is_cuda:
        unpack_flat = _choose_gpu_unpacker()
    elif raw.device.type == "cpu" and kind != "Q8_0" and not compiling:  # Q8_0 has no large intermediate results
        unpack_flat = _unpack_chunks
    return unpack_flat(raw.reshape(-1), kind, dtype).view(raw.shape[0], -1)


@torch.library.custom_op(
    "toyexp::unpacked", mutates_args=(), schema="(Tensor raw, str kind, ScalarType dtype) -> Tensor"
)
def unpack_op(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise as `unpack` does, as a single op that torch.compile does not look into."""
    return unpack(raw, kind, dtype)


@unpack_op.register_fake
def _(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    per_block, block_bytes = SIZES[kind]
    return raw.new_empty(raw.shape[0], raw.shape[1] // block_bytes * per_block, dtype=dtype)


def _unpack_blocks(flat: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise consecutive blocks with torch ops: uint8 [bytes] -> [numbers]."""
    return _UNPACKERS[kind](flat.view(-1, SIZES[kind][1])).flatten().to(dtype)


def _unpack_chunks(flat: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Dequantise as `_unpack_blocks` does, but `CHUNK` numbers at a time, so that the CPU's cache holds all results."""
    per_block, block_bytes = SIZES[kind]
    numbers = torch.empty(flat.numel() // block_bytes * per_block, dtype=dtype)
    for part, target in zip(flat.split(CHUNK // per_block * block_bytes), numbers.split(CHUNK), strict=True):
        target.copy_(_unpack_blocks(part, kind, torch.float32))
    return numbers


@cache
def _choose_gpu_unpacker() -> Callable[[Tensor, str, torch.dtype], Tensor]:
    """Return the function that dequantises blocks on a GPU.

    This is the Triton kernel. If the kernel is missing or fails in a trial, it is the slower `_unpack_blocks`.
    """
    try:
        from toyexp_torch.kernels.unpack import unpack_blocks

        unpack_blocks(torch.zeros(4 * SIZES["Q8_0"][1], dtype=torch.uint8, device="cuda"), "Q8_0", torch.float32)
    except Exception as error:  # of any type: a missing C compiler, a driver that Triton does not support
        reason = str(error).strip().partition("\n")[0]
        log.info("Triton does not work here (%s); GGUF types are dequantised by slower torch ops", reason)
        return _unpack_blocks
    return unpack_blocks


# -- parts of block layouts --------------------------------------------------------------------------------------------


def _half(b: Tensor, at: int) -> Tensor:
    """Return the float16 number at byte `at` (an even number) of each block, as float32 [blocks, 1]."""
    pair = b[:, at : at + 2]
    if torch.compiler.is_compiling():  # the compiler cannot fuse a view that changes the element size
        low, high = pair.int().unbind(-1)
        return (low | high << 8).to(torch.int16)[:, None].view(torch.float16).to(torch.float32)
    return pair.view(torch.float16).to(torch.float32)


def _fields(b: Tensor, bits: int, group: int) -> Tensor:
    """Split bytes into fields of `bits` bits -> uint8 [blocks, numbers].

    From each `group` consecutive bytes, take the lowest field of every byte, then the next field of every byte, and so
    on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)
    return (b.unflatten(1, (-1, 1, group)) >> shifts[:, None] & (1 << bits) - 1).flatten(1)


def _centre_codes(codes: Tensor, middle: int) -> Tensor:
    """Subtract `middle`, the code of the number 0, from unsigned codes -> int8."""
    return codes.view(torch.int8) - middle


def _scale(numbers: Tensor, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """Multiply the numbers by the `scale` of their group, and subtract the group's minimum `low`, if given.

    `scale` and `low` are [blocks, groups].
    """
    scaled = numbers.to(torch.float32).unflatten(1, (scale.shape[1], -1)) * scale[..., None]
    return (scaled if low is None else scaled - low[..., None]).flatten(1)


# -- blocks of 32 ------------------------------------------------------------------------------------------------------


def _q4_0(b: Tensor) -> Tensor:
    return _scale(_centre_codes(_fields(b[:, 2:], 4, 16), 8), _half(b, 0))


def _q4_1(b: Tensor) -> Tensor:
    return _scale(_fields(b[:, 4:], 4, 16), _half(b, 0), -_half(b, 2))


def _q5_0(b: Tensor) -> Tensor:
    codes = _fields(b[:, 6:], 4, 16) | _fields(b[:, 2:6], 1, 1) << 4
    return _scale(_centre_codes(codes, 16), _half(b, 0))


def _q5_1(b: Tensor) -> Tensor:
    codes = _fields(b[:, 8:], 4, 16) | _fields(b[:, 4:8], 1, 1) << 4
    return _scale(codes, _half(b, 0), -_half(b, 2))


def _q8_0(b: Tensor) -> Tensor:
    return _scale(b[:, 2:].view(torch.int8), _half(b, 0))


# -- blocks of 256 -----------------------------------------------------------------------------------------------------


def _q2_k(b: Tensor) -> Tensor:
    return _scale(_fields(b[:, 16:80], 2, 32), _half(b, 80) * (b[:, :16] & 15), _half(b, 82) * (b[:, :16] >> 4))


def _q3_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2
    scales = _fields(b[:, 96:104], 4, 8) | _fields(b[:, 104:108], 2, 4) << 4
    return _scale(_centre_codes(codes, 4), _half(b, 108) * _centre_codes(scales, 32))


def _q4_k(b: Tensor) -> Tensor:
    return _scale(_fields(b[:, 16:], 4, 32), *_scale_and_minimum(b))


def _q5_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4
    return _scale(codes, *_scale_and_minimum(b))


def _scale_and_minimum(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minimums of the 8 groups in each block of Q4_K or Q5_K, float32 [blocks, 8] each.

    Each scale and each minimum is the product of a 6-bit integer and a float16 number of the block. The integers are
    packed in 12 bytes. For the last four groups, the upper two bits of an integer are stored in a byte of the first
    four groups, as its upper two bits.
    """
    scale, minimum, rest = b[:, 4:16].unflatten(1, (3, 1, 4)).unbind(1)
    last = torch.arange(2, device=b.device)[:, None] > 0
    scale = torch.where(last, rest & 15 | scale >> 2 & 48, scale & 63)
    minimum = torch.where(last, rest >> 4 | minimum >> 2 & 48, minimum & 63)
    return _half(b, 0) * scale.flatten(1), _half(b, 2) * minimum.flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    codes = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    return _scale(_centre_codes(codes, 32), _half(b, 208) * b[:, 192:208].view(torch.int8))


_UNPACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
KINDS = (*UNBLOCKED, *_UNPACKERS)


# -- matrices that stay packed, and are dequantised at each use --------------------------------------------------------


class Packed:
    """Frozen matrix [out, in] that stays quantised in memory, as in its GGUF file: uint8 [out, bytes of a row].

    The matrix is dequantised at each use. The backward pass dequantises it again, instead of keeping the dequantised
    numbers of the forward pass (Dettmers et al. 2023, "QLoRA").
    """

    def __init__(self, raw: Tensor, kind: str, dtype: torch.dtype):
        self.raw, self.kind, self._dtype = raw, kind, dtype

    @classmethod
    def read(cls, tensor: PlanTensor, device: torch.device, dtype: torch.dtype) -> Packed | None:
        """Read the bytes of a tensor from its GGUF file, and return it as a Packed matrix on the device.

        Return None if the tensor is not stored in a GGUF file, or if its type in the file, such as F32, is not one of
        the types in `KINDS`, which this module can dequantise.
        """
        info = mappable_tensor(tensor)
        if info is None or info.type not in KINDS:
            return None
        assert isinstance(tensor.values, FromGGUF)
        return cls(torch.from_numpy(tensor.values.raw()).to(device), info.type, dtype)

    def __len__(self) -> int:
        return len(self.raw)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the whole matrix, dequantised to `dtype`, [out, in]."""
        return unpack(self.raw, self.kind, dtype)

    def dense(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return `rows` of the matrix (default: all), dequantised to the session's dtype, [n, in]."""
        return unpack(self.raw[rows], self.kind, self._dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the transposed matrix -> [..., out], in the dtype of autocast or, without it, of x.

        Only x has a gradient.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        numbers = partial(self.numbers, dtype)
        if torch.compiler.is_compiling():  # checkpoint() keeps the compiler from saving the whole matrix
            return F.linear(x, checkpoint(numbers, use_reentrant=False, preserve_rng_state=False))
        return PackedLinear.apply(x, numbers)


class PackedLinear(torch.autograd.Function):
    """Autograd function: the product of x [..., in] and the transpose of a packed matrix [out, in].

    The forward and the backward pass each dequantise the matrix. Only x has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Callable[[], Tensor]) -> Tensor:
        """Return x times the transpose of `matrix()`, which dequantises the matrix."""
        ctx.matrix, ctx.dtype = matrix, x.dtype
        return F.linear(x, matrix())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x, dx = dy w, and None for the matrix."""
        return (dy @ ctx.matrix()).to(ctx.dtype), None
