"""Initial values, drawn on the host by name and seed, so that every engine starts from the same bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError
from toyexp.base.random import generator

if TYPE_CHECKING:
    import numpy as np


class Values(ABC):
    """Where a tensor's first values come from."""

    @abstractmethod
    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """The float32 array of `shape` for the tensor `name` under `seed`."""

    def check_finite(self) -> None:
        """Raises UserError for values that are read from elsewhere and hold what is no finite number."""
        return

    def export_metadata(self) -> Mapping[str, Any]:
        """What a model that was trained from them has to say of where they come from; nothing of values drawn here."""
        return {}


@dataclass(frozen=True)
class Normal(Values):
    """Values of a normal distribution with mean 0 and standard deviation `std`.

    Raises UserError unless that is a finite number from 0.
    """

    std: float

    def __post_init__(self) -> None:
        if not isinstance(self.std, Real) or not 0 <= self.std < math.inf:
            raise UserError(f"{self!r}: a standard deviation is a finite number from 0")

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """A stream of its own for each name."""
        import numpy as np

        return generator(seed, name).standard_normal(shape, dtype="float32") * np.float32(self.std)


@dataclass(frozen=True)
class Constant(Values):
    """The same value everywhere. Raises UserError unless that is a finite number."""

    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.value, Real) or not math.isfinite(self.value):
            raise UserError(f"{self!r}: what a tensor starts from is a finite number")

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """That value."""
        import numpy as np

        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class ArrayValues(Values):
    """Values that are already here: a float32 array of the tensor's shape."""

    array: np.ndarray

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """The array."""
        import numpy as np

        return np.ascontiguousarray(self.array, np.float32)

    def __repr__(self) -> str:
        return f"ArrayValues(array{list(self.array.shape)})"
