"""The words behind a sub-command: switches, options with a value, and the rest."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from toyexp.base.bounds import is_whole
from toyexp.base.errors import UserError, choose
from toyexp.contract.registry import modules_in

PROBE = "--\0"  # a word that no command line can hold: read_options answers it with its tables


class Tables(Exception):
    """The options that a sub-command reads: switches, and those that take a value with an example of one."""

    def __init__(self, switches: Collection[str], values: Mapping[str, str]):
        super().__init__()
        self.switches, self.values = tuple(switches), dict(values)


@dataclass(frozen=True)
class Words:
    """What was typed, told apart."""

    switches: set[str]
    values: dict[str, str]  # by option; of one given twice the last, as everywhere on command lines
    rest: list[str]  # files and settings


def read_options(
    command: str, words: Sequence[str], switches: Collection[str] = (), values: Mapping[str, str] | None = None
) -> Words:
    """Tells the words apart; `values` has an example for each option that takes one. UserError for any other option.

    Raises Tables when they are the PROBE.
    """
    values = values or {}
    if list(words) == [PROBE]:
        raise Tables(switches, values)
    found = Words(set(), {}, [])
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag in switches:
            if equals:
                raise UserError(f"{word}: {flag} takes no value")
            found.switches.add(flag)
        elif flag in values:
            if not equals and (not left or left[0] in switches or left[0] in values):
                raise UserError(f"{flag} needs a value, such as {flag} {values[flag]}")
            found.values[flag] = value if equals else left.pop(0)
        elif word.startswith("-"):
            raise UserError(f"{command} {word}: there is no such option; {choose(flag, (*switches, *values))}")
        else:
            found.rest.append(word)
    return found


def take_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The local modules of `plugins=[...]`, and the other words; UserError for what is no module's name."""
    return modules_in(words), [word for word in words if not word.startswith("plugins=")]


def refuse_settings(command: str, words: Sequence[str], taken: str = "plugins=[...] alone") -> None:
    """Raises UserError for a word that is a setting, and no file's name, where a command takes none."""
    for word in words:
        if "=" in word and not os.path.lexists(word):
            raise UserError(
                f"{command} {word}: is a setting of a run; {command} takes {taken}: toyexp {command} --help"
            )


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether a command is asked how it is used."""
    return "-h" in words or "--help" in words


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
