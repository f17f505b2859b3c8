"""A GGUF file again in another type, with every key as it is."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from toyexp.formats.gguf.ggml_types import checked, dequantise
from toyexp.formats.gguf.quantise import FILE_TYPES, K_QUANTS, quantise, tensor_type
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import Writer
from toyexp.interfaces.format import ModelFile, TensorInfo

PLAIN = ("F32", "F16", "BF16")


def rewrite_gguf(file: GGUFFile, path: Path, kind: str, requantize: bool) -> list[str]:
    """Writes the file again at `path`; returns what is odd about its numbers.

    Raises UserError for numbers that would be rounded a second time, unless `requantize` says so.
    """
    tied = "output.weight" not in file.tensors
    types = {t.name: tensor_type(t.name, t.shape, kind, tied) for t in file.tensors.values()}
    require_exact(file, types, requantize, every=kind in K_QUANTS)
    if kind not in K_QUANTS:
        return _written(file, types, kind).save(path)
    quantise(file.path, path, kind, requantize)
    problems: list[str] = []
    for t in file.tensors.values():
        deque(checked(t.name, _raw(file, t), t.type, problems), maxlen=0)
    return problems


def require_exact(file: ModelFile, types: Mapping[str, str], requantize: bool, every: bool = False) -> None:
    """Raises UserError for numbers that would be rounded a second time, unless that was asked for.

    `types` are those that the tensors get; with `every` even one that stays in its type is rounded anew.
    """

    def is_rounded(t: TensorInfo) -> bool:
        return types[t.name] != "F32" and (types[t.name] != t.type or every)

    again = [t for t in file.tensors.values() if t.type not in PLAIN and is_rounded(t)]
    if again and not requantize:
        kinds = ", ".join(sorted({t.type for t in again}))
        raise file.error(
            f"is quantised already ({len(again)} of {len(file.tensors)} tensors: {kinds}); rounding twice "
            "loses more than rounding the original once. Export that, or take --type f32, or add --requantize"
        )


def _written(file: GGUFFile, types: Mapping[str, str], kind: str) -> Writer:
    """The file's keys and tensors, the latter in the types given."""
    writer = Writer()
    own = {"general.file_type": FILE_TYPES[kind], "general.quantization_version": 2}
    for key, value in file.metadata.items():
        if key in own:
            writer.add(key, own.pop(key))
        elif not key.startswith("split."):
            writer.add(key, value, file.kinds[key])
    for key, value in own.items():
        writer.add(key, value)
    for info in file.tensors.values():
        if info.type == types[info.name]:
            writer.add_bytes(info.name, info.shape, info.type, _raw(file, info))
        else:
            numbers = map(dequantise, _raw(file, info), itertools.repeat(info.type_id))
            writer.add_numbers(info.name, info.shape, types[info.name], numbers)
    return writer


def _raw(file: GGUFFile, info: TensorInfo) -> Iterator[np.ndarray]:
    return (raw for _, raw in file.pieces(info))
