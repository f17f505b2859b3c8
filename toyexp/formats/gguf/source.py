"""First values that stand in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from toyexp.contract.format import TensorInfo
from toyexp.contract.plan import PlanTensor
from toyexp.contract.values import Values
from toyexp.formats.gguf.read import GGUFFile


@dataclass(frozen=True)
class FromGGUF(Values):
    """A tensor of a GGUF file; an engine may map it in place instead of copying it.

    `rows` takes the first rows only; None takes them all.
    """

    path: str
    tensor: str
    rows: int | None = None

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """The tensor, in float32 whatever its type in the file."""
        return opened(self.path).weights(self.tensor, rows=self.rows)

    def check_finite(self) -> None:
        """Raises UserError where the tensor holds a NaN or an infinity."""
        opened(self.path).check_finite(self.tensor, self.rows)


def in_place(tensor: PlanTensor) -> TensorInfo | None:
    """Where a tensor of the plan stands in its file, if an engine may use it as it lies there; None where it may not.

    It may use what is frozen: matrices of any type, and float32 of any shape. What has another shape than the plan says
    is left to the reader, which says what is wrong. Raises GGUFError for a file without the tensor, and for NaN in it.
    """
    values = tensor.values
    if tensor.trainable or not isinstance(values, FromGGUF):
        return None
    file = opened(values.path)
    info = file.tensors.get(values.tensor)
    if info is None:
        raise file.error(f"has no tensor {values.tensor}")
    rows = info.shape[0] if values.rows is None else values.rows
    if tensor.shape != (rows, *info.shape[1:]) or (len(info.shape) != 2 and info.type != "F32"):
        return None
    file.check_finite(values.tensor, values.rows)
    return info


def opened(path: str) -> GGUFFile:
    """The GGUF file, kept open: a base of hundreds of tensors has its header read once, not for each of them."""
    try:
        status = Path(path).stat()
    except OSError:
        return _opened(path, ())  # which says what is wrong
    return _opened(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1)
def _opened(path: str, version: tuple[int, ...]) -> GGUFFile:
    return GGUFFile(path)
