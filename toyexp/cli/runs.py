"""What runs are here, and runs side by side: `toyexp runs` and `toyexp compare`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, escape_cell
from toyexp.base.formatting import (
    align_columns,
    display_path,
    format_bytes,
    format_csv,
    format_metric,
    pluralise,
    short_path,
)
from toyexp.base.tables import align_table, drop_columns, fits_terminal, terminal_width, wrap_lines
from toyexp.base.terminal import print_line, print_note
from toyexp.base.writing import require_writable
from toyexp.interfaces.command import Answer, Arguments
from toyexp.results.filters import filter_runs, sort_runs, split_filters
from toyexp.results.run_dirs import COLUMNS, Run, find_runs, read_run, unzip_archives

HELP = """\
usage: toyexp runs [DIR ...] [FILTER ...] [options]

Lists the runs below these directories or zip archives (by default outputs/), the newest last.

FILTER is key=value, !=, <, <=, > or >= (quote < and > for the shell); all must hold:
  toyexp runs recipe=warm,lora 'loss<4.5' state=completed
  toyexp runs 'name=gpt2*' 'when>2026-11-20' optim.weight_decay=0.1
A key is a column (name, when, sweep, recipe, model, data, engine, seed, lr, batch_size, steps, loss, train_loss,
seconds, speed, state), a held-out score such as accuracy, or any setting of config.yaml. < and > compare numbers, and
when with a date, a time, today or yesterday.

options
held-out is the loss. state: completed; diverged (the loss ended above where it began); stopped, by a callback; pruned,
by a search; interrupted, failed or killed; running; unreadable."""

HEADS = ("when", "name", "sweep", "recipe", "data", "engine", "seed", "lr", "steps", "held-out", "state", "run")
RIGHT = ("seed", "lr", "steps", "held-out")


DROP_IF_EQUAL = ("engine", "data", "sweep", "steps", "seed", "name", "recipe", "lr")  # that need not stand in each line
DROP_ORDER = ("sweep", "name", "when", "data", "engine", "seed", "steps")


@dataclass(frozen=True)
class Runs(Answer):
    """What was found."""

    runs: Sequence[Run]
    seen: int  # before the filters
    where: Sequence[str]
    notes: Sequence[str] = ()  # which runs the filters could not ask, and which links were not followed

    def plain(self) -> dict[str, Any]:
        """The runs, each with all that is known of it."""
        return {"runs": [run.plain() for run in self.runs], "notes": self.note_lines()}

    def note_lines(self) -> list[str]:
        """Return what could not be read of these runs and of those that the filters left out."""
        return [*self.notes, *(f"not read: {short_path(run.path)}, {run.unread}" for run in self.runs if run.unread)]

    def lines(self) -> list[str]:
        """A table, and what it adds up to."""
        where, notes = ", ".join(self.where), [f"note: {escape_cell(note)}" for note in self.note_lines()]
        if not self.runs:
            none = f"none of {pluralise(self.seen, 'run')} below {where} is asked for by these filters"
            empty = f"no runs below {where}; begin one: toyexp, or look elsewhere: toyexp runs DIR"
            return [none if self.seen else empty, *notes]
        scores = self._scores
        heads = [*HEADS[:-2], *scores, *HEADS[-2:]]
        rows = [[escape_cell(cell) for cell in line] for line in [heads, *(row(run, scores) for run in self.runs)]]
        states = [run.state for run in self.runs]
        total = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(sorted(states)))
        of = "" if len(self.runs) == self.seen else f" of {self.seen}"
        rows = [row[:2] + row[3:] for row in rows] if not any(run.sweep for run in self.runs) else rows
        table, missing = fit_rows(rows)
        count = f"{len(self.runs)}{of} run{'' if self.seen == 1 else 's'}: {total}"
        return [*align_table(table, {*RIGHT, *scores}), "", *wrap_lines([*missing, *notes, count])]

    def csv(self) -> str:
        """The same as a table of every column."""
        scores = self._scores
        rows = [
            [display_path(r.path), *(getattr(r, c) for c in COLUMNS), *map(r.scores.get, scores)] for r in self.runs
        ]
        return format_csv([["path", *COLUMNS, *scores], *rows])

    @property
    def _scores(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.scores))


def run(arguments: Arguments) -> int:
    """Look for runs, and list them."""
    check_form(arguments)
    places, filters = split_filters(arguments.rest)
    for word in places:
        if not Path(word).is_dir() and not (word.lower().endswith(".zip") and Path(word).is_file()):
            raise UserError(f"runs {word}: is no directory and no filter (key=value); see toyexp runs --help")
    named, notes = places or ["outputs"], list[str]()
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
    """Raise UserError if two forms of the answer are asked for at once."""
    if arguments.json and arguments.csv:
        raise UserError("--json --csv: are two forms of the same; leave one of them out")


def row(run: Run, scores: Sequence[str]) -> list[str]:
    """A run's cells."""
    steps = "-" if run.steps is None else str(run.steps)
    steps += f"/{run.of}" if run.of is not None and run.steps not in (None, run.of) else ""
    why = f": {run.why}" if run.why and run.state in ("failed", "stopped", "unreadable") else ""
    return [
        format_time(run.when), run.name, *(getattr(run, key) or "-" for key in ("sweep", "recipe", "data", "engine")),
        "-" if run.seed is None else str(run.seed),
        "-" if run.lr is None else f"{run.lr:g}", steps, format_metric(run.loss),
        *(format_metric(run.scores.get(s)) for s in scores),
        run.state + (why if len(why) < 60 else why[:57] + "..."), short_path(run.path.absolute()),
    ]  # fmt: skip


