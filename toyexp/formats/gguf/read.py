"""Read GGUF files. Metadata is read when a file is opened, weights when they are requested.

A split model is read as one file. toyexp has its own reader because the files are untrusted: gguf-py 0.19 hangs on
counts that are far too large and misreads offsets that overflow, and ggml aborts the process. header.py validates
headers. This module memory-maps nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import printable
from toyexp.formats.gguf.ggml_types import GGUF_TYPES, NUMBERS, all_finite, dequantise, encodes_finite
from toyexp.formats.gguf.header import GGUFError, Part, source_path
from toyexp.interfaces.format import ModelFile, TensorInfo


class GGUFFile(ModelFile):
    """Open GGUF file with its `metadata` and `tensors`; weights are read on demand.

    If `path` is the first part of a split model, open the other parts too. Raise GGUFError with the path and the cause
    for a missing or invalid file.
    """

    is_converted = False  # True: the file has another format, see ConvertedFile

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.stem = self.path.stem  # of names of files that are made from this one
        first = Part(self.path)
        self.parts: dict[Path, Any] = {first.path: first}
        self._finite: set[tuple[str, int | None]] = set()  # (name, rows) already checked
        try:
            self._open_parts(first)
            self.version = first.version
            self.metadata: Mapping[str, Any] = first.metadata
            self.kinds: Mapping[str, int] = first.kinds  # GGUF value type of each key
            self.tensors: Mapping[str, TensorInfo] = self._all_tensors(first)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and all its parts."""
        for part in self.parts.values():
            part.close()

    @property
    def paths(self) -> list[Path]:
        """Paths of all files of the model in order: several for a split model, otherwise one."""
        return list(self.parts)

    @property
    def size(self) -> int:
        """Total size of the model's files in bytes."""
        return sum(part.size for part in self.parts.values())

    def error(self, cause: str) -> GGUFError:
        """Return an error that names this file and the cause."""
        return GGUFError(f"{source_path(self.path)}: {cause}")

    # -- weights ------------------------------------------------------------------------------------------------

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a tensor dequantised to float32, or the first `rows` of a matrix."""
        info, shape = self._find_tensor(name, rows)
        out = np.empty(math.prod(shape), np.float32)
        for start, raw in self.pieces(info, out.size):
            numbers = dequantise(raw, info.type_id)
            out[start : start + numbers.size] = numbers
        return out.reshape(shape)

    def weights(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a tensor as `read` does; raise GGUFError if it contains NaN or infinity."""
        array = self.read(name, rows)
        if not all_finite(array):
            raise self._not_finite(name)
        return array

    def check_finite(self, name: str, rows: int | None = None) -> None:
        """Raise GGUFError if a tensor, or its first `rows` rows, contains NaN or infinity.

        A tensor that passed the check is not checked again.
        """
        info, shape = self._find_tensor(name, rows)
        if (name, rows) in self._finite:  # a file that changed since is not noticed
            return
        for _, raw in self.pieces(info, math.prod(shape)):
            if not encodes_finite(raw, info.type_id):
                raise self._not_finite(name)
        self._finite.add((name, rows))

    def read_raw(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return the stored bytes of a tensor, or of its first `rows` rows, as uint8 [.., bytes per row]."""
        info, shape = self._find_tensor(name, rows)
        _, per_block, block_bytes = GGUF_TYPES[info.type_id]
        raw = np.empty(math.prod(shape) // per_block * block_bytes, np.uint8)
        for start, piece in self.pieces(info, math.prod(shape)):
            position = start // per_block * block_bytes
            raw[position : position + piece.size] = piece
        return raw.reshape(*shape[:-1], -1)

    def pieces(self, info: TensorInfo, count: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a tensor's stored bytes in pieces, as pairs (index of the piece's first number, uint8 array).

        If `count` is given, read only the first `count` numbers of the tensor. Each piece but the last holds `NUMBERS`
        numbers, which fit into the processor's cache.
        """
        _, per_block, block_bytes = GGUF_TYPES[info.type_id]
        part, total = self.parts[info.path], math.prod(info.shape) if count is None else count
        for start in range(0, total, NUMBERS):
            size = min(NUMBERS, total - start) // per_block * block_bytes
            data = part.pread(info.offset + start // per_block * block_bytes, size, info.name)
            yield start, np.frombuffer(data, np.uint8)

    def _find_tensor(self, name: str, rows: int | None) -> tuple[TensorInfo, tuple[int, ...]]:
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"has no tensor {name}")
        if rows is None:
            return info, info.shape
        if len(info.shape) < 2 or not 1 <= rows <= info.shape[0]:
            raise self.error(f"{name} has {info.shape[0]} rows, {rows} were requested")
        return info, (rows, *info.shape[1:])

    def _not_finite(self, name: str) -> GGUFError:
        return GGUFError(f"{source_path(self.tensors[name].path)}: {printable(name)} contains NaN or infinity")

    # -- split models -------------------------------------------------------------------------------------------

    def _open_parts(self, first: Part) -> None:
        """Open the other parts of a split model, whose numbered files lie next to the first."""
        number, count, tensors = first.split
        if count == 1:
            return
        name = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", self.path.name)
        if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
            ending = _ending(number, count)
            raise self.error(f"is part {number + 1} of {count} of a model, so its name must end in {ending}")
        paths = [self.path.with_name(name[1] + _ending(i, count)) for i in range(count)]
        if number:
            raise self.error(f"is part {number + 1} of {count} of a model; give the first one, {paths[0].name}")
        memory = first.spent
        for i, path in enumerate(paths[1:], 1):
            try:
                part = self.parts[path] = Part(path, memory)
            except GGUFError as error:
                raise GGUFError(f"{error} (part {i + 1} of {count} of {self.path.name})") from None
            if part.split != (i, count, tensors):
                raise part.error(f"is not part {i + 1} of {count} of {self.path.name}, by its split.* keys")
            memory = part.spent

    def _all_tensors(self, first: Part) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for part in self.parts.values():
            duplicate = next((name for name in part.tensors if name in tensors), None)
            if duplicate is not None:
                raise part.error(f"has the tensor {printable(duplicate)}, as has {tensors[duplicate].path.name}")
            tensors |= part.tensors
        expected = first.split[2]
        if expected is not None and expected != len(tensors):
            raise self.error(f"split.tensors.count is {expected}, its parts have {len(tensors)} tensors")
        return tensors


def _ending(number: int, count: int) -> str:
    return f"-{number + 1:05}-of-{count:05}.gguf"
