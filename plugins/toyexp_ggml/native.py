"""C kernels that replace slow ggml ops on the CPU, compiled at first use by any compiler that could build ggml-python.

Compiling takes a tenth of a second, so the library is cached. It is loaded only from a directory where no other user
can write, because its code runs with this user's rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
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
FLAGS = ("-O2", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
# For AVX2 and AVX-512; without the second flag clang would compute with half vectors.
X86_FLAGS = ("-march=native", "-mprefer-vector-width=512") if platform.machine() in ("x86_64", "AMD64") else ()
CPU_INFO = Path("/proc/cpuinfo")
SECONDS = 60  # timeout for the compiler


class Transpose(ctypes.Structure):
    """C struct with the arguments of the kernel `transpose`."""

    _fields_ = (
        ("source", ctypes.c_void_p * 2),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("matrices", "rows", "columns")),
    )


class Product(ctypes.Structure):
    """C struct with the arguments of the kernel `product`: c [n, m] = a [n, k] b [k, m]."""

    _fields_ = (
        ("source", ctypes.c_void_p * 2),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "m", "k", "a_transposed", "b_transposed")),
        ("to_float", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
    )


class Attention(ctypes.Structure):
    """C struct with the arguments of the kernels `attention` and `attention_back`."""

    _fields_ = (
        ("source", ctypes.c_void_p * 4),
        ("target", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "shared", "size", "causal")),
        ("scale", ctypes.c_float),
    )


class Elements(ctypes.Structure):
    """C struct with the arguments of the kernels `gelu` and `swiglu_back`."""

    _fields_ = (("source", ctypes.c_void_p * 3), ("target", ctypes.c_void_p), ("size", ctypes.c_int64))


class AdamW(ctypes.Structure):
    """C struct with the arguments of the kernel `adamw`."""

    _fields_ = (("source", ctypes.c_void_p * 5), ("target", ctypes.c_void_p), ("size", ctypes.c_int64))


def kernel(name: str) -> Any:
    """Return the address of the function `name` of kernels.c, or None if kernels.c cannot be compiled."""
    library, _ = _library()
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if library else None


def instruction_set() -> str:
    """Return the instruction set for which kernels.c is compiled; empty if it does not multiply faster than ggml."""
    library, _ = _library()
    return library.instruction_set().decode() if library else ""


def unavailable_reason() -> str:
    """Return why kernels.c cannot be used; empty if it can."""
    library, problem = _library()
    return "" if library else problem


def cache_problem() -> str:
    """Return a line that says why kernels.c is compiled at each start; empty if it is cached or cannot be compiled."""
    library, problem = _library()
    return problem if library else ""


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """Return the library compiled from kernels.c, or None, and a text that says why it is None or is not cached."""
    command = shlex.split(os.environ.get("CC", "")) or next(([c] for c in COMPILERS if shutil.which(c)), [])
    if not command:
        return None, "there is no C compiler"
    try:
        try:
            return _with_functions(_load_cached(command, _cached_path(command))), ""
        except OSError as error:  # for example, the disk of the cache is full, or mounted noexec
            reason = f"{error.strerror or error}; set TOYEXP_CACHE to a directory of your own"
        with tempfile.TemporaryDirectory(prefix="toyexp-", ignore_cleanup_errors=True) as directory:
            library = _with_functions(ctypes.CDLL(_compile(command, Path(directory, "kernels.so"))))
        return library, f"kernels.c is compiled at each start: the cache {cache_dir() or '~/.cache'}: {reason}"
    except subprocess.TimeoutExpired:
        return None, f"the C compiler {command[0]} took more than {SECONDS} s"
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines() or [str(error)]
        message = next((line for line in lines if "error:" in line), lines[0])
        return None, f"the C compiler {command[0]} failed ({message})"


def _with_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library; raise AttributeError if its functions are missing or hidden, as some options of CC do."""
    library.instruction_set.restype = ctypes.c_char_p
    return library


def _compile(command: Sequence[str], target: Path) -> str:
    subprocess.run(
        [*command, *FLAGS, *X86_FLAGS, "-o", str(target), str(SOURCE)],
        check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS,
    )  # fmt: skip
    return str(target)


def _cached_path(command: Sequence[str]) -> Path:
    """Return the cache path for this compiler, source and machine; raise OSError without a private directory."""
    folder, compiler = cache_dir(), shutil.which(command[0])
    if folder is None or not folder.is_absolute() or compiler is None or getattr(os, "getuid", None) is None:
        raise OSError("is not an absolute path")
    executable = Path(compiler).resolve()
    status = executable.stat()  # size and time differ between versions of a compiler
    build = (
        *command, *FLAGS, *X86_FLAGS, executable, status.st_size, status.st_mtime_ns, platform.system(),
        platform.machine(), *_cpu_flags(),
    )  # fmt: skip
    digest = hashlib.sha256(repr(tuple(map(str, build))).encode() + SOURCE.read_bytes()).hexdigest()[:32]
    private = folder / f"kernels-{os.getuid()}"  # a shared cache has one directory for each user
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(private):
        raise OSError("other users can write to it")
    return private / f"{digest}.so"


def _cpu_flags() -> list[str]:
    """Return the lines of /proc/cpuinfo that name the first CPU's instruction sets; none if there is no such file."""
    with contextlib.suppress(OSError), CPU_INFO.open() as file:
        return [line for line in itertools.takewhile(str.strip, file) if line.startswith(("flags", "Features"))]
    return []


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def _load_cached(command: Sequence[str], path: Path) -> ctypes.CDLL:
    """Return the library at `path`, or build it if the file is missing, damaged or owned by another user.

    Raise OSError if this fails.
    """
    digest = path.with_suffix(".sha256")  # loading a damaged library would crash the process
    if not (is_private(path) and is_private(digest) and read_file(digest) == _digest(path)):
        with write_atomically(path) as fresh:
            _compile(command, fresh)
            fresh.chmod(0o600)
        with write_atomically(digest) as fresh:
            fresh.write_bytes(_digest(path))
    return ctypes.CDLL(str(path))
