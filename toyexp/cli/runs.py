"""`toyexp runs` lists runs; `toyexp compare` compares runs and sweeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, escape_cell
from toyexp.base.formatting import display_path, format_bytes, format_csv, format_metric, pluralise, short_path
from toyexp.base.tables import align_table, drop_columns, fits_terminal, name_dropped
from toyexp.base.terminal import print_line, print_note
from toyexp.base.writing import require_writable
from toyexp.interfaces.command import Answer, Arguments
from toyexp.results.filters import filter_runs, sort_runs, split_filters
from toyexp.results.run_dirs import COLUMNS, Run, find_runs, read_run, unzip_archives

HELP = """\
usage: toyexp runs [DIR ...] [FILTER ...] [options]

List the runs in directories (searched recursively) or zip archives, by default outputs/; the newest comes last.

FILTER is key=value, or with !=, <, <=, > or >= (quote < and > for the shell). All filters must match:
  toyexp runs recipe=warm,lora 'loss<4.5' state=completed
  toyexp runs 'name=gpt2*' 'when>2026-11-20' optim.weight_decay=0.1
A key is a column (name, when, sweep, recipe, model, data, engine, seed, lr, batch_size, steps, loss, train_loss,
seconds, speed, state), a held-out metric such as accuracy, ppl, or any setting in config.yaml. < and > compare numbers;
`when` is compared with a date, which covers its whole day, a time, today or yesterday.

