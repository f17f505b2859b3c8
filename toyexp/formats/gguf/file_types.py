"""The types a GGUF is written in, and which tensor gets which, as llama.cpp's own quantiser chooses."""

from __future__ import annotations

from collections.abc import Iterable

from toyexp.base.errors import UserError, choose

# general.file_type of llama.cpp. gguf-py encodes the first; the K-quants take llama.cpp itself, see quantise.py.
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9}
K_QUANTS = {
    "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17,
    "q6_k": 18,
}  # fmt: skip


def check_type(kind: str, key: str = "type", others: Iterable[str] = ()) -> None:
    """Raises UserError unless `kind`, given as `key`, is a type that can be written, and Unavailable without llama.cpp.

    That is needed for the K-quants alone. `others` are what could have been given beside these types.
    """
    if kind not in FILE_TYPES | K_QUANTS:
        raise UserError(f"{key}={kind}: {choose(kind, [*FILE_TYPES, *K_QUANTS, *others])}")
    if kind in K_QUANTS:
        from toyexp.formats.gguf.quantise import quantiser  # deferred: it starts processes

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
