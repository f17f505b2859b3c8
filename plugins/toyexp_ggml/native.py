"""What ggml does on the CPU by C code of ours, built when first used by a compiler such as ggml-python's build needed.

That takes a tenth of a second, and the result is not kept, so that no file which others may write is ever loaded. Where
there is no compiler, ggml's own ops do the same, to the bit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("kernels.c")
COMPILERS = ("cc", "gcc", "clang")
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
        with tempfile.TemporaryDirectory(prefix="toyexp-", ignore_cleanup_errors=True) as folder:
            built = Path(folder, "kernels.so")
            subprocess.run(
                [*command, "-O3", "-shared", "-fPIC", "-o", str(built), str(SOURCE)],
                check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=SECONDS,
            )  # fmt: skip
            return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        return f"the C compiler {command[0]} failed ({(said or [str(error)])[0]})"
