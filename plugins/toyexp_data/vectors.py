"""Vectors with float targets, from a NumPy file or from arrays."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import toyexp
from toyexp import VECTORS, Data, Dataset, Kind, UserError, suggest
from toyexp.base import numpy as np
from toyexp.base import require_file, require_range
from toyexp_data.examples import spread_held_out


@dataclass
class Vectors(Data):
    """Vectors with float targets, for objective=mse and objective=contrastive."""

    name: ClassVar[str] = "vectors"
    gives: ClassVar[Kind] = VECTORS
    arrays: ClassVar[Any] = None  # of an object made by `from_arrays`: the vectors and their targets

    path: str = ""  # .npz file with arrays x [N, n] and y [N, m], or .npy file of vectors that are their own targets
    val_fraction: float = 0.1  # share of the rows held out for validation, evenly spread; (0, 1)

    @classmethod
    def from_arrays(cls, x: np.ndarray, y: np.ndarray | None = None, val_fraction: float = 0.1) -> Vectors:
        """Return data for `toyexp.train(data=...)` of vectors x [N, n] and targets y [N, m], by default x itself."""
        data = cls(val_fraction=val_fraction)
        data.arrays = (x, x if y is None else y)  # type: ignore[misc]  # of this object
        return data

    def check(self) -> None:
        """Raise UserError for invalid settings and a missing file."""
        require_range("data", self, val_fraction="(0,1)")
        if self.arrays is None and not self.path:
            raise UserError("data=vectors needs a NumPy file: data.path=points.npz")
        if self.arrays is None:
            require_file(self.path, f"data.path={self.path}")

    def open(self, vocabulary: Path | None) -> Dataset:
        """Read the arrays and hold out some rows."""
        x, y = (_as_vectors(array, name) for array, name in zip(self.arrays or self._read(), "xy", strict=True))
        if len(x) != len(y) or len(x) < 2:
            raise UserError(f"data.path={self.path}: x has {len(x)} rows and y {len(y)}; use equal numbers, at least 2")
        return toyexp.VectorDataset(x, y, spread_held_out(len(x), self.val_fraction), {"path": self.path})

    def _read(self) -> tuple[Any, Any]:
        try:
            loaded = np.load(self.path, allow_pickle=False)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile):
            raise UserError(
                f"data.path={self.path}: is not a NumPy file of numbers; save it with numpy.savez"
            ) from None
        if isinstance(loaded, np.ndarray):
            return loaded, loaded
        if "x" not in loaded:
            raise UserError(f"data.path={self.path}: has no array x; {suggest('x', [*loaded])}")
        return loaded["x"], loaded["y"] if "y" in loaded else loaded["x"]


def _as_vectors(array: Any, name: str) -> np.ndarray:
    """Return an array as finite float32 vectors [N, n]; numbers [N] become vectors [N, 1]."""
    array = np.asarray(array)
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiub" or not array.size:
        raise UserError(f"data: {name} is {list(array.shape)} {array.dtype}; expected numbers [N, n]")
    vectors = np.ascontiguousarray(array.reshape(len(array), -1), np.float32)
    if not np.isfinite(vectors).all():
        raise UserError(f"data: {name} contains NaN or infinity")
    return vectors
