"""All that touches ggml: its library, devices, memory, and static graphs with one method per op.

A failed GGML_ASSERT ends the whole process, so everything that ggml asserts is checked here and raises GraphError.
Shapes are written as numpy orders them, [B, T, d]; ggml's own `ne` is the reverse.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from pathlib import Path
from typing import Any

from toyexp import ToyexpError

ABSENT = "ggml_backend_cuda_allreduce_tensor"


def _load() -> Any:
    """ggml-python, with two habits of its version 0.0.45 held back while it loads.

    It looks up a function that ggml's CUDA library declares and does not have, and its import fails. And it shows
    ggml's C++ symbols to every library that is loaded later, which broke PyTorch's compiler on a GPU.
    """
    lookup, visible = ctypes.CDLL.__getattr__, ctypes.RTLD_GLOBAL

    def lenient(library: ctypes.CDLL, name: str) -> Any:
        return ctypes.CFUNCTYPE(None)() if name == ABSENT else lookup(library, name)

    ctypes.CDLL.__getattr__ = lenient  # type: ignore[method-assign]
    ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL  # type: ignore[misc]
    try:
        return importlib.import_module("ggml")
    finally:
        ctypes.CDLL.__getattr__ = lookup  # type: ignore[method-assign]
        ctypes.RTLD_GLOBAL = visible  # type: ignore[misc]


ggml = _load()


@ggml.ggml_log_callback
def _log(level: int, text: bytes, user_data: Any) -> None:
    """ggml's warnings and errors go to toyexp's log, not to the terminal; its chatter nowhere."""
    if level in (ggml.GGML_LOG_LEVEL_WARN, ggml.GGML_LOG_LEVEL_ERROR) and text.strip():
        logging.getLogger("toyexp").warning("ggml: %s", text.decode(errors="replace").strip())


ggml.ggml_log_set(_log, None)
# ggml-python 0.0.45 leaves these pointers to be read as an int of 32 bits.
ggml.ggml_backend_sched_get_tensor_backend.restype = ctypes.c_void_p
ggml.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p

F32, I32 = ggml.GGML_TYPE_F32, ggml.GGML_TYPE_I32


class GraphError(ToyexpError):
    """A graph that cannot be built: which op, and which shapes it was given."""


def found(name: str) -> Any:
    """ggml's first device whose name begins so; None where there is none."""
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        if ggml.ggml_backend_dev_name(device).decode().startswith(name):
            return device
    return None


def devices() -> dict[str, str]:
    """The devices this build of ggml finds here, by name, with a description."""
    here = (ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count()))
    return {ggml.ggml_backend_dev_name(d).decode(): ggml.ggml_backend_dev_description(d).decode().strip() for d in here}


def built_with(name: str) -> bool:
    """Whether this build of ggml knows that kind of device at all; its library may be there and find none."""
    kinds = (ggml.ggml_backend_reg_get(i) for i in range(ggml.ggml_backend_reg_count()))
    if any(ggml.ggml_backend_reg_name(kind).decode().startswith(name) for kind in kinds):
        return True
    return any(Path(ggml.__file__).parent.glob(f"lib/*ggml-{name.lower()}.*"))


def has_llamafile() -> bool:
    """Whether ggml's CPU code has llamafile's matrix products."""
    return bool(ggml.ggml_cpu_has_llamafile())


def version() -> str:
    """ggml's version."""
    return ggml.ggml_version().decode()
