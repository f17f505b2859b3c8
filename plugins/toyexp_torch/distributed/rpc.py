"""Messages between the processes of a run: plain data, NumPy arrays, and dataclasses such as a plan.

A message is a pickle that stores a dataclass as its class and its fields. The reader builds only dataclasses and arrays
and rejects every other name, so that a message cannot run code.
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
    """Connection to another process of the run. Only one thread may receive; any thread may send."""

    def __init__(self, connection: socket.socket):
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message made by `encode`. Raise OSError if the other process is gone."""
        with self._sending:
            self._connection.send_bytes(message)

    def beat(self) -> None:
        """Send a heartbeat, unless another thread is sending a message. Raise OSError if the other process is gone."""
        if self._sending.acquire(blocking=False):
            try:
                self._connection.send_bytes(b"")
            finally:
                self._sending.release()

    def receive(self) -> Any:
        """Wait for the next message and return its value, or None for a heartbeat.

        Raise EOFError if the other process is gone.
        """
        try:
            message = self._connection.recv_bytes()
        except OSError:
            raise EOFError from None
        return _Reader(io.BytesIO(message)).load() if message else None

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._connection.fileno()

    def cut(self) -> None:
        """Shut the connection down in both directions. This wakes threads on either side that receive or send."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def encode(value: Any) -> bytes:
    """Return the bytes of a message that contains `value`. Raise UserError for a value that cannot be sent."""
    message = io.BytesIO()
    _Writer(message, protocol=5).dump(value)
    return message.getvalue()


def _array(dtype: str, shape: tuple[int, ...], data: bytearray) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape)


def _build(cls: type, fields: Mapping[str, Any]) -> Any:
    return cls(**fields)


PLAIN = (int, float, str, tuple, list)
ALLOWED = (*PLAIN, dict, Path, _array, _build)  # all that a message may contain besides dataclasses


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Return how pickle stores a value: as plain data, or as a dataclass and its fields.

        Raise UserError for a value that cannot be sent.
        """
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
        if any(value is allowed for allowed in ALLOWED):
            return NotImplemented
        if dataclasses.is_dataclass(cls):
            return _build, (cls, {f.name: getattr(value, f.name) for f in dataclasses.fields(cls) if f.init})
        if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
            raise UserError(
                f"engine.devices: {cls.__module__}.{cls.__qualname__} cannot be sent to the other ranks; with "
                "several devices a plan must consist of plain data and dataclasses"
            )
        if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
            raise UserError(
                f"engine.devices: the other ranks cannot import {value.__qualname__}; define it at the top level of a "
                "module other than the main program"
            )
        return NotImplemented


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the named class if it is a dataclass or an allowed type. Raise UnpicklingError for any other name."""
        value = super().find_class(module, name)
        is_dataclass = isinstance(value, type) and dataclasses.is_dataclass(value)
        if is_dataclass or any(value is allowed for allowed in ALLOWED):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not a dataclass")
