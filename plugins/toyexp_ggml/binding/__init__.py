"""Binding to ggml: library, devices, memory, and static graphs with one method per op.

A failed GGML_ASSERT ends the whole process. Everything that ggml asserts is therefore checked here first and raises
GraphError. Shapes are in numpy's order, [B, T, d]; ggml's own shapes (`ne`) are in the reverse order.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from pathlib import Path
from typing import Any

from toyexp import ToyexpError

ABSENT = "ggml_backend_cuda_allreduce_tensor"  # declared by ggml-python, missing in its CUDA library


def _load() -> Any:
    """Import ggml-python, with workarounds for two faults of version 0.0.45.

    ggml-python looks up a function that ggml's CUDA library lacks, so importing it would fail. It also loads ggml with
    RTLD_GLOBAL: libraries loaded later then see ggml's C++ symbols, which broke PyTorch's compiler on a GPU.
    """
    lookup, global_mode = ctypes.CDLL.__getattr__, ctypes.RTLD_GLOBAL

    def lenient(library: ctypes.CDLL, name: str) -> Any:
        return ctypes.CFUNCTYPE(None)() if name == ABSENT else lookup(library, name)

    ctypes.CDLL.__getattr__ = lenient  # type: ignore[method-assign]
    ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL  # type: ignore[misc]
    try:
        return importlib.import_module("ggml")
    finally:
        ctypes.CDLL.__getattr__ = lookup  # type: ignore[method-assign]
        ctypes.RTLD_GLOBAL = global_mode  # type: ignore[misc]


ggml = _load()


@ggml.ggml_log_callback
def _log(level: int, text: bytes, user_data: Any) -> None:
    """Send ggml's warnings and errors to toyexp's log instead of the terminal; drop its other output."""
    if level in (ggml.GGML_LOG_LEVEL_WARN, ggml.GGML_LOG_LEVEL_ERROR) and text.strip():
        logging.getLogger("toyexp").warning("ggml: %s", text.decode(errors="replace").strip())


ggml.ggml_log_set(_log, None)
# ggml-python 0.0.45 does not declare these return types, so ctypes would truncate the pointers to 32 bits.
ggml.ggml_backend_sched_get_tensor_backend.restype = ctypes.c_void_p
ggml.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p

F32, I32 = ggml.GGML_TYPE_F32, ggml.GGML_TYPE_I32


class GraphError(ToyexpError):
    """Error for a graph that cannot be built or computed. For a wrong op, the message names the op and the shapes."""


def find_device(name: str) -> Any:
    """Return ggml's first device whose name begins with `name`, or None."""
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        if ggml.ggml_backend_dev_name(device).decode().startswith(name):
            return device
    return None


def devices() -> dict[str, str]:
    """Return the description of each device that this build of ggml finds, keyed by ggml's name of the device."""
    devs = (ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count()))
    return {ggml.ggml_backend_dev_name(d).decode(): ggml.ggml_backend_dev_description(d).decode().strip() for d in devs}


def is_built_with(name: str) -> bool:
    """Return True if this build of ggml includes the backend `name` (such as CUDA), even if no such device exists."""
    kinds = (ggml.ggml_backend_reg_get(i) for i in range(ggml.ggml_backend_reg_count()))
    if any(ggml.ggml_backend_reg_name(kind).decode().startswith(name) for kind in kinds):
        return True
    return any(Path(ggml.__file__).parent.glob(f"lib/*ggml-{name.lower()}.*"))


def has_llamafile() -> bool:
    """Return True if ggml's CPU code contains llamafile's matrix products."""
    return bool(ggml.ggml_cpu_has_llamafile())


def version() -> str:
    """Return ggml's version."""
    return ggml.ggml_version().decode()
