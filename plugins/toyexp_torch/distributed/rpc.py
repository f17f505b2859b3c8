"""Messages between the processes of a run: plain data, NumPy arrays, and dataclasses such as a plan.

A message is a pickle in which a dataclass is its class and its fields. The reader builds dataclasses and arrays, and
refuses every other name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import socket
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from toyexp import UserError


class Link:
    """A connection to another process of the run. It is read by one thread; any thread may send."""

    def __init__(self, connection: socket.socket):
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Sends what `written` made; OSError when the other side is gone."""
        with self._sending:
            self._connection.send_bytes(message)

    def beat(self) -> None:
        """Sends a sign of life, unless a message is on its way; OSError when the other side is gone."""
        if self._sending.acquire(blocking=False):
            try:
                self._connection.send_bytes(b"")
            finally:
                self._sending.release()

    def receive(self) -> Any:
        """Waits for the next message, None for a sign of life; EOFError when the other side is gone."""
        try:
            message = self._connection.recv_bytes()
        except OSError:
            raise EOFError from None
        return _Reader(io.BytesIO(message)).load() if message else None

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def cut(self) -> None:
        """Wakes whoever reads or sends, on both sides: nothing comes through any more."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def written(value: Any) -> bytes:
    """Return a message that holds a value; UserError for one that cannot be sent."""
    message = io.BytesIO()
    _Writer(message, protocol=5).dump(value)
    return message.getvalue()


def _array(dtype: str, shape: tuple[int, ...], data: bytearray) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape)


def _build(cls: type, fields: Mapping[str, Any]) -> Any:
    return cls(**fields)


PLAIN = (int, float, str, tuple, list)
NAMED = (*PLAIN, dict, Path, _array, _build)  # what a message may name beside dataclasses


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce a value that is not plain, and a class of one; UserError for what cannot be sent."""
        cls = type(value)
        if isinstance(value, np.ndarray):
            return _array, (value.dtype.str, value.shape, bytearray(np.ascontiguousarray(value)))
        if isinstance(value, np.generic):
            return type(value.item()), (value.item(),)
        if isinstance(value, PurePath):
            return Path, (str(value),)
        if isinstance(value, Mapping):
            return dict, ([*value.items()],)
        if base := next((base for base in PLAIN if isinstance(value, base)), None):
            return base, (base(value),)
        if any(value is named for named in NAMED):
            return NotImplemented
        if dataclasses.is_dataclass(cls):
            return _build, (cls, {f.name: getattr(value, f.name) for f in dataclasses.fields(cls) if f.init})
        if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
            raise UserError(
                f"engine.devices: {cls.__module__}.{cls.__qualname__} cannot be sent to the other ranks; a plan that "
                "is computed by several is made of plain data and dataclasses"
            )
        if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
            raise UserError(
                f"engine.devices: the other ranks cannot find {value.__qualname__}, which is no part of a module; put "
                "it at the top level of one of its own"
            )
        return NotImplemented


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a dataclass, or what a message is made of; UnpicklingError for any other name."""
        found = super().find_class(module, name)
        if any(found is named for named in NAMED) or (isinstance(found, type) and dataclasses.is_dataclass(found)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no dataclass")
