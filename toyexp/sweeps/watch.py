"""Show a sweep's progress in the terminal. Launchers pass the lines that jobs print to a `Watch`."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from toyexp.base.terminal import is_notebook, print_line, print_note, terminal_width
from toyexp.sweeps.board import Board
from toyexp.sweeps.directory import SUCCEEDED, Job, LaunchSpec, SweepDir
from toyexp.sweeps.launchers.job_process import Stop
from toyexp.sweeps.summary_table import outcome


class Watch:
    """Terminal output of a sweep. Launchers may call its methods from several threads."""

    folder: SweepDir  # set when the first job is composed
    board: Board | None = None  # shown instead of lines

    def __init__(
        self, environment: Callable[[Job], Mapping[str, str]], stop: Stop, alone: bool, total: int = 0,
        verbose: bool = True,
    ):  # fmt: skip
        """Create the terminal output of a sweep of `total` jobs.

        If jobs run one at a time (`alone`), their lines are printed without a job number. If `verbose` is False, the
        standard output of jobs is not printed. `environment(job)` returns the extra environment variables of a job.
        """
        self.stop, self.verbose = stop, verbose
        self._environment, self._alone, self._total = environment, alone, total
        self._printing = threading.Lock()
        self._width = 0  # columns of the longest job number with overrides so far

    def launch_spec(self, job: Job) -> LaunchSpec:
        """Return the specification to start a job."""
        return replace(self.folder.launch_spec(job), environment=self._environment(job))

    def begin(self, jobs: Sequence[Job], shown: bool = True) -> None:
        """Record that jobs start. If `shown`, show them on the board or print a line for each.

        A launcher calls this method before it starts the jobs.
        """
        self.folder.mark_running(jobs)
        for job in jobs if shown else ():
            if self.board:
                with self._printing:
                    self.board.begin(job)
            else:
                head = self._head(job)
                place = f"job {job.number + 1} of {self._total}"
                begins = "begins" if job.attempts == 1 else "begins again"
                self.say(f"\n{head}  ({place})" if self._alone and self.verbose else f"{head}  {begins}, {place}")

    def hear(self, job: Job | None, line: str, stream: IO[str]) -> None:
        """Show a line that a job has printed. `job` is None for a line of a process that trains several jobs."""
        if self.board and job:
            with self._printing:
                self.board.hear(job, line)
        elif self.verbose or job is None or stream is sys.stderr:
            self.say(line if self._alone or job is None else f"[{job.number}] {line}", stream)

    def end(self, job: Job) -> None:
        """Remove a job from the board, and print a line with its result if the job was successful.

        In a notebook, or if the job printed its result itself, print no line.
        """
        if self.board:
            with self._printing:
                self.board.end(job)
        if job.status in SUCCEEDED and (self.board or not self.verbose) and not is_notebook():
            line = f"{self._head(job)}  {outcome(job)}"
            is_wide = len(line) > (terminal_width() or len(line))
            self.say(re.sub(r" *(  completed|  diverged) after \d+ steps?", r"\1", line) if is_wide else line)

    def _head(self, job: Job) -> str:
        """Return a job's number and overrides, padded to the longest so far, so that what follows is aligned."""
        head = f"[{job.number}] {job.label}".rstrip()
        self._width = max(self._width, len(head))
        return head.ljust(self._width)

    def say(self, line: str, stream: IO[str] | None = None) -> None:
        """Print a line above the board."""
        board = self.board.hide() if self.board else contextlib.nullcontext()
        with self._printing, contextlib.suppress(OSError), board:  # the reader or terminal may be gone
            (print_note if stream is sys.stderr else print_line)(line)

    def close(self) -> None:
        """Remove the board."""
        if self.board:
            self.board.clear()
        self.board = None
