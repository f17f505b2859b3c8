"""Read and write safetensors files. toyexp stores the model's GGUF keys in them as JSON, in the metadata `gguf`."""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.files import open_file
from toyexp.formats.gguf.ggml_types import dequantise, encode_pieces, iter_pieces
from toyexp.formats.gguf.header import HEADER_LIMIT, SAVED, check_offsets
from toyexp.interfaces.format import ModelFile, TensorInfo

KEYS = "gguf"
TYPES = {"F32": (0, 4), "F16": (1, 2), "BF16": (30, 2)}  # supported dtypes: (ggml type id, bytes per number)
Tensor = tuple[tuple[int, ...], Callable[[], np.ndarray]]  # shape, and a function that returns the numbers


def json_object(text: Any, subject: str) -> dict[str, Any]:
    """Parse a JSON object. If the text is not one, raise UserError with a message that begins with `subject`."""
    try:
        value = json.loads(text) if isinstance(text, str | bytes) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{subject} is not a JSON object")
    return value


class TensorsFile(ModelFile):
    """An open safetensors file from any program. Its metadata values are strings. Raises UserError if it is broken."""

    def __init__(self, path: Path):
        self.path, self._file, self.parts = path, open_file(path), {path: weakref.proxy(self)}  # not a cycle
        self.close = weakref.finalize(self, self._file.close)  # closed with the object
        size = os.fstat(self._file.fileno()).st_size
        if (start := self._file.read(8)) == b"version ":
            raise self.error("is a Git LFS pointer: git lfs pull fetches the file")
        length = int.from_bytes(start, "little")
        if not 2 <= length <= min(size - 8, HEADER_LIMIT):
            claim = f"its header claims {length} bytes, the file has {size}"
            raise self.error(f"is not a complete safetensors file: {claim}")
        header = json_object(self._file.read(length), f"{path}: its header")
        metadata = header.pop("__metadata__", None)
        self.metadata: Mapping[str, Any] = self._keys(metadata if isinstance(metadata, dict) else {})
        self.tensors: Mapping[str, TensorInfo] = {n: self._info(n, entry, 8 + length) for n, entry in header.items()}
        check_offsets(self.tensors.values(), 8 + length, size, 1, self.error)

    def _keys(self, metadata: dict[str, Any]) -> Mapping[str, Any]:
        """Convert the metadata in the file's header to the value of the attribute `metadata`; here unchanged."""
        return metadata

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a tensor in float32, or only its first `rows` rows."""
        info = self.tensors[name]
        shape = info.shape if rows is None else (min(rows, info.shape[0]), *info.shape[1:])
        raw = self.pread(info.offset, math.prod(shape) * TYPES[info.type][1], name)
        return dequantise(np.frombuffer(raw, np.uint8), info.type_id).reshape(shape)

    def pread(self, offset: int, count: int, label: str) -> bytes:
        """Return `count` bytes at `offset`, which belong to the tensor `label`; raise UserError if there are fewer."""
        self._file.seek(offset)
        if len(data := self._file.read(count)) < count:
            raise self.error(f"was cut while it was read: {printable(label)} needs {count} bytes at {offset}")
        return data

    def _info(self, name: str, entry: Any, start: int) -> TensorInfo:
        label = f"tensor {printable(name)}"
        try:
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise self.error(f"{label} has no dtype, shape and data_offsets") from None
        sizes = shape if isinstance(shape, list) and len(shape) <= 4 else [0]
        if not all(type(n) is int and n >= low for n, low in [*((n, 1) for n in sizes), (begin, 0), (end, 0)]):
            raise self.error(f"{label} has the shape {printable(str(shape))} at {printable(str([begin, end]))}")
        if str(kind) not in TYPES:
            raise self.error(f"{label} is of type {printable(str(kind))}, expected {', '.join(TYPES)}")
        number, size = TYPES[kind]
        if end - begin != math.prod(shape) * size:
            raise self.error(f"{label} has {end - begin} bytes, its shape {shape} takes {math.prod(shape) * size}")
        return TensorInfo(name, tuple(shape), kind, number, self.path, start + begin, end - begin)


class SafetensorsFile(TensorsFile):
    """An open safetensors file that toyexp wrote; `metadata` holds its GGUF keys. Raises UserError for other files."""

    def _keys(self, metadata: dict[str, Any]) -> Mapping[str, Any]:
        if KEYS not in metadata:
            raise self.error(f"was not written by toyexp (its metadata lack the model's keys); {SAVED}")
        return json_object(metadata[KEYS], f"{self.path}: its metadata {KEYS}")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], kind: str, metadata: Mapping[str, str]) -> list[str]:
    """Write tensors in the dtype `kind`, one at a time.

    `tensors` maps each name to the tensor's shape and a function that returns its numbers. Return a sentence for each
    tensor with numbers that are not finite or too large for the dtype.
    """
    problems: list[str] = []
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (shape, _) in tensors.items():
        start, end = end, end + math.prod(shape) * TYPES[kind][1]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, (_, numbers) in tensors.items():
            for piece in encode_pieces(name, iter_pieces(numbers()), kind, problems):
                file.write(piece.data)
        file.flush()
        os.fsync(file.fileno())
    return problems
