"""Filter and sort runs by their settings and numbers: `recipe=warm`, `loss<3`."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from toyexp.base.errors import UserError, suggest
from toyexp.base.formatting import short_path
from toyexp.results.run_dirs import COLUMNS, Run, setting_texts

FILTER = re.compile(r"([A-Za-z_][\w.]*)(!=|<=|>=|==?|<|>)(.*)", re.DOTALL)
ORDER_OPERATORS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}
NUMERIC_COLUMNS = ("seed", "lr", "batch_size", "steps", "of", "loss", "train_loss", "seconds", "speed")
KEY_ALIASES = dict.fromkeys(("held_out", "held-out", "eval_loss"), "loss")
KEY_ALIASES |= {"started": "when", "tokens_per_second": "speed"}


@dataclass(frozen=True)
class Filter:
    """A condition on one setting or number of a run, such as `loss<3`: key, operator and value."""

    text: str
    key: str
    sign: str
    value: str

    @classmethod
    def parse(cls, word: str) -> Filter | None:
        """Parse a word as a filter. Return None if it is not a filter but, for example, a directory.

        Raise UserError if the operator does not suit the key or the value.
        """
        match = FILTER.fullmatch(word)
        if not match or os.path.lexists(word):
            return None
        key, sign, value = match[1], "=" if match[2] == "==" else match[2], match[3]
        name = KEY_ALIASES.get(key, key)
        if sign in ORDER_OPERATORS and name == "when":
            _parse_time(word, value)
        elif name == "when":  # a day matches each of its times
            days = re.sub(r"\b(today|yesterday)\b", lambda match: str(_parse_time(word, match[0]).date()), value)
            value = re.sub("[^,]+", r"\g<0>*", days)
        elif sign in ORDER_OPERATORS and name in COLUMNS and name not in NUMERIC_COLUMNS:
            raise UserError(f"{word}: {key} is text; compare it with '{key}=...' or != (* matches any text)")
        elif sign in ORDER_OPERATORS and ((number := _to_float(value)) is None or math.isnan(number)):
            raise UserError(f"{word}: {sign} needs a number, such as '{key}{sign}3'")
        return cls(word, name, sign, value)

    def matches(self, value: Any) -> bool:
        """Return True if a run with this value of the key matches the filter.

        If the run has no value (None), it matches `key!=...`, `key=` and `key=null`.
        """
        if value is None:
            return self.sign == "!=" or (self.sign == "=" and self.value in ("", "null"))
        if self.key == "when":
            with contextlib.suppress(ValueError):
                run_time = datetime.fromisoformat(value).astimezone()
                if self.sign in ORDER_OPERATORS:
                    return bool(ORDER_OPERATORS[self.sign](run_time, _parse_time(self.text, self.value)))
                value = run_time.isoformat()
        if self.sign in ("=", "!="):
            printed = self.key != "lr" and "." not in self.key  # metrics also match as printed, with four decimals
            return any(_is_equal(value, item, printed) for item in self.value.split(",")) is (self.sign == "=")
        number, bound = _to_float(value), _to_float(self.value)
        return number is not None and bound is not None and ORDER_OPERATORS[self.sign](number, bound)


def split_filters(words: Sequence[str]) -> tuple[list[str], list[Filter]]:
    """Split the words of a command line into paths and parsed filters."""
    filters = [Filter.parse(word) for word in words]
    paths = [word for word, f in zip(words, filters, strict=True) if f is None]
    return paths, [f for f in filters if f is not None]


def filter_runs(runs: Iterable[Run], filters: Sequence[Filter], notes: list[str]) -> list[Run]:
    """Return the runs that match all filters. Add a note for each run whose settings cannot be read.

    Raise UserError for a key that no run has, or if a filter compares a text with < or >.
    """
    runs, known_keys = list(runs), set(COLUMNS)
    quick = [f for f in filters if f.key in (*COLUMNS, "ppl")]
    slow = [f for f in filters if f not in quick]  # these need the whole configuration
    matching = [run for run in runs if all(f.matches(run.value(f.key)) for f in quick)]
    unread = [run for run in runs if run.unread and run not in matching]
    notes += [f"settings unknown: {short_path(run.path)}, {run.unread}" for run in unread]
    if not slow or not matching:
        return matching
    accepted: list[Run] = []
    for run in matching:
        if not (has := {**setting_texts(run.path), **run.scores}):
            notes.append(f"settings unknown: {short_path(run.path)}, {run.unread or 'config.yaml cannot be read'}")
        known_keys |= set(has)
        for f in slow:
            text = has.get(f.key, "null")
            if f.sign in ORDER_OPERATORS and _to_float(text) is None and text not in ("null", "None"):
                raise UserError(f"{f.text}: {f.key} is text ({text}) in {short_path(run.path)}; compare with = or !=")
        if all(f.matches(has.get(f.key)) for f in slow):
            accepted.append(run)
    for f in slow:
        if f.key not in known_keys:
            raise UserError(f"{f.text}: no run here has {f.key}; {_suggest_key(f.key, known_keys)}")
    return accepted


def sort_runs(runs: Iterable[Run], key: str) -> list[Run]:
    """Return the runs sorted by a column or setting, in ascending order, or descending for `-key`.

    Runs without a value come last. Raise UserError for a key that no run has.
    """
    runs, falling, name = list(runs), key.startswith("-"), key.lstrip("-")
    name = KEY_ALIASES.get(name, name)
    values: list[Any] = [run.value(name) for run in runs]
    if runs and name not in COLUMNS and all(value is None for value in values):
        run_settings = [setting_texts(run.path) for run in runs]
        values = [settings.get(name) for settings in run_settings]
        if all(value is None for value in values):
            hint = _suggest_key(name, {*COLUMNS, *(key for settings in run_settings for key in settings)})
            raise UserError(f"--sort {key}: no run here has {name}; {hint}")
    ranked_runs = [(_sort_key(value), run) for value, run in zip(values, runs, strict=True) if not _is_none(value)]
    ranked_runs.sort(key=lambda pair: pair[0], reverse=falling)
    return [run for _, run in ranked_runs] + [run for value, run in zip(values, runs, strict=True) if _is_none(value)]


def _suggest_key(key: str, keys: Iterable[str]) -> str:
    hint = suggest(key, keys)
    return hint if hint.startswith("did you") else "to see all keys: toyexp runs --json, or config.yaml of a run"


def _is_none(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _sort_key(value: Any) -> tuple[bool, float, str]:
    number = _to_float(value)
    return (number is None, 0.0 if number is None else number, str(value))


def _is_equal(value: Any, text: str, printed: bool) -> bool:
    value_number, number = _to_float(value), _to_float(text)
    if value_number is not None and number is not None:
        return value_number == number or (printed and f"{value_number:.4f}" == text)
    if str(value) in ("true", "false", "null"):
        return str(value) == text.lower() or (value, text) == ("null", "None")
    return fnmatchcase(str(value), text)


def _parse_time(word: str, text: str) -> datetime:
    """Parse the date or time `text`. For a day, month or year, return its start.

    A time without a time zone is in the time zone of this machine. If `text` is not a date or time, raise UserError
    with a message that quotes `word`.
    """
    day = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    if text in ("today", "yesterday"):
        return day - timedelta(days=text == "yesterday")
    try:
        return datetime.fromisoformat(text + "2000-01-01"[len(text) :] if len(text) in (4, 7) else text).astimezone()
    except ValueError:
        examples = "'when>2026-11', 'when>2026-11-20', 'when>2026-11-20T18:00', 'when>yesterday'"
        raise UserError(f"{word}: when needs a date, a time, today or yesterday: {examples}") from None


def _to_float(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
