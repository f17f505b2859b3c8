"""Compare runs and sweeps side by side: their points, the settings that differ, and the metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, escape_cell, suggest
from toyexp.base.formatting import format_count, format_csv, format_metric, pluralise, short_keys, short_path
from toyexp.base.tables import align_table, drop_columns, fits_terminal, wrap_lines
from toyexp.interfaces.command import Answer
from toyexp.results.comparison import Comparison, Entry
from toyexp.results.filters import Filter, filter_runs
from toyexp.results.ranking import TRAIN, Point, mean
from toyexp.results.run_dirs import read_run, resolve_runs, sweep_metric
from toyexp.sweeps.directory import read_sweep


@dataclass(frozen=True)
class ComparisonAnswer(Answer):
    """Answer of `toyexp compare`."""

    comparison: Comparison

    def plain(self) -> dict[str, Any]:
        """Return the points, the best first, and the settings that differ, as plain data."""
        found = self.comparison
        best, points = found.ranking.best, []
        for point in found.ranking.points:
            settings = {key: point.jobs[0].settings.get(key) for key in found.keys}
            known = not math.isnan(point.mean)
            points.append({
                "settings": settings, "mean": point.mean if known else None, "deviation": point.deviation,
                "counted": len(point.values), "best": point is best,
                "runs": [entry.run.plain() for entry in point.jobs],
            })  # fmt: skip
        differ = {key: found.values(key) for key in found.every_key}
        return {"metric": found.ranking.column, "points": points, "differ": differ, "notes": found.notes()}

    def lines(self) -> list[str]:
        """Return a table of the points, and below it other differences and notes."""
        found = self.comparison
        ranking = found.ranking
        scores = [name for name in ("loss", *found.scores) if f"held-out {name}" != ranking.column]
        others = [f"held-out {name}" for name in scores] + ([TRAIN] if ranking.column != TRAIN else [])
        heads = [
            *map(escape_cell, found.keys or ["name"]),
            "runs",
            self._steps_head,
            ranking.column,
            *others,
            "speed",
            "",
        ]
        rows = [[escape_cell(cell) for cell in self._row(point, scores)] for point in ranking.points]
        if not fits_terminal([heads, *rows]):
            heads = [*map(escape_cell, short_keys(found.keys) or ["name"]), *heads[len(found.keys) or 1 :]]
        table, gone = drop_columns([heads, *rows], ["speed", *reversed(others), self._steps_head])
        lines = align_table(table, {"runs", self._steps_head, *others, "speed"})
        points = "" if len(ranking.points) == len(found.entries) else f" in {pluralise(len(ranking.points), 'point')}"
        below = [f"columns left out to fit the terminal: {', '.join(gone)}; --csv has all"] if gone else []
        below.append(f"{pluralise(len(found.entries), 'run')}{points}")
        if ranking.has_seeds:
            below[-1] += "; mean ± standard deviation (over n-1) of the completed runs"
        for leader, keys_along in found.linked_keys.items():
            some = ", ".join(f"{key} {'|'.join(found.values(key))}" for key in keys_along[:6])
            more = f" and {len(keys_along) - 6} more" if len(keys_along) > 6 else ""
            below.append(f"with {leader}: {some}{more}")
        also = [key for key in found.other_keys if key not in ("seed", "name")]
        below += [f"also differ, without separating points: {', '.join(also)}"] if also else []
        below += [f"note: {note}" for note in found.notes()]
        return [*lines, "", *wrap_lines([escape_cell(line) for line in below])]

    @property
    def _steps_head(self) -> str:
        """Head of the steps column; it must differ from a varying setting `steps`."""
        return "steps taken" if "steps" in self.comparison.keys else "steps"

    def _row(self, point: Point[Entry], scores: list[str]) -> list[str]:
        found, first = self.comparison, point.jobs[0]
        done = [entry.run for entry in point.jobs if entry.status == "completed"] or [e.run for e in point.jobs]
        cells = [first.settings.get(key, "-") for key in found.keys] or [first.run.name]
        steps = sorted({run.steps for run in done if run.steps is not None})
        of = "-" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
        others = [mean(run.value(name) for run in done) for name in scores]
        if found.ranking.column != TRAIN:
            others.append(mean(run.train_loss for run in done))
        speed = mean(run.speed for run in done)
        known = len(point.values) + point.repeats
        counts = f"{known}/{len(point.jobs)}" if known < len(point.jobs) else str(len(done))
        mark = "best" if point is found.ranking.best and len(found.ranking.points) > 1 else ""
        speed_told = "-" if speed is None else f"{format_count(speed)}/s"
        return [*cells, counts, of, str(point), *map(format_metric, others), speed_told, mark]

    def csv(self) -> str:
        """Return CSV with a row for each run, in the order of the points."""
        found = self.comparison
        heads = ["run", "name", *found.keys, "seed", "state", self._steps_head, "held-out loss",
                 *(f"held-out {n}" for n in found.scores), TRAIN, "seconds", "speed", "counted",
                 f"{found.ranking.column} mean", f"{found.ranking.column} std", "best"]  # fmt: skip
        table: list[list[Any]] = [heads]
        best = found.ranking.best
        for entry, point in found.ranking.jobs():
            run, known = entry.run, bool(point.values)
            table.append([
                short_path(run.path.absolute()), run.name, *(entry.settings.get(key) for key in found.keys), run.seed,
                run.state, run.steps, run.loss, *(run.scores.get(n) for n in found.scores), run.train_loss,
                run.seconds, run.speed, len(point.values), point.mean if known else None, point.deviation,
                "best" if point is best else None,
            ])  # fmt: skip
        return format_csv(table)


def compare_runs(
    places: Sequence[str], filters: Sequence[Filter], metric: str | None, pooled: bool = False
) -> ComparisonAnswer:
    """Compare the runs in `places` that match the filters. Raise UserError if no run matches or has the metric."""
    paths = resolve_runs("compare", places, notes := list[str]())
    runs = filter_runs([read_run(path) for path in paths], filters, notes)
    if not runs:
        raise UserError(f"compare {' '.join(f.text for f in filters)}: none of {pluralise(len(paths), 'run')} matches")
    comparison = Comparison.build(runs, metric or sweep_metric([Path(place) for place in places]), pooled)
    for place in map(Path, places):
        with contextlib.suppress(UserError):  # no sweep, or a damaged one
            gone = [d for j in read_sweep(place)[0] if j.result and not (place / (d := str(j.directory))).is_dir()]
            told = f"not counted: {pluralise(len(gone), 'run')} of {short_path(place)} no longer there: "
            notes += [told + ", ".join(gone[:3])] if gone else []
    comparison.selection_notes = notes
    if metric and metric not in (known := {"loss", "ppl", *comparison.scores}):
        evaluated = comparison.scores or any(run.loss is not None for run in runs)
        there_is = (
            suggest(metric, known)
            if evaluated
            else "no run was evaluated; leave out --metric to compare the training loss"
        )
        raise UserError(f"--metric {metric}: no run here has this metric; {there_is}")
    return ComparisonAnswer(comparison)
