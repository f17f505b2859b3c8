"""Reads GGUF headers and tensors without trusting a byte of them.

Own code because files come from strangers: gguf-py 0.19 loops on absurd counts and turns a wrapped offset into
weights, and ggml aborts the process. Every count here is held against a cap and against the bytes that are left,
all arithmetic is in Python integers, and nothing is memory-mapped.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from toyexp.errors import UserError, printable

HEADER_LIMIT = 256 << 20  # bytes of metadata and tensor table
KEY_LIMIT = 65_535  # bytes of a key
STRING_LIMIT = 16 << 20  # bytes of a string
ARRAY_LIMIT = 4_000_000  # elements of an array
TENSOR_LIMIT = 1 << 40  # elements of a tensor
CHUNK = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}

# ggml type: (name, elements per block, bytes per block). The quantised ones are read through gguf-py.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip


class GGUFError(UserError):
    """A file that is not a GGUF we can read, with its path and the cause."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its shape in numpy order ([out, in]), its type, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    offset: int  # bytes from the start of the file
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` and `tensors` are read at once, weights only when asked for.

    Raises GGUFError, with the path and one cause, for anything that is missing, broken or absurd.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise GGUFError(f"{self.path}: {_os_cause(error)}") from None
        self._closed = weakref.finalize(self, os.close, self._fd)  # whoever keeps a file open need not think of it
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._closed()
        self._fd = -1

    @property
    def architecture(self) -> str:
        """general.architecture; raises GGUFError when the file has none."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise self.error("has no general.architecture")
        return value

    def error(self, cause: str) -> GGUFError:
        """An error about this file."""
        return GGUFError(f"{self.path}: {cause}")

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """A tensor as float32, dequantised; `rows` reads only the first rows of a matrix."""
        return dequantise(self.read_raw(name, rows), self.tensors[name].type_id)

    def read_raw(self, name: str, rows: int | None = None) -> np.ndarray:
        """A tensor's bytes as they stand in the file, uint8 [.., bytes of a row]; see `read` for `rows`."""
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"has no tensor {name}")
        shape, nbytes = info.shape, info.nbytes
        if rows is not None:
            if len(shape) < 2 or not 1 <= rows <= shape[0]:
                raise self.error(f"{name} has {shape[0]} rows, {rows} were asked for")
            nbytes, shape = nbytes // shape[0] * rows, (rows, *shape[1:])
        raw = np.frombuffer(self._pread(info.offset, nbytes, name), np.uint8)
        return raw.reshape(*shape[:-1], -1)

    # -- the header ---------------------------------------------------------------------------------------------

    def _pread(self, offset: int, count: int, what: str) -> bytes:
        data = os.pread(self._fd, count, offset)
        while data and len(data) < count:
            more = os.pread(self._fd, count - len(data), offset + len(data))
            if not more:
                break
            data += more
        if len(data) != count:
            raise self.error(f"read failed: {what} needs {count} bytes at {offset}, the file gave {len(data)}")
        return data

    def _parse(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self.error("is not a regular file")
        self.size = status.st_size
        cursor = _Cursor(self)
        start = os.pread(self._fd, 64, 0)
        if start.startswith(b"version https://git-lfs"):
            raise self.error("is not a GGUF file but a Git LFS pointer: fetch the real file")
        if not start.startswith(b"GGUF") or self.size < 24:
            raise self.error("is not a GGUF file" + (f" ({self.size} bytes)" if self.size < 24 else ""))
        cursor.take(4, "the magic")
        version = cursor.number("<I", "the version")
        if version in (0x02000000, 0x03000000):
            raise self.error("is a big-endian GGUF, which is not supported")
        if version not in (2, 3):
            raise self.error(f"has GGUF version {version}; 2 and 3 are supported")
        self.version: int = version
        n_tensors, n_keys = cursor.number("<Q", "the tensor count"), cursor.number("<Q", "the key count")
        cursor.allow(n_keys, 8 + 4 + 1, "keys")
        cursor.allow(n_tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = cursor.string("a key", KEY_LIMIT)
            if not key or "\0" in key:
                raise self.error("has an empty key" if not key else "has a key with a NUL byte")
            if key in self.metadata:
                raise self.error(f"has the key {printable(key)} twice")
            self.metadata[key] = cursor.value(cursor.number("<I", "a value type"), printable(key))
        self.tensors: Mapping[str, TensorInfo] = self._parse_tensors(cursor, n_tensors)

    def _parse_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
            raise self.error(f"general.alignment={printable(str(alignment))} is not a power of two from 8 to 65536")
        table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string("a tensor name", 64)
            dims = cursor.number("<I", f"the shape of {printable(name)}")
            if not 1 <= dims <= 4:
                raise self.error(f"tensor {printable(name)} has {dims} dimensions")
            shape = tuple(cursor.number("<Q", f"the shape of {printable(name)}") for _ in range(dims))[::-1]
            kind = cursor.number("<I", f"the type of {printable(name)}")
            table.append((name, shape, kind, cursor.number("<Q", f"the offset of {printable(name)}")))
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in table:
            label = f"tensor {printable(name)}"
            if "\0" in name:
                raise self.error(f"{label} has a NUL byte in its name")
            if not name or name in tensors:
                raise self.error(f"{label} is listed twice" if name else "has a tensor without a name")
            if min(shape) < 1 or math.prod(shape) > TENSOR_LIMIT:
                raise self.error(f"{label} has the shape {list(shape)}")
            if kind not in TYPES:
                raise self.error(f"{label} has the unknown type {kind}")
            type_name, per_block, block_bytes = TYPES[kind]
            if shape[-1] % per_block:
                raise self.error(f"{label} has rows of {shape[-1]}, {type_name} needs a multiple of {per_block}")
            nbytes = math.prod(shape) // per_block * block_bytes
            if offset % alignment:
                raise self.error(f"{label} starts at {offset}, which is not a multiple of {alignment}")
            if start + offset + nbytes > self.size:
                raise self.error(f"{label} ends {start + offset + nbytes - self.size} bytes after the end of the file")
            tensors[name] = TensorInfo(name, shape, type_name, kind, start + offset, nbytes)
        by_place = sorted(tensors.values(), key=lambda t: t.offset)
        for one, following in itertools.pairwise(by_place):
            if one.offset + one.nbytes > following.offset:
                raise self.error(f"tensors {printable(one.name)} and {printable(following.name)} overlap")
        return tensors


def dequantise(raw: np.ndarray, type_id: int) -> np.ndarray:
    """Bytes [.., bytes of a row] of a ggml type as float32 [.., in]."""
    name = TYPES[type_id][0]
    if name == "F32":
        return raw.view("<f4").astype(np.float32)
    if name == "F16":
        return raw.view("<f2").astype(np.float32)
    if name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants  # deferred: only quantised files need it

    return np.ascontiguousarray(quants.dequantize(raw, GGMLQuantizationType(type_id)), np.float32)


class _Cursor:
    """Walks the header in bounds-checked reads through one buffer."""

    def __init__(self, file: GGUFFile):
        self.file, self.at = file, 0
        self.end = min(file.size, HEADER_LIMIT)
        self._buffer, self._start = b"", 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            where = "the file" if self.end == self.file.size else f"a header of {HEADER_LIMIT >> 20} MiB"
            raise self.file.error(f"{what} does not fit into {where} (at byte {self.at})")
        first = self.at - self._start
        if first < 0 or first + count > len(self._buffer):
            size = min(max(count, CHUNK), self.end - self.at)
            self._buffer, self._start, first = self.file._pread(self.at, size, what), self.at, 0
        self.at += count
        return self._buffer[first : first + count]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def allow(self, count: int, smallest: int, what: str) -> None:
        if count * smallest > self.end - self.at:
            raise self.file.error(f"claims {count} {what}, more than fit into the file")

    def string(self, what: str, limit: int) -> str:
        length = self.number("<Q", what)
        if length > limit:
            raise self.file.error(f"{what} claims {length} bytes, the limit is {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.file.error(f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key}", STRING_LIMIT)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], f"the value of {key}")
        if kind != _ARRAY:
            raise self.file.error(f"{key} has the unknown value type {kind}")
        item, count = self.number("<I", f"the array {key}"), self.number("<Q", f"the array {key}")
        if count > ARRAY_LIMIT:
            raise self.file.error(f"the array {key} claims {count} elements, the limit is {ARRAY_LIMIT}")
        if item == _STRING:
            self.allow(count, 8, f"strings in {key}")
            return [self.string(f"a string of {key}", STRING_LIMIT) for _ in range(count)]
        if item not in _DTYPES:
            raise self.file.error(f"the array {key} has the unknown element type {item}")
        dtype = np.dtype(_DTYPES[item])
        return np.frombuffer(self.take(count * dtype.itemsize, f"the array {key}"), dtype)


def _os_cause(error: OSError) -> str:
    return "not found" if isinstance(error, FileNotFoundError) else f"cannot be opened: {error.strerror}"