options
The column held-out shows the held-out loss. States: completed, diverged (the final loss is above the first), stopped
(by a callback), pruned (by a search), interrupted, failed, killed, running, unreadable."""

HEADS = ("when", "name", "sweep", "recipe", "data", "engine", "seed", "lr", "steps", "held-out", "state", "run")
RIGHT = ("seed", "lr", "steps", "held-out")
# Columns that are dropped first if all runs have the same value.
DROP_IF_EQUAL = ("engine", "data", "sweep", "steps", "seed", "name", "recipe", "lr")
DROP_ORDER = ("sweep", "data", "engine", "name", "when", "steps")
MAX_REASONS = 5  # reasons for failures that are shown below the table


@dataclass(frozen=True)
class Runs(Answer):
    """Result of `toyexp runs`: the runs that match the filters."""

    runs: Sequence[Run]
    seen: int  # number of runs before filtering
    where: Sequence[str]  # searched directories and archives, as typed
    notes: Sequence[str] = ()  # for example, about runs whose settings cannot be read, or links that were not followed

    def plain(self) -> dict[str, Any]:
        """Return the runs with all their columns and metrics, and the notes, for --json."""
        return {"runs": [run.plain() for run in self.runs], "notes": self.note_lines()}

    def note_lines(self) -> list[str]:
        """Return the notes, and a line for each run with files that cannot be read."""
        return [*self.notes, *(f"not read: {short_path(run.path)}, {run.unread}" for run in self.runs if run.unread)]

    def lines(self) -> list[str]:
        """Return a table of the runs, the notes, and a line with the number of runs in each state.

        In a terminal that is too narrow for the paths, the table has paths below the runs' common directory. If these
        are too wide too, each path follows its run on a line of its own.
        If no run matches, return a line that says so instead of the table.
        """
        where, notes = ", ".join(self.where), [f"note: {escape_cell(note)}" for note in self.note_lines()]
        if not self.runs:
            none = f"none of {pluralise(self.seen, 'run')} in {where} matches the filters"
            empty = f"no runs in {where}; start one with `toyexp`, or list another directory: toyexp runs DIR"
            return [none if self.seen else empty, *notes]
        scores = self._scores
        heads = [*HEADS[:-2], *scores, *HEADS[-2:]]
        rows = [[escape_cell(cell) for cell in line] for line in [heads, *(row(run, scores) for run in self.runs)]]
        states = [run.state for run in self.runs]
        total = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(sorted(states)))
        of_all = "" if len(self.runs) == self.seen else f" of {self.seen}"
        rows = [row[:2] + row[3:] for row in rows] if not any(run.sweep for run in self.runs) else rows
        table, missing = fit_rows(rows)
        right = {*RIGHT, *scores}
        root = os.path.commonpath([run.path.absolute().parent for run in self.runs])
        below = [escape_cell(os.path.relpath(run.path.absolute(), root)) for run in self.runs]
        root_note = f"paths below {escape_cell(short_path(Path(root)))}"
        if not fits_terminal(table):
            table, missing = fit_rows([rows[0], *([*r[:-1], p] for r, p in zip(rows[1:], below, strict=True))])
            missing = [root_note, *missing]
        if fits_terminal(table):
            lines = align_table(table, right)
        else:  # each path on a line of its own, whole if it fits, so that it can be copied
            table, missing = fit_rows([row[:-1] for row in rows])
            head, *runs = align_table(table, right)
            paths = [f"  {row[-1]}" for row in rows[1:]]
            if not fits_terminal([[path] for path in paths]):
                paths, missing = [f"  {path}" for path in below], [root_note, *missing]
            lines = [head, *(line for pair in zip(runs, paths, strict=True) for line in pair)]
        count = f"{len(self.runs)}{of_all} run{'' if self.seen == 1 else 's'}: {total}"
        return [*lines, "", *missing, *self._reasons(), *notes, count]

    def _reasons(self) -> list[str]:
        """Return a line for each reason why runs failed, were stopped or cannot be read.

        The line has the path of the last run with that reason.
        """
        stopped = [run for run in self.runs if run.why and run.state in ("failed", "stopped", "unreadable")]
        reasons = {run.why.removeprefix("RunFailed: "): run for run in stopped}
        lines = [f"{run.state}: {short_path(run.path.absolute())}: {escape_cell(why)}" for why, run in reasons.items()]
        hidden = len(lines) - MAX_REASONS
        return [*([f"{hidden} older reasons left out; --json has all"] if hidden > 0 else []), *lines[-MAX_REASONS:]]

    def csv(self) -> str:
        """Return the text of a CSV file with a row per run and all columns and metrics."""
        scores = self._scores
        rows = [
            [display_path(r.path), *(getattr(r, c) for c in COLUMNS), *map(r.scores.get, scores)] for r in self.runs
        ]
        return format_csv([["path", *COLUMNS, *scores], *rows])

    @property
    def _scores(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.scores))


def run(arguments: Arguments) -> int:
    """Print the runs in directories and archives that match the filters, as text, CSV or JSON; return 0."""
    check_form(arguments)
    paths, filters = split_filters(arguments.rest)
    for word in paths:
        if not Path(word).is_dir() and not (word.lower().endswith(".zip") and Path(word).is_file()):
            raise UserError(f"runs {word}: not a directory, zip archive or filter (key=value); see toyexp runs --help")
    named, notes = paths or ["outputs"], list[str]()
    with unzip_archives(named) as where:
        runs = [
            read_run(path) for path in dict.fromkeys(path for word in where for path in find_runs(Path(word), notes))
        ]
        chosen = sort_runs(filter_runs(runs, filters, notes), arguments.sort or "when")
    answer = Runs(chosen[-arguments.last :] if arguments.last else chosen, len(runs), named, notes)
    if not arguments.csv:
        return answer.show(arguments)
    print(answer.csv(), end="")
    for note in answer.note_lines():
        print_note(f"note: {note}")
    return 0


def check_form(arguments: Arguments) -> None:
    """Raise UserError if both --json and --csv are given."""
    if arguments.json and arguments.csv:
        raise UserError("--json --csv: choose one output format; leave out the other")


def row(run: Run, scores: Sequence[str]) -> list[str]:
    """Return the cells of a run in the table of runs; `scores` are the names of metrics that have a column."""
    steps = "-" if run.steps is None else str(run.steps)
    steps += f"/{run.of}" if run.of is not None and run.steps not in (None, run.of) else ""
    return [
        format_time(run.when), run.name, *(getattr(run, key) or "-" for key in ("sweep", "recipe", "data", "engine")),
        "-" if run.seed is None else str(run.seed),
        "-" if run.lr is None else f"{run.lr:g}", steps, format_metric(run.loss),
        *(format_metric(run.scores.get(s)) for s in scores),
        run.state, short_path(run.path.absolute()),
    ]  # fmt: skip


def format_time(when: str) -> str:
    """Return an ISO 8601 time as local time, such as 2026-11-21 05:50.

    Return "-" for an empty text, and any other text unchanged.
    """
    try:
        return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return when or "-"


def fit_rows(rows: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Drop columns of a table until it fits the terminal.

    The first of `rows` has the column heads. Columns with the same value for all runs are dropped first, then metrics
    that fewer than a quarter of the runs have. The columns in DROP_ORDER come next, because the path of a run shows
    most of their values too. Return the rows, and notes for the user about the columns that were dropped.
    """
    if fits_terminal(rows):
        return [list(row) for row in rows], []
    columns_of = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
    alike = {head: cells[0] for head in DROP_IF_EQUAL if len(set(cells := columns_of.get(head, ()))) == 1 < len(cells)}
    rare = [head for head, cells in columns_of.items() if head not in HEADS and 4 * cells.count("-") > 3 * len(cells)]
    table, dropped = drop_columns(rows, [*alike, *rare, *DROP_ORDER])
    same, others = [head for head in dropped if head in alike], [head for head in dropped if head not in alike]
    notes = [f"same for all runs: {', '.join(f'{head} {alike[head]}' for head in same)}"] if same else []
    return table, [*notes, *name_dropped(others, "; --csv has all")]


