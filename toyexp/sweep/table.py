"""The table of a sweep, a line for each job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toyexp.base.terminal import say
from toyexp.base.words import columns, short

if TYPE_CHECKING:
    from toyexp.sweep.directory import Job, SweepDir


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
    say("")
    for line in columns(table, right={0, *range(2, len(table[0]) - 1)}):
        say(line)
