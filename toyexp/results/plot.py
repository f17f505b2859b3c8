"""Draw runs as a figure for print: their held-out curves, and their final metric.

Runs that differ only in their seed form a point, which has one colour and one row.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.drawing import (
    COLOURS,
    GREY,
    INK,
    MARKS,
    PALE,
    SMALL,
    TITLE_LENGTH,
    Sheet,
    find_divergence,
    fit_text,
    fit_y_axis,
    format_number,
    mark_above,
    set_step_axis,
    use_plot_style,
)
from toyexp.base.errors import UserError
from toyexp.base.formatting import describe_parameters, display_path, pluralise, short_keys
from toyexp.base.run_plot import FAILED, Curves, Points, draw_curves, loss_unit
from toyexp.results import plot_search
from toyexp.results.comparison import Comparison, Entry, seed_key
from toyexp.results.events import Curve, History, average_bins, read_run_facts
from toyexp.results.plot_search import Search
from toyexp.results.ranking import TRAIN, Point
from toyexp.results.run_dirs import FINAL_STATES, find_runs

MOST_RUNS = 200  # runs in one picture; the best are drawn
MAX_POINTS = len(COLOURS)  # points with a colour and a row; the others are grey
CURVE_POINTS = 60  # averaged values of a training curve, drawn if there is no held-out data
MAX_VALUES = 4  # values of a setting that the title lists
ROW_INCHES = 0.27

Steps = dict[int, float]  # values of a curve by step


@dataclass
class Line:
    """Curves of one point, which is a group of runs that differ only in their seed."""

    point: Point[Entry]
    runs: list[tuple[Steps, bool]]  # values of each run, and whether it completed
    mean: Steps  # over seeds, at the steps that the curves of all seeds have
    band: dict[int, tuple[float, float]]  # mean ± deviation within the extremes of the seeds; empty for a single seed

    @classmethod
    def read(cls, point: Point[Entry], column: str) -> Line:
        """Read the curves of `column` from the events of a point's runs, and average them over seeds."""
        runs = [
            (_read_curve(History.read(entry.run.path), column), entry.run.state in FINAL_STATES) for entry in point.jobs
        ]
        seeds: dict[object, list[Steps]] = {}
        for entry, (curve, is_complete) in zip(point.jobs, runs, strict=True):
            if is_complete and curve:
                seeds.setdefault(seed_key(entry), []).append(curve)
        averages = [_average(curves) for curves in seeds.values()]
        mean = _average(averages)
        values = {at: [curve[at] for curve in averages] for at in mean} if len(averages) > 1 else {}
        spread = {at: statistics.stdev(some) for at, some in values.items()}
        band = {at: (max(mean[at] - spread[at], min(some)), min(mean[at] + spread[at], max(some)))
                for at, some in values.items()}  # fmt: skip
        return cls(point, runs, mean, band)

    @property
    def values(self) -> list[float]:
        """Values of all runs at all steps."""
        return [value for curve, _ in self.runs for value in curve.values()]


@use_plot_style()
def draw_sheet(comparison: Comparison, title: str, search: Path | None = None) -> Sheet:
    """Draw the compared runs, or the search in the directory `search`. `title` names the directories of the runs.

    Raise UserError if no run has a final metric, and Unavailable without matplotlib.
    """
    if search and (result := Search.read(search)):
        unit = describe_unit(next(find_runs(search), search), result.metric)
        return plot_search.draw_search(result, title, unit)
    return draw_run(comparison.entries[0]) if len(comparison.entries) == 1 else draw_runs(comparison, title)


