"""Rank the jobs of a sweep by a metric.

Jobs that differ only in their seed form a point. Points are ranked by the mean over their jobs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from toyexp.interfaces.model import lower_is_better

METRIC = "sweep.metric="
DATA = ("data", "text", "tokenizer", "tokens", "images")  # names of digests; `data` decides whether data differ
LOSS = "loss"  # name of the digest of an objective whose held-out loss is no cross-entropy
UNCOMPARED_DIGESTS = (*DATA[1:], "vocabulary", LOSS)  # do not separate points: `data` or settings cover them
SCALED = ("loss", "ppl", "margin")  # metrics whose scale depends on the objective
TRAIN = "smoothed train loss"  # the metric if there is no held-out data
TOO_LARGE = 1e300  # numbers from here on count as infinite: their sums and spans would overflow


class Scored(Protocol):
    """Protocol of jobs that can be ranked."""

    number: int
    overrides: list[str]
    status: Any
    result: dict[str, Any]


J = TypeVar("J", bound=Scored)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values, except None and values of magnitude TOO_LARGE or more; None if none is left."""
    numbers = [value for value in values if value is not None and abs(value) < TOO_LARGE]
    return statistics.fmean(numbers) if numbers else None


@dataclass
class Point(Generic[J]):
    """Jobs that differ only in their seed."""

    label: str
    jobs: list[J] = field(default_factory=list)  # completed jobs come first, the best at the head
    values: list[float] = field(default_factory=list)  # one value for each seed with a completed job
    repeats: int = 0  # completed runs beyond the first of each seed; a seed's value is the mean of all its runs

    @cached_property
    def mean(self) -> float:
        """Mean of the metric over the seeds; NaN if no job has completed."""
        return math.nan if (value := mean(self.values)) is None else value

    @cached_property
    def deviation(self) -> float | None:
        """Sample standard deviation of the metric over the seeds (divisor n - 1); None for fewer than two seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def diverged(self) -> str:
        """How many completed jobs diverged, such as "2 of 3 diverged"; "diverged" for a single job, "" for none."""
        return _count([bool(job.result.get("diverged")) for job in self.jobs if job.status == "completed"], "diverged")

    @property
    def state(self) -> str:
        """How many jobs diverged or, if none has completed, failed; "" for none."""
        return self.diverged if self.values else _count([job.status == "failed" for job in self.jobs], "failed")

    def __str__(self) -> str:
        form = "z.4f" if max(abs(self.mean), self.deviation or 0.0) < 1e7 else ".4g"
        spread = "" if self.deviation is None else f" ± {self.deviation:{form}}"
        return f"{self.mean:{form}}{spread}" if self.values else "-"


def _count(flags: Sequence[bool], word: str) -> str:
    return f"{sum(flags)} of {len(flags)} {word}" if any(flags) and len(flags) > 1 else word if any(flags) else ""


def job_sources(job: Scored) -> Mapping[str, str]:
    """Return the digests of the data and files that a job read; {} if the job recorded none.

    The keys name what was read, such as `data`.
    """
    return job.result.get("sources") or {}


@dataclass
class Ranking(Generic[J]):
    """Points of a sweep, the best first. A point consists of the jobs that differ only in their seed.

    Points without a result come last, sorted by their number of steps, the highest number first.
    """

    column: str  # column of the summary: held-out loss, held-out accuracy, TRAIN
    points: list[Point[J]]
    changed_sources: list[str] = field(default_factory=list)  # digests that differ between jobs with equal settings

    @property
    def best(self) -> Point[J] | None:
        """The best point (settings averaged over seeds); None without results or if the points cannot be compared."""
        return self.points[0] if self.points and self.points[0].values and not self.conflict else None

    @cached_property
    def conflict(self) -> str:
        """Reason why the values of the points cannot be compared: other data or losses; "" if they can."""
        sources = [job_sources(point.jobs[0]) for point in self.points if point.values]
        differ = [role for role in DATA if len({digests[role] for digests in sources if role in digests}) > 1]
        subjects = ["data"] if "data" in differ else []
        if self.column.endswith(SCALED) and len({digests.get(LOSS) for digests in sources}) > 1:
            subjects.append("objectives")
        detail = f" ({', '.join(differ[1:] or differ)})" if "data" in differ else ""
        return f"the {' and '.join(subjects)} differ between points{detail}" if subjects else ""

    @property
    def marked(self) -> Point[J] | None:
        """The point that tables mark as best; None if fewer than two points have results."""
        return self.best if sum(bool(point.values) for point in self.points) > 1 else None

    def mark(self, point: Point[J]) -> str:
        """Return a point's last cell in tables: how many of its jobs diverged or failed, and whether it is best."""
        return "  ".join(filter(None, [point.state, "best" if point is self.marked else ""]))

    @property
    def caption(self) -> str:
        """Line that says what the numbers after ± are."""
        included = ", including diverged ones" if any(point.diverged for point in self.points) else ""
        return f"mean ± standard deviation (over n-1) of the completed runs{included}"

    def notes(self) -> list[str]:
        """Return notes about changed or differing data and files, and about points that are equally good."""
        notes = []
        if changed := " and ".join(self.changed_sources):
            notes.append(f"{changed} changed between runs of equal settings, which form separate points")
        if self.conflict:
            scores = [point.jobs[0].result.get("eval_scores") or {} for point in self.points if point.values]
            shared = [name for name in scores[0] if name not in SCALED and all(name in other for other in scores)]
            metric = shared[0] if shared and "data" not in self.conflict else ""
            hint = f"; to rank them by {metric}: toyexp compare SWEEP --metric {metric}" if metric else ""
            name = "margins" if self.column.endswith("margin") else "losses"
            notes.append(f"{self.conflict}: their {name} cannot be compared{hint}")
        if self.best and (tied := sum(point.mean == self.best.mean for point in self.points)) > 1:
            notes.append(f"{tied} points are equally good; the first of them is marked as best")
        return notes

    @property
    def has_seeds(self) -> bool:
        """True if any point has completed jobs with several seeds."""
        return any(len(point.values) > 1 for point in self.points)

    def jobs(self) -> list[tuple[J, Point[J]]]:
        """Return each job with its point (the jobs that differ only in their seed), the best first.

        Jobs that have not completed come last. They are in the order of their points: by steps, then by the metric.
        """
        pairs = [(job, point) for point in self.points for job in point.jobs]
        done = [pair for pair in pairs if pair[0].status == "completed" and pair[1].values]
        numbers = {job.number for job, _ in done}
        rest = [pair for pair in pairs if pair[0].number not in numbers]
        return done + sorted(rest, key=lambda pair: pair[0].status != "completed")

    def table(self) -> list[tuple[str, ...]]:
        """Return rows of text: a header, and for each point its settings, seeds, mean ± deviation, and mark."""
        rows: list[tuple[str, ...]] = [("settings", "seeds", self.column, "")]
        rows += [(p.label or "-", str(len(p.values)), str(p), self.mark(p)) for p in self.points]
        return rows


