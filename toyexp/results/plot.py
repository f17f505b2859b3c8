"""Runs side by side as a picture that one would print: their held-out curves, and how well each choice ended."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.drawing import (
    COLOURS,
    GREY,
    INK,
    LABEL,
    MARKS,
    PALE,
    SMALL,
    TITLE_LENGTH,
    Sheet,
    fit_text,
    set_log_scale,
    set_step_axis,
    use_plot_style,
)
from toyexp.base.errors import UserError
from toyexp.base.formatting import pluralise, short_keys
from toyexp.results import plot_search
from toyexp.results.comparison import Comparison, Entry, seed_of
from toyexp.results.events import History, means
from toyexp.results.found import DONE
from toyexp.results.plot_search import Search
from toyexp.results.ranking import TRAIN, Point

MOST_RUNS = 200  # that are read for one picture: the best
NAMED = len(COLOURS)  # points that have a colour and a row
POINTS = 60  # of a curve of the training loss, where nothing is held out
LISTED = 4  # values of a setting that a title names
ROW = 0.27  # inches

Steps = dict[int, float]


@dataclass
class Line:
    """The curves of one point."""

    point: Point[Entry]
    runs: list[tuple[Steps, bool]]  # of each run its values, and whether it came to its end
    mean: Steps  # over seeds, where all have a value
    deviation: Steps  # likewise, of two seeds or more

    @classmethod
    def of(cls, point: Point[Entry], column: str) -> Line:
        """Reads the events of its runs."""
        runs = [(_steps(History.of(entry.run.path), column), entry.run.state in DONE) for entry in point.jobs]
        seeds: dict[object, list[Steps]] = {}
        for entry, (curve, done) in zip(point.jobs, runs, strict=True):
            if done and curve:
                seeds.setdefault(seed_of(entry), []).append(curve)
        each = [_mean_of(curves) for curves in seeds.values()]
        mean = _mean_of(each)
        spread = {at: statistics.stdev(one[at] for one in each) for at in mean} if len(each) > 1 else {}
        return cls(point, runs, mean, spread)

    @property
    def values(self) -> list[float]:
        """All of them."""
        return [value for curve, _ in self.runs for value in curve.values()]


@use_plot_style()
def sheet(comparison: Comparison, title: str, search: Path | None = None) -> Sheet:
    """The picture of runs, or of the search that has its directory there; `title` is where the runs are.

    Raises UserError where no run has come to a score, Unavailable without matplotlib.
    """
    found = Search.of(search) if search else None
    return plot_search.drawn(found, title) if found else drawn(comparison, title)


def drawn(comparison: Comparison, place: str) -> Sheet:
    """The picture of runs as curves; `place` is where they are. UserError where no run has come to a score."""
    total = len(comparison.entries)
    comparison = comparison.best(MOST_RUNS)
    ranking = comparison.ranking
    if not any(point.values for point in ranking.points):
        raise UserError(f"{place}: no run has come to its end with a score yet; there is nothing to draw")
    lines = [Line.of(point, ranking.column) for point in ranking.points]
    named = [line for line in lines if line.point.values][:NAMED]
    rest = [line for line in lines if line not in named]
    rows = max(len(named) + bool(rest), 2)
    heights = (4.6, 0.6 + ROW * rows)
    whole = Sheet(0.5 + sum(heights), swept(comparison), _below(comparison, place, total), heights, columns=(1, 1))
    above, below = whole.panels
    low, high = _limits(lines, ranking.column)
    _curves(above, named, rest, ranking.column, (low, high))
    _ends(below, comparison, named, rest)
    return whole


def swept(comparison: Comparison) -> str:
    """What differs between the runs: of each setting its values, if they are few, and how many seeds."""
    seeds = {entry.settings["seed"] for entry in comparison.entries if "seed" in entry.settings}
    also = [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
    names = short_keys(comparison.keys)
    told = [f"{name} {_listed(comparison.values(key))}" for name, key in zip(names, comparison.keys, strict=True)]
    whole = " × ".join([*told, *also])
    return (whole if len(whole) <= TITLE_LENGTH else " × ".join([*names, *also])) or comparison.entries[0].run.name


def told(mean: float, deviation: float | None) -> str:
    """A mean in as many digits as its deviation has, which has two."""
    if not deviation:
        return f"{mean:.5g}"
    places = max(1 - math.floor(math.log10(deviation)), 0)
    return f"{mean:.{places}f} ± {deviation:.{places}f}"


def _listed(values: Sequence[str]) -> str:
    try:
        values = sorted(values, key=float)
    except ValueError:
        numbers = False
    else:
        numbers = True
    if len(values) <= LISTED:
        return ", ".join(values)
    return f"{values[0]} to {values[-1]} ({len(values)} values)" if numbers else f"{len(values)} values"


def _below(comparison: Comparison, place: str, total: int) -> str:
    """What all runs have in common, and what the picture leaves out."""
    runs = [entry.run for entry in comparison.entries]
    told = [place, pluralise(total, "run")]
    if len(runs) < total:
        told.append(f"the best {len(runs)} are shown")
    for part in ("recipe", "model", "data", "engine"):
        values = {getattr(run, part) for run in runs}
        told += values if len(values) == 1 else []
    lengths = {run.of for run in runs}
    told += [f"{length} steps" for length in lengths if length] if len(lengths) == 1 else []
    bad = [run for run in runs if run.state not in DONE]
    told += [f"{len(bad)} did not come to their end" if len(bad) > 1 else "1 did not come to its end"] if bad else []
    told += ["other data: these losses do not compare"] if comparison.ranking.other_data else []
    return " · ".join(filter(None, told))


def _steps(history: History, column: str) -> Steps:
    """The score step by step; of the training loss the means of stretches."""
    curve = history.held_out_curve(column.removeprefix("held-out "))
    steps, values = means(history.curve("loss"), POINTS) if column == TRAIN else curve
    return dict(zip(steps.round().astype(int).tolist(), values.tolist(), strict=True))


def _mean_of(curves: Sequence[Steps]) -> Steps:
    """The mean at each step at which all have a value."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {at: statistics.fmean(curve[at] for curve in curves) for at in sorted(common)}


