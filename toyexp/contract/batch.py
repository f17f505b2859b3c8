"""What a step reads: named arrays, and what each of them holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Batch = Mapping[str, "np.ndarray"]


@dataclass(frozen=True)
class InputSpec:
    """One array of a batch, without its leading batch axis."""

    shape: tuple[int, ...]
    dtype: str
    below: int | None = None  # what integers must stay below, from 0; None: unchecked
    optional: bool = False  # a batch without it means zeros


def batch_digest(batch: Batch) -> str:
    """16 hex digits that identify a batch, for comparing the data order of two runs."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(batch[name].tobytes())
    return digest.hexdigest()[:16]
