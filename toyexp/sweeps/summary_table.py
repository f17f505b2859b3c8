"""Print a sweep's results in the terminal: a line for each job that ends, and a table of all jobs at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toyexp.base.formatting import format_duration, pluralise, short_keys, short_path
from toyexp.base.tables import align_table, drop_columns, fit_table, fits_terminal
from toyexp.base.terminal import print_line
from toyexp.results.ranking import TRAIN, rank_jobs
from toyexp.sweeps.directory import SUCCEEDED, Job, Status, SweepDir, job_state, number_cells, score_names


def print_table(jobs: Sequence[Job], folder: SweepDir | None) -> None:
    """Print the sweep's directory and a table of the jobs, the best first, with run directories relative to it.

    The row of a failed job shows the first clause of its error message. The full error messages follow below the table.
    `folder` is None if the sweep has no directory, because none of its jobs was valid.

    A table that is too wide for the terminal is shortened in steps. First, only the last part of each key is shown. If
    that is not enough, training losses are left out, then run directories and error messages, and then steps.
    """
    names, ranking = score_names(jobs), folder.rank() if folder else rank_jobs(jobs)
    ordered = [job for job, _ in ranking.jobs()]
    keys = list(dict.fromkeys(word.partition("=")[0] for job in jobs for word in job.overrides))
    brief_keys = dict(zip(keys, short_keys(keys), strict=True))
    has_several = sum(job.status == Status.COMPLETED for job in jobs) > 1
    errors: dict[str, int] = {}  # error message -> number of the first job with it
    for job in ordered:
        if job.status not in SUCCEEDED:
            errors.setdefault(job.error or "", job.number)

    def label(job: Job, is_brief: bool) -> str:
        parts = (word.partition("=") for word in job.overrides)
        return " ".join((brief_keys[key] if is_brief and sep else key) + sep + value for key, sep, value in parts)

    def end(job: Job, is_short: bool) -> str:
        if job.status == Status.COMPLETED:
            path = job.directory if folder and job.directory and not is_short else ""
            state = "diverged" if job_state(job) == "diverged" else ""
            is_best = ranking.best and job is ranking.best.jobs[0] and has_several
            return "  ".join(filter(None, [path, state, "best" if is_best else ""]))
        if job.status == Status.PRUNED:
            return "pruned" if is_short else f"pruned at {job.result.get('steps', 0)}"
        first = errors[job.error or ""]
        if job.status == Status.REFUSED and first != job.number:
            return f"{job.status}, as job {first}"
        why = "" if is_short else short_reason(job.error or "")
        return why if why.startswith(job.status) else f"{job.status}: {why}" if why else str(job.status)

    heads = ["job", "overrides", "steps", TRAIN, "held-out loss", *(f"held-out {name}" for name in names), "run"]
    for is_brief, is_short, left_out in ((False, False, []), (True, False, [TRAIN]), (True, True, [TRAIN, "steps"])):
        rows = [[str(j.number), label(j, is_brief), *number_cells(j, names, "-"), end(j, is_short)] for j in ordered]
        table, _ = drop_columns([heads, *rows], left_out)
        if fits_terminal(table):
            break
    table_lines = align_table(table, {"job", *heads[2:-1]})
    print_line(f"\nsweep   {short_path(folder.path)}" if folder else "")
    for line in table_lines:
        print_line(line)
    for message, number in errors.items():
        if not any(message in line for line in table_lines):
            print_line(f"job {number}   {message}")
    if ranking.has_seeds or ranking.changed_sources:
        print_line(f"\n{ranking.caption}")
        points = ranking.table()
        if not fits_terminal(points):  # "diverged" rather than "2 of 3 diverged"
            points = [(*row[:-1], re.sub(r"^\d+ of \d+ ", "", row[-1])) for row in points]
        for line in fit_table(points, {"seeds"}, ["seeds"]):
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
