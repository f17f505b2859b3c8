"""Choose the type of each tensor of a GGUF file as llama.cpp does, and quantise to K-quants with llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from toyexp.base.errors import RunFailed, Unavailable, UserError, printable, suggest
from toyexp.base.packages import probe_import
from toyexp.base.writing import convert_write_errors, write_atomically

# Values of general.file_type. gguf-py encodes FILE_TYPES; K_QUANTS need llama.cpp.
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9}
K_QUANTS = {
    "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17,
    "q6_k": 18,
}  # fmt: skip
# Program that takes the arguments of llama-quantize. It runs in a child process, because llama.cpp may abort.
CHILD = """
import ctypes, os, sys
import llama_cpp
*flags, source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
params.allow_requantize = "--allow-requantize" in flags
sys.exit(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)))
"""


def quantiser(setting: str) -> list[str]:
    """Return a command that takes the arguments of llama-quantize (SOURCE TARGET KIND).

    Raise Unavailable if llama.cpp is not installed. The message says that `setting` needs llama.cpp.
    """
    program = shutil.which("llama-quantize")
    if program is not None:
        return [program]
    reason = probe_import("llama_cpp")
    if reason is None:
        return [sys.executable, "-P", "-c", CHILD]
    remedy = f"put its llama-quantize on the PATH, or pip install llama-cpp-python (llama_cpp {reason})"
    raise Unavailable(f"{setting} needs llama.cpp, which is not installed: {remedy}")


def quantise(source: Path, target: Path, kind: str, requantise: bool = False) -> None:
    """Convert the GGUF file `source` to the file type `kind` with llama.cpp, and write it atomically to `target`.

    With `requantise`, `source` may be quantised already. If llama.cpp fails, raise RunFailed with its message.
    """
    program = [*quantiser(f"type={kind}"), *(["--allow-requantize"] if requantise else [])]
    with convert_write_errors(target), write_atomically(target) as temporary:
        run = subprocess.run(
            [*program, str(source), str(temporary), kind.upper()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # no debugger backtrace on an abort
        )
        if run.returncode != 0:
            raise RunFailed(f"{target}: llama.cpp could not write it: {_cause(run)}")


def _cause(run: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in run.stdout.splitlines() if line.strip()]
    messages = [line for line in lines if "fail" in line.lower() or "error" in line.lower()] or lines
    return printable(messages[0] if messages else f"it ended with {run.returncode}", 200)


# Ends of names of tensors with several axes that stay F32 in every type.
EXACT = (
    "_norm.weight", "position_embd.weight", "ffn_gate_inp.weight", "conv.weight", "conv1d.weight", ".ssm_a", ".ssm_d",
)  # fmt: skip


def check_type(kind: str, key: str = "type", others: Iterable[str] = ()) -> None:
    """Raise UserError for an unknown file type `kind`, and Unavailable if `kind` needs llama.cpp, which is missing.

    The message names the setting `key`. `others` are values that this setting allows besides the file types.
    """
    if kind not in FILE_TYPES | K_QUANTS:
        raise UserError(f"{key}={kind}: {suggest(kind, [*FILE_TYPES, *K_QUANTS, *others])}")
    if kind in K_QUANTS:
        quantiser(f"{key}={kind}")


def tensor_type(name: str, shape: tuple[int, ...], kind: str, tied: bool) -> str:
    """Return the ggml type of a tensor in a file of type `kind`.

    llama.cpp chooses the same types, except for the output layer. Norms, biases, position embeddings, routers of
    experts, convolutions and the numbers of SSM heads stay F32. Matrices whose rows are not divisible by 32 become F16.
    The output layer (token_embd.weight if `tied`) suffers most from rounding, so it is Q8_0 in 4- and 5-bit files.
    llama.cpp uses Q6_K there, but gguf-py cannot write that type.
    """
    if kind == "f32" or len(shape) < 2 or name.endswith(EXACT):
        return "F32"
    if kind in ("f16", "bf16"):
        return kind.upper()
    if shape[-1] % 32:
        return "F16"
    is_output = name == "output.weight" or (tied and name == "token_embd.weight")
    return "Q8_0" if is_output else kind.upper()
