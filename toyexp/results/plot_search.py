"""Draw a hyperparameter search for print: the metric by trial, and against each setting that was searched."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toyexp.base.drawing import (
    AMBER,
    BAND,
    BLUE,
    GREY,
    TITLE_LENGTH,
    Sheet,
    caption,
    fit_text,
    format_number,
    set_log_scale,
)
from toyexp.base.errors import UserError
from toyexp.base.formatting import format_metric, format_value, pluralise, short_keys
from toyexp.interfaces.model import lower_is_better
from toyexp.results.run_dirs import sweep_overrides
from toyexp.training.checkpoint import matches_type, read_json_or_empty

SEARCH_FILE = "search.json"
MAX_PANELS = 6  # settings with a panel; the most important ones
PANELS_PER_ROW = 3
MAX_NAMES = 12  # values that are shown of a setting that is not numeric
CUT = 0.4  # height of the logarithmic part of an axis, as a fraction of its linear part
RASTER_TRIALS = 500  # with more trials, an SVG contains the dots as a bitmap


@dataclass(frozen=True)
class Trial:
    """A trial of a search: a value for each searched setting, and the score that the trial reached."""

    number: int
    values: Mapping[str, Any]
    is_complete: bool
    score: float | None  # final metric; of a pruned trial, the last metric; None if there is none
    step: int | None  # step of a pruned trial's score; None in files of older versions


@dataclass(frozen=True)
class Search:
    """Result of a search, read from its directory."""

    algorithm: str  # tpe, random, ...
    metric: str
    repeats: int  # runs of each trial, which differ in their seed
    trials: Sequence[Trial]
    importances: Mapping[str, float]
    no_importances: str  # reason if there are none
    notes: Sequence[str]  # reasons why scores cannot be compared
    log_keys: Set[str]  # settings on a logarithmic scale, such as lr=tag(log, interval(1e-4, 1e-1))

    @classmethod
    def read(cls, directory: Path) -> Search | None:
        """Read the result of a finished search; return None for any other directory."""
        record = {"notes": [], "no_importances": "", "trials": [], **read_json_or_empty(directory / SEARCH_FILE)}
        hints = {"search": str, "metric": str, "repeats": int, "importances": Mapping[str, float], "notes": list[str],
                 "no_importances": str, "trials": list[Mapping[str, Any]]}  # fmt: skip
        of_each = {"trial": int, "values": Mapping[str, Any], "state": str, "score": float | int | None,
                   "step": int | None}  # fmt: skip
        if not all(matches_type(record.get(name), hint) for name, hint in hints.items()):
            return None
        if not all(matches_type(row.get(name), hint) for row in record["trials"] for name, hint in of_each.items()):
            return None
        trials = [
            Trial(row["trial"], row["values"], row["state"] == "complete", row["score"], row.get("step"))
            for row in record["trials"]
        ]
        parted = [line.partition("=") for line in sweep_overrides(directory, "space")]
        by_magnitude = {key.lstrip("+") for key, _, value in parted if re.match(r"tag\(\s*log\b", value)}
        return cls(
            record["search"], record["metric"], record["repeats"], trials, record["importances"],
            record["no_importances"], record["notes"], by_magnitude,
        )  # fmt: skip

    @property
    def keys(self) -> list[str]:
        """Keys of the settings that were searched, the most important first."""
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial.values))
        return sorted(keys, key=lambda key: -self.importances.get(key, 0.0))

    def slots(self, key: str) -> list[str]:
        """Return the values of a setting if the plot gives each value a place on the axis, as for categories.

        Return [] if the axis is numeric. Numbers are shown like categories if most trials repeat the number of another
        trial, which means that the numbers were chosen from a list.
        """
        values = [trial.values[key] for trial in self.trials if key in trial.values]
        are_numbers = all(matches_type(value, float | int) for value in values)
        names = list(dict.fromkeys(map(format_value, sorted(values, key=None if are_numbers else format_value))))
        return names[:MAX_NAMES] if not are_numbers or 2 * len(names) <= len(values) else []

    @property
    def is_minimising(self) -> bool:
        """True if a lower metric is better."""
        return lower_is_better(self.metric)

    @property
    def completed(self) -> list[Trial]:
        """Trials that completed with a score."""
        return [trial for trial in self.trials if trial.is_complete and trial.score is not None]

    @cached_property
    def limits(self) -> tuple[float, float, float, float]:
        """The better and the worse end of the axis's linear part, the end of its logarithmic part, the worst metric.

        The linear part leaves out trials that are much worse than the better half of the completed ones. If there are
        such trials, completed or pruned, the logarithmic part shows them; see `place`.
        """
        sign = 1 if self.is_minimising else -1
        costs = sorted(sign * (trial.score or 0.0) for trial in self.completed) or [0.0]
        every = [sign * trial.score for trial in self.trials if trial.score is not None] or [0.0]
        best, middle = costs[0], statistics.median(costs)
        worst = max((cost for cost in costs if cost <= best + 4 * (middle - best)), default=best)
        pad = 0.06 * (worst - best) or 0.05 * abs(best) or 1.0
        low, high = min(best, *every) - 2 * pad, worst + pad  # more room for the star at the best
        end = high + CUT * (high - low) * (max(every) > high)
        return sign * low, sign * high, sign * end, sign * max(every)

    def place(self, score: float) -> float:
        """Return a metric's coordinate on the axis: the metric itself, or a compressed one in the logarithmic part.

        There, the coordinate grows with the logarithm of 1 plus the distance from the linear part, in units of the
        length of that part. The worst metric is near the end.
        """
        better, worse, end, worst = self.limits
        excess, most = (math.log1p(max((value - worse) / (worse - better), 0.0)) for value in (score, worst))
        return worse + 0.85 * (end - worse) * excess / most if excess else score

    @property
    def cut_ticks(self) -> list[tuple[float, str]]:
        """Coordinates and labels of two ticks in the logarithmic part of the axis; [] if it has no such part.

        The ticks are near the middle of the part and near the worst metric, at numbers with as few digits as possible.
        """
        better, worse, end, worst = self.limits
        if end == worse:
            return []
        middle = worse + (worse - better) * (math.sqrt(1 + (worst - worse) / (worse - better)) - 1)
        room = 0.15 * abs(end - worse)
        rounded = [[float(f"{value:.{digits}g}") for digits in range(1, 18)] for value in (middle, worst)]
        ticks = [next(v for v in some if abs(self.place(v) - self.place(some[-1])) < room) for some in rounded]
        return [(self.place(tick), format_number(tick, 6)) for tick in ticks]

    @property
    def pruning_steps(self) -> tuple[int, int]:
        """First and last step of a pruned trial's metric; (0, 0) if unknown."""
        steps = [trial.step for trial in self.trials if not trial.is_complete and trial.step is not None] or [0]
        return min(steps), max(steps)

    def describe_pruning(self) -> list[str]:
        """Return the parts of a legend that say how a chart shows pruned trials and the compressed range."""
        first, last = self.pruning_steps
        pruned = sum(not trial.is_complete and trial.score is not None for trial in self.trials)
        steps = f" at steps {first} to {last}, stronger: later" if first < last else f" at step {last}"
        rings = f"rings: {pluralise(pruned, 'trial')} pruned{steps if last else ''}"
        return [rings] * (pruned > 0) + ["grey band: logarithmic"] * bool(self.cut_ticks)

    def describe(self) -> str:
        """Return a title: the algorithm, the searched settings and the number of trials."""
        names, after = short_keys(self.keys), f": {pluralise(len(self.trials), 'trial')}"
        title = f"{self.algorithm} search of {', '.join(names)}{after}"
        return title if len(title) <= TITLE_LENGTH else f"{self.algorithm} search of {len(names)} settings{after}"


