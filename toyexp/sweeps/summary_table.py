"""Print a sweep's results in the terminal: a line for each job that ends, and a table of all jobs at the end."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Sequence

from toyexp.base.formatting import align_columns, format_duration, pluralise, short_keys, short_path
from toyexp.base.terminal import is_terminal, print_line
from toyexp.results.ranking import TRAIN, rank_jobs
from toyexp.sweeps.directory import (
    SEEDS_CAPTION,
    SUCCEEDED,
    Job,
    Status,
    SweepDir,
    job_state,
    number_cells,
    score_names,
)


def print_table(jobs: Sequence[Job], folder: SweepDir | None) -> None:
    """Print a table of the jobs, the best first. The row of a failed job shows its error.

    `folder` is None if no job was valid, so that the sweep has no directory. In a narrow terminal the table is
    shortened in steps. First, run directories become relative to the sweep's directory, keys are cut to their last
    part, and reasons for pruning are left out. Then training losses are left out, and at last the run directories.
    """
    names, ranking = score_names(jobs), folder.rank() if folder else rank_jobs(jobs)
    ordered = [job for job, _ in ranking.jobs()]
    keys = list(dict.fromkeys(word.partition("=")[0] for job in jobs for word in job.overrides))
    brief_keys = dict(zip(keys, short_keys(keys), strict=True))
    refused: dict[str, int] = {}  # error message -> number of the first job with it

    def label(job: Job, brief: int) -> str:
        parts = (word.partition("=") for word in job.overrides)
        return " ".join((brief_keys[key] if brief and equals else key) + equals + value for key, equals, value in parts)

    def end(job: Job, brief: int) -> str:
        why = job.error or ""
        state = why if why.startswith(job.status) else f"{job.status}: {why}" if why else str(job.status)
        if job.status == Status.COMPLETED:
            state = ""
            if folder and job.directory and brief < 3:
                state = job.directory if brief else short_path(folder.run_dir(job))
            state += "  diverged" if job_state(job) == "diverged" else ""
            return state + ("  best" if ranking.best and job is ranking.best.jobs[0] else "")
        if job.status == Status.REFUSED and refused.setdefault(state, job.number) != job.number:
            return f"{job.status}, as job {refused[state]}"
        return str(job.status) if job.status == Status.PRUNED and brief else state

    def lines(brief: int) -> list[str]:
        heads = ["job", "overrides", "steps", TRAIN, "held-out loss", *(f"held-out {name}" for name in names), "run"]
        rows = [[str(j.number), label(j, brief), *number_cells(j, names, "-"), end(j, brief)] for j in ordered]
        table = [row[:3] + row[4:] if brief > 1 else row for row in (heads, *rows)]
        return align_columns(table, right={0, *range(2, len(table[0]) - 1)})

    width = shutil.get_terminal_size().columns if is_terminal() else sys.maxsize
    # Rows of failed jobs may be longer than a line.
    count = [True, *(job.status in SUCCEEDED for job in ordered)]
    for brief in range(4):
        table_lines = lines(brief)
        if max(map(len, itertools.compress(table_lines, count))) < width:
            break
    print_line("")
    for number, line in enumerate(table_lines):
        print_line(line, "" if number else "bold")
    if ranking.has_seeds or ranking.changed_sources:
        print_line(f"\n{SEEDS_CAPTION}")
        for number, line in enumerate(align_columns(ranking.table(), right={1})):
            print_line(line, "" if number else "bold")
    for note in ranking.notes():
        print_line(f"note    {note}")


def outcome(job: Job) -> str:
    """Return a text with the results of a completed job, or with the reason why a job was pruned."""
    if job.status == Status.PRUNED:
        return f"pruned: {job.error}"
    names = score_names([job])
    heads = (TRAIN, "held-out loss", *(f"held-out {name}" for name in names))
    _, *values = number_cells(job, names, "-")
    parts = [f"{head} {value}" for head, value in zip(heads, values, strict=True) if value != "-"]
    state, steps, seconds = job_state(job), job.result.get("steps", 0), job.result.get("seconds")
    parts += [] if seconds is None else [format_duration(seconds)]
    advice = ["try a lower lr"] if state == "diverged" else []
    return "  ".join([f"{state} after {pluralise(steps, 'step')}", *parts, *advice])
