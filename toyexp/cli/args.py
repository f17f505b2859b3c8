"""What sub-commands have in common: how they read the words behind them."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from toyexp.base.errors import UserError
from toyexp.base.validators import is_whole
from toyexp.interfaces.command import Arguments

T = TypeVar("T")


def refuse_settings(command: str, words: Sequence[str], taken: str = "plugins=[...] alone") -> None:
    """Raises UserError for a word that is a setting, and no file's name, where a command takes none."""
    for word in words:
        if "=" in word and not os.path.lexists(word):
            raise UserError(
                f"{command} {word}: is a setting of a run; {command} takes {taken}: toyexp {command} --help"
            )


def one_file(command: str, files: Sequence[str], usage: str) -> Path:
    """What a command is about; UserError, with its `usage`, for nothing and for several."""
    if len(files) != 1 or not files[0]:
        raise UserError(f"{shlex.join([command, *files])}: takes one file or run directory{usage}")
    return Path(files[0])


def require_settings(command: str, words: Sequence[str]) -> None:
    """Raises UserError for a word that is no setting."""
    for word in words:
        if "=" not in word and word[:1] not in "~+":
            raise UserError(f"{command} {word}: is no setting; write key=value; see toyexp {command} --help")


def options(cls: type[T], arguments: Arguments, limits: Mapping[str, tuple[float, float]], **more: Any) -> T:
    """A dataclass of options as they were typed, each by its field: `--top-k 4` is top_k, a number within its limits.

    `more` are fields that no option gives.
    """
    for f in fields(cls):  # type: ignore[arg-type]
        flag = f"--{f.name.replace('_', '-')}"
        if flag in arguments.switches:
            more[f.name] = True
        if flag in arguments.values and f.name not in more:
            text = arguments.values[flag]
            more[f.name] = number(flag, text, *limits[flag], whole=f.type == "int") if flag in limits else text
    return cls(**more)


def number(flag: str, text: str, low: float, high: float, whole: bool = False) -> float:
    """The number that an option was given; UserError outside of low to high, and for one that is not finite."""
    if whole:
        if not is_whole(text, int(low), int(high)):
            raise UserError(f"{flag} {text}: takes a whole number from {low} to {high}")
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and low <= value <= high):
        asked = f" from {low:g} to {high:g}" if math.isfinite(high) else f", {low:g} or above"
        raise UserError(f"{flag} {text}: takes a number{asked}")
    return value
