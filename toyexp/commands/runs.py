"""What runs are here: `toyexp runs`."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, in_a_cell
from toyexp.base.words import columns, counted, short
from toyexp.commands.options import Answer, number
from toyexp.commands.width import aligned, fits, room, without, wrapped
from toyexp.contract.command import Arguments
from toyexp.runs.chosen import divided, filtered, ordered
from toyexp.runs.found import COLUMNS, Run, below, look

HELP = """\
usage: toyexp runs [DIR ...] [FILTER ...] [--sort KEY] [--last N] [--json | --csv]

The runs below these directories (outputs/ unless others are named), the newest at the end.

FILTER is key=value, !=, <, <=, > or >=; several must all hold. In quotes, for < and > mean something to a shell:
  toyexp runs recipe=warm,lora 'loss<4.5' state=completed
  toyexp runs 'name=gpt2*' 'when>2026-11-20' optim.weight_decay=0.1
A key is a column (name, when, recipe, model, data, engine, seed, lr, batch_size, steps, loss, train_loss, seconds,
speed, state), a held-out score such as accuracy, or any setting of config.yaml.

--sort KEY    by a column or a setting, from the smallest; --sort=-loss from the largest
--last N      the last N of them
--csv         every column, for a spreadsheet; --json the same with the scores

steps are those taken, of those asked for where it was not all; held-out is the loss. state: completed; stopped, by a
callback; pruned, by a search; interrupted, failed or killed; running. Of two of them: toyexp compare."""

HEADS = ("when", "name", "recipe", "engine", "seed", "lr", "steps", "held-out", "state", "run")
RIGHT = ("seed", "lr", "steps", "held-out")


ALIKE = ("engine", "steps", "seed", "name", "recipe", "lr")  # that need not stand in each line
FIRST_OUT = ("name", "when", "engine", "seed", "steps")


@dataclass(frozen=True)
class Runs(Answer):
    """What was found."""

    runs: Sequence[Run]
    seen: int  # before the filters
    where: Sequence[str]

    def plain(self) -> dict[str, Any]:
        """The runs, each with all that is known of it."""
        return {"runs": [run.plain() for run in self.runs]}

    def lines(self) -> list[str]:
        """A table, and what it adds up to."""
        where = ", ".join(self.where)
        if not self.seen:
            return [f"no runs below {where}; begin one: toyexp, or look elsewhere: toyexp runs DIR"]
        if not self.runs:
            return [f"none of {counted(self.seen, 'run')} below {where} is asked for by these filters"]
        scores = list(dict.fromkeys(name for run in self.runs for name in run.scores))
        heads = [*HEADS[:-2], *scores, *HEADS[-2:]]
        rows = [[in_a_cell(cell) for cell in line] for line in [heads, *(row(run, scores) for run in self.runs)]]
        states = [run.state for run in self.runs]
        total = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(sorted(states)))
        of = "" if len(self.runs) == self.seen else f" of {self.seen}"
        table, notes = fitted(rows)
        notes.append(f"{len(self.runs)}{of} run{'' if self.seen == 1 else 's'}: {total}")
        return [*aligned(table, {*RIGHT, *scores}), "", *wrapped(notes)]

    def csv(self) -> str:
        """The same as a table of every column."""
        scores = list(dict.fromkeys(name for run in self.runs for name in run.scores))
        table = [["path", *COLUMNS, *scores]]
        table += [[str(r.path), *(_cell(getattr(r, c)) for c in COLUMNS), *(_cell(r.scores.get(s)) for s in scores)]
                  for r in self.runs]  # fmt: skip
        return as_csv(table)


def run(arguments: Arguments) -> int:
    """Looks for runs, and lists them."""
    one_form(arguments)
    places, filters = divided(arguments.rest)
    for word in places:
        if not Path(word).is_dir():
            raise UserError(f"runs {word}: is no directory and no filter (key=value); see toyexp runs --help")
    where = places or ["outputs"]
    runs = [look(path) for path in dict.fromkeys(path for word in where for path in below(Path(word)))]
    chosen = ordered(filtered(runs, filters), arguments.values.get("--sort", "when"))
    if last := arguments.values.get("--last"):
        chosen = chosen[-int(number("--last", last, 1, 1 << 40, whole=True)) :]
    answer = Runs(chosen, len(runs), where)
    if "--csv" in arguments.switches:
        print(answer.csv(), end="")
        return 0
    return answer.show(arguments)


def one_form(arguments: Arguments) -> None:
    """Raises UserError where two forms of the answer are asked for at once."""
    if {"--json", "--csv"} <= arguments.switches:
        raise UserError("--json --csv: are two forms of the same; leave one of them out")
    for form in arguments.switches & {"--json", "--csv"}:
        if word := next((w for w in arguments.rest if w.endswith(f".{form[2:]}") and not os.path.lexists(w)), ""):
            raise UserError(f"{form} {word}: {form} prints, and takes no file; into one: {form} > {word}")


def row(run: Run, scores: Sequence[str]) -> list[str]:
    """A run's cells."""
    steps = "-" if run.steps is None else str(run.steps)
    steps += f"/{run.of}" if run.of is not None and run.steps not in (None, run.of) else ""
    why = f": {run.why}" if run.why and run.state in ("failed", "stopped") else ""
    return [
        told_time(run.when), run.name, run.recipe or "-", run.engine or "-", "-" if run.seed is None else str(run.seed),
        "-" if run.lr is None else f"{run.lr:g}", steps, told(run.loss), *(told(run.scores.get(s)) for s in scores),
        run.state + (why if len(why) < 60 else why[:57] + "..."), short(run.path.absolute()),
    ]  # fmt: skip


def told(value: float | None) -> str:
    """A score, as all tables have it."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


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
    alike = {head: cells[0] for head in ALIKE if len(set(cells := columns_of[head])) == 1 and len(cells) > 1}
    table, gone = without(rows, [*alike, *FIRST_OUT])
    same, others = [head for head in gone if head in alike], [head for head in gone if head not in alike]
    notes = [f"in all of them: {', '.join(f'{head} {alike[head]}' for head in same)}"] if same else []
    notes += [f"no room here for: {', '.join(others)}; --csv has all"] if others else []
    over = max(map(len, columns(table))) - (room() or sys.maxsize)
    keep = max(max(len(row[-2]) for row in table) - max(over, 0), 12)
    cut = [[*row[:-2], row[-2] if len(row[-2]) <= keep else row[-2][: keep - 3] + "...", row[-1]] for row in table]
    return cut, notes


def as_csv(table: Sequence[Sequence[str]]) -> str:
    """Rows as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
