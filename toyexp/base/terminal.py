"""What a person sees: lines as they come, the outcome of a run, the table of a sweep."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import for_terminal

if TYPE_CHECKING:
    from toyexp.sweep.directory import Job, SweepDir
    from toyexp.training.experiment import Result


def fit_encoding() -> None:
    """Lets what the terminal's encoding lacks (a C locale, PYTHONIOENCODING=ascii) become a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_status = ""  # what stands in the terminal's last line, to be gone when the next line comes


def status(text: str) -> None:
    """What is being done, on a terminal alone and until the next line; "" takes it away."""
    global _status
    if text == _status or not (sys.stdout and sys.stdout.isatty()):
        return
    with contextlib.suppress(OSError):
        print(f"\r{' ' * len(_status)}\r{text}", end="", flush=True)
        _status = text


def say(line: str) -> None:
    """A line for the person who watches. A reader who went away (`| head`) or a full disk ends them, not the run."""
    status("")
    try:
        print(for_terminal(line), flush=True)
    except OSError:  # or the disk that takes the output is full
        drop_output()


def drop_output() -> None:
    """Lets whatever is still printed vanish."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_fails() -> bool:
    """Whether nothing more can be printed, as on a full disk; whatever follows then vanishes."""
    if not sys.stdout or sys.stdout.isatty():
        return False
    try:
        print(flush=True)  # an empty line: of an error one does not see which file it was about
    except OSError:
        drop_output()
        return True
    return False


def hold_standard_files() -> None:
    """Opens those of files 0, 1 and 2 that are closed: else the next file opened would get what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def write_text(text: str) -> None:
    """Text as it comes, without a new line."""
    status("")
    print(text, end="", flush=True)


def complain(line: str) -> None:
    """A line on stderr; where that cannot be written, the exit code has to do."""
    status("")
    with contextlib.suppress(OSError):
        print(f"toyexp: {for_terminal(line)}", file=sys.stderr)


def print_result(result: Result) -> None:
    """The outcome of one run, and where everything is."""
    from toyexp.training.experiment import count
    from toyexp.training.rundir import bytes_in

    outcome = result.outcome
    speed = f" · {count(outcome.tokens_per_second)} {result.reads}/s" if outcome.tokens_per_second else ""
    say(f"{outcome.reason} after {outcome.steps} steps in {outcome.seconds:.1f} s{speed}")
    if outcome.why:
        say(f"stopped because {outcome.why}")
    if outcome.skipped:
        say(f"{outcome.skipped} of these steps were skipped: their loss or gradient was no finite number")
    if outcome.eval_loss is not None and outcome.first_eval_loss is not None:
        say(f"held-out loss {outcome.first_eval_loss:.4f} -> {outcome.eval_loss:.4f}")
    for name, value in outcome.eval_scores.items():
        say(f"held-out {name} {outcome.first_eval_scores[name]:.4f} -> {value:.4f}")
    if result.best and result.best.step != outcome.steps:
        say(f"best held-out {result.best.metric} {result.best.score:.4f} after step {result.best.step}")
    say(f"run     {short(result.dir)}")
    for path in result.artifacts:
        shown = path.relative_to(result.dir) if path.is_relative_to(result.dir) else path
        step, best = result.steps_of.get(path, outcome.steps), result.best and result.best.step
        last = ", the last" if best not in (None, step) else ""
        of = f"  of step {step}{', the best' if step == best else last}" if step != outcome.steps or last else ""
        say(f"        {shown}  {bytes_in(path) / 1e6:.2f} MB{of}")


def short(path: Path) -> str:
    """Relative to here when it is below here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_table(jobs: Sequence[Job], folder: SweepDir | None) -> None:
    """One line per job of a sweep: what was varied, final losses and scores, where it is or why not."""
    from toyexp.sweep.directory import Status, numbers, scores

    names = scores(jobs)
    heads = ["steps", "train loss", "held-out loss", *(f"held-out {name}" for name in names)]
    table: list[tuple[str, ...]] = [("job", "overrides", *heads, "run")]
    for job in jobs:
        where = short(folder.run(job)) if folder and job.directory else ""
        why = str(job.error or "")
        told = why if why.startswith(job.status) else f"{job.status}: {why}" if why else str(job.status)
        end = where if job.status == Status.COMPLETED else told
        table.append((str(job.number), job.label, *numbers(job, names, "-"), end))
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    say("")
    for row in table:
        cells = [
            cell.ljust(w) if c in (1, len(row) - 1) else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())
