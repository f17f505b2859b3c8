"""ggml's number types: their layout, decoding to float32 and encoding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

NUMBERS = 1 << 18  # numbers dequantised at once: few enough for the processor's cache

# ggml type: (name, elements per block, bytes per block). The quantised ones are read through gguf-py.
GGUF_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
UNSUPPORTED = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}
# Byte offsets of a block's float16 scales: its numbers are finite if the scales are.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
FAST_CHECK_TYPES = {"F32", "F16", "BF16", *_SCALES}
IDS = {name: type_id for type_id, (name, _, _) in GGUF_TYPES.items()}
# Largest number of a type; its scale (or the number itself) is a float16.
LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "Q4_0": 8 * 65504.0, "Q5_0": 16 * 65504.0, "Q4_1": 65504.0,
           "Q5_1": 65504.0}  # fmt: skip


def dequantise(raw: np.ndarray, type_id: int) -> np.ndarray:
    """Decode a ggml type: convert bytes of shape [.., bytes per row] to float32 of shape [.., numbers per row]."""
    name = GGUF_TYPES[type_id][0]
    if name == "F32":
        return raw.view("<f4").astype(np.float32)
    if name == "F16":
        return raw.view("<f2").astype(np.float32)
    if name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):  # callers that need finite numbers check for them
        if name == "Q8_0":  # a scale and 32 integers; own code, because the shipped donor uses it
            blocks = raw.reshape(-1, 34)
            numbers = blocks[:, :2].copy().view("<f2").astype(np.float32) * blocks[:, 2:].view(np.int8)
            return numbers.reshape(*raw.shape[:-1], raw.shape[-1] // 34 * 32)
        from gguf import GGMLQuantizationType, quants  # deferred: slow to import and rarely needed

        return np.ascontiguousarray(quants.dequantize(raw, GGMLQuantizationType(type_id)), np.float32)


def encodes_finite(raw: np.ndarray, type_id: int) -> bool:
    """Return True if the bytes `raw` of a ggml type encode only finite numbers.

    For most quantised types only the scales are checked: all numbers of a block are finite if its scales are.
    """
    name, _, block_bytes = GGUF_TYPES[type_id]
    if name not in _SCALES:
        return all_finite(dequantise(raw, type_id))
    blocks = raw.reshape(-1, block_bytes)
    return all(all_finite(blocks[:, offset : offset + 2].copy().view("<f2")) for offset in _SCALES[name])


def all_finite(array: np.ndarray) -> bool:
    """Return True if no number in the array is NaN or infinite.

    The function tests the sum in float64, which is finite if all numbers are: finite float32 numbers cannot overflow
    it.
    """
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return math.isfinite(array.sum(dtype=np.float64))


def fitting_type(array: np.ndarray, type_name: str) -> str:
    """Return `type_name`, or F32 if the array has finite numbers too large for that type."""
    largest = LARGEST.get(type_name)
    if largest is None or not array.size or -largest <= array.min() <= array.max() <= largest:
        return type_name
    return "F32" if bool((np.abs(array[np.isfinite(array)]) > largest).any()) else type_name


def iter_pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array's numbers in order as float32, in pieces small enough to encode in little memory."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, NUMBERS):
        yield np.ascontiguousarray(flat[start : start + NUMBERS], np.float32)


def encode(numbers: np.ndarray, type_name: str) -> np.ndarray:
    """Encode float32 numbers as bytes of a ggml type. Their count must be a multiple of the type's block size."""
    with np.errstate(all="ignore"):  # callers report non-finite results
        if type_name == "F32":
            return numbers.astype("<f4", copy=False).view(np.uint8)
        if type_name == "F16":
            return numbers.astype("<f2").view(np.uint8)
        from gguf import GGMLQuantizationType, quants  # deferred: training never needs it

        return quants.quantize(numbers, GGMLQuantizationType[type_name]).view(np.uint8)


def check_pieces(name: str, pieces: Iterable[np.ndarray], type_name: str, problems: list[str]) -> Iterator[np.ndarray]:
    """Yield the bytes of the tensor `name` unchanged, piece by piece.

    Append a sentence to `problems` if the bytes encode a NaN or an infinity.
    """
    has_nonfinite = False
    for raw in pieces:
        has_nonfinite = has_nonfinite or not encodes_finite(raw, IDS[type_name])
        yield raw
    if has_nonfinite:
        problems.append(f"{name} contains NaN or infinity")


def encode_pieces(
    name: str, numbers: Iterable[np.ndarray], type_name: str, problems: list[str]
) -> Iterator[np.ndarray]:
    """Yield a tensor's float32 pieces as bytes of a ggml type.

    Append a sentence to `problems` if a number is NaN, infinite or too large for the type.
    """
    has_nonfinite, largest = False, 0.0
    for piece in numbers:
        raw = encode(piece, type_name)
        if not encodes_finite(raw, IDS[type_name]):
            has_nonfinite |= not all_finite(piece)
            largest = max(largest, float(np.abs(piece).max()))
        yield raw
    if has_nonfinite:
        problems.append(f"{name} contains NaN or infinity")
    elif largest:
        problems.append(f"{name} has numbers up to {largest:.3g}, too large for {type_name}: infinity was written")
