"""Random streams that depend only on a key and are equal on every machine."""

from __future__ import annotations

import hashlib

from toyexp.base.lazy import numpy as np


def stream(*key: object) -> np.random.Philox:
    """Return a stream of 64-bit words that depends only on `key`; numpy guarantees that Philox never changes."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def generator(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends only on `seed` and `name`. Different names give independent generators."""
    return np.random.Generator(stream(seed, name))
