"""Random numbers that are a function of a key alone, the same on every machine."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def stream(*key: object) -> np.random.Philox:
    """A counter-based stream of 64-bit words that is a function of its key alone; numpy promises it never changes."""
    import numpy as np

    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def generator(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of `name` under `seed`; no draw depends on which others were drawn before it."""
    import numpy as np

    return np.random.Generator(stream(seed, name))
