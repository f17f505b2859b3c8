"""Restore process-wide state, such as random seeds and the environment, after an API call or a job of a sweep."""

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

# Variables that libraries read only once, when they load; they are not removed.
LIBRARY_VARIABLES = ("GOMP_SPINCOUNT", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")


@contextlib.contextmanager
def restore_process_state() -> Iterator[None]:
    """Restore random state, environment, working directory, logging and module search path when the context ends."""
    torch: Any = sys.modules.get("torch")  # only if a plugin loaded it
    seeds = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    environment, directory, path = dict(os.environ), Path.cwd(), list(sys.path)
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
        os.chdir(directory)
        for entry in [entry for entry in sys.path if entry not in path]:
            sys.path.remove(entry)
        for logger, handlers, level in loggers:
            logger.setLevel(level)
            for handler in [h for h in logger.handlers if h not in handlers]:
                logger.removeHandler(handler)
                handler.close()


@contextlib.contextmanager
def use_torch_defaults(torch: Any) -> Iterator[None]:
    """Use PyTorch's default dtype, device, autograd and precision settings; restore the caller's settings on exit."""
    with contextlib.ExitStack() as entered:
        contexts = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda", "mps")]
        contexts += [torch.device("cpu")] if torch.get_default_device().type != "cpu" else []
        for context in (torch.inference_mode(False), torch.enable_grad(), *contexts):
            entered.enter_context(context)
        entered.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        with contextlib.suppress(RuntimeError):  # fails if the caller set backends.fp32_precision
            entered.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield
