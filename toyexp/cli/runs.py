"""What runs are here: `toyexp runs`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, in_a_cell
from toyexp.base.formatting import as_csv, columns, counted, score, short, shown
from toyexp.base.tables import aligned, fits, room, without, wrapped
from toyexp.base.terminal import tell_aside
from toyexp.interfaces.command import Answer, Arguments
from toyexp.results.filters import Filter, divided, filtered, ordered
from toyexp.results.found import COLUMNS, Run, below, look, unzipped

HELP = """\
usage: toyexp runs [DIR ...] [FILTER ...] [options]

The runs below these directories (outputs/ unless others are named), the newest at the end.

FILTER is key=value, !=, <, <=, > or >=; several must all hold. In quotes, for < and > mean something to a shell:
  toyexp runs recipe=warm,lora 'loss<4.5' state=completed
  toyexp runs 'name=gpt2*' 'when>2026-11-20' optim.weight_decay=0.1
A key is a column (name, when, sweep, recipe, model, data, engine, seed, lr, batch_size, steps, loss, train_loss,
seconds, speed, state), a held-out score such as accuracy, or any setting of config.yaml. < and > compare numbers, and
when with a date, a time, today or yesterday. DIR may be a zip archive of runs.

options
steps are those taken, of those asked for where it was not all; held-out is the loss. state: completed; diverged, if the
loss ended above where it began; stopped, by a callback; pruned, by a search; interrupted, failed or killed; running;
unreadable. Of two of them: toyexp compare."""

HEADS = ("when", "name", "sweep", "recipe", "data", "engine", "seed", "lr", "steps", "held-out", "state", "run")
RIGHT = ("seed", "lr", "steps", "held-out")


ALIKE = ("engine", "data", "sweep", "steps", "seed", "name", "recipe", "lr")  # that need not stand in each line
FIRST_OUT = ("sweep", "name", "when", "data", "engine", "seed", "steps")


@dataclass(frozen=True)
class Runs(Answer):
    """What was found."""

    runs: Sequence[Run]
    seen: int  # before the filters
    where: Sequence[str]
    notes: Sequence[str] = ()  # which runs the filters could not ask, and which links were not followed

    def plain(self) -> dict[str, Any]:
        """The runs, each with all that is known of it."""
        return {"runs": [run.plain() for run in self.runs], "notes": self.told()}

    def told(self) -> list[str]:
        """Return what could not be read of these runs and of those that the filters left out."""
        return [*self.notes, *(f"not read: {short(run.path)}, {run.unread}" for run in self.runs if run.unread)]

    def lines(self) -> list[str]:
        """A table, and what it adds up to."""
        where = ", ".join(self.where)
        if not self.runs:
            none = f"none of {counted(self.seen, 'run')} below {where} is asked for by these filters"
            empty = f"no runs below {where}; begin one: toyexp, or look elsewhere: toyexp runs DIR"
            return [none if self.seen else empty, *(f"note: {in_a_cell(note)}" for note in self.notes)]
        scores = list(dict.fromkeys(name for run in self.runs for name in run.scores))
        heads = [*HEADS[:-2], *scores, *HEADS[-2:]]
        rows = [[in_a_cell(cell) for cell in line] for line in [heads, *(row(run, scores) for run in self.runs)]]
        states = [run.state for run in self.runs]
        total = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(sorted(states)))
        of = "" if len(self.runs) == self.seen else f" of {self.seen}"
        rows = [row[:2] + row[3:] for row in rows] if not any(run.sweep for run in self.runs) else rows
        table, notes = fitted(rows)
        notes += [f"note: {in_a_cell(note)}" for note in self.told()]
        notes.append(f"{len(self.runs)}{of} run{'' if self.seen == 1 else 's'}: {total}")
        return [*aligned(table, {*RIGHT, *scores}), "", *wrapped(notes)]

    def csv(self) -> str:
        """The same as a table of every column."""
        scores = list(dict.fromkeys(name for run in self.runs for name in run.scores))
        table = [["path", *COLUMNS, *scores]]
        rows = [[shown(r.path), *(getattr(r, c) for c in COLUMNS), *map(r.scores.get, scores)] for r in self.runs]
        table += [["" if cell is None else str(cell) for cell in row] for row in rows]
        return as_csv(table)


def run(arguments: Arguments) -> int:
    """Looks for runs, and lists them."""
    one_form(arguments)
    places, filters = divided(arguments.rest)
    for word in places:
        if not word:
            raise UserError("runs '': is empty (a variable that is not set?); leave it out, or name a directory")
        if not Path(word).is_dir() and not (word.lower().endswith(".zip") and Path(word).is_file()):
            raise UserError(f"runs {word}: is no directory and no filter (key=value); see toyexp runs --help")
    with unzipped(places or ["outputs"]) as where:
        return _list(arguments, places or ["outputs"], where, filters)


def _list(arguments: Arguments, named: Sequence[str], where: Sequence[str], filters: Sequence[Filter]) -> int:
    """Print the runs below `where`, which the user `named`."""
    notes: list[str] = []
    runs = [look(path) for path in dict.fromkeys(path for word in where for path in below(Path(word), notes))]
    chosen = ordered(filtered(runs, filters, notes), arguments.sort or "when")
    if arguments.last:
        chosen = chosen[-arguments.last :]
    answer = Runs(chosen, len(runs), named, notes)
    if arguments.csv:
        print(answer.csv(), end="")
        for note in answer.told():
            tell_aside(f"note: {note}")
        return 0
    return answer.show(arguments)


def one_form(arguments: Arguments) -> None:
    """Raises UserError where two forms of the answer are asked for at once."""
    if arguments.json and arguments.csv:
        raise UserError("--json --csv: are two forms of the same; leave one of them out")
    form = "json" if arguments.json else "csv" if arguments.csv else None
    if word := next((w for w in arguments.rest if form and w.endswith(f".{form}") and not os.path.lexists(w)), ""):
        raise UserError(f"--{form} {word}: --{form} prints, and takes no file; into one: --{form} > {word}")


def row(run: Run, scores: Sequence[str]) -> list[str]:
    """A run's cells."""
    steps = "-" if run.steps is None else str(run.steps)
    steps += f"/{run.of}" if run.of is not None and run.steps not in (None, run.of) else ""
    why = f": {run.why}" if run.why and run.state in ("failed", "stopped", "unreadable") else ""
    return [
        told_time(run.when), run.name, *(getattr(run, key) or "-" for key in ("sweep", "recipe", "data", "engine")),
        "-" if run.seed is None else str(run.seed),
        "-" if run.lr is None else f"{run.lr:g}", steps, score(run.loss), *(score(run.scores.get(s)) for s in scores),
        run.state + (why if len(why) < 60 else why[:57] + "..."), short(run.path.absolute()),
    ]  # fmt: skip


def told_time(when: str) -> str:
    """A time, in the zone of this machine."""
    try:
        return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return when or "-"


def fitted(rows: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[str]]:
    """Rows that fit the terminal, and what has to be said of what they lack for it.

    What is alike in all of them goes first, then what a run's place says mostly too; at last the state is cut.
    """
    if fits(rows):
        return [list(row) for row in rows], []
    columns_of = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
    alike = {head: cells[0] for head in ALIKE if len(set(cells := columns_of.get(head, ()))) == 1 < len(cells)}
    table, gone = without(rows, [*alike, *FIRST_OUT])
    same, others = [head for head in gone if head in alike], [head for head in gone if head not in alike]
    notes = [f"in all of them: {', '.join(f'{head} {alike[head]}' for head in same)}"] if same else []
    notes += [f"no room here for: {', '.join(others)}; --csv has all"] if others else []
    over = max(map(len, columns(table))) - (room() or sys.maxsize)
    keep = max(max(len(row[-2]) for row in table) - max(over, 0), 12)
    cut = [[*row[:-2], row[-2] if len(row[-2]) <= keep else row[-2][: keep - 3] + "...", row[-1]] for row in table]
    return cut, notes
