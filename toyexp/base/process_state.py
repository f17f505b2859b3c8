"""Process-wide state that a call of the Python API, and a job in the process of its sweep, puts back."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY_VARIABLES = ("GOMP_SPINCOUNT", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")  # by a library, as it starts


@contextlib.contextmanager
def restore_process_state() -> Iterator[None]:
    """Put back random state, environment, working directory, logging, and where modules are looked for."""
    torch: Any = sys.modules.get("torch")  # where a plugin has loaded it; this never does
    seeds = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    environment, here, path = dict(os.environ), Path.cwd(), list(sys.path)
    loggers = [
        (logger, logger.handlers[:], logger.level) for logger in (logging.getLogger(), logging.getLogger("toyexp"))
    ]
    try:
        with use_torch_defaults(torch) if torch else contextlib.nullcontext():
            yield
    finally:
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        if torch := sys.modules.get("torch"):
            torch.set_rng_state(torch.Generator().get_state() if seeds[2] is None else seeds[2])
        for name in os.environ.keys() - environment.keys() - set(LIBRARY_VARIABLES):
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(here)
        for place in [place for place in sys.path if place not in path]:
            sys.path.remove(place)
        for logger, handlers, level in loggers:
            logger.setLevel(level)
            for handler in [h for h in logger.handlers if h not in handlers]:
                logger.removeHandler(handler)
                handler.close()


@contextlib.contextmanager
def use_torch_defaults(torch: Any) -> Iterator[None]:
    """Compute under PyTorch's defaults, whatever context the caller is in, and restore the caller's settings."""
    with contextlib.ExitStack() as entered:
        plain = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda", "mps")]
        plain += [torch.device("cpu")] if torch.get_default_device().type != "cpu" else []
        for context in (torch.inference_mode(False), torch.enable_grad(), *plain):
            entered.enter_context(context)
        entered.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        with contextlib.suppress(RuntimeError):  # of a caller who sets backends.fp32_precision, beside which it fails
            entered.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield
