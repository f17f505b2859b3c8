"""The table of a sweep, a line for each job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toyexp.base.terminal import say
from toyexp.base.words import short

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
    widths = [max(len(row[c]) for row in table) for c in range(len(table[0]))]
    say("")
    for row in table:
        cells = [
            cell.ljust(w) if c in (1, len(row) - 1) else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())
