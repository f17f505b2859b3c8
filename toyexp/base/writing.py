"""Atomic writes of files and directories, and strict JSON.

A run's or sweep's directory may come from someone else, and a link in it could lead to any other file. Therefore every
file in such a directory is opened through this module, which follows no links. `tests/core/test_house.py` lists the
exceptions.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toyexp.base.errors import RunFailed, UserError, printable
from toyexp.base.files import KINDS
from toyexp.base.lazy import numpy as np


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success, flush the file or directory and rename it to `path`.

    If an exception is raised, remove the temporary file and leave `path` as it was.
    """
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary = folder / path.name
    try:
        make_empty_directory(folder)
        yield temporary
        if temporary.is_dir():
            sync_directory(temporary)
            swap(temporary, path)
        else:
            with open(temporary, "rb+") as file:  # Windows only flushes files opened for writing
                os.fsync(file.fileno())
            temporary.replace(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to RunFailed with the file's path."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error) or "the disk may be full"
        raise RunFailed(f"{path}: could not be written: {why}") from error


@contextlib.contextmanager
def reject_bad_names() -> Iterator[None]:
    """Raise UserError for a file name that is too long or not valid Unicode."""
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        if getattr(error, "errno", errno.ENAMETOOLONG) != errno.ENAMETOOLONG:
            raise
        raise UserError(f"invalid file name: {printable(str(error), 120)}") from None


def unwritable_reason(path: Path) -> str | None:
    """Return why `path` cannot be created, or None if nothing is known to prevent it."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            Path(f"{path}.{os.getpid()}.tmp").lstat()  # fails for too long a name or a loop of links
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        return error.strerror
    if not parent.is_dir():
        return os.strerror(errno.ENOTDIR)
    return None if os.access(parent, os.W_OK | os.X_OK) else f"{os.strerror(errno.EACCES)}: {parent}"


def require_writable(subject: str, path: Path) -> None:
    """Raise UserError unless a file can be created at `path`; the message starts with `subject`."""
    if not path.parent.is_dir():
        raise UserError(f"{subject}: there is no directory {path.parent}")
    if why := unwritable_reason(path):
        raise UserError(f"{subject}: cannot be written ({why}); choose another path")


def swap(new: Path, path: Path) -> None:
    """Rename `new` to `path`, replacing a file or directory there. Raise OSError if that fails."""
    if path.is_symlink() or not path.is_dir():
        new.replace(path)
        return
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        path.rename(old)
        new.rename(path)
    finally:
        if not path.exists():  # interrupted between the two renames
            old.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def require_plain(path: Path, kind: int = stat.S_IFREG, grows: bool = False) -> None:
    """Raise UserError if `path` exists and is a link, or is not of the type `kind` (by default a regular file).

    If `grows` is True, also raise it for a file with a second hard link, because the file will be changed in place.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if (actual := stat.S_IFMT(status.st_mode)) != kind:
        problem = f"it is {KINDS.get(actual, 'something else')}, not {KINDS[kind]}"
    elif grows and stat.S_ISREG(kind) and status.st_nlink > 1:
        problem = "it has a hard link, a second name under which the file would change too"
    else:
        return
    raise UserError(f"{path}: {problem}; move it away")


def require_plain_path(root: Path, path: Path) -> None:
    """Raise UserError if `path`, or one of its parents below `root`, is a link or exists and is not a directory."""
    for folder in (path, *path.parents)[: len(path.parts) - len(root.parts)]:
        require_plain(folder, stat.S_IFDIR)


def open_for_writing(path: Path, flags: int = 0) -> int:
    """Open or create a file that is changed in place, and return its file descriptor.

    Raise UserError if it is a link or a special file, or has a second hard link.
    """
    require_plain(path, grows=True)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)


def make_directory(path: Path) -> Path:
    """Create a directory if it is missing, and return its path; raise UserError if it is a link or a file."""
    require_plain(path, stat.S_IFDIR)
    path.mkdir(exist_ok=True)
    return path


def make_empty_directory(path: Path) -> None:
    """Create an empty directory. If a killed process left a directory there, replace it."""
    shutil.rmtree(path, ignore_errors=True)  # ignores a link, on which mkdir fails
    path.mkdir()


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Replace a small file atomically; unlike `write_atomically`, do not flush its directory entry."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    if getattr(os, "O_DIRECTORY", None) is None:  # Windows cannot open directories
        return
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def total_bytes(path: Path) -> int:
    """Return the size of a file, or of the files in a directory."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def dump_json(fields: Mapping[str, Any], indent: int | None = None) -> str:
    """Serialise to strict JSON; non-finite numbers become null."""
    if indent is None:
        with contextlib.suppress(ValueError):  # a non-finite number
            return LINE_ENCODER.encode(fields if type(fields) is dict else {**fields})
    return json.dumps(
        {k: _replace_nonfinite(v) for k, v in fields.items()}, indent=indent, allow_nan=False, default=_to_json
    )


def _to_json(value: object) -> Any:
    """Convert a value that JSON lacks: NumPy scalars and arrays to numbers, mappings to dicts, others to text."""
    if isinstance(value, Mapping):
        return {**value}
    return _replace_nonfinite(value.tolist()) if isinstance(value, np.generic | np.ndarray) else str(value)


LINE_ENCODER = json.JSONEncoder(allow_nan=False, default=_to_json, check_circular=False)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(v) for v in value]
    return value