def _limits(lines: Sequence[Line], column: str) -> tuple[float, float]:
    """From where to where values are shown: of a loss what is far above all that runs began with is left out."""
    every = [value for line in lines for value in line.values]
    if not every:  # of runs that kept no events
        return -math.inf, math.inf
    began = [curve[min(curve)] for line in lines for curve, _ in line.runs if curve]
    low, top = min(every), max(began)
    if column.endswith("loss") and max(every) > top + (top - low) / 4:
        return low, top + (top - low) / 20
    return low, max(every)


def _curves(axes: Any, named: Sequence[Line], rest: Sequence[Line], column: str, limits: tuple[float, float]) -> None:
    """Held-out scores over steps: a point's mean in its band, its runs thin; the best above all others."""
    for line in rest:
        for curve, _ in line.runs:
            axes.plot(list(curve), list(curve.values()), color=PALE, linewidth=0.7, zorder=1)
    for rank, line in reversed(list(enumerate(named))):
        colour, best = COLOURS[rank], rank == 0
        for curve, done in line.runs:
            if curve and (len(line.runs) > 1 or not done):
                axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.6, alpha=0.3, zorder=2)
            if curve and not done:  # where it broke off
                axes.plot(max(curve), curve[max(curve)], color=colour, marker="x", markersize=5, zorder=3)
        if line.deviation:
            sides = [[line.mean[at] + sign * line.deviation[at] for at in line.mean] for sign in (-1, 1)]
            axes.fill_between(list(line.mean), *sides, color=colour, alpha=0.12, linewidth=0, zorder=2)
        axes.plot(list(line.mean), list(line.mean.values()), color=colour, linewidth=2.2 if best else 1.2,
                  marker=MARKS[rank], markersize=4.5 if best else 3.5, markevery=max(len(line.mean) // 12, 1),
                  zorder=5 if best else 4)  # fmt: skip
    every = [value for line in (*named, *rest) for value in line.values]
    low, high = limits
    shown = [value for value in every if low <= value <= high]
    if set_log_scale(axes, "y", shown):
        axes.set_ylim(low * 0.9, high * 1.1)
    elif math.isfinite(high) and high > low:
        axes.set_ylim(low - (high - low) / 20, high + (high - low) / 20)
    above = sum(any(value > high for value in curve.values()) for line in (*named, *rest) for curve, _ in line.runs)
    if above:
        text = f"{pluralise(above, 'run')} {'goes' if above == 1 else 'go'} above what is shown, up to {max(every):.4g}"
        axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=SMALL, color=GREY,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})  # fmt: skip
    axes.set_ylabel(column)
    set_step_axis(axes)


