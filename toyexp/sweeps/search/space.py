"""What a search chooses from: the keys with several values of a command line, as intervals, ranges and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError
from toyexp.base.formatting import typed
from toyexp.config.top_level import MOST_JOBS
from toyexp.sweeps.combinations import swept
from toyexp.sweeps.directory import Job

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


@dataclass(frozen=True)
class Interval:
    """Every number from `low` to `high`."""

    key: str
    line: str  # as it was typed
    low: float
    high: float
    log: bool  # orders of magnitude are alike
    whole: bool

    def words(self) -> list[str]:
        """The settings that show both of its ends."""
        return [f"{self.key}={typed(self.low)}", f"{self.key}={typed(self.high)}"]

    def count(self) -> float:
        """How many values it has."""
        return self.high - self.low + 1 if self.whole else math.inf

    def at(self, place: int) -> Any:
        """One of its whole numbers, counted from 0, as Optuna has it."""
        return self.low + place

    def distribution(self, of: Any) -> Any:
        """What Optuna draws from, made by its module of distributions."""
        kind = of.IntDistribution if self.whole else of.FloatDistribution
        return kind(self.low, self.high, log=self.log)

    def setting(self, value: Any) -> str:
        """A value of Optuna's, as it is typed."""
        return f"{self.key}={typed(value)}"


@dataclass(frozen=True)
class Listed:
    """Values that can be counted."""

    key: str
    line: str  # as it was typed
    settings: Sequence[str]  # a setting for each; numbers of a range rise
    numbers: Sequence[float]  # of a range, whose neighbours are alike; else none

    def words(self) -> list[str]:
        """A setting for each value."""
        return list(self.settings)

    def count(self) -> float:
        """How many values it has."""
        return len(self.settings)

    def at(self, place: int) -> Any:
        """One of its values, counted from 0, as Optuna has it."""
        return self.numbers[place] if self.numbers else self.settings[place].partition("=")[2]

    def distribution(self, of: Any) -> Any:
        """What Optuna draws from, made by its module of distributions."""
        if not self.numbers:
            return of.CategoricalDistribution([self.at(place) for place in range(len(self.settings))])
        low, high = self.numbers[0], self.numbers[-1]
        if all(isinstance(number, int) for number in self.numbers):
            return of.IntDistribution(low, high, step=self.numbers[1] - low)
        return of.FloatDistribution(low, high, step=float(f"{self.numbers[1] - low:.12g}"))

    def setting(self, value: Any) -> str:
        """A value of Optuna's, as it is typed."""
        if not self.numbers:
            return f"{self.key}={value}"
        return min(zip(self.numbers, self.settings, strict=True), key=lambda pair: abs(pair[0] - value))[1]


Key = Interval | Listed
Types = Callable[[str], set[Any]]  # what a key takes


def space(search: str, parsed: Sequence[Override], types: Types = lambda key: set()) -> list[Key]:
    """The keys that a search has to find values for; UserError where it cannot. `types` are those that a key takes."""
    keys = [_key(override) for override in parsed if override.is_sweep_override()]
    if not keys:
        raise UserError(
            f"sweep.search={search}: no key has several values, such as 'lr=tag(log, interval(1e-4, 1e-1))'"
        )
    if loads := [key.line for key in keys if key.key.lstrip("+") == "plugins"]:
        raise UserError(f"{loads[0]}: what is loaded is the same for all points: plugins=[a,b]")
    intervals = [key for key in keys if isinstance(key, Interval)]
    for key in intervals:
        name, _, value = key.line.partition("=")
        if not key.whole and (takes := types(key.key)) and not takes & {float, Any}:
            raise UserError(
                f"{key.line}: {key.key} takes whole numbers: {name}=int({value})"
                if int in takes
                else f"{key.line}: {key.key} takes no numbers"
            )
    if search == "grid" and intervals:
        raise UserError(
            f"{intervals[0].line}: an interval has no end of values, and sweep.search=grid takes them all; "
            "name them, or search by random, tpe or cmaes"
        )
    if search == "cmaes":
        named = [key for key in keys if isinstance(key, Listed) and not key.numbers]
        if named:
            raise UserError(
                f"{named[0].line}: sweep.search=cmaes takes intervals and ranges of numbers alone; tpe takes lists"
            )
        if len(keys) < 2:
            raise UserError(f"{keys[0].line}: sweep.search=cmaes takes two keys or more; tpe takes one")
    return keys


def _key(override: Override) -> Key:
    key, line = override.get_key_element(), str(override.input_line)
    value: Any = override.value()
    tags: set[str] = getattr(value, "tags", set())  # a glob has none
    log = "log" in tags and override.is_interval_sweep()
    if wrong := sorted(tags - {"log"} if override.is_interval_sweep() else tags):
        raise UserError(
            f"{line}: tag {wrong[0]} is not known here; an interval takes log: tag(log, interval(1e-4, 1e-1))"
        )
    if override.is_interval_sweep():
        low, high = value.start, value.end
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(f"{line}: an interval goes from a number to a higher one: interval(0.1, 0.5)")
        if log and low <= 0:
            raise UserError(f"{line}: with log an interval begins above 0")
        return Interval(key, line, low, high, log, isinstance(low, int) and isinstance(high, int))
    found = list(swept(override))
    is_range = override.is_range_sweep() and len(found) > 1
    if is_range:
        found.sort(key=lambda pair: pair[1])
    numbers = [number if isinstance(number, int) else float(f"{number:.12g}") for _, number in found if is_range]
    return Listed(key, line, [word for word, _ in found], numbers)


def probes(keys: Sequence[Key]) -> list[Job]:
    """Jobs that show each value once, and the ends of each interval: what is wrong with one is told before a run."""
    lists = [key.words() for key in keys]
    first = [words[0] for words in lists]
    others = ([*first[:k], word, *first[k + 1 :]] for k, words in enumerate(lists) for word in words[1:])
    return [Job(number, words) for number, words in enumerate((first, *others))]


def size(keys: Sequence[Key]) -> float:
    """How many points there are; infinity where a number may be any of an interval."""
    return math.prod(key.count() for key in keys)


def grid(keys: Sequence[Key]) -> int:
    """How many combinations lists have; UserError for more than a sweep may have jobs."""
    if (count := int(size(keys))) > MOST_JOBS:
        raise UserError(f"{count} combinations of values: a sweep has at most {MOST_JOBS} jobs")
    return count


def point(keys: Sequence[Key], number: int) -> dict[str, Any]:
    """The values of one of so many points, by key, as Optuna has them; the last key varies fastest."""
    found: dict[str, Any] = {}
    for key in reversed(keys):
        number, place = divmod(number, int(key.count()))
        found[key.key] = key.at(place)
    return found
