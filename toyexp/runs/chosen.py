"""Runs that are asked for: `recipe=warm`, `loss<3`, in an order."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from toyexp.base.errors import UserError, choose
from toyexp.runs.found import COLUMNS, Run
from toyexp.runs.settings import settings

FILTER = re.compile(r"([A-Za-z_][\w.]*)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
NUMBERS = ("seed", "lr", "batch_size", "steps", "of", "loss", "train_loss", "seconds", "speed")  # columns
ALSO = {"held_out": "loss", "held-out": "loss", "eval_loss": "loss", "started": "when", "tokens_per_second": "speed"}


@dataclass(frozen=True)
class Filter:
    """One of them."""

    typed: str
    key: str
    sign: str
    value: str

    @classmethod
    def of(cls, word: str) -> Filter | None:
        """A word as a filter; None for one that is none, such as the name of a directory."""
        found = FILTER.fullmatch(word)
        if not found or os.path.lexists(word):
            return None
        key, sign, value = found.groups()
        if sign in ("<", ">", "<=", ">=") and not value:
            raise UserError(f"{word}: {sign} takes a value to compare with, such as '{key}{sign}3'")
        if sign in ("<", ">", "<=", ">=") and ALSO.get(key, key) in NUMBERS and _number(value) is None:
            raise UserError(f"{word}: {key} is a number, such as '{key}{sign}3'")
        return cls(word, ALSO.get(key, key), sign, value)

    def takes(self, value: Any) -> bool:
        """Whether a run with that value is asked for; one without a value is, by != alone."""
        if value is None:
            return self.sign == "!=" or (self.sign == "=" and self.value in ("", "null"))
        if self.sign in ("=", "!="):
            return any(_equal(value, one) for one in self.value.split(",")) is (self.sign == "=")
        there, asked = _number(value), _number(self.value)
        if there is not None and asked is not None:
            return _compared(there, asked, self.sign)
        return there is None and asked is None and _compared(str(value), self.value, self.sign)


def divided(words: Sequence[str]) -> tuple[list[str], list[Filter]]:
    """Words that name places, and those that are filters."""
    filters = [Filter.of(word) for word in words]
    places = [word for word, one in zip(words, filters, strict=True) if one is None]
    return places, [one for one in filters if one is not None]


def filtered(runs: Iterable[Run], filters: Sequence[Filter]) -> list[Run]:
    """The runs that all filters take; UserError for a key that no run has."""
    runs, known = list(runs), set(COLUMNS)
    quick = [f for f in filters if f.key in COLUMNS]
    slow = [f for f in filters if f.key not in COLUMNS]  # for which the whole configuration is read
    left = [run for run in runs if all(f.takes(run.value(f.key)) for f in quick)]
    if not slow or not left:
        return left
    told: list[Run] = []
    for run in left:
        has = {**settings(run.path), **run.scores}
        known |= set(has)
        if all(f.takes(has.get(f.key)) for f in slow):
            told.append(run)
    for f in slow:
        if f.key not in known:
            raise UserError(f"{f.typed}: no run here has {f.key}; {_nearest(f.key, known)}")
    return told


def ordered(runs: Iterable[Run], key: str) -> list[Run]:
    """Runs by a column or a setting, from the smallest; `-key` from the largest. Those without a value come last."""
    runs, falling, name = list(runs), key.startswith("-"), key.lstrip("-")
    name = ALSO.get(name, name)
    values: list[Any] = [run.value(name) for run in runs]
    if runs and name not in COLUMNS and all(value is None for value in values):
        each = [settings(run.path) for run in runs]
        values = [one.get(name) for one in each]
        if all(value is None for value in values):
            raise UserError(
                f"--sort {key}: no run here has {name}; {_nearest(name, {*COLUMNS, *(k for s in each for k in s)})}"
            )
    there = [(_rank(value), run) for value, run in zip(values, runs, strict=True) if not _is_none(value)]
    there.sort(key=lambda pair: pair[0], reverse=falling)
    return [run for _, run in there] + [run for value, run in zip(values, runs, strict=True) if _is_none(value)]


def _nearest(key: str, known: Iterable[str]) -> str:
    near = choose(key, known)
    return near if near.startswith("did you") else "its keys: toyexp runs --json, and those of its config.yaml"


def _is_none(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _rank(value: Any) -> tuple[bool, float, str]:
    number = _number(value)
    return (number is None, 0.0 if number is None else number, str(value))


def _equal(value: Any, asked: str) -> bool:
    there, number = _number(value), _number(asked)
    if there is not None and number is not None:
        return there == number
    return fnmatchcase(str(value), asked)


def _compared(there: Any, asked: Any, sign: str) -> bool:
    told: dict[str, Callable[[], bool]] = {
        "<": lambda: there < asked, "<=": lambda: there <= asked,
        ">": lambda: there > asked, ">=": lambda: there >= asked,
    }  # fmt: skip
    return told[sign]()


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