# -- compare -----------------------------------------------------------------------------------------------------


HELP_COMPARE = """\
usage: toyexp compare WHAT ... [FILTER ...] [options]

Compare runs: which settings differ, and the results. WHAT is a run, a sweep, a directory or zip archive with runs, or a
quoted pattern ('outputs/warm-*'). FILTER is as in toyexp runs (recipe=warm 'lr>1e-3').

Runs that differ only in their seed form a group, shown with mean and standard deviation (n-1) of the completed runs.
The best group comes first. Settings that always vary together with another one (the sizes of a preset) are listed below
the table. Runs with different data or base models are in different groups; the column `data digest` or `base digest`
distinguishes them.

options
--pool groups equal runs from different directories, such as those of a class; without it the column `whose`
distinguishes them. --html contains curves, table, settings against metric, samples, and the command of each run. --plot
draws held-out curves with a band over seeds and the final value of each group; for one run, it draws the curves of that
run; for a search, the scores by trial and by setting."""


def run_compare(arguments: Arguments) -> int:
    """Compare runs and sweeps: print the comparison, or with --html or --plot write it to a file; return 0."""
    from toyexp.base.drawing import check_plot_path
    from toyexp.results.plot import draw_sheet
    from toyexp.results.plot_search import Search
    from toyexp.results.report import Report
    from toyexp.sweeps.compare import compare_runs

    check_form(arguments)
    page, plot, metric = arguments.html, arguments.plot, arguments.metric
    if (page or plot) and (arguments.json or arguments.csv):
        option, other = f"--html {page}" if page else f"--plot {plot}", "--json" if arguments.json else "--csv"
        raise UserError(f"{option} {other}: cannot be combined; run the command twice")
    if arguments.column and not plot:
        raise UserError(f"--column {arguments.column}: sets the width of a plot; add --plot curves.svg")
    if page:
        check_report_path(page)
    picture = check_plot_path("--plot", plot) if plot else None
    named, filters = split_filters(arguments.rest)
    if not named:
        raise UserError("compare: needs runs, sweeps or directories with runs, such as toyexp compare outputs")
    with unzip_archives(named) as paths:
        answer = compare_runs(paths, filters, metric, arguments.pool)
        comparison, single = answer.comparison, Path(paths[0]) if len(paths) == 1 else None
        source = " ".join(map(display_path, paths))
        if page:
            size = Report(source, Search.read(single) if single else None).write(comparison, Path(page))
            print_line(f"report  {page}, {format_bytes(size)}")
        if picture:
            figure = draw_sheet(comparison, source, None if filters or metric else single)
            print_line(f"plot    {plot}, {format_bytes(figure.write(picture, arguments.column))}")
        if not page and not picture:
            if not arguments.csv:
                return answer.show(arguments)
            print(answer.csv(), end="")
        for note in comparison.notes():
            print_note(f"note: {note}")
    return 0


def check_report_path(page: str) -> None:
    """Raise UserError if the report of --html cannot be written to `page`. Called before runs are read.

    An existing file may be overwritten only if it is a report of toyexp. Raise Unavailable if plotly is not installed.
    """
    from toyexp.results.report import is_report, require_plotly

    path = Path(page)
    if path.is_dir() or path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {page}: must be a file name that ends in .html, such as --html report.html")
    require_writable(f"--html {page}", path)
    if os.path.lexists(path) and not is_report(path):
        raise UserError(f"--html {page}: already exists and is not a report of toyexp; choose another name")
    require_plotly()
