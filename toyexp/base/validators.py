"""Checks of settings, such as that numbers fit float32 (used by engines) or 32-bit integers (used by GGUF files)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from operator import ge, gt, le, lt

from toyexp.base.errors import UserError, suggest

MAX_INT = 2**31 - 1  # largest count
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal float32 range, without importing numpy


def require_float32(key: str, value: float) -> None:
    """Raise UserError for a number that float32 would round to infinity or 0."""
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise UserError(f"{key}={value}: must be within float32's range, from {SMALLEST:.3g} to {LARGEST:.3g}")


def require_positive(key: str, value: float) -> None:
    """Raise UserError unless a number is above 0 and in range: float32's for a float, below 2**31 for an integer."""
    if value <= 0:
        raise UserError(f"{key}={value}: must be above 0")
    if isinstance(value, float):
        require_float32(key, value)
    elif value > MAX_INT:
        raise UserError(f"{key}={value}: must be at most {MAX_INT}")


def require_choice(section: str, part: object, /, **words: Collection[str]) -> None:
    """Raise UserError unless the attributes of `part` have allowed values.

    `words` maps names of attributes to their allowed values. `section` is the configuration section of `part`, such as
    optim: the error message names the setting as section.name.
    """
    for name, choices in words.items():
        if (value := getattr(part, name)) not in choices:
            raise UserError(f"{section}.{name}={value}: {suggest(value, choices)}")


def require_range(section: str, part: object, /, **bounds: str) -> None:
    """Raise UserError if an attribute of `part` is outside its interval; None is always allowed.

    `bounds` maps names of attributes to intervals, such as `[1,inf)` or `(0,1]`. `section` is the configuration section
    of `part`, such as optim: the error message names the setting as section.name.
    """
    for name, bound in bounds.items():
        is_inside, words = _interval(bound)
        if (value := getattr(part, name)) is not None and not is_inside(value):
            raise UserError(f"{section}.{name}={value}: must be {words}")


@functools.cache
def _interval(bound: str) -> tuple[Callable[[float], bool], str]:
    low, high = bound[1:-1].split(",")
    lowest, highest = float(low), float(high)
    above, below = gt if bound[0] == "(" else ge, lt if bound[-1] == ")" else le
    words = [f"{'above' if above is gt else 'at least'} {low}"]
    words += [] if high == "inf" else [f"{'below' if below is lt else 'at most'} {high}"]
    return lambda number: above(number, lowest) and below(number, highest), " and ".join(words)


def is_integer(text: str, lowest: int, highest: int) -> bool:
    """Return True if a text is a whole number from `lowest` to `highest`."""
    digits = text.lstrip("0") or text[:1]
    return text.isascii() and text.isdecimal() and lowest <= int(digits[:20]) <= highest
