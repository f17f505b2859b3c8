"""What sub-commands have in common: how they read what stands behind them, and show what they found."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from toyexp.base.errors import UserError
from toyexp.base.formatting import columns
from toyexp.base.terminal import on_terminal
from toyexp.base.validators import is_whole
from toyexp.base.writing import dump_json
from toyexp.interfaces.command import Arguments

T = TypeVar("T")


class Answer(ABC):
    """A dataclass of what a command found out."""

    def plain(self) -> dict[str, Any]:
        """As plain data, for --json."""
        return asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def lines(self) -> list[str]:
        """For a person."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def show(self, arguments: Arguments) -> int:
        """Prints it in lines, or with --json as that; returns the exit code of what was done."""
        print(dump_json(self.plain(), indent=2) if "--json" in arguments.switches else self)
        return 0


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


# -- tables and sentences as wide as the terminal ---------------------------------------------------------------------


def room() -> int | None:
    """Characters of a line; None where it goes to no terminal, and may be of any length."""
    return shutil.get_terminal_size().columns if on_terminal() else None


def without(rows: Sequence[Sequence[str]], expendable: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Rows, the first of which has the heads, that fit the terminal, and what was left out for it.

    The columns of `expendable` go one after another, the first of them first, as long as there is too little room.
    """
    table, gone = [list(row) for row in rows], []
    for head in expendable:
        if fits(table):
            break
        if head in table[0]:
            place = table[0].index(head)
            table = [[*row[:place], *row[place + 1 :]] for row in table]
            gone.append(head)
    return table, gone


def fits(rows: Sequence[Sequence[str]]) -> bool:
    """Whether a table has room."""
    width = room()
    return width is None or max(map(len, columns(rows))) <= width


def aligned(rows: Sequence[Sequence[str]], right: Collection[str]) -> list[str]:
    """Rows as lines, the columns with these heads at their right edge."""
    return columns(rows, right={place for place, head in enumerate(rows[0]) if head in right})


def wrapped(lines: Sequence[str]) -> list[str]:
    """Sentences, broken between words where they are too long."""
    width = room()
    if width is None:
        return list(lines)
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