def draw_run(entry: Entry) -> Sheet:
    """Draw the curves of one run, as its callback `plots` does. Raise UserError if no step is recorded."""
    run, history, curves = entry.run, History.read(entry.run.path), Curves()
    if not len(history.step):
        raise UserError(f"{display_path(run.path)}: {run.unread or 'no step is recorded'}; there is nothing to draw")
    curves.describe(entry.facts, run.name, run.recipe, run.engine, run.batch_size, run.lr, run.seed)
    steps = history.step.tolist()
    for name in ("lr", *history.logged):
        curves.steps[name] = _to_points(history.curve(name))
    for name in ("loss", "grad_norm"):  # with the steps at which they were not finite
        curves.steps[name] = steps, history[name].tolist()
    for name in history.held_out:
        if name != "step" and len((scores := history.held_out_curve(name))[0]):
            curves.held_out[name] = _to_points(scores)
    curves.warnings = {event["step"]: event["about"] for event in history.warnings if event["step"] is not None}
    if steps[-1] < (run.of or 0) and run.state != "running":
        curves.early_end = steps[-1], run.state if run.state == FAILED else run.why or run.state
    return draw_curves(curves)


def _to_points(curve: Curve) -> Points:
    return curve[0].tolist(), curve[1].tolist()


def draw_runs(comparison: Comparison, source: str) -> Sheet:
    """Draw runs as curves; `source` names their directories. Raise UserError if no run has a final metric."""
    total = len(comparison.entries)
    comparison = comparison.best(MOST_RUNS)
    ranking = comparison.ranking
    if not any(point.values for point in ranking.points):
        raise UserError(f"{source}: no run has completed with a metric yet; there is nothing to draw")
    lines = [Line.read(point, ranking.column) for point in ranking.points]
    coloured = [line for line in lines if line.point.values][:MAX_POINTS]
    rest = [line for line in lines if line not in coloured]
    others = [line for line in rest if any(is_complete for _, is_complete in line.runs)]
    stopped = [entry for line in lines for entry in line.point.jobs if entry.run.state not in FINAL_STATES]
    unit = describe_unit(comparison.entries[0].run.path, ranking.column)
    rows = max(len(coloured) + bool(others) + bool(stopped), 2)
    heights = [4.6, 0.75 + ROW_INCHES * rows]
    picture = Sheet(0.5 + sum(heights), describe_best(comparison), _footer(comparison, source, total), heights, [1, 1])
    above, below = picture.panels
    limits = _limits(lines, ranking.column)
    _draw_curves(above, coloured, rest, limits)
    above.set_ylabel(ranking.column + unit)
    _draw_ends(below, comparison, coloured, others, stopped)
    _clip_outliers(below, [line.point for line in coloured], limits[1])
    spread = "\nmean ± standard deviation over seeds" if ranking.has_seeds else ""
    below.set_xlabel(f"{ranking.column} at the end{unit}{spread}")
    return picture


def describe_unit(run: Path, metric: str) -> str:
    """Return a loss's unit with a leading blank, such as " (nats per token)"; return "" for any other metric."""
    data = read_run_facts(run).get("data") or {}
    return f" (nats per {loss_unit(data)})" if metric.endswith("loss") else ""


def describe_best(comparison: Comparison) -> str:
    """Return a title with the best metric and its settings; if the points cannot be ranked, what was varied."""
    best, column = comparison.ranking.best, comparison.ranking.column
    if best is None:
        return describe_sweep(comparison)
    result = f"{column} {best}"
    if len(comparison.ranking.points) == 1:
        return f"{describe_sweep(comparison)}: {best.state or result}"
    return f"Best {result}: {' '.join(comparison.label(best.jobs[0], brief=True).split())}"


