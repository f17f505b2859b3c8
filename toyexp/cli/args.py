"""What sub-commands have in common: how they read the words behind them."""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from toyexp.base.errors import UserError
from toyexp.base.validators import is_whole
from toyexp.interfaces.command import Arguments

T = TypeVar("T")


def one_file(command: str, files: Sequence[str], usage: str) -> Path:
    """What a command is about; UserError, with its `usage`, for nothing and for several."""
    if len(files) != 1 or not files[0]:
        raise UserError(f"{shlex.join([command, *files])}: takes one file or run directory{usage}")
    return Path(files[0])


def options(cls: type[T], arguments: Arguments, **more: Any) -> T:
    """Return a dataclass of the options that were typed, each by its field; `more` are its other fields."""
    typed = {f.name: vars(arguments).get(f.name) for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in typed.items() if value is not None}, **more)


def number(low: float, high: float = math.inf, whole: bool = False) -> Callable[[str], float]:
    """Return the `type` of an option that takes a finite number from low to high."""

    def parse(text: str) -> float:
        if whole:
            if not is_whole(text, int(low), int(high)):
                raise ArgumentTypeError(f"takes a whole number from {low} to {high}")
            return int(text)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            asked = f" from {low:g} to {high:g}" if math.isfinite(high) else f", {low:g} or above"
            raise ArgumentTypeError(f"takes a number{asked}")
        return value

    return parse
