"""Files and directories that appear under their names once they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from toyexp.base.errors import RunFailed


@contextlib.contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """A name beside `path` to write under; what stands there is flushed and becomes `path`, or goes away on an error.

    Raises RunFailed for a disk that cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RunFailed(f"{path}: could not be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # a disk that cannot be written, which was the error
            temporary.unlink(missing_ok=True)


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
