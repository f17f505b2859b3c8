"""What the processes of a run tell one another: plain data, numpy's arrays, and dataclasses such as a plan.

A message is JSON, and behind it the bytes of the arrays that it names. A dataclass travels as its class's name and its
fields, and is made anew on the other side, once for all places that hold it: nothing else is ever called there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp import UserError

HEAD = struct.Struct("<QQ")  # bytes of JSON, and bytes of arrays; a sign of life has neither
ALIGNMENT = 64  # bytes, at a multiple of which each array begins
CLASS, SAME, ARRAY, TUPLE, MAP, PATH = "class", "same", "array", "tuple", "map", "path"  # what JSON lacks


Message = list[bytes | memoryview]


class Link:
    """A connection to another process of the run. It is read by one thread; any thread may send."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Sends what `written` made; OSError when nobody is there any more."""
        with self._sending:
            for part in message:
                self._socket.sendall(part)

    def beat(self) -> None:
        """Sends a sign of life, unless a message is on its way; OSError when nobody is there any more."""
        if self._sending.acquire(blocking=False):
            try:
                self._socket.sendall(HEAD.pack(0, 0))
            finally:
                self._sending.release()

    def receive(self) -> Any:
        """Waits for the next message; EOFError when the other side is gone."""
        while True:
            words, size = HEAD.unpack(self._exactly(HEAD.size))
            if words:
                text = self._exactly(words)
                return _Reader(self._exactly(size)).made(json.loads(text))

    def arrived(self) -> Iterator[Any]:
        """What can be read without waiting: messages, None for a sign of life; EOFError when the other is gone."""
        try:
            chunk = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            raise EOFError
        self._received += chunk
        while len(self._received) >= HEAD.size:
            words, size = HEAD.unpack_from(self._received)
            end = HEAD.size + words + size
            if len(self._received) < end:
                return
            text, data = self._received[HEAD.size : HEAD.size + words], self._received[HEAD.size + words : end]
            del self._received[:end]
            yield _Reader(data).made(json.loads(text)) if words else None

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def cut(self) -> None:
        """Wakes whoever reads or sends, here and there: nothing comes through any more."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            try:
                count = self._socket.recv_into(view[have:])
            except OSError:
                count = 0
            if not count:
                raise EOFError
            have += count
        return data


def written(value: Any) -> Message:
    """A message that holds a value; UserError for one that cannot be sent."""
    writer = _Writer()
    words = json.dumps(writer.plain(value)).encode()
    size = sum(_room(array.nbytes) for array in writer.arrays)
    message: Message = [HEAD.pack(len(words), size) + words]
    for array in writer.arrays:
        if array.nbytes:
            message += [array.reshape(-1).view(np.uint8).data, bytes(_room(array.nbytes) - array.nbytes)]
    return message


def _room(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# -- what is sent -----------------------------------------------------------------------------------------------------


class _Writer:
    """Makes JSON of values; their arrays stand beside it."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._known: dict[int, int] = {}  # the dataclasses that were written, by identity

    def plain(self, value: Any) -> Any:
        """`value` as JSON holds it; UserError for what cannot be sent."""
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray):
            self.arrays.append(np.ascontiguousarray(value))
            return {ARRAY: [value.dtype.str, list(value.shape)]}
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, tuple):
            return {TUPLE: [self.plain(item) for item in value]}
        if isinstance(value, Mapping):
            return {MAP: [[self.plain(key), self.plain(item)] for key, item in value.items()]}
        return {PATH: str(value)} if isinstance(value, Path) else self._dataclass(value)

    def _dataclass(self, value: Any) -> dict[str, Any]:
        cls = type(value)
        if not dataclasses.is_dataclass(cls):
            raise UserError(
                f"engine.devices: {cls.__module__}.{cls.__qualname__} cannot be sent to the other ranks; a plan that "
                "is computed by several is made of plain data and dataclasses"
            )
        if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
            raise UserError(
                f"engine.devices: the other ranks cannot find {cls.__qualname__}, which is no part of a module; put it "
                "at the top level of one of its own"
            )
        if id(value) in self._known:
            return {SAME: self._known[id(value)]}
        fields = {f.name: self.plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        self._known[id(value)] = len(self._known)
        return {CLASS: [cls.__module__, cls.__qualname__, fields]}


class _Reader:
    """Makes values of JSON and the arrays beside it."""

    def __init__(self, data: bytearray):
        self._data, self._start = memoryview(data), 0
        self._known: list[Any] = []

    def made(self, value: Any) -> Any:
        """What a _Writer was given."""
        if isinstance(value, list):
            return [self.made(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == ARRAY:
            return self._array(np.dtype(content[0]), content[1])
        if kind == MAP:
            return {self.made(key): self.made(item) for key, item in content}
        if kind == TUPLE:
            return tuple(self.made(item) for item in content)
        if kind == PATH:
            return Path(content)
        if kind == SAME:
            return self._known[content]
        module, name, fields = content
        self._known.append(_dataclass(module, name)(**{key: self.made(item) for key, item in fields.items()}))
        return self._known[-1]

    def _array(self, dtype: np.dtype, shape: list[int]) -> np.ndarray:
        count = math.prod(shape)
        found = np.frombuffer(self._data, dtype, count, self._start) if count else np.empty(0, dtype)
        self._start += _room(count * dtype.itemsize)
        return found.reshape(shape)


def _dataclass(module: str, name: str) -> type:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise TypeError(f"{module}.{name} is no dataclass")
    return found
