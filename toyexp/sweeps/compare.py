"""Compare runs and sweeps side by side: the settings that differ, and the metrics.

Runs that differ only in their seed form one point of the comparison.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, escape_cell, suggest
from toyexp.base.formatting import format_count, format_csv, format_metric, pluralise, short_keys, short_path
from toyexp.base.tables import align_table, drop_columns, fits_terminal, name_dropped
from toyexp.interfaces.command import Answer
from toyexp.results.comparison import Comparison, Entry
from toyexp.results.filters import Filter, filter_runs
from toyexp.results.ranking import TRAIN, Point, mean
from toyexp.results.run_dirs import read_run, resolve_runs, sweep_metric
from toyexp.sweeps.directory import read_sweep


@dataclass(frozen=True)
class ComparisonAnswer(Answer):
    """Result of `toyexp compare`, as plain data, as lines of text, or as CSV."""

    comparison: Comparison

    def plain(self) -> dict[str, Any]:
        """Return the comparison as a dict for JSON.

        The key `points` has a list of the points (runs that differ only in their seed), the best first. The key
        `differ` has a dict that maps each setting that differs between runs to its different values.
        """
        comparison = self.comparison
        best, points = comparison.ranking.best, []
        for point in comparison.ranking.points:
            settings = {key: point.jobs[0].settings.get(key) for key in comparison.keys}
            has_mean = not math.isnan(point.mean)
            points.append({
                "settings": settings, "mean": point.mean if has_mean else None, "deviation": point.deviation,
                "counted": len(point.values), "best": point is best,
                "runs": [entry.run.plain() for entry in point.jobs],
            })  # fmt: skip
        differ = {key: comparison.values(key) for key in comparison.every_key}
        return {"metric": comparison.ranking.column, "points": points, "differ": differ, "notes": comparison.notes()}

    def lines(self) -> list[str]:
        """Return a table with a row for each point (a group of runs that differ only in their seed).

        Below the table are the number of runs, notes, and the settings that differ between runs but have no column.
        """
        comparison = self.comparison
        ranking = comparison.ranking
        scores = [name for name in ("loss", *comparison.scores) if f"held-out {name}" != ranking.column]
        other_heads = [f"held-out {name}" for name in scores] + ([TRAIN] if ranking.column != TRAIN else [])
        numbers = ["runs", self._steps_head, ranking.column, *other_heads, "speed", ""]
        heads = [*map(escape_cell, comparison.keys or ["name"]), *numbers]
        rows = [[escape_cell(cell) for cell in self._row(point, scores)] for point in ranking.points]
        if not fits_terminal([heads, *rows]):
            heads = [*map(escape_cell, short_keys(comparison.keys) or ["name"]), *heads[len(comparison.keys) or 1 :]]
        table, dropped_heads = drop_columns([heads, *rows], ["speed", *reversed(other_heads), self._steps_head, "runs"])
        lines = align_table(table, {"runs", self._steps_head, ranking.column, *other_heads, "speed"})
        points = f" in {pluralise(len(ranking.points), 'point')}"
        points = "" if len(ranking.points) == len(comparison.entries) else points
        below = name_dropped(dropped_heads, "; --csv has all")
        below.append(f"{pluralise(len(comparison.entries), 'run')}{points}")
        if ranking.has_seeds:
            below[-1] += f"; {ranking.caption}"
        for leader, keys_along in comparison.linked_keys.items():
            linked = ", ".join(f"{key} {'|'.join(comparison.values(key))}" for key in keys_along[:6])
            more = f" and {len(keys_along) - 6} more" if len(keys_along) > 6 else ""
            below.append(f"with {leader}: {linked}{more}")
        other_keys = [key for key in comparison.other_keys if key not in ("seed", "name")]
        below += [f"also differ, but do not form separate points: {', '.join(other_keys)}"] if other_keys else []
        below += [f"note: {note}" for note in comparison.notes()]
        return [*lines, "", *map(escape_cell, below)]

    @property
    def _steps_head(self) -> str:
        """Header of the column with the number of trained steps.

        It is "steps taken" if the setting `steps` has a column too, otherwise "steps".
        """
        return "steps taken" if "steps" in self.comparison.keys else "steps"

    def _row(self, point: Point[Entry], scores: list[str]) -> list[str]:
        comparison, first = self.comparison, point.jobs[0]
        runs = [entry.run for entry in point.jobs if entry.status == "completed"] or [e.run for e in point.jobs]
        cells = [first.settings.get(key, "-") for key in comparison.keys] or [first.run.name]
        steps = sorted({run.steps for run in runs if run.steps is not None})
        steps_text = "-" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
        other_means = [mean(run.value(name) for run in runs) for name in scores]
        if comparison.ranking.column != TRAIN:
            other_means.append(mean(run.train_loss for run in runs))
        speed = mean(run.speed for run in runs)
        run_count = len(point.values) + point.repeats
        counts = f"{run_count}/{len(point.jobs)}" if run_count < len(point.jobs) else str(len(runs))
        ends = ["-" if speed is None else f"{format_count(speed)}/s", comparison.ranking.mark(point)]
        return [*cells, counts, steps_text, str(point), *map(format_metric, other_means), *ends]

    def csv(self) -> str:
        """Return CSV with a row for each run.

        Rows are sorted by the mean of the metric over the runs that differ only in their seed, the best first.
        """
        comparison = self.comparison
        heads = ["run", "name", *comparison.keys, "seed", "state", self._steps_head, "held-out loss",
                 *(f"held-out {n}" for n in comparison.scores), TRAIN, "seconds", "speed", "counted",
                 f"{comparison.ranking.column} mean", f"{comparison.ranking.column} std", "best"]  # fmt: skip
        table: list[list[Any]] = [heads]
        best = comparison.ranking.best
        for entry, point in comparison.ranking.jobs():
            run, has_mean = entry.run, bool(point.values)
            table.append([
                short_path(run.path.absolute()), run.name, *(entry.settings.get(key) for key in comparison.keys),
                run.seed, run.state, run.steps, run.loss, *(run.scores.get(n) for n in comparison.scores),
                run.train_loss, run.seconds, run.speed, len(point.values), point.mean if has_mean else None,
                point.deviation, "best" if point is best else None,
            ])  # fmt: skip
        return format_csv(table)


def compare_runs(
    directories: Sequence[str], filters: Sequence[Filter], metric: str | None, pool: bool = False
) -> ComparisonAnswer:
    """Compare the runs in `directories` (directories of runs or sweeps) that match the filters.

    `metric` is the name of the metric that ranks the runs; None stands for the sweep's metric. With `pool`, runs with
    equal settings form one point even if their directories or names differ. Raise UserError if no run matches or has
    the metric.
    """
    paths = resolve_runs("compare", directories, notes := list[str]())
    runs = filter_runs([read_run(path) for path in paths], filters, notes)
    if not runs:
        raise UserError(f"compare {' '.join(f.text for f in filters)}: none of {pluralise(len(paths), 'run')} matches")
    comparison = Comparison.build(runs, metric or sweep_metric([Path(directory) for directory in directories]), pool)
    for directory in map(Path, directories):
        with contextlib.suppress(UserError):  # no sweep, or a damaged one
            jobs = read_sweep(directory)[0]
            deleted_runs = [d for j in jobs if j.result and not (directory / (d := str(j.directory))).is_dir()]
            note = f"not counted: {pluralise(len(deleted_runs), 'run')} of {short_path(directory)} no longer there: "
            notes += [note + ", ".join(deleted_runs[:3])] if deleted_runs else []
    comparison.selection_notes = notes
    if metric and metric not in (metrics := {"loss", "ppl", *comparison.scores}):
        evaluated = comparison.scores or any(run.loss is not None for run in runs)
        untested = "no run was evaluated; leave out --metric to compare the training loss"
        there_is = suggest(metric, metrics) if evaluated else untested
        raise UserError(f"--metric {metric}: no run here has this metric; {there_is}")
    return ComparisonAnswer(comparison)
