"""The types a GGUF is written in: which tensor gets which, as llama.cpp's own quantiser chooses, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from toyexp.base.errors import UserError, choose
from toyexp.formats.gguf.ggml_types import GGUF_TYPES, NUMBERS, all_finite, encodes_finite
from toyexp.formats.gguf.quantise import quantiser

# general.file_type of llama.cpp. gguf-py encodes the first; the K-quants take llama.cpp itself, see quantise.py.
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9}
K_QUANTS = {
    "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17,
    "q6_k": 18,
}  # fmt: skip
IDS = {name: type_id for type_id, (name, _, _) in GGUF_TYPES.items()}


def check_type(kind: str, key: str = "type", others: Iterable[str] = ()) -> None:
    """Raises UserError unless `kind`, given as `key`, is a type that can be written, and Unavailable without llama.cpp.

    That is needed for the K-quants alone. `others` are what could have been given beside these types.
    """
    if kind not in FILE_TYPES | K_QUANTS:
        raise UserError(f"{key}={kind}: {choose(kind, [*FILE_TYPES, *K_QUANTS, *others])}")
    if kind in K_QUANTS:
        quantiser(f"{key}={kind}")


def tensor_type(name: str, shape: tuple[int, ...], kind: str, tied: bool) -> str:
    """The ggml type of a tensor in a file of type `kind`, as llama.cpp's quantiser chooses; `tied`: no output.weight.

    Norms, biases and positions stay F32, and rows that cannot be cut into 32s become F16. The output layer matters
    most: beside types of 4 and 5 bits it is Q8_0, where llama.cpp takes Q6_K, which gguf-py cannot write.
    """
    if kind == "f32" or len(shape) < 2 or name.endswith(("_norm.weight", "position_embd.weight")):
        return "F32"
    if kind in ("f16", "bf16"):
        return kind.upper()
    if shape[-1] % 32:
        return "F16"
    is_output = name == "output.weight" or (tied and name == "token_embd.weight")
    return "Q8_0" if is_output else kind.upper()


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
