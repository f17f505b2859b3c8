"""The search space: keys with several values on the command line, as intervals, ranges and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from toyexp.base.errors import UserError
from toyexp.base.formatting import format_value
from toyexp.sweeps.combinations import sweep_values
from toyexp.sweeps.directory import Job


@dataclass(frozen=True)
class Key:
    """A setting that a search varies: its key, and its values as an interval, a range of numbers, or a list."""

    key: str
    line: str  # the override as typed
    settings: Sequence[str]  # an override for each value, in ascending order; for an interval, for its two ends
    numbers: Sequence[float]  # the values of `settings` as numbers; empty for a list
    is_interval: bool = False
    log: bool = False  # sample an interval on a logarithmic scale

    @property
    def is_whole(self) -> bool:
        """Whether all numbers of the setting are integers."""
        return all(isinstance(number, int) for number in self.numbers)

    def count(self) -> float:
        """Return the number of values; infinite for an interval of floats."""
        if not self.is_interval:
            return len(self.settings)
        return self.numbers[1] - self.numbers[0] + 1 if self.is_whole else math.inf

    def value(self, index: int) -> Any:
        """Return the value at `index`: a number for an interval or a range, and text for a list."""
        if self.is_interval:
            return self.numbers[0] + index
        return self.numbers[index] if self.numbers else self.settings[index].partition("=")[2]

    def distribution(self, distributions: Any) -> Any:
        """Return the distribution from which Optuna samples the values.

        `distributions` is the module optuna.distributions.
        """
        if not self.numbers:
            return distributions.CategoricalDistribution([self.value(index) for index in range(len(self.settings))])
        kind, low = distributions.IntDistribution if self.is_whole else distributions.FloatDistribution, self.numbers[0]
        if self.is_interval:
            return kind(low, self.numbers[1], log=self.log)
        step = self.numbers[1] - low
        return kind(low, self.numbers[-1], step=step if self.is_whole else float(f"{step:.12g}"))

    def setting(self, value: Any) -> str:
        """Return the override that sets the key to `value`, a value that Optuna chose.

        For a range, `value` is first rounded to the nearest number of the range.
        """
        if self.is_interval or not self.numbers:
            return f"{self.key}={format_value(value)}"
        return min(zip(self.numbers, self.settings, strict=True), key=lambda pair: abs(pair[0] - value))[1]


Types = Callable[[str], set[Any]]  # maps a key to its accepted types


def parse_space(search: str, parsed: Sequence[Override], types: Types = lambda key: set()) -> list[Key]:
    """Return the keys of the search space: all keys that have several values in the overrides `parsed`.

    `types` is a function that returns the types that the setting of a key accepts. Raise UserError if the algorithm
    `search` does not support a key.
    """
    keys = [_key(override) for override in parsed if override.is_sweep_override()]
    if not keys:
        example = "'lr=tag(log, interval(1e-4, 1e-1))'"
        raise UserError(f"sweep.search={search}: needs a key with several values or an interval, such as {example}")
    intervals = [key for key in keys if key.is_interval]
    for key in intervals:
        name, _, value = key.line.partition("=")
        if not key.is_whole and (accepted_types := types(key.key)) and not accepted_types & {float, Any}:
            accepted = f"whole numbers: {name}=int({value})" if int in accepted_types else "no numbers"
            raise UserError(f"{key.line}: {key.key} takes {accepted}")
    if search == "grid" and intervals:
        raise UserError(
            f"{intervals[0].line}: an interval has infinitely many values, too many for sweep.search=grid; "
            "list the values, or use random, tpe or cmaes"
        )
    if search == "cmaes":
        cmaes, list_keys = "sweep.search=cmaes needs", [key for key in keys if not key.numbers]
        if list_keys:
            raise UserError(f"{list_keys[0].line}: {cmaes} numeric ranges, not lists; for lists: sweep.search=tpe")
        if len(keys) < 2:
            raise UserError(f"{keys[0].line}: {cmaes} at least two keys with values; for one key: sweep.search=tpe")
    return keys


def _key(override: Override) -> Key:
    key, line = override.get_key_element(), str(override.input_line)
    value: Any = override.value()
    tags: set[str] = getattr(value, "tags", set())  # a glob has no tags
    is_interval, log = override.is_interval_sweep(), "log" in tags
    if unknown := sorted(tags - {"log"} if is_interval else tags):
        raise UserError(f"{line}: unknown tag {unknown[0]}; an interval accepts log: tag(log, interval(1e-4, 1e-1))")
    if is_interval:
        low, high = value.start, value.end
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(f"{line}: an interval needs two finite numbers, the lower one first: interval(0.1, 0.5)")
        if log and low <= 0:
            raise UserError(f"{line}: an interval with log must start above 0")
        return Key(
            key, line, [f"{key}={format_value(low)}", f"{key}={format_value(high)}"], [low, high], is_interval, log
        )
    values = list(sweep_values(override))
    is_range = override.is_range_sweep() and len(values) > 1
    if is_range:
        values.sort(key=lambda pair: pair[1])
    numbers = [number if isinstance(number, int) else float(f"{number:.12g}") for _, number in values if is_range]
    return Key(key, line, [word for word, _ in values], numbers)


def make_probes(keys: Sequence[Key]) -> list[Job]:
    """Return example jobs, whose settings are checked before the first job of a search starts.

    Each value of a list or range, and both ends of each interval, occur in at least one of these jobs.
    """
    lists = [key.settings for key in keys]
    first = [words[0] for words in lists]
    others = ([*first[:k], word, *first[k + 1 :]] for k, words in enumerate(lists) for word in words[1:])
    return [Job(number, words) for number, words in enumerate((first, *others))]


def count_points(keys: Sequence[Key]) -> float:
    """Return the number of combinations of values. It is infinite if a key has an interval of floats."""
    return math.prod(key.count() for key in keys)


def nth_point(keys: Sequence[Key], number: int) -> dict[str, Any]:
    """Return combination `number` of the values, as a dict {key: value}.

    As `number` counts up, the value of the last key changes fastest.
    """
    point_values: dict[str, Any] = {}
    for key in reversed(keys):
        number, index = divmod(number, int(key.count()))
        point_values[key.key] = key.value(index)
    return point_values
