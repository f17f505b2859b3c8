"""Initial values of tensors.

They are drawn on the host from the seed and the tensor's name, so that every engine starts from the same bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.lazy import numpy as np
from toyexp.base.random import generator


class Values(ABC):
    """Base class of sources of a tensor's initial values."""

    @abstractmethod
    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return initial float32 values of this shape for the tensor `name`. Equal arguments give equal values."""

    def check_finite(self) -> None:
        """Raise UserError if the values come from a file and contain NaN or infinity."""
        return

    def export_metadata(self) -> Mapping[str, Any]:
        """Return metadata about the origin of the values, to store in an exported model; empty for random values."""
        return {}


@dataclass(frozen=True)
class Normal(Values):
    """Normal values with mean 0 and standard deviation `std`.

    Raises UserError unless `std` is finite and not negative.
    """

    std: float

    def __post_init__(self) -> None:
        if not isinstance(self.std, Real) or not 0 <= self.std < math.inf:
            raise UserError(f"{self!r}: std must be a finite number >= 0")

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return random values. Each combination of seed and tensor name has its own random stream."""
        return generator(seed, name).standard_normal(shape, dtype="float32") * np.float32(self.std)


@dataclass(frozen=True)
class Constant(Values):
    """One finite number for all elements. Raises UserError for NaN or infinity."""

    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.value, Real) or not math.isfinite(self.value):
            raise UserError(f"{self!r}: value must be a finite number")

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return an array filled with the value."""
        return np.full(shape, self.value, np.float32)


@dataclass(frozen=True)
class ArrayValues(Values):
    """Values from a float32 array of the tensor's shape."""

    array: np.ndarray

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return the array."""
        return np.ascontiguousarray(self.array, np.float32)

    def __repr__(self) -> str:
        return f"ArrayValues(array{list(self.array.shape)})"