def format_time(when: str) -> str:
    """A time, in the zone of this machine."""
    try:
        return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return when or "-"


def fit_rows(rows: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Rows that fit the terminal, and what has to be said of what they lack for it.

    What is alike in all of them goes first, then what a run's place says mostly too; at last the state is cut.
    """
    if fits_terminal(rows):
        return [list(row) for row in rows], []
    columns_of = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
    alike = {head: cells[0] for head in DROP_IF_EQUAL if len(set(cells := columns_of.get(head, ()))) == 1 < len(cells)}
    table, gone = drop_columns(rows, [*alike, *DROP_ORDER])
    same, others = [head for head in gone if head in alike], [head for head in gone if head not in alike]
    notes = [f"in all of them: {', '.join(f'{head} {alike[head]}' for head in same)}"] if same else []
    notes += [f"columns left out to fit the terminal: {', '.join(others)}; --csv has all"] if others else []
    over = max(map(len, align_columns(table))) - (terminal_width() or sys.maxsize)
    keep = max(max(len(row[-2]) for row in table) - max(over, 0), 12)
    cut = [[*row[:-2], row[-2] if len(row[-2]) <= keep else row[-2][: keep - 3] + "...", row[-1]] for row in table]
    return cut, notes


# -- side by side -----------------------------------------------------------------------------------------------------


HELP_COMPARE = """\
usage: toyexp compare WHAT ... [FILTER ...] [options]

Runs side by side: what differs in their settings, and how well they did. WHAT is a run, a sweep, a directory or a zip
archive that holds runs, or a pattern of these in quotes ('outputs/warm-*'); FILTER is as in toyexp runs (recipe=warm
'lr>1e-3').

Runs that differ only in their seed are one point, with the mean and standard deviation (over n-1) of the completed
ones; the best point comes first. Settings that vary with another one (the sizes of a preset) stand below the table.
Runs of different data or base models are different points, told apart by the column `data digest` or `base digest`.

options
--pool is for the runs of a class, which the column `whose` tells apart otherwise. --html writes curves, table, settings
against score, samples, and how to repeat each. --plot draws held-out curves with a band over seeds and where each point
ended, and of a search its scores by trial and setting."""


def run_compare(arguments: Arguments) -> int:
    """Compare the named runs."""
    from toyexp.base.drawing import check_plot_path
    from toyexp.results.plot import draw_sheet
    from toyexp.results.report import Report, read_importance, title
    from toyexp.sweeps.compare import compare_runs

    check_form(arguments)
    page, plot, metric = arguments.html, arguments.plot, arguments.metric
    if (page or plot) and (arguments.json or arguments.csv):
        asked, other = f"--html {page}" if page else f"--plot {plot}", "--json" if arguments.json else "--csv"
        raise UserError(f"{asked} {other}: are two answers; ask for them one after the other")
    if page:
        check_report_path(page)
    picture = check_plot_path("--plot", plot) if plot else None
    named, filters = split_filters(arguments.rest)
    if not named:
        raise UserError("compare: takes runs, sweeps or directories that hold some, such as toyexp compare outputs")
    with unzip_archives(named) as places:
        answer = compare_runs(places, filters, metric, arguments.pool)
        comparison, alone = answer.comparison, Path(places[0]) if len(places) == 1 else None
        if page:
            size = Report(title(places), read_importance(alone) if alone else None).write(comparison, Path(page))
            print_line(f"report  {page}, {format_bytes(size)}")
        if picture:
            whole = alone if not filters and not metric else None
            print_line(f"plot    {plot}, {format_bytes(draw_sheet(comparison, title(places), whole).write(picture))}")
        if not page and not picture:
            if not arguments.csv:
                return answer.show(arguments)
            print(answer.csv(), end="")
        for note in comparison.notes():
            print_note(f"note: {note}")
    return 0


def check_report_path(page: str) -> None:
    """Raise UserError before anything is read if the page cannot be written."""
    from toyexp.results.report import is_report, require_plotly

    path = Path(page)
    if path.is_dir() or path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {page}: takes the name of a file that ends in .html, such as --html report.html")
    require_writable(f"--html {page}", path)
    if os.path.lexists(path) and not is_report(path):
        raise UserError(f"--html {page}: is there already, and is no report of toyexp's; choose another name")
    require_plotly()
