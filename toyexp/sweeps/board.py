"""The board at the bottom of a terminal: running jobs, counts, time left, and the best result so far."""

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
from toyexp.sweeps.directory import FAILURES, SUCCEEDED, Job, Status
from toyexp.sweeps.journal import Throttle

REDRAW = 0.2  # seconds between drawings
FREE_LINES = 4  # lines of the terminal that the board leaves free
MAX_ROWS = 16  # running jobs with a line of their own


@dataclass
class Board:
    """Status lines at the bottom of a terminal, which are redrawn while parallel jobs run.

    The methods take no lock. Their caller, `Watch`, holds its own lock while it calls them.
    """

    jobs: Callable[[], Sequence[Job]]
    ranking: Callable[[], Ranking[Job]]
    at_once: int
    _running: dict[int, tuple[Job, float, str]] = field(default_factory=dict)  # by number: job, start time, last line
    _took: list[float] = field(default_factory=list)  # seconds of successful jobs
    _best: str = ""
    _height: int = 0  # lines that are drawn
    _drawn: float = 0.0

    def __post_init__(self) -> None:
        self._looked = Throttle(self._update_best)

    def begin(self, job: Job) -> None:
        """Show a job that starts."""
        self._running[job.number] = (job, time.monotonic(), "begins")
        self.draw()

    def hear(self, job: Job, line: str) -> None:
        """Record `line` as the latest output of a job. Redraw the board at most every REDRAW seconds."""
        if line.strip() and job.number in self._running:
            self._running[job.number] = (job, self._running[job.number][1], line.strip())
        if time.monotonic() - self._drawn >= REDRAW:
            self.draw()

    def end(self, job: Job) -> None:
        """Remove a job that has ended, and update the estimate of the time left and the best result."""
        if job.number in self._running:
            _, since, _ = self._running.pop(job.number)
            if job.status in SUCCEEDED:
                self._took.append(time.monotonic() - since)
        self._looked.request(len(self.jobs()))

    def _update_best(self) -> None:
        ranking = self.ranking()
        if best := ranking.best:
            self._best = f"best so far {best.label or f'job {best.jobs[0].number}'}: {ranking.column} {best}"

    def lines(self, width: int = sys.maxsize) -> list[str]:
        """Return the board's lines: job counts, the best result if there is one, and a line for each running job.

        The overrides in a job's line are shortened to fit into `width` columns. At most MAX_ROWS jobs have a line.
        """
        statuses = [job.status for job in self.jobs()]
        if self._looked.is_pending:
            self._looked.request(len(statuses))
        completed, waiting = statuses.count(Status.COMPLETED), statuses.count(Status.WAITING)
        failed = sum(status in FAILURES for status in statuses)
        left_over = bool(waiting or self._running)
        counts = [f"{len(self._running)} running"] if left_over else []
        counts += [f"{completed} of {len(statuses)} done"]
        counts += [f"{pruned} pruned"] if (pruned := statuses.count(Status.PRUNED)) else []
        counts += [f"{failed} failed"] if failed else []
        if self._took and left_over:  # assumes that jobs take equally long
            job_seconds, now = statistics.mean(self._took), time.monotonic()
            seconds_left = waiting * job_seconds + sum(
                max(job_seconds - (now - since), 0.0) for _, since, _ in self._running.values()
            )
            at_once = min(max(self.at_once, len(self._running)), waiting + len(self._running))
            counts.append(f"about {format_duration(seconds_left / at_once)} left")
        entries = list(self._running.values())
        rows = []
        for job, _, line in entries[:MAX_ROWS]:
            keep = max(width - len(line) - 2, width // 3)  # room for the settings, which are cut
            head = f"[{job.number}] {job.label}".rstrip()
            rows.append(f"{head if len(head) <= keep else head[: keep - 3] + '...'}  {line}")
        rows += [f"... and {len(entries) - MAX_ROWS} more"] if len(entries) > MAX_ROWS else []
        return [" · ".join(counts), *([self._best] if self._best else []), *rows]

    def draw(self) -> None:
        """Redraw the board."""
        size = shutil.get_terminal_size()
        width = size.columns - 1
        lines = [escape_controls(line) for line in self.lines(width)[: max(size.lines - FREE_LINES, 1)]]
        lines = [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines]
        with contextlib.suppress(OSError):
            print_text(self._up() + "".join(line + "\n" for line in lines))
        self._height, self._drawn = len(lines), time.monotonic()

    @contextlib.contextmanager
    def hide(self) -> Iterator[None]:
        """Hide the board while other output is printed, then redraw it."""
        self.clear()
        yield
        self.draw()

    def clear(self) -> None:
        """Remove the board from the terminal."""
        with contextlib.suppress(OSError):
            print_text(self._up())
        self._height = 0

    def _up(self) -> str:
        """Return control codes that move the cursor to the board's first line and erase from there."""
        return f"\x1b[{self._height}A\r\x1b[J" if self._height else ""


@dataclass
class NotebookBoard(Board):
    """Board in a notebook. A redraw replaces the text of the earlier board in the cell's output."""

    _shown: Any = None

    def draw(self) -> None:
        """Redraw the board."""
        from IPython.display import display

        text = "\n".join(map(escape_controls, self.lines()))
        output = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._shown is None:
            self._shown = display(output, raw=True, display_id=True)
        else:
            self._shown.update(output, raw=True)
        self._drawn = time.monotonic()

    @contextlib.contextmanager
    def hide(self) -> Iterator[None]:
        """Do nothing, because in a notebook the board does not get in the way of other output."""
        yield

    def clear(self) -> None:
        """Redraw the board a last time. A notebook keeps this final board instead of removing it."""
        self.draw()


def make_board(
    jobs: Callable[[], Sequence[Job]], ranking: Callable[[], Ranking[Job]], at_once: int, wanted: bool
) -> Board | None:
    """Return the board that shows a sweep's progress, or None if there is no board.

    In a notebook there is always a board, and in a terminal only if `wanted`. If output is silenced, there is no board.
    `jobs` and `ranking` are functions that return the current jobs and their ranking. `at_once` is the number of
    parallel jobs, from which the board estimates the time left.
    """
    if is_silent():
        return None
    if is_notebook():
        return NotebookBoard(jobs, ranking, at_once)
    return Board(jobs, ranking, at_once) if is_terminal() and wanted else None
