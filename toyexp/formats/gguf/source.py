"""First values that stand in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.contract.format import TensorInfo
from toyexp.contract.plan import PlanTensor
from toyexp.contract.values import Values
from toyexp.formats.gguf.read import GGUFFile

_PARENT = ("name", "author", "organization", "version", "url", "repo_url")  # what a base is known by


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

    def passed_on(self) -> Mapping[str, Any]:
        """The licence of the file's model, and what that was; an adapter has none but that of its base."""
        file = opened(self.path)
        return {} if file.metadata.get("general.type") == "adapter" else _inherited(file)


def _inherited(base: GGUFFile) -> Mapping[str, Any]:
    """The `general.*` keys, without that prefix, of a model trained from `base`: its licence, and what it was."""
    found = {key: base.text(f"general.{key}") for key in ("license", "license.name", "license.link")}
    parent = {key: base.text(f"general.{key}") for key in _PARENT}
    parent["name"] = parent["name"] or base.path.stem
    found |= {f"base_model.0.{key}": value for key, value in parent.items()}
    return {"base_model.count": 1, **{key: value for key, value in found.items() if value}}


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


@lru_cache(maxsize=2)  # a base, and what is put on it
def _opened(path: str, version: tuple[int, ...]) -> GGUFFile:
    return GGUFFile(path)
