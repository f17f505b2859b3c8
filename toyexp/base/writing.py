"""Files and directories that appear under their names once they are whole, and strict JSON.

Every file and folder that toyexp writes inside a run or a sweep is opened by a function of this module, which follows
no link: the directory may come from a stranger. `tests/core/test_house.py` lists the exceptions.
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


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a place to write a file or directory to; flushed, it becomes `path` once it is whole, or goes away."""
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    place = folder / path.name
    try:
        make_empty_directory(folder)
        yield place
        if place.is_dir():
            sync_directory(place)
            swap(place, path)
        else:
            with open(place, "rb+") as file:  # Windows flushes no file that is open for reading alone
                os.fsync(file.fileno())
            place.replace(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Says of an OSError which file could not be written, as RunFailed: it ends whoever cannot do without."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error) or "the disk may be full"
        raise RunFailed(f"{path}: could not be written: {why}") from error


@contextlib.contextmanager
def reject_bad_names() -> Iterator[None]:
    """Raise UserError for a name that no file can have: it is too long, or holds half a character."""
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        if getattr(error, "errno", errno.ENAMETOOLONG) != errno.ENAMETOOLONG:
            raise
        raise UserError(f"no file can have such a name: {printable(str(error), 120)}") from None


def unwritable_reason(path: Path) -> str | None:
    """Return why no file or folder can be made at `path`, or None if nothing is known against it yet."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            Path(f"{path}.{os.getpid()}.tmp").lstat()  # too long a name, or a loop of links
        there = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        return error.strerror
    if not there.is_dir():
        return os.strerror(errno.ENOTDIR)
    return None if os.access(there, os.W_OK | os.X_OK) else f"{os.strerror(errno.EACCES)}: {there}"


def require_writable(asked: str, path: Path) -> None:
    """Raise UserError unless a file can be made at `path`, which a person typed in the words `asked`."""
    if not path.parent.is_dir():
        raise UserError(f"{asked}: there is no directory {path.parent}")
    if why := unwritable_reason(path):
        raise UserError(f"{asked}: cannot be written ({why}); choose another place")


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


def require_plain(path: Path, kind: int = stat.S_IFREG, grows: bool = False) -> None:
    """Raise UserError for a link, or another `kind`, in the place of what we write; a hard link if it `grows`."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if (found := stat.S_IFMT(status.st_mode)) != kind:
        what = f"it is {KINDS.get(found, 'something else')}, not {KINDS[kind]}"
    elif grows and stat.S_ISREG(kind) and status.st_nlink > 1:
        what = "it has a second name (a hard link), under which it would change too"
    else:
        return
    raise UserError(f"{path}: {what}; move it away")


def require_plain_path(root: Path, path: Path) -> None:
    """Raise UserError if `path`, or a folder between `root` and it, is a link or no folder."""
    for folder in (path, *path.parents)[: len(path.parts) - len(root.parts)]:
        require_plain(folder, stat.S_IFDIR)


def open_for_writing(path: Path, flags: int = 0) -> int:
    """Open a file that changes where it is, or create it, and return its descriptor; see `require_plain`."""
    require_plain(path, grows=True)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)


def make_directory(path: Path) -> Path:
    """Make a folder that may be there already, and return its path; see `require_plain`."""
    require_plain(path, stat.S_IFDIR)
    path.mkdir(exist_ok=True)
    return path


def make_empty_directory(path: Path) -> None:
    """Make an empty folder in place of one that a killed process left."""
    shutil.rmtree(path, ignore_errors=True)  # not of a link, at which mkdir fails
    path.mkdir()


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, content: bytes) -> None:
    """Write a small file in one piece without waiting for its name to be on the disk, unlike `in_one_piece`."""
    place = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        place.unlink(missing_ok=True)
        write_synced(place, content)
        place.replace(path)
    finally:
        place.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flushes the names in a directory to the disk."""
    if getattr(os, "O_DIRECTORY", None) is None:  # Windows opens no directories
        return
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def total_bytes(path: Path) -> int:
    """The size of a file, or of the files in a directory."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def dump_json(fields: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become null."""
    if indent is None:
        with contextlib.suppress(ValueError):  # of a number that is not finite
            return LINE_ENCODER.encode(fields if type(fields) is dict else {**fields})
    return json.dumps(
        {k: _replace_nonfinite(v) for k, v in fields.items()}, indent=indent, allow_nan=False, default=_to_json
    )


def _to_json(value: object) -> Any:
    """What JSON has no word for: numbers and arrays of numpy's as plain numbers, and the rest as text."""
    import numpy as np

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
