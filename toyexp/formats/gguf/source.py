"""First values that stand in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

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
