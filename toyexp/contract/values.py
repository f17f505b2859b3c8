"""Initial values, drawn on the host by name and seed, so that every engine starts from the same bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from toyexp.formats.gguf.read import GGUFFile

Array = np.ndarray


@dataclass(frozen=True)
class Normal:
    """Values of a normal distribution with mean 0 and standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class Given:
    """Values that are already here: a float32 array of the tensor's shape."""

    array: Array

    def __repr__(self) -> str:
        return f"Given(array{list(self.array.shape)})"


@dataclass(frozen=True)
class FromGGUF:
    """A tensor of a GGUF file; an engine may map it in place instead of copying it.

    `rows` takes the first rows only; None takes them all.
    """

    path: str
    tensor: str
    rows: int | None = None


Values = Normal | Constant | Given | FromGGUF


def stream(*key: object) -> np.random.Philox:
    """A counter-based stream of 64-bit words that is a function of its key alone; numpy promises it never changes."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def generator(seed: int, name: str) -> np.random.Generator:
    """The random stream that belongs to `name` under `seed`.

    Philox is counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a stream is a
    function of its key alone, so no draw depends on which other tensors were drawn before it.
    """
    return np.random.Generator(stream(seed, name))


def draw(values: Values, shape: tuple[int, ...], seed: int, name: str) -> Array:
    """The float32 array of `shape` that `values` describes for the tensor `name`."""
    if isinstance(values, Normal):
        return generator(seed, name).standard_normal(shape, dtype=np.float32) * np.float32(values.std)
    if isinstance(values, Constant):
        return np.full(shape, values.value, np.float32)
    if isinstance(values, Given):
        return np.ascontiguousarray(values.array, np.float32)
    return opened(values.path).weights(values.tensor, rows=values.rows)


def opened(path: str) -> GGUFFile:
    """The GGUF file, kept open: a base of hundreds of tensors has its header read once, not for each of them."""
    try:
        status = Path(path).stat()
    except OSError:
        return _opened(path, ())  # which says what is wrong
    return _opened(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1)
def _opened(path: str, version: tuple[int, ...]) -> GGUFFile:
    from toyexp.formats.gguf.read import GGUFFile  # deferred: runs that read no GGUF do not pay for the reader

    return GGUFFile(path)
