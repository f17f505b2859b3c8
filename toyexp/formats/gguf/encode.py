"""Numbers as the bytes of the types that a GGUF is written in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from toyexp.formats.gguf.ggml_types import GGUF_TYPES, NUMBERS, all_finite, encodes_finite

IDS = {name: type_id for type_id, (name, _, _) in GGUF_TYPES.items()}


# The largest number of a type: its scale, or itself, is a float16.
LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0, "Q4_0": 8 * 65504.0, "Q5_0": 16 * 65504.0, "Q4_1": 65504.0,
           "Q5_1": 65504.0}  # fmt: skip


def fitting(array: np.ndarray, type_name: str) -> str:
    """The type, or F32 for an array with finite numbers that are too large for it."""
    largest = LARGEST.get(type_name)
    if largest is None or not array.size or -largest <= array.min() <= array.max() <= largest:
        return type_name
    return "F32" if bool((np.abs(array[np.isfinite(array)]) > largest).any()) else type_name


def pieces_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array's numbers in order, as float32, few enough at a time that what encodes them stays small."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, NUMBERS):
        yield np.ascontiguousarray(flat[start : start + NUMBERS], np.float32)


def encode(numbers: np.ndarray, type_name: str) -> np.ndarray:
    """float32 numbers, whole blocks of them, as bytes of a ggml type."""
    with np.errstate(all="ignore"):  # what is not finite, or overflows, is told by `checked`
        if type_name == "F32":
            return numbers.astype("<f4", copy=False).view(np.uint8)
        if type_name == "F16":
            return numbers.astype("<f2").view(np.uint8)
        from gguf import GGMLQuantizationType, quants  # deferred: training never needs it

        return quants.quantize(numbers, GGMLQuantizationType[type_name]).view(np.uint8)


def checked(name: str, pieces: Iterable[np.ndarray], type_name: str, problems: list[str]) -> Iterator[np.ndarray]:
    """The bytes of a tensor as they are; a sentence goes to `problems` where they stand for no finite numbers."""
    broken = False
    for raw in pieces:
        broken = broken or not encodes_finite(raw, IDS[type_name])
        yield raw
    if broken:
        problems.append(f"{name} holds numbers that are NaN or infinite")


def encoded(name: str, numbers: Iterable[np.ndarray], type_name: str, problems: list[str]) -> Iterator[np.ndarray]:
    """The pieces of a tensor as bytes of a ggml type; a sentence goes to `problems` where they are not finite."""
    broken, largest = False, 0.0
    for piece in numbers:
        raw = encode(piece, type_name)
        if not encodes_finite(raw, IDS[type_name]):
            broken |= not all_finite(piece)
            largest = max(largest, float(np.abs(piece).max()))
        yield raw
    if broken:
        problems.append(f"{name} holds numbers that are NaN or infinite")
    elif largest:
        problems.append(f"{name} holds numbers up to {largest:.3g}, which {type_name} cannot: infinity was written")
