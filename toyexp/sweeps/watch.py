"""What a launcher tells its sweep: jobs begin and print; a person sees lines, or a board."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO

from toyexp.base.terminal import print_line
from toyexp.sweeps.board import Board
from toyexp.sweeps.directory import ANSWERED, Job, Order, SweepDir
from toyexp.sweeps.launchers.job_process import Stop
from toyexp.sweeps.summary_table import outcome


class Watch:
    """A sweep as its launcher sees it; its methods may be called from several threads."""

    folder: SweepDir  # once the first job has said where it is
    board: Board | None = None  # in place of lines

    def __init__(self, environment: Callable[[Job], Mapping[str, str]], stop: Stop, alone: bool):
        """Print lines without a job's number if jobs run `alone`."""
        self.stop = stop
        self._environment, self._alone = environment, alone
        self._printing = threading.Lock()

    def order(self, job: Job) -> Order:
        """Return what starts a job."""
        return replace(self.folder.order(job), environment=self._environment(job))

    def begin(self, jobs: Sequence[Job], shown: bool = True) -> None:
        """Note that jobs begin, before they do, and say so."""
        self.folder.begin(jobs)
        for job in jobs if shown else ():
            if self.board:
                with self._printing:
                    self.board.begin(job)
            else:
                head = f"[{job.number}] {job.label}".rstrip()
                self.say(f"\n{head}" if self._alone else f"{head}  begins")

    def hear(self, job: Job | None, line: str, stream: IO[str]) -> None:
        """Show a line that a job has printed, or a process of several."""
        if self.board and job:
            with self._printing:
                self.board.hear(job, line)
        else:
            self.say(line if self._alone or job is None else f"[{job.number}] {line}", stream)

    def ended(self, job: Job) -> None:
        """Show what became of a job."""
        if self.board:
            with self._printing:
                self.board.ended(job)
            if job.status in ANSWERED:
                self.say(f"[{job.number}] {job.label}".rstrip() + f"  {outcome(job)}")

    def say(self, line: str, stream: IO[str] | None = None) -> None:
        """Print a line above the board."""
        board = self.board.away() if self.board else contextlib.nullcontext()
        with self._printing, contextlib.suppress(OSError), board:  # a reader, or a terminal, that is gone
            if stream is sys.stderr:
                print(line, file=stream, flush=True)
            else:
                print_line(line)

    def close(self) -> None:
        """Take the board off the terminal."""
        if self.board:
            self.board.clear()
        self.board = None
