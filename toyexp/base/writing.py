"""Files and directories that appear under their names once they are whole, and strict JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toyexp.base.errors import RunFailed


@contextlib.contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """A place of the same name to write a file or a directory to: it becomes `path` once it is whole, or goes away.

    It is flushed to the disk before it is renamed. Raises OSError; see `required`.
    """
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    place = folder / path.name
    try:
        folder.mkdir(exist_ok=True)
        yield place
        if place.is_dir():
            sync_directory(place)
            swap(place, path)
        else:
            with open(place, "rb") as file:
                os.fsync(file.fileno())
            place.replace(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def required(path: Path) -> Iterator[None]:
    """Says of an OSError which file could not be written, as RunFailed: it ends whoever cannot do without."""
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{path}: could not be written: {error.strerror or str(error) or 'the disk may be full'}"
        ) from error


def swap(new: Path, path: Path) -> None:
    """Renames the file or directory `new` to `path`; a directory that was there is gone afterwards. Raises OSError."""
    if path.is_symlink() or not path.is_dir():
        new.replace(path)
        return
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        path.rename(old)
        new.rename(path)
    finally:
        if not path.exists():  # interrupted between the two names
            old.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Writes a small file in one piece in place of an earlier one. Raises OSError.

    Unlike `in_one_piece` it makes no directory and does not wait for the name to be on the disk: each takes as long as
    the file itself. A file that is renamed there later comes to the disk no sooner.
    """
    place = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(place, content)
        place.replace(path)
    finally:
        place.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flushes the names in a directory to the disk."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def bytes_in(path: Path) -> int:
    """The size of a file, or of the files in a directory."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def dump_json(fields: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become null."""
    if indent is None:
        try:
            return LINE.encode(
                fields if type(fields) is dict else {**fields}
            )  # as it is, which it nearly always can be
        except ValueError:  # of a number that is not finite
            pass
    return json.dumps({k: _finite(v) for k, v in fields.items()}, indent=indent, allow_nan=False, default=_plain)


def _plain(value: object) -> Any:
    """What JSON has no word for: numbers and arrays of numpy's as plain numbers, and the rest as text."""
    import numpy as np

    if isinstance(value, Mapping):
        return {**value}
    return _finite(value.tolist()) if isinstance(value, np.generic | np.ndarray) else str(value)


class _Lines(json.JSONEncoder):
    """An encoder that is made once: for each line anew it takes as long as the line itself."""

    def __init__(self) -> None:
        super().__init__(allow_nan=False, default=_plain, check_circular=False)
        words = (json.encoder.encode_basestring_ascii, None, self.key_separator, self.item_separator)
        make = getattr(json.encoder, "c_make_encoder", None)
        self._parts = make and make(None, self.default, *words, self.sort_keys, self.skipkeys, self.allow_nan)

    def encode(self, o: Any) -> str:
        """See json."""
        return "".join(self._parts(o, 0)) if self._parts else super().encode(o)


LINE = _Lines()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