def draw_search(search: Search, source: str, unit: str) -> Sheet:
    """Draw a search; `source` names its directory, `unit` is the unit of its metric.

    Raise UserError if no trial has a score.
    """
    if not search.completed:
        raise UserError(f"{source}: no trial of this search has a score yet; there is nothing to draw")
    best = (min if search.is_minimising else max)(search.completed, key=lambda trial: trial.score or 0.0)
    keys, names = search.keys[:MAX_PANELS], short_keys(search.keys)
    rows = -(-len(keys) // PANELS_PER_ROW)
    pairs = zip(search.keys, short_keys(search.keys), strict=True)
    settings = " ".join(f"{name}={format_value(best.values[key])}" for key, name in pairs if key in best.values)
    title = f"Best held-out {search.metric} {format_metric(best.score)}: {settings}"
    sheet = Sheet(0.5 + 3.2 + 2.4 * rows, title, " · ".join(_footer(search, source, keys)),
                  [3.2] + [2.4] * rows, columns=[1] + [min(len(keys), PANELS_PER_ROW)] * rows)  # fmt: skip
    above, *panels = sheet.panels
    _draw_trials(above, search, best)
    for number, (axes, key) in enumerate(zip(panels, keys, strict=False)):
        _draw_setting(axes, search, key, names[number], best)
        axes.tick_params(labelleft=number % PANELS_PER_ROW == 0)
    above.set_ylabel(f"held-out {search.metric}{unit}")
    for axes in panels[::PANELS_PER_ROW]:
        axes.set_ylabel(f"held-out {search.metric}")
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    return sheet


def _footer(search: Search, source: str, keys: Sequence[str]) -> list[str]:
    parts = [
        search.describe(),
        source,
        *search.notes,
        f"{search.repeats} seeds a trial, their mean" if search.repeats > 1 else "",
    ]
    parts += search.describe_pruning()
    unscored = sum(trial.score is None for trial in search.trials)
    parts += [f"importance for the ranking of {len(search.trials)} trials"] if search.importances else []
    parts += [f"{unscored} without a score"] if unscored else []
    hidden_keys = [key for key in search.keys if key not in keys]
    parts += [f"not shown: {', '.join(hidden_keys)}"] if hidden_keys else []
    parts += ["dots of one value: left to right by trial"] if any(map(search.slots, keys)) else []
    return [part for part in parts if part]


def _draw_dots(axes: Any, search: Search, positions: Mapping[int, float], best: Trial) -> None:
    """Draw a dot for each trial at its place in `positions`, which maps trial numbers to x coordinates.

    Pruned trials have a metric of an earlier step; they are drawn as rings, the darker the later they were pruned. A
    star marks the best trial.
    """
    first, last = search.pruning_steps
    dots = [(positions[trial.number], search.place(trial.score), BLUE if trial.is_complete else "none",
             BLUE if trial.is_complete else (GREY, 1 - 0.35 * (last - (trial.step or first)) / max(last - first, 1)))
            for trial in sorted(search.trials, key=lambda trial: trial.is_complete)
            if trial.score is not None and trial.number in positions]  # fmt: skip
    if dots:
        x, y, faces, edges = zip(*dots, strict=True)
        axes.scatter(x, y, s=20, facecolors=faces, edgecolors=edges, clip_on=False, zorder=3,
                     rasterized=len(search.trials) > RASTER_TRIALS)  # fmt: skip
    better, worse, end, _ = search.limits
    axes.set_ylim(*sorted((better, worse)))
    if cut := search.cut_ticks:
        ticks = [tick for tick in axes.get_yticks() if min(better, worse) <= tick <= max(better, worse)]
        labels = axes.yaxis.get_major_formatter().format_ticks(ticks)
        axes.set_yticks([*ticks, *(at for at, _ in cut)], [*labels, *(text for _, text in cut)])
        axes.axhspan(worse, end, color=BAND, linewidth=0)
        axes.set_ylim(*sorted((better, end)))
    if best.number in positions:
        axes.plot(positions[best.number], best.score, marker="*", markersize=13, markerfacecolor="none",
                  markeredgecolor=AMBER, markeredgewidth=1.3, zorder=5, clip_on=False)  # fmt: skip


def _draw_trials(axes: Any, search: Search, best: Trial) -> None:
    axes.margins(x=0.02)
    _draw_dots(axes, search, {trial.number: trial.number for trial in search.trials}, best)
    scores = (trial.score or 0.0 for trial in search.completed)
    so_far = [*map(search.place, itertools.accumulate(scores, min if search.is_minimising else max))]
    numbers = [trial.number for trial in search.completed]
    last = max(trial.number for trial in search.trials)
    axes.step([*numbers, last], [*so_far, so_far[-1]], where="post", color=AMBER, linewidth=1.6)
    caption(axes, f"line: best so far; star: best trial, {best.number}", AMBER, "left")
    axes.set_xlabel("trial")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_setting(axes: Any, search: Search, key: str, name: str, best: Trial) -> None:
    trials = [trial for trial in search.trials if key in trial.values]
    values, slots = [trial.values[key] for trial in trials], search.slots(key)
    if not slots:
        if key not in search.log_keys or not set_log_scale(axes, "x", values):
            axes.locator_params(axis="x", nbins=4)
        positions = {trial.number: float(value) for trial, value in zip(trials, values, strict=True)}
    else:
        # Spread equal values by trial number, so that dots do not overlap.
        positions = {
            trial.number: slots.index(format_value(value)) + 0.5 * trial.number / max(len(search.trials) - 1, 1) - 0.25
            for trial, value in zip(trials, values, strict=True)
            if format_value(value) in slots
        }
        labels = [fit_text(text, 14) for text in slots]
        axes.set_xticks(range(len(labels)), labels, rotation=30 if sum(map(len, labels)) > 24 else 0)
        axes.set_xlim(-0.5, len(slots) - 0.5)
        for border in range(1, len(slots)):
            axes.axvline(border - 0.5, color=GREY, linewidth=0.3)
    _draw_dots(axes, search, positions, best)
    share = search.importances.get(key)
    matters = f"\n(importance {share:.0%})" if share is not None else ""
    axes.set_xlabel(f"{fit_text(name, 26)}{matters}")
