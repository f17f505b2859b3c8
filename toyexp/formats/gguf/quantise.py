"""K-quants, which llama.cpp alone can write: by its program, or by its Python package in a child process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from toyexp.base.errors import RunFailed, Unavailable, printable
from toyexp.base.packages import why_not_apart
from toyexp.base.writing import in_one_piece, required

# It takes the words that llama-quantize takes. llama.cpp may abort, which must not end more than this.
CHILD = """
import ctypes, os, sys
import llama_cpp
*flags, source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
params.allow_requantize = "--allow-requantize" in flags
sys.exit(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)))
"""


def quantiser(asked: str) -> list[str]:
    """The command that quantises as `llama-quantize SOURCE TARGET KIND` does; Unavailable when there is none."""
    program = shutil.which("llama-quantize")
    if program is not None:
        return [program]
    reason = why_not_apart("llama_cpp")
    if reason is None:
        return [sys.executable, "-P", "-c", CHILD]
    raise Unavailable(
        f"{asked} is written by llama.cpp, which is not here: put its llama-quantize on the PATH, "
        f"or pip install llama-cpp-python (llama_cpp {reason})"
    )


def quantise(source: Path, target: Path, kind: str, requantise: bool = False) -> None:
    """Writes `target`, in one piece, from a GGUF of another type; RunFailed with llama.cpp's words when it cannot."""
    program = [*quantiser(f"type={kind}"), *(["--allow-requantize"] if requantise else [])]
    with required(target), in_one_piece(target) as temporary:
        run = subprocess.run(
            [*program, str(source), str(temporary), kind.upper()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # an abort is told in one line, without a debugger
        )
        if run.returncode != 0:
            raise RunFailed(f"{target}: llama.cpp could not write it: {_cause(run)}")


def _cause(run: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    told = [line for line in lines if "fail" in line.lower() or "error" in line.lower()] or lines
    return printable(told[0] if told else f"it ended with {run.returncode}", 200)
