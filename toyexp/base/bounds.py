"""What a setting's number may be: engines compute in float32, and a GGUF counts in 32 bits."""

from __future__ import annotations

import math

import numpy as np

from toyexp.base.errors import UserError

MOST = 2**31 - 1  # of anything that is counted
SMALLEST, LARGEST = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def require_float32(key: str, value: float) -> None:
    """Raises UserError for a number that float32 would make infinite, or 0."""
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise UserError(f"{key}={value}: must be a number that float32 holds, from {SMALLEST:.3g} to {LARGEST:.3g}")


def require_positive(key: str, value: float) -> None:
    """Raises UserError unless a number is above 0, and no more than float32 holds or 31 bits count."""
    if not math.isfinite(value):
        raise UserError(f"{key}={value}: must be a finite number")
    if value <= 0:
        raise UserError(f"{key}={value}: must be above 0")
    if isinstance(value, float):
        require_float32(key, value)
    elif value > MOST:
        raise UserError(f"{key}={value}: must be at most {MOST}")


def is_whole(text: str, least: int, most: int) -> bool:
    """Whether a text is a whole number from least to most."""
    digits = text.lstrip("0") or text[:1]
    return text.isascii() and text.isdecimal() and least <= int(digits[:20]) <= most
