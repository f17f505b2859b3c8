"""What sub-commands have in common: how they read what stands behind them, and show what they found."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from toyexp.base.bounds import is_whole
from toyexp.base.errors import UserError
from toyexp.base.writing import dump_json


def show(found: Any, as_json: bool) -> None:
    """What a command found out, in lines or as JSON."""
    print(dump_json(found.plain(), indent=2) if as_json else "\n".join(found.lines()))


def refuse_settings(command: str, words: Sequence[str], taken: str = "plugins=[...] alone") -> None:
    """Raises UserError for a word that is a setting, and no file's name, where a command takes none."""
    for word in words:
        if "=" in word and not os.path.lexists(word):
            raise UserError(
                f"{command} {word}: is a setting of a run; {command} takes {taken}: toyexp {command} --help"
            )


def require_settings(command: str, words: Sequence[str]) -> None:
    """Raises UserError for a word that is no setting."""
    for word in words:
        if "=" not in word and word[:1] not in "~+":
            raise UserError(f"{command} {word}: is no setting; write key=value; see toyexp {command} --help")


def whole(flag: str, text: str, least: int, most: int) -> int:
    """The whole number that an option was given; UserError outside of least to most."""
    if not is_whole(text, least, most):
        raise UserError(f"{flag} {text}: takes a whole number from {least} to {most}")
    return int(text)


def real(flag: str, text: str, low: float, high: float = math.inf) -> float:
    """The number that an option was given; UserError outside of low to high, and for one that is not finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        asked = f" from {low:g} to {high:g}" if math.isfinite(high) else f", {low:g} or above"
        raise UserError(f"{flag} {text}: takes a number{asked}")
    return number
