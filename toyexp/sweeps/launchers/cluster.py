"""Jobs on other machines that see the sweep's files: handed over, waited for, and begun again where one was lost."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toyexp.base.formatting import pluralise
from toyexp.base.ownership import DirectoryLocked, lock, require_unlocked
from toyexp.sweeps.directory import ANSWERED, Ended, Job, Order
from toyexp.sweeps.launchers.job_process import NOT_STARTED, Stop, run_process
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.watch import Watch

POLL = 0.2  # seconds between looks at the jobs
MOST = 1000  # jobs that are handed over in one go; an array of Slurm's has 1001 unless it was told otherwise
LOOK = 2.0  # seconds between a job's looks at whether its sweep still runs
LETS_GO = 120.0  # seconds until a run that was lost has saved and ended, or its disk has given its lock back


class OnNode:
    """What runs on a node: a job's process. It travels there as a pickle."""

    def __init__(self, order: Order, stop_file: Path | None = None):
        self.order, self.stop = replace(order, goes_on=True), Stop()  # a cluster may begin it a second time by itself
        self._stop_file = stop_file  # another machine makes it when the job is to end
        self._next_look = math.inf

    def __call__(self) -> Ended:
        """Runs the job; what it prints is passed on to the log that the cluster keeps."""
        if self._is_followed():  # else the sweep is gone already, or locks do not reach this node
            self._next_look = 0.0
        self._wait_for_the_run()
        if self.stop.requested:
            return Ended(128 + signal.SIGTERM, "interrupted")
        return run_process(self.order, self.stop, lambda line, to: print(line, file=to, flush=True), self._poll)

    def _poll(self) -> None:
        """Ask the job to save and exit if the sweep says so, or was killed."""
        is_gone = False
        if time.monotonic() > self._next_look:
            self._next_look, is_gone = time.monotonic() + LOOK, not self._is_followed()
        if (is_gone or (self._stop_file and self._stop_file.exists())) and not self.stop.requested:
            self.stop.end()

    def _is_followed(self) -> bool:
        """Return True if a sweep holds the lock of its directory."""
        try:
            require_unlocked(self.order.log.parent.parent)
        except DirectoryLocked:
            return True
        except OSError:
            pass
        return False

    def _wait_for_the_run(self) -> None:
        """Until nobody writes it: where its node or worker was lost, its process may still be saving."""
        until = time.monotonic() + LETS_GO
        while time.monotonic() < until and not self.stop.requested:
            try:
                os.close(lock(self.order.directory))
            except DirectoryLocked:
                time.sleep(POLL)
                self._poll()
            except OSError:  # there is no such run yet
                return
            else:
                return


@dataclass(frozen=True)
class Lost:
    """A job that ended with the machine, or what ran it there, and not by itself."""

    why: str


class Cluster(Launcher):
    """Takes jobs. A handle is what it knows one of them by."""

    retries = 0  # how often a job that was lost is begun again

    def begin(self, folder: Path) -> None:
        """Prepare for the first job of the sweep in this directory."""

    @abstractmethod
    def submit(self, works: Sequence[OnNode]) -> Sequence[tuple[str, Any]]:
        """Return a name for people and a handle of each; raise whatever the cluster has against them."""

    @abstractmethod
    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        """Return those that are over, after a moment's wait if none is."""

    @abstractmethod
    def result(self, handle: Any) -> Ended | Lost:
        """Return what came of a job that is over."""

    @abstractmethod
    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Have these save and end, or not begin; they were told so `times` before."""

    def work(self, order: Order) -> OnNode:
        """Return what it is to run."""
        return OnNode(order)

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        """Yield each job with how it ended. When the sweep is stopped the running ones save, and the others leave."""
        self.begin(watch.folder.path)
        running: dict[Any, Job] = {}
        lost: list[Job] = []
        tries: dict[int, int] = {}
        told = 0
        while True:
            free = min(max(self.limit() - len(running), 0 if running else 1), MOST)
            if watch.stop.requested:
                yield from ((job, Ended(128 + signal.SIGTERM, "interrupted")) for job in lost)
                lost = []
            batch, lost = lost[:free], lost[free:]
            if new := list(itertools.islice(jobs, free - len(batch))):
                watch.begin(new, shown=False)
            yield from self._submitted([*batch, *new], watch, running)
            if not running and not batch and not new:
                return
            while told < watch.stop.ends:
                self.stop(list(running), told)
                told += 1
            for handle in self.ended(list(running)):
                job, result = running.pop(handle), self.result(handle)
                if not isinstance(result, Lost):
                    yield job, result
                    if job.status in ANSWERED:  # it printed elsewhere
                        watch.say(f"[{job.number}] {job.status} after {job.result.get('steps')} steps")
                    continue
                if watch.stop.requested:
                    lost.append(job)
                    continue
                tries[job.number] = tries.get(job.number, 0) + 1
                if tries[job.number] > self.retries:
                    given_up = f", begun again {pluralise(self.retries, 'time')}" if self.retries else ""
                    yield job, Ended(128 + signal.SIGKILL, f"{self.name}: {result.why}{given_up}")
                    continue
                again = f"begun again, {tries[job.number]} of {self.retries} times"
                watch.say(f"[{job.number}] lost ({result.why}): {again}")
                job.attempts += 1
                lost.append(job)

    def _submitted(
        self, batch: Sequence[Job], watch: Watch, running: dict[Any, Job]
    ) -> Iterator[tuple[Job, Ended]]:  # fmt: skip
        """Hand jobs over, all at once; those that cannot be have ended."""
        if not batch:
            return
        try:
            handles = self.submit([self.work(watch.order(job)) for job in batch])
        except Exception as error:  # whatever the cluster has against it
            yield from ((job, Ended(NOT_STARTED, f"{self.name}: {last_line(error)}")) for job in batch)
            return
        for job, (name, handle) in zip(batch, handles, strict=True):
            watch.say(f"[{job.number}] {job.label}".rstrip() + f"  submitted{name}")
            running[handle] = job


def last_line(error: BaseException) -> str:
    """Return what a cluster's own error comes to."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
