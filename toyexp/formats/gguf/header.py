"""Parse the header of an untrusted GGUF file: keys and their values, and the offsets of the tensors.

Every count is checked against a limit and the remaining bytes; all arithmetic uses Python integers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shlex
import stat
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.files import READ_FLAGS, explain_missing, wrong_kind
from toyexp.formats.gguf.ggml_types import GGUF_TYPES, UNSUPPORTED
from toyexp.interfaces.format import TensorInfo

HEADER_LIMIT = 256 << 20  # bytes of metadata and tensor table, in the file and in memory, over all parts
KEY_LIMIT = 65_535  # bytes of a key
STRING_LIMIT = 16 << 20  # bytes of a string
ARRAY_LIMIT = 4_000_000  # elements of an array
NAME_LIMIT = 63  # bytes of a tensor's name, as in ggml
TENSOR_LIMIT = 1 << 40  # elements of a tensor
CHUNK = 1 << 20  # bytes of the header read at once

# Python's memory overhead per key, tensor and string, in bytes.
KEY_MEMORY, TENSOR_MEMORY, STRING_MEMORY = 400, 800, 64

# Value types, as codes shared by struct and numpy.
SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from

# What to do with weights that toyexp cannot read.
SAVED = "toyexp reads a directory with config.json and model.safetensors, as transformers' save_pretrained() writes it"

CUT = "if it is incomplete, download or copy it again"
SOURCE_PATHS: dict[Path, Path] = {}  # temporary file: its original, which errors name


def source_path(path: Path) -> Path:
    """Return the path that error messages about the file `path` name.

    If `path` is a temporary file that toyexp converted from another file, this is the path of that other file.
    """
    return SOURCE_PATHS.get(path, path)


class GGUFError(UserError):
    """Error: a file is not a readable GGUF. The message has the path and the cause."""


def _pread_fallback(file: int, count: int, offset: int) -> bytes:
    os.lseek(file, offset, os.SEEK_SET)
    return os.read(file, count)


_pread = getattr(os, "pread", _pread_fallback)  # missing on Windows


class Part:
    """One open file of a GGUF model, with its parsed header. A split model has several such files.

    `spent` is the memory in bytes that the header of this file and the headers of the model's earlier files take.
    """

    def __init__(self, path: Path, spent: int = 0):
        self.path, self.spent = path, spent
        try:
            self._fd = os.open(path, READ_FLAGS)
        except FileNotFoundError:
            raise self.error(explain_missing(path)) from None
        except OSError as error:
            raise self.error(f"cannot be opened: {error.strerror}") from None
        self.close = weakref.finalize(self, os.close, self._fd)  # closed with the object
        try:
            self._parse()
            self.split = self._split()  # part number from 0, number of parts, tensors in all parts
        except BaseException:
            self.close()
            raise

    def error(self, cause: str) -> GGUFError:
        """Return an error that names this file and the cause."""
        return GGUFError(f"{source_path(self.path)}: {cause}")

    def pread(self, offset: int, count: int, label: str | _Label) -> bytes:
        """Return `count` bytes at `offset`; raise GGUFError if the file has fewer."""
        if not self.close.alive:
            raise self.error(f"is closed: {label} cannot be read")
        data = _pread(self._fd, count, offset)
        while data and len(data) < count:
            more = _pread(self._fd, count - len(data), offset + len(data))
            if not more:
                break
            data += more
        if len(data) != count:
            raise self.error(f"read failed: {label} needs {count} bytes at {offset}, the file gave {len(data)}")
        return data

    def _split(self) -> tuple[int, int, int | None]:
        values = [self.metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count")]
        if any(v is not None and (type(v) is not int or v < 0) for v in values):
            raise self.error("has a split.* key that is not a whole number")
        number, count, tensors = values[0] or 0, values[1] or 1, values[2]
        if not number < count < 100_000:
            raise self.error(f"claims to be part {number + 1} of {count}")
        return number, count, tensors

    # -- the header ---------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        status = os.fstat(self._fd)
        if stat.S_ISDIR(status.st_mode):
            raise self.error("is a directory; name a GGUF file, such as model.gguf in a run directory")
        if reason := wrong_kind(status.st_mode):
            raise self.error(reason)
        self.size = status.st_size
        cursor = _Cursor(self)
        start = _pread(self._fd, 64, 0)
        if start.startswith(b"version https://git-lfs"):
            raise self.error("is not a GGUF file but a Git LFS pointer: git lfs pull fetches the file")
        if start[8:9] == b"{" and not start.startswith(b"GGUF"):
            command = SAVED
            if b'"gguf":' in start:  # metadata of a file that toyexp wrote
                command = f"toyexp export {shlex.quote(str(self.path))} --type gguf converts it"
            raise self.error(f"is not a GGUF file but safetensors; {command}")
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
        cursor.allow(n_keys, 8 + 4 + 1, KEY_MEMORY, "keys")
        cursor.allow(n_tensors, 8 + 1 + 4 + 8 + 4 + 8, TENSOR_MEMORY, "tensors")
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}
        for _ in range(n_keys):
            key = cursor.string("a key", KEY_LIMIT)
            if not key or "\0" in key:
                raise self.error("has an empty key" if not key else "has a key with a NUL byte")
            if key in self.metadata:
                raise self.error(f"has the key {printable(key)} twice")
            self.kinds[key] = cursor.number("<I", "a value type")
            self.metadata[key] = cursor.value(self.kinds[key], _Label("", key))
        self.tensors: Mapping[str, TensorInfo] = self._parse_tensors(cursor, n_tensors)

    def _parse_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
            raise self.error(f"general.alignment={printable(str(alignment))} is not a power of two from 8 to 65536")
        table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string("a tensor name", NAME_LIMIT)
            dims = cursor.number("<I", _Label("the shape of", name))
            if not 1 <= dims <= 4:
                raise self.error(f"tensor {printable(name)} has {dims} dimensions")
            shape = tuple(cursor.number("<Q", _Label("the shape of", name)) for _ in range(dims))[::-1]
            kind = cursor.number("<I", _Label("the type of", name))
            table.append((name, shape, kind, cursor.number("<Q", _Label("the offset of", name))))
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in table:
            label = _Label("tensor", name)
            if "\0" in name:
                raise self.error(f"{label} has a NUL byte in its name")
            if not name or name in tensors:
                raise self.error(f"{label} is listed twice" if name else "has a tensor without a name")
            if min(shape) < 1 or math.prod(shape) > TENSOR_LIMIT:
                raise self.error(f"{label} has the shape {list(shape)}")
            if kind in UNSUPPORTED:
                raise self.error(f"{label} is of type {UNSUPPORTED[kind]}, which is not supported")
            if kind not in GGUF_TYPES:
                raise self.error(f"{label} has the unknown type {kind}")
            type_name, per_block, block_bytes = GGUF_TYPES[kind]
            if shape[-1] % per_block:
                raise self.error(f"{label} has rows of {shape[-1]}, {type_name} needs a multiple of {per_block}")
            nbytes = math.prod(shape) // per_block * block_bytes
            if offset % alignment:
                raise self.error(f"{label} starts at {offset}, which is not a multiple of {alignment}")
            tensors[name] = TensorInfo(name, shape, type_name, kind, self.path, start + offset, nbytes)
        check_offsets(tensors.values(), start, self.size, alignment, self.error)
        return tensors


def check_offsets(
    tensors: Iterable[TensorInfo], start: int, size: int, alignment: int, error: Callable[[str], UserError]
) -> None:
    """Raise `error(cause)` unless the tensors fill a file of `size` bytes from the offset `start` to its end.

    Each tensor must begin at the first multiple of `alignment` after the end of the previous tensor.
    """
    in_order = sorted(tensors, key=lambda t: t.offset)
    for tensor in in_order:
        if (beyond := tensor.offset + tensor.nbytes - size) > 0:
            raise error(f"tensor {printable(tensor.name)} ends {beyond} bytes after the end of the file; {CUT}")
    for previous, following in itertools.pairwise(in_order):
        if previous.offset + previous.nbytes > following.offset:
            raise error(f"tensors {printable(previous.name)} and {printable(following.name)} overlap")
    end = start
    for tensor in in_order:
        if tensor.offset - end >= alignment:
            raise error(f"has {tensor.offset - end} unused bytes before tensor {printable(tensor.name)}")
        end = tensor.offset + tensor.nbytes
    if size - end >= alignment:
        raise error(f"has {size - end} unused bytes after its last tensor")


class _Label(NamedTuple):
    """Subject of an error message: fixed words, then a name from the file, in which special characters are escaped."""

    words: str
    name: str

    def __str__(self) -> str:
        return f"{self.words} {printable(self.name)}".lstrip()


class _Cursor:
    """Buffered reader of a GGUF header. It keeps the current position and checks bounds."""

    def __init__(self, part: Part):
        self.part, self.at = part, 0
        self.end = min(part.size, HEADER_LIMIT)
        self._buffer, self._start = b"", 0

    def take(self, count: int, label: str | _Label) -> bytes:
        if count > self.end - self.at:
            where = f"the file; {CUT}" if self.end == self.part.size else f"a header of {HEADER_LIMIT >> 20} MiB"
            raise self.part.error(f"at byte {self.at}: {label} does not fit into {where}")
        first = self.at - self._start
        if first < 0 or first + count > len(self._buffer):
            size = min(max(count, CHUNK), self.end - self.at)
            self._buffer, self._start, first = self.part.pread(self.at, size, label), self.at, 0
        self.at += count
        return self._buffer[first : first + count]

    def number(self, form: str, label: str | _Label) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), label))[0]

    def allow(self, count: int, smallest: int, memory: int, label: str | _Label) -> None:
        """Raise GGUFError if `count` items do not fit into the rest of the file, or exceed the memory limit.

        An item takes at least `smallest` bytes of the file and `memory` bytes of memory. The message calls the items
        `label`.
        """
        if count * smallest > self.end - self.at:
            raise self.part.error(f"claims {count} {label}, more than fit into the file; {CUT}")
        self.spend(count * memory, count, label)

    def spend(self, memory: int, *label: object) -> None:
        self.part.spent += memory
        if self.part.spent > HEADER_LIMIT:
            subject = " ".join(map(str, label))
            raise self.part.error(f"{subject}: its header takes more than {HEADER_LIMIT >> 20} MiB of memory")

    def string(self, label: str | _Label, limit: int) -> str:
        length = self.number("<Q", label)
        if length > limit:
            raise self.part.error(f"{label} claims {length} bytes, the limit is {limit}")
        self.spend(4 * length, label)  # Python uses up to four bytes per character
        try:
            return self.take(length, label).decode("utf-8")
        except UnicodeDecodeError:
            raise self.part.error(f"{label} is not UTF-8") from None

    def strings(self, count: int, label: _Label) -> list[str]:
        """Read and return `count` strings.

        Strings that lie completely in the buffer are decoded here, which is faster than calling `string`.
        """
        texts: list[str] = []
        while len(texts) < count:
            texts.append(self.string(label, STRING_LIMIT))
            buffer, first = self._buffer, self.at - self._start
            position, size, add, length = first, len(buffer), texts.append, _LENGTH
            with contextlib.suppress(struct.error, UnicodeDecodeError):  # the checked path then reports the error
                for _ in range(count - len(texts)):
                    begin = position + 8
                    stop = begin + length(buffer, position)[0]
                    if stop > size:
                        break
                    add(buffer[begin:stop].decode())
                    position = stop
            self.at += position - first
            self.spend(4 * (position - first), label)
        return texts

    def value(self, kind: int, key: _Label) -> Any:
        if kind == STRING:
            return self.string(_Label("the value of", key.name), STRING_LIMIT)
        if kind in SCALARS:
            return self.number(SCALARS[kind], _Label("the value of", key.name))
        if kind != ARRAY:
            raise self.part.error(f"{key} has the unknown value type {kind}")
        array = _Label("the array", key.name)
        item, count = self.number("<I", array), self.number("<Q", array)
        if count > ARRAY_LIMIT:
            raise self.part.error(f"{array} claims {count} elements, the limit is {ARRAY_LIMIT}")
        if item == STRING:
            self.allow(count, 8, STRING_MEMORY, _Label("strings in", key.name))
            return self.strings(count, _Label("a string of", key.name))
        if item not in SCALARS:
            raise self.part.error(f"{array} has the unknown element type {item}")
        dtype = np.dtype(SCALARS[item])
        self.spend(count * dtype.itemsize, array)
        return np.frombuffer(self.take(count * dtype.itemsize, array), dtype)
