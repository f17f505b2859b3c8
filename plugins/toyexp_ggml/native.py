"""What ggml does on the CPU by C code of ours, built when first used by a compiler such as ggml-python's build needed.

That takes a tenth of a second, so the result is kept where only this user may write, and loaded from nowhere else: what
others could have put there is code of theirs. Where there is no compiler, ggml's own ops do the same, to the bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toyexp.base import cache_dir, is_private, read_file, write_atomically

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-shared", "-fPIC")
SECONDS = 60  # after which a compiler counts as broken


class Transpose(ctypes.Structure):
    """What the kernel `transpose` is to do."""

    _fields_ = (
        ("source", ctypes.c_void_p * 2),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("matrices", "rows", "columns")),
    )


def kernel(name: str) -> Any:
    """The address of a function of kernels.c; None where there is no compiler, or one that fails."""
    library = _library()
    return None if isinstance(library, str) else ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def missing() -> str:
    """Why ggml's own ops do it; empty where they need not."""
    library = _library()
    return library if isinstance(library, str) else ""


@functools.cache
def _library() -> ctypes.CDLL | str:
    """What was built, or why it was not."""
    command = shlex.split(os.environ.get("CC", "")) or next(([c] for c in COMPILERS if shutil.which(c)), [])
    if not command:
        return "there is no C compiler"
    try:
        with contextlib.suppress(OSError):  # no room, or a disk that nothing is run from
            if kept := _place(command):
                return _kept(command, kept)
        with tempfile.TemporaryDirectory(prefix="toyexp-", ignore_cleanup_errors=True) as folder:
            return ctypes.CDLL(_built(command, Path(folder, "kernels.so")))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        return f"the C compiler {command[0]} failed ({(said or [str(error)])[0]})"


def _built(command: Sequence[str], target: Path) -> str:
    subprocess.run(
        [*command, *FLAGS, "-o", str(target), str(SOURCE)],
        check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS,
    )  # fmt: skip
    return str(target)


def _place(command: Sequence[str]) -> Path | None:
    """Where is kept what this compiler builds of that source on this machine; None where no place is private."""
    folder, compiler = cache_dir(), shutil.which(command[0])
    if folder is None or not folder.is_absolute() or compiler is None or getattr(os, "getuid", None) is None:
        return None
    there = Path(compiler).resolve()
    status = there.stat()  # another version of the compiler is another file
    told = (*command, *FLAGS, there, status.st_size, status.st_mtime_ns, platform.system(), platform.machine())
    digest = hashlib.sha256(repr(tuple(map(str, told))).encode() + SOURCE.read_bytes()).hexdigest()[:32]
    private = folder / f"kernels-{os.getuid()}"  # where several users share the rest, each has one of his own
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    return private / f"{digest}.so" if is_private(private) else None


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def _kept(command: Sequence[str], place: Path) -> ctypes.CDLL:
    """Return the library at `place`; build it if it is missing, damaged or another's. Raise OSError if that fails."""
    digest = place.with_suffix(".sha256")  # a file that a disk damaged would end the process when it is loaded
    if not (is_private(place) and is_private(digest) and read_file(digest) == _digest(place)):
        with write_atomically(place) as fresh:
            _built(command, fresh)
            fresh.chmod(0o600)
        with write_atomically(digest) as fresh:
            fresh.write_bytes(_digest(place))
    return ctypes.CDLL(str(place))
