"""What formats of files are written in: a file that holds a model, and what of it lies where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toyexp.base.errors import UserError


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its shape in numpy order ([out, in]), its type, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type: str
    type_id: int
    path: Path  # the file that holds it, of a split model one of several
    offset: int  # bytes from the start of that file
    nbytes: int


class ModelFile(Protocol):
    """An open file that holds a model: what a model reads itself from."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """What the file says it holds; raises UserError where it says nothing."""

    def error(self, cause: str) -> UserError:
        """An error that names the file."""

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """The first rows of a tensor, or all of it, in float32."""