def rank_jobs(
    jobs: Iterable[J], overrides: Sequence[str] = (), seed: Callable[[J], object] = lambda job: job.number
) -> Ranking[J]:
    """Group jobs that differ only in their seed into points; rank these by the metric that the `overrides` name.

    The default metric is the held-out loss, or the training loss if no job has a held-out loss. `seed(job)` returns a
    job's seed. Jobs of a point with the same seed count as one job, with the mean of their metrics. By default each job
    counts on its own.
    """
    jobs = list(jobs)
    metric = next((word.removeprefix(METRIC) for word in reversed(overrides) if word.startswith(METRIC)), "loss")
    column = "held-out loss" if metric == "ppl" else f"held-out {metric}"
    if all(metric_value(job, column) is None for job in jobs):
        metric, column = "loss", "held-out loss"
    if all(metric_value(job, column) is None for job in jobs):
        column = TRAIN
    sign = 1 if lower_is_better(metric) else -1
    settings_groups: dict[tuple[str, ...], list[J]] = {}
    for job in jobs:
        own_words = tuple(word for word in job.overrides if word.partition("=")[0] != "seed")
        settings_groups.setdefault(own_words, []).append(job)
    points_by_words: dict[tuple[str, ...], Point[J]] = {}
    changed_roles: dict[str, None] = {}
    for words, group in settings_groups.items():
        roles = dict.fromkeys(role for job in group for role in job_sources(job) if role not in UNCOMPARED_DIGESTS)
        changed = [role for role in roles if len({s[role] for job in group if role in (s := job_sources(job))}) > 1]
        changed_roles |= dict.fromkeys(changed)
        for job in group:
            marks = [f"{role}#{job_sources(job)[role][:8]}" for role in changed if role in job_sources(job)]
            points_by_words.setdefault((*words, *marks), Point(" ".join((*words, *marks)))).jobs.append(job)
    for point in points_by_words.values():
        job_values = {job.number: value for job in point.jobs if (value := metric_value(job, column)) is not None}
        point.jobs.sort(key=lambda job: (job.number not in job_values, sign * job_values.get(job.number, 0.0)))
        by_seed: dict[object, list[float]] = {}
        for job in sorted(point.jobs, key=lambda job: job.number):
            if job.number in job_values:
                by_seed.setdefault(seed(job), []).append(job_values[job.number])
        point.values = [values[0] if len(values) == 1 else statistics.fmean(values) for values in by_seed.values()]
        point.repeats = len(job_values) - len(point.values)

    def order(point: Point[J]) -> tuple[float, ...]:
        if point.values:
            return 0, sign * point.mean
        steps = max(job.result.get("steps") or 0 for job in point.jobs)
        last = [value for job in point.jobs if (value := metric_value(job, column, is_last=True)) is not None]
        return 1, -steps, min((sign * value for value in last), default=math.inf)

    return Ranking(column, sorted(points_by_words.values(), key=order), [*changed_roles])


def metric_value(job: Scored, column: str, is_last: bool = False) -> float | None:
    """Return a job's value in a column, such as `held-out loss`; None if there is none or it is not finite.

    If the job has not completed, return its last value if `is_last` is True, and None otherwise.
    """
    result: Mapping[str, Any] = job.result if is_last or job.status == "completed" else {}
    name = column.removeprefix("held-out ")
    numbers = {TRAIN: result.get("train_loss"), "loss": result.get("eval_loss"), **(result.get("eval_scores") or {})}
    value = numbers.get(name)
    return float(value) if value is not None and abs(value) < TOO_LARGE else None
