"""A sweep's jobs for the person who watches: the table at the end, and a line of each."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Sequence

from toyexp.base.formatting import columns, duration, last_words, short
from toyexp.base.terminal import on_terminal, say
from toyexp.results.ranking import TRAIN, ranked
from toyexp.sweeps.directory import SPREAD, Job, Status, SweepDir, numbers, scores, state_of


def print_table(jobs: Sequence[Job], folder: SweepDir | None) -> None:
    """One line a job, the best first, and why where it is not completed.

    Where a terminal is too narrow, runs stand by their names below the sweep's directory; if that is not enough,
    settings by the last of their words, and what was pruned without the reason, which its own line told; then training
    losses are left out, and at last the names, which begin with a job's number.
    """
    names = scores(jobs)
    ranking = folder.ranking() if folder else ranked(jobs)
    ordered = [job for job, _ in ranking.jobs()]
    keys = list(dict.fromkeys(word.partition("=")[0] for job in jobs for word in job.overrides))
    brief_keys = dict(zip(keys, last_words(keys), strict=True))

    def lines(brief: int) -> list[str]:
        """The table, the briefer the higher."""
        left_out = {3} if brief > 2 else set()
        first: dict[str, int] = {}  # the job that is shown with these words
        table = [("job", "overrides", "steps", TRAIN, "held-out loss", *(f"held-out {n}" for n in names), "run")]
        for job in ordered:
            why = job.error or ""
            end = why if why.startswith(job.status) else f"{job.status}: {why}" if why else str(job.status)
            if job.status == Status.COMPLETED:
                end = ""
                if folder and job.directory and brief < 4:
                    end = job.directory if brief else short(folder.run(job))
                end += "  diverged" if state_of(job) == "diverged" else ""
                end += "  best" if ranking.best and job is ranking.best.jobs[0] else ""
            elif job.status == Status.PRUNED and brief > 1:
                end = str(job.status)
            elif job.status == Status.REFUSED and first.setdefault(end, job.number) != job.number:
                end = f"{job.status}, as job {first[end]}"
            words = [(word, *word.partition("=")) for word in job.overrides]
            brief_words = [f"{brief_keys[key]}={value}" if equals else word for word, key, equals, value in words]
            label = " ".join(brief_words) if brief > 1 else job.label
            table.append((str(job.number), label, *numbers(job, names, "-"), end))
        cells = [[cell for place, cell in enumerate(row) if place not in left_out] for row in table]
        return columns(cells, right={0, *range(2, len(cells[0]) - 1)})

    width = shutil.get_terminal_size().columns if on_terminal() else sys.maxsize
    # What failed may say more than a line has room for.
    count = [True, *(job.status in (Status.COMPLETED, Status.PRUNED) for job in ordered)]
    for brief in range(5):
        shown = lines(brief)
        if max(map(len, itertools.compress(shown, count))) < width:
            break
    say("")
    for line in shown:
        say(line)
    if ranking.seeds or ranking.apart:
        say(f"\n{SPREAD}")
        for line in columns(ranking.table(), right={1}):
            say(line)
    for note in ranking.notes():
        say(f"note    {note}")


def outcome(job: Job) -> str:
    """A line of a job that completed, or was pruned."""
    if job.status == Status.PRUNED:
        return f"pruned: {job.error}"
    names = scores([job])
    heads = (TRAIN, "held-out loss", *(f"held-out {name}" for name in names))
    steps, *values = numbers(job, names, "-")
    told = [f"{head} {value}" for head, value in zip(heads, values, strict=True) if value != "-"]
    seconds = job.result.get("seconds")
    return "  ".join([f"{state_of(job)} after {steps} steps", *told, *([] if seconds is None else [duration(seconds)])])
