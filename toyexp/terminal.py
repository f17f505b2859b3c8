"""What a person sees: lines as they come, the outcome of a run, the table of a sweep."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.errors import for_terminal

if TYPE_CHECKING:
    from toyexp.experiment import Result


def say(line: str) -> None:
    """A line for the person who watches. A reader who went away (`| head`) or a full disk ends them, not the run."""
    try:
        print(for_terminal(line), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(line: str) -> None:
    """A line on stderr; where that cannot be written, the exit code has to do."""
    with contextlib.suppress(OSError):
        print(f"toyexp: {for_terminal(line)}", file=sys.stderr)


def print_result(result: Result) -> None:
    """The outcome of one run, and where everything is."""
    from toyexp.experiment import count

    outcome = result.outcome
    speed = f" · {count(outcome.tokens_per_second)} {result.reads}/s" if outcome.tokens_per_second else ""
    say(f"{outcome.reason} after {outcome.steps} steps in {outcome.seconds:.1f} s{speed}")
    if outcome.why:
        say(f"stopped because {outcome.why}")
    if outcome.eval_loss is not None and outcome.first_eval_loss is not None:
        say(f"held-out loss {outcome.first_eval_loss:.4f} -> {outcome.eval_loss:.4f}")
    for name, value in outcome.eval_scores.items():
        say(f"held-out {name} {outcome.first_eval_scores[name]:.4f} -> {value:.4f}")
    say(f"run     {_short(result.dir)}")
    for path in result.artifacts:
        shown = path.relative_to(result.dir) if path.is_relative_to(result.dir) else path
        say(f"        {shown}  {path.stat().st_size / 1e6:.2f} MB")


def _short(path: Path) -> str:
    """Relative to here when it is below here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_table(rows: Sequence[tuple[str, Result | Exception]]) -> None:
    """One line per job of a sweep: what was varied, final losses and scores, where it is."""
    outcomes = [result.outcome for _, result in rows if not isinstance(result, Exception)]
    scores = list(dict.fromkeys(name for outcome in outcomes for name in outcome.eval_scores))
    numbers = ["train loss", "held-out loss", *(f"held-out {name}" for name in scores)]
    table: list[tuple[str, ...]] = [("job", "overrides", "steps", *numbers, "run")]
    for i, (label, result) in enumerate(rows):
        if isinstance(result, Exception):
            table.append((str(i), label, "-", *("-" for _ in numbers), f"failed: {result}"))
            continue
        outcome = result.outcome
        values = [outcome.train_loss, outcome.eval_loss, *map(outcome.eval_scores.get, scores)]
        shown = [f"{x:.4f}" if x is not None else "-" for x in values]
        table.append((str(i), label, str(outcome.steps), *shown, _short(result.dir)))
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    say("")
    for row in table:
        cells = [
            cell.ljust(w) if c in (1, len(row) - 1) else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())