def describe_sweep(comparison: Comparison) -> str:
    """Return a title for the plot of a sweep, with the settings that differ and the number of seeds.

    The values of a setting are listed if there are few of them. Settings that vary together are named together, such as
    `steps 60, 100 with lr 0.01, 0.003`, with their values in the same order.
    """
    seeds = {entry.settings["seed"] for entry in comparison.entries if "seed" in entry.settings}
    seed_text = [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
    groups = [comparison.named_together(key) for key in comparison.keys]
    all_keys = [key for group in groups for key in group]
    short = dict(zip(all_keys, short_keys(all_keys), strict=True))
    names = [" with ".join(short[key] for key in group) for group in groups]
    setting_texts = [
        " with ".join(f"{short[key]} {_format_values(values)}" for key, values in _list_values(comparison, group))
        for group in groups
    ]
    varied = [*comparison.keys, *["seed"] * len(seed_text)]
    combinations = {tuple(entry.settings.get(key) for key in varied) for entry in comparison.entries}
    is_product = len(combinations) == math.prod(len(comparison.values(key)) for key in varied)
    between = " × " if is_product else "; "
    title = between.join([*setting_texts, *seed_text])
    title = title if len(title) <= TITLE_LENGTH else between.join([*names, *seed_text])
    return title or comparison.entries[0].run.name


def _list_values(comparison: Comparison, keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each key with its values. The keys vary together; their values are sorted by those of the first key."""
    rows = dict.fromkeys(tuple(entry.settings.get(key, "-") for key in keys) for entry in comparison.entries
                         if keys[0] in entry.settings)  # fmt: skip
    try:
        ordered = sorted(rows, key=lambda row: float(row[0]))
    except ValueError:
        ordered = list(rows)
    return [(key, [row[place] for row in ordered]) for place, key in enumerate(keys)]


def _format_values(values: Sequence[str]) -> str:
    if len(values) <= MAX_VALUES:
        return ", ".join(values)
    try:
        low, *_, high = sorted(values, key=float)
    except ValueError:
        return f"{len(values)} values"
    return f"{low} to {high} ({len(values)} values)"


def _footer(comparison: Comparison, source: str, total: int) -> str:
    """Return the line below the title.

    It names the directories of the runs and the settings that all runs share. It also has notes, for example on omitted
    runs.
    """
    runs = [entry.run for entry in comparison.entries]
    has_best = comparison.ranking.best is not None and len(comparison.ranking.points) > 1
    parts = [describe_sweep(comparison)] if has_best else []
    parts += [source, pluralise(total, "run")]
    if len(runs) < total:
        parts.append(f"the best {len(runs)} are shown")
    for part in ("recipe", "model", "data", "engine"):
        values = {getattr(run, part) for run in runs}
        parts += values if len(values) == 1 else []
    lengths = {run.of for run in runs}
    parts += [f"{length} steps" for length in lengths if length] if len(lengths) == 1 else []
    trained = {describe_parameters(entry.facts.get("model") or {}) for entry in comparison.entries}
    parts += [text for text in trained if " train" in text or ":" in text] if len(trained) == 1 else []
    incomplete = [run for run in runs if run.state not in FINAL_STATES]
    parts += [f"{len(incomplete)} did not complete"] if incomplete else []
    parts += ["thin: seeds, thick: their mean"] if comparison.ranking.has_seeds else []
    parts += [f"{conflict}: losses cannot be compared"] if (conflict := comparison.ranking.conflict) else []
    return " · ".join(filter(None, parts))


def _read_curve(history: History, column: str) -> Steps:
    """Return the values of the metric by step. Training losses are averaged over bins of steps."""
    curve = history.held_out_curve(column.removeprefix("held-out "))
    steps, values = average_bins(history.curve("loss"), CURVE_POINTS) if column == TRAIN else curve
    return dict(zip(steps.round().astype(int).tolist(), values.tolist(), strict=True))


def _average(curves: Sequence[Steps]) -> Steps:
    """Return the mean of the curves at each step that all curves have."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {at: statistics.fmean(curve[at] for curve in curves) for at in sorted(common)}


def _limits(lines: Sequence[Line], column: str) -> tuple[float, float]:
    """Return the lowest and highest value to show.

    Losses that are far above the initial losses of all runs are not shown, unless all runs diverged.
    """
    all_values = [value for line in lines for value in line.values]
    if not all_values:  # no run recorded events
        return -math.inf, math.inf
    began = [curve[min(curve)] for line in lines for curve, _ in line.runs if curve]
    low, top = min(all_values), max(*began, *(line.point.mean for line in lines[:1]))
    is_any_stable = any(not entry.result.get("diverged") for line in lines for entry in line.point.jobs)
    if column.endswith("loss") and is_any_stable and max(all_values) > top + (top - low) / 4:
        return low, top + (top - low) / 20
    return low, max(all_values)


def _draw_curves(axes: Any, named: Sequence[Line], rest: Sequence[Line], limits: tuple[float, float]) -> None:
    """Draw the curves of the `named` points in colour, the best on top, and those of the `rest` in pale grey.

    A point is a group of runs that differ only in their seed. A coloured point has a line for its mean, a band for its
    standard deviation, and a thin line for each run. A cross marks the last step of a run that did not complete.
    """
    low, high = limits
    for line in rest:
        for curve, _ in line.runs:
            axes.plot(list(curve), list(curve.values()), color=PALE, linewidth=0.7, zorder=1)
    for rank, line in reversed(list(enumerate(named))):
        colour, best = COLOURS[rank], rank == 0
        for curve, is_complete in line.runs:
            if curve and (len(line.runs) > 1 or not is_complete):
                axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.6, alpha=0.3, zorder=2)
        if line.band:
            lows, highs = zip(*line.band.values(), strict=True)
            axes.fill_between(list(line.band), lows, highs, color=colour, alpha=0.12, linewidth=0, zorder=2)
        axes.plot(list(line.mean), list(line.mean.values()), color=colour, linewidth=2.2 if best else 1.2,
                  marker=MARKS[rank], markersize=4.5 if best else 3.5, markevery=max(len(line.mean) // 12, 1),
                  zorder=5 if best else 4)  # fmt: skip
    for line in (*named, *rest):
        for (curve, is_complete), entry in zip(line.runs, line.point.jobs, strict=True):
            if not is_complete:
                at = max(curve, default=0)
                stop, value = max(entry.run.steps or 0, at), min(curve.get(at, high), high)
                axes.plot([at, stop], [value, value], color=INK, linewidth=0.8, linestyle=":", zorder=6, clip_on=False)
                axes.plot(stop, value, color=INK, marker="x", markersize=6, zorder=6, clip_on=False)
    all_values = [value for line in (*named, *rest) for value in line.values]
    above = sum(any(value > high for value in curve.values()) for line in (*named, *rest) for curve, _ in line.runs)
    fit_y_axis(axes, low, high, pluralise(above, "run"), max(all_values, default=high))
    set_step_axis(axes)
    for rank, line in enumerate(named):
        mark_above(axes, [*line.mean], [*line.mean.values()], COLOURS[rank])


def _draw_ends(
    axes: Any, comparison: Comparison, named: Sequence[Line], rest: Sequence[Line], stopped: Sequence[Entry]
) -> None:
    """Draw a row for the final metric of each `named` point, the best at the top.

    A point is a group of runs that differ only in their seed. A row shows the final metric for each seed, their mean
    and standard deviation, and the settings. One more row shows the range of all points in `rest`. Another row names
    the runs in `stopped`, which did not complete.
    """
    axes.grid(visible=False)
    axes.grid(axis="x")
    axes.xaxis.get_major_locator().set_params(min_n_ticks=3)  # also in a journal's column
    best = comparison.ranking.best
    for rank, line in enumerate(named):
        point, colour = line.point, COLOURS[rank]
        if len(point.values) > 1:
            axes.plot(point.values, [rank] * len(point.values), color=colour, marker="|", markersize=7, alpha=0.6,
                      linestyle="none")  # fmt: skip
        axes.errorbar(point.mean, rank, xerr=point.deviation or None, color=colour, marker=MARKS[rank],
                      markersize=6 if rank == 0 else 5, linewidth=1.4)  # fmt: skip
        text = str(point) + (", best" if line.point is best and len(named) > 1 else "")
        starts = [find_divergence([*curve], [*curve.values()]) for curve, _ in line.runs]
        if comparison.ranking.column.endswith("loss") and (steps := [step for step in starts if step is not None]):
            text = f"{text}, diverged" if rank == 0 else f"diverged by step {min(steps)}"  # the mean is off the scale
        _write_beside(axes, rank, text, INK, "bold" if rank == 0 else "normal")
    labels = [comparison.label(line.point.jobs[0], brief=True) for line in named]
    if rest:
        labels.append(f"{pluralise(len(rest), 'other')}, grey")
        means = [line.point.mean for line in rest if line.point.values]
        if means:
            low, high = (min(means), max(means))
            axes.plot([low, high], [len(named)] * 2, color=PALE, linewidth=3, solid_capstyle="butt")
            text = format_number(low, 5) + (f" to {format_number(high, 5)}" if len(means) > 1 else "")
        else:
            text = "without a score"
        _write_beside(axes, len(named), text, GREY)
    if stopped:
        states = ", ".join(f"{number} {state}" for state, number in Counter(e.run.state for e in stopped).items())
        text = states if len(stopped) > 1 else f"{stopped[0].run.state} at step {stopped[0].run.steps or 0}"
        _write_beside(axes, len(labels), text)
        settings = [comparison.label(entry, brief=True).split("  ") for entry in stopped]
        shared = "  ".join(text for text in settings[0] if all(text in texts for texts in settings))
        labels.append(f"× {shared}" if shared else "× did not complete")
    axes.set_yticks(range(len(labels)))
    axes.yaxis.set_major_formatter(lambda row, _: _fit_labels(axes, labels)[round(row)])  # fits any width of the page
    for rank, label in enumerate(axes.get_yticklabels()):
        label.set_color(GREY if rest and rank == len(named) else INK)  # not the point's: some are too pale in print
        label.set_fontweight("bold" if rank == 0 else "normal")
    axes.set_ylim(max(len(labels), 2) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _fit_labels(axes: Any, labels: Sequence[str]) -> list[str]:
    """Shorten the labels of rows to the width of the page: drop the names of settings if these do not fit."""
    most = int(min(46, 8 * axes.figure.bbox.width / axes.figure.dpi))
    if max(map(len, labels)) > most:
        labels = [re.sub(r"[^\s=]+=", "", label) for label in labels]
    return [fit_text(label, most) for label in labels]


def _write_beside(axes: Any, row: int, text: str, colour: str = INK, weight: str = "normal") -> None:
    """Write a text to the right of a panel, beyond the marks at its edge."""
    axes.annotate(text, (1, row), xycoords=axes.get_yaxis_transform(), xytext=(8, 0), textcoords="offset points",
                  color=colour, fontsize=SMALL, fontweight=weight, va="center")  # fmt: skip


def _clip_outliers(axes: Any, points: Sequence[Point[Entry]], high: float) -> None:
    """Fit the x axis to the results that are near the best and at most `high`. Draw others as arrows at the edge."""
    ends = [point.mean for point in points]
    sides = [point.mean + sign * (point.deviation or 0.0) for point in points for sign in (-1, 1)]
    reach = [*(value for point in points for value in point.values), *sides]
    best, middle = ends[0], statistics.median(ends)
    limit = best + 4 * (middle - best)

    def is_far(value: float) -> bool:
        return value > high or abs(value - best) > abs(limit - best) > 0

    inliers = [value for value in reach if not is_far(value)]
    if 0 < len(inliers) < len(reach):
        pad = 0.05 * (max(inliers) - min(inliers)) or 0.01 * abs(best)
        axes.set_xlim(min(inliers) - pad, max(inliers) + pad)
        for rank, mean in enumerate(ends):
            if is_far(mean):
                axes.plot(0.98 if mean > best else 0.02, rank, transform=axes.get_yaxis_transform(), clip_on=False,
                          marker=">" if mean > best else "<", color=COLOURS[rank], markersize=6)  # fmt: skip
