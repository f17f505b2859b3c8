"""A board in the last lines of a terminal: the jobs that run, counts, the time left, and the best point so far."""

from __future__ import annotations

import contextlib
import html
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from toyexp.base.errors import escape_controls
from toyexp.base.formatting import format_duration
from toyexp.base.terminal import is_notebook, is_silent, is_terminal, print_text
from toyexp.results.ranking import Ranking
from toyexp.sweeps.directory import ANSWERED, FAILURES, Job, Status
from toyexp.sweeps.journal import Seldom

REDRAW = 0.2  # seconds between two pictures
ROOM = 4  # lines of the terminal that are left to what stands above
MOST = 16  # jobs with a line of their own


@dataclass
class Board:
    """Board of jobs that run side by side. The caller holds the lock of what is printed."""

    jobs: Callable[[], Sequence[Job]]
    ranking: Callable[[], Ranking[Job]]
    at_once: int
    _running: dict[int, tuple[Job, float, str]] = field(default_factory=dict)  # since when, and the last line
    _took: list[float] = field(default_factory=list)  # seconds of the jobs that came to an answer
    _best: str = ""
    _height: int = 0  # lines that stand there
    _drawn: float = 0.0

    def __post_init__(self) -> None:
        self._looked = Seldom(self._look)

    def begin(self, job: Job) -> None:
        """Show a job that begins."""
        self._running[job.number] = (job, time.monotonic(), "begins")
        self.draw()

    def hear(self, job: Job, line: str) -> None:
        """Show the last line that a job has printed."""
        if line.strip() and job.number in self._running:
            self._running[job.number] = (job, self._running[job.number][1], line.strip())
        self.draw(soon=True)

    def ended(self, job: Job) -> None:
        """Take off a job that has ended, and count it."""
        if job.number in self._running:
            _, since, _ = self._running.pop(job.number)
            if job.status in ANSWERED:
                self._took.append(time.monotonic() - since)
        self._looked.ask(len(self.jobs()))

    def _look(self) -> None:
        ranking = self.ranking()
        if best := ranking.best:
            self._best = f"best so far {best.label or f'job {best.jobs[0].number}'}: {ranking.column} {best}"

    def lines(self, width: int = sys.maxsize) -> list[str]:
        """Return a line of counts, one of the best point, and one for each job that runs, cut to `width`."""
        statuses = [job.status for job in self.jobs()]
        if self._looked.waits:
            self._looked.ask(len(statuses))
        done, waiting = statuses.count(Status.COMPLETED), statuses.count(Status.WAITING)
        failed = sum(status in FAILURES for status in statuses)
        left_over = bool(waiting or self._running)
        counts = [f"{len(self._running)} running"] if left_over else []
        counts += [f"{done} of {len(statuses)} done"]
        counts += [f"{pruned} pruned"] if (pruned := statuses.count(Status.PRUNED)) else []
        counts += [f"{failed} failed"] if failed else []
        if self._took and left_over:  # as far as those that are left are like those that were
            each, now = statistics.mean(self._took), time.monotonic()
            left = waiting * each + sum(max(each - (now - since), 0.0) for _, since, _ in self._running.values())
            counts.append(f"about {format_duration(left / max(self.at_once, len(self._running)))} left")
        entries = list(self._running.values())
        rows = []
        for job, _, line in entries[:MOST]:
            keep = max(width - len(line) - 2, width // 3)  # of long settings, which are cut
            head = f"[{job.number}] {job.label}".rstrip()
            rows.append(f"{head if len(head) <= keep else head[: keep - 3] + '...'}  {line}")
        rows += [f"... and {len(entries) - MOST} more"] if len(entries) > MOST else []
        return [" · ".join(counts), *([self._best] if self._best else []), *rows]

    def draw(self, soon: bool = False) -> None:
        """Draw the board again; with `soon` not if that was a moment ago."""
        if soon and time.monotonic() - self._drawn < REDRAW:
            return
        size = shutil.get_terminal_size()
        width = size.columns - 1
        shown = [escape_controls(line)[:width] for line in self.lines(width)[: max(size.lines - ROOM, 1)]]
        with contextlib.suppress(OSError):
            print_text(self._up() + "".join(line + "\n" for line in shown))
        self._height, self._drawn = len(shown), time.monotonic()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Hide the board while other output is printed, then redraw it."""
        self.clear()
        yield
        self.draw()

    def clear(self) -> None:
        """Take the board off the terminal."""
        with contextlib.suppress(OSError):
            print_text(self._up())
        self._height = 0

    def _up(self) -> str:
        """Return what moves the cursor to the first line of the board, and erases from there on."""
        return f"\x1b[{self._height}A\r\x1b[J" if self._height else ""


@dataclass
class Cell(Board):
    """Board in a notebook: one output of the cell, which each drawing replaces."""

    _shown: Any = None

    def draw(self, soon: bool = False) -> None:
        """Draw the board again; with `soon` not if that was a moment ago."""
        from IPython.display import display

        if soon and time.monotonic() - self._drawn < REDRAW:
            return
        text = "\n".join(map(escape_controls, self.lines()))
        output = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._shown is None:
            self._shown = display(output, raw=True, display_id=True)
        else:
            self._shown.update(output, raw=True)
        self._drawn = time.monotonic()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Do nothing: other output has outputs of its own."""
        yield

    def clear(self) -> None:
        """Draw the board for the last time."""
        self.draw()


def board_for(
    jobs: Callable[[], Sequence[Job]], ranking: Callable[[], Ranking[Job]], at_once: int, side_by_side: bool
) -> Board | None:
    """Return a board in a notebook, and for jobs side by side before a terminal; else None: lines are printed."""
    if is_silent():
        return None
    if is_notebook():
        return Cell(jobs, ranking, at_once)
    return Board(jobs, ranking, at_once) if is_terminal() and side_by_side else None
