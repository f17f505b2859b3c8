"""Which jobs of a sweep did best: points, which are jobs that differ in their seed alone, in the order of a metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from toyexp.interfaces.model import lower_is_better

METRIC = "sweep.metric="
DATA = ("data", "text", "tokenizer", "tokens", "images")  # digests of the data; `data` alone decides whether it differs
ASIDE = (*DATA[1:], "vocabulary")  # digests by which no point differs: `data` covers them
TRAIN = "smoothed train loss"  # what decides where nothing is held out


class Scored(Protocol):
    """What is asked of a job."""

    number: int
    overrides: list[str]
    status: Any
    result: dict[str, Any]


J = TypeVar("J", bound=Scored)


def mean(values: Iterable[float | None]) -> float | None:
    """Of what there is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@dataclass
class Point(Generic[J]):
    """The jobs of one choice of values."""

    label: str
    jobs: list[J] = field(default_factory=list)  # those that completed come first, the best at the head
    values: list[float] = field(default_factory=list)  # of those that completed, one for each seed
    repeats: int = 0  # of those, runs of a seed beyond its first, whose values are one: their mean

    @cached_property
    def mean(self) -> float:
        """Over the seeds; NaN where none has completed."""
        return math.nan if (found := mean(self.values)) is None else found

    @cached_property
    def deviation(self) -> float | None:
        """The standard deviation of a sample, over n-1; None for fewer than two seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        form = ".4f" if abs(self.mean) < 1e7 else ".4g"
        spread = "" if self.deviation is None else f" ± {self.deviation:{form}}"
        return f"{self.mean:{form}}{spread}" if self.values else "-"


def sources_of(job: Scored) -> Mapping[str, str]:
    """Return the digests of the data and files that a job read, by role; empty for a run that recorded none."""
    return job.result.get("sources") or {}


@dataclass
class Ranking(Generic[J]):
    """The points of a sweep, the best first; those without a number at the end, in their order."""

    column: str  # of the summary: held-out loss, held-out accuracy, TRAIN
    points: list[Point[J]]
    apart: list[str] = field(default_factory=list)  # roles of sources that changed among jobs of the same settings

    @property
    def best(self) -> Point[J] | None:
        """The first point, if it has a number and all points were evaluated on the same data."""
        return self.points[0] if self.points and self.points[0].values and not self.other_data else None

    @cached_property
    def other_data(self) -> list[str]:
        """In which digests the data of points with a number differ; empty if their losses compare."""
        each = [sources_of(point.jobs[0]) for point in self.points if point.values]
        differ = [role for role in DATA if len({one[role] for one in each if role in one}) > 1]
        return differ if "data" in differ else []

    def notes(self) -> list[str]:
        """Return what a reader of these numbers has to know about the data and files behind them."""
        told = []
        if self.apart:
            told.append(f"{' and '.join(self.apart)} changed between runs of equal settings: counted apart by digest")
        if self.other_data:
            differ = ", ".join(self.other_data[1:] or self.other_data)
            told.append(f"the data differ between points ({differ}): their losses do not compare")
        if self.best and (tied := sum(point.mean == self.best.mean for point in self.points)) > 1:
            told.append(f"{tied} points are equally good; the first of them is marked as best")
        return told

    @property
    def seeds(self) -> bool:
        """Whether a mean is one of several."""
        return any(len(point.values) > 1 for point in self.points)

    def jobs(self) -> list[tuple[J, Point[J]]]:
        """All jobs in that order, each with its point; what has not completed comes last, by number."""
        pairs = [(job, point) for point in self.points for job in point.jobs]
        done = [pair for pair in pairs if pair[0].status == "completed" and pair[1].values]
        numbers = {job.number for job, _ in done}
        return done + sorted((pair for pair in pairs if pair[0].number not in numbers), key=lambda pair: pair[0].number)

    def table(self) -> list[tuple[str, ...]]:
        """A head, and a row for each point."""
        rows: list[tuple[str, ...]] = [("settings", "seeds", self.column, "")]
        for point in self.points:
            mark = "best" if point is self.best else ""
            rows.append((point.label or "-", str(len(point.values)), str(point), mark))
        return rows


def ranked(
    jobs: Iterable[J], own: Sequence[str] = (), seed: Callable[[J], object] = lambda job: job.number
) -> Ranking[J]:
    """Jobs in the order of the metric among the sweep's `own` settings, by default their held-out loss.

    Those of a point that have one `seed` count once; in a sweep no two have.
    """
    jobs = list(jobs)
    metric = next((word.removeprefix(METRIC) for word in reversed(own) if word.startswith(METRIC)), "loss")
    column = "held-out loss" if metric == "ppl" else f"held-out {metric}"
    if all(_value(job, column) is None for job in jobs):
        metric, column = "loss", "held-out loss"
    if all(_value(job, column) is None for job in jobs):
        column = TRAIN
    sign = 1 if lower_is_better(metric) else -1
    alike: dict[tuple[str, ...], list[J]] = {}
    for job in jobs:
        own_words = tuple(word for word in job.overrides if word.partition("=")[0] != "seed")
        alike.setdefault(own_words, []).append(job)
    found: dict[tuple[str, ...], Point[J]] = {}
    apart: dict[str, None] = {}
    for words, some in alike.items():
        roles = dict.fromkeys(role for job in some for role in sources_of(job) if role not in ASIDE)
        changed = [role for role in roles if len({s[role] for job in some if role in (s := sources_of(job))}) > 1]
        apart |= dict.fromkeys(changed)
        for job in some:
            marks = [f"{role}#{sources_of(job)[role][:8]}" for role in changed if role in sources_of(job)]
            found.setdefault((*words, *marks), Point(" ".join((*words, *marks)))).jobs.append(job)
    for point in found.values():
        known = {job.number: value for job in point.jobs if (value := _value(job, column)) is not None}
        point.jobs.sort(key=lambda job: (job.number not in known, sign * known.get(job.number, 0.0)))
        of_seeds: dict[object, list[float]] = {}
        for job in sorted(point.jobs, key=lambda job: job.number):
            if job.number in known:
                of_seeds.setdefault(seed(job), []).append(known[job.number])
        point.values = [some[0] if len(some) == 1 else statistics.fmean(some) for some in of_seeds.values()]
        point.repeats = len(known) - len(point.values)
    points = sorted(found.values(), key=lambda p: (not p.values, sign * p.mean if p.values else 0.0))
    return Ranking(column, points, [*apart])


def _value(job: Scored, column: str) -> float | None:
    """What a job that completed has in a column, where that is a number."""
    result: Mapping[str, Any] = job.result if job.status == "completed" else {}
    name = column.removeprefix("held-out ")
    found = {TRAIN: result.get("train_loss"), "loss": result.get("eval_loss"), **(result.get("eval_scores") or {})}
    value = found.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
