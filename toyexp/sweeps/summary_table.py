"""Print a sweep's results in the terminal: a line for each job that ends, and a table of all jobs at the end."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from toyexp.base.formatting import format_duration, pluralise, short_keys, short_path
from toyexp.base.tables import align_table, fit_table, fits_terminal
from toyexp.base.terminal import print_line, terminal_width
from toyexp.results.ranking import TRAIN, rank_jobs
from toyexp.sweeps.directory import Job, Status, SweepDir, job_state, number_cells, score_names


def print_table(jobs: Sequence[Job], folder: SweepDir | None) -> None:
    """Print the sweep's directory and a table of the jobs, the best first, with run directories relative to it.

    The row of a failed job shows the first clause of its error message. The full error messages follow below the table.
    `folder` is None if the sweep has no directory, because none of its jobs was valid.

    A table that is too wide for the terminal is shortened in steps. First, only the last part of each key is shown. If
    that is not enough, training losses are left out, and then steps and the run directories.
    """
    names, ranking = score_names(jobs), folder.rank() if folder else rank_jobs(jobs)
    ordered = [job for job, _ in ranking.jobs()]
    keys = list(dict.fromkeys(word.partition("=")[0] for job in jobs for word in job.overrides))
    brief_keys = dict(zip(keys, short_keys(keys), strict=True))
    completed = [job for job in jobs if job.status == Status.COMPLETED]
    errors: dict[str, int] = {}  # error message -> number of the first job with it

    def label(job: Job, brief: int) -> str:
        parts = (word.partition("=") for word in job.overrides)
        return " ".join((brief_keys[key] if brief and equals else key) + equals + value for key, equals, value in parts)

    def end(job: Job, brief: int) -> str:
        if job.status == Status.COMPLETED:
            path = job.directory if folder and job.directory else ""
            is_best = ranking.best and job is ranking.best.jobs[0] and len(completed) > 1
            state = "diverged" if job_state(job) == "diverged" else ""
            return "  ".join(filter(None, [path if brief < 3 else "", state, "best" if is_best else ""]))
        if job.status == Status.PRUNED:
            return f"pruned at {job.result.get('steps', 0)}" if brief < 4 else "pruned"
        first = errors.setdefault(job.error or "", job.number)
        if job.status == Status.REFUSED and first != job.number:
            return f"{job.status}, as job {first}"
        why = "" if brief > 2 else short_reason(job.error or "")
        return why if why.startswith(job.status) else f"{job.status}: {why}" if why else str(job.status)

    def lines(brief: int) -> list[str]:
        heads = ["job", "overrides", "steps", TRAIN, "held-out loss", *(f"held-out {name}" for name in names), "run"]
        rows = [[str(j.number), label(j, brief), *number_cells(j, names, "-"), end(j, brief)] for j in ordered]
        table = [row[: 3 - (brief > 2)] + row[4:] if brief > 1 else row for row in (heads, *rows)]
        return align_table(table, {"job", *heads[2:-1]})

    width = terminal_width() or sys.maxsize
    for brief in range(5):
        table_lines = lines(brief)
        if max(map(len, table_lines)) < width:
            break
    print_line(f"\nsweep   {short_path(folder.path)}" if folder else "")
    for line in table_lines:
        print_line(line)
    for message, number in errors.items():
        if not any(message in line for line in table_lines):
            print_line(f"job {number}   {message}")
    if ranking.has_seeds or ranking.changed_sources:
        print_line(f"\n{ranking.caption}")
        rows = ranking.table()
        if not fits_terminal(rows):  # "diverged" rather than "2 of 3 diverged"
            rows = [(*row[:-1], re.sub(r"^\d+ of \d+ ", "", row[-1])) for row in rows]
        for line in fit_table(rows, {"seeds"}, ["seeds"]):
            print_line(line)
    for note in ranking.notes():
        print_line(f"note    {note}")


def short_reason(error: str) -> str:
    """Return the first clause of an error message.

    If the message begins with a step, such as "step 12 (...): ", the step is moved to the end of the clause.
    """
    step = re.match(r"(step \d+) \(.*?\): ", error)
    clause = re.split(r"; | and the gradient norm ", error[step.end() :] if step else error)[0]
    return f"{clause} ({step[1]})" if step else clause


def outcome(job: Job) -> str:
    """Return a text with the results of a completed or pruned job: held-out metrics, or else the training loss."""
    names = score_names([job])
    heads = (TRAIN, "held-out", *(f"held-out {name}" for name in names))
    _, *values = number_cells(job, names, "-")
    parts = [f"{head} {value}" for head, value in zip(heads, values, strict=True) if value != "-"]
    parts = [part for part in parts if part.startswith("held-out")] or parts
    state, steps, seconds = job_state(job), job.result.get("steps", 0), job.result.get("seconds")
    parts += [] if seconds is None else [format_duration(seconds)]
    advice = ["try a lower lr"] if state == "diverged" else []
    return "  ".join([f"{state} after {pluralise(steps, 'step')}", *parts, *advice])