def _ends(axes: Any, comparison: Comparison, named: Sequence[Line], rest: Sequence[Line]) -> None:
    """A row for each point, the best at the top: its runs, mean and deviation, and what it is."""
    axes.grid(visible=False)
    axes.grid(axis="x")
    best = comparison.ranking.best
    for rank, line in enumerate(named):
        point, colour = line.point, COLOURS[rank]
        if len(point.values) > 1:
            axes.plot(point.values, [rank] * len(point.values), color=colour, marker="|", markersize=7, alpha=0.6,
                      linestyle="none")  # fmt: skip
        axes.errorbar(point.mean, rank, xerr=point.deviation or None, color=colour, marker=MARKS[rank],
                      markersize=6 if rank == 0 else 5, linewidth=1.4)  # fmt: skip
        text = told(point.mean, point.deviation) + (", best" if line.point is best and len(named) > 1 else "")
        axes.text(1.01, rank, text, transform=axes.get_yaxis_transform(), color=INK, fontsize=LABEL, va="center",
                  fontweight="bold" if rank == 0 else "normal")  # fmt: skip
    labels = [fit_text(comparison.label(line.point.jobs[0], brief=True), 46) for line in named]
    if rest:
        labels.append(f"{pluralise(len(rest), 'other')}, grey")
        means = [line.point.mean for line in rest if line.point.values]
        if means:
            low, high = (min(means), max(means))
            axes.plot([low, high], [len(named)] * 2, color=PALE, linewidth=3, solid_capstyle="butt")
            text = f"{low:.5g}" + (f" to {high:.5g}" if len(means) > 1 else "")
        else:
            text = "without a score"
        axes.text(1.01, len(named), text, transform=axes.get_yaxis_transform(), color=GREY, fontsize=LABEL, va="center")
    axes.set_yticks(range(len(labels)), labels)
    for rank, label in enumerate(axes.get_yticklabels()):
        label.set_color(
            INK if rank < len(named) else GREY
        )  # the marks have the colours, of which some are pale in print
        label.set_fontweight("bold" if rank == 0 else "normal")
    axes.set_ylim(max(len(labels), 2) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    axes.tick_params(axis="y", length=0)
    _narrow(axes, [line.point for line in named], comparison.ranking.column)
    spread = ", mean ± deviation over seeds" if comparison.ranking.seeds else ""
    axes.set_xlabel(f"{comparison.ranking.column} at the end{spread}")


def _narrow(axes: Any, points: Sequence[Point[Entry]], column: str) -> None:
    """Where one point is far worse than the others, the others decide what is shown."""
    ends = [point.mean for point in points]
    sides = [point.mean + sign * (point.deviation or 0.0) for point in points for sign in (-1, 1)]
    reach = [*(value for point in points for value in point.values), *sides]
    best, middle = ends[0], statistics.median(ends)
    limit = best + 4 * (middle - best)
    far = [value for value in reach if abs(value - best) > abs(limit - best) > 0]
    if far:
        near = [value for value in reach if value not in far]
        pad = 0.05 * (max(near) - min(near))
        axes.set_xlim(min(near) - pad, max(near) + pad)
        for rank, mean in enumerate(ends):
            if abs(mean - best) > abs(limit - best):
                axes.plot(0.995 if mean > best else 0.005, rank, transform=axes.get_yaxis_transform(), clip_on=False,
                          marker=">" if mean > best else "<", color=COLOURS[rank], markersize=6)  # fmt: skip
