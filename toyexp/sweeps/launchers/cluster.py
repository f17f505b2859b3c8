"""Run jobs on other machines that share the sweep's file system: submit jobs, wait, and resubmit lost jobs."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toyexp.base.formatting import pluralise
from toyexp.base.ownership import DirectoryLocked, lock, require_unlocked
from toyexp.sweeps.directory import Job, JobExit, LaunchSpec
from toyexp.sweeps.launchers.job_process import NOT_STARTED, Stop, run_process
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.watch import Watch

POLL = 0.2  # seconds between checks of the jobs
MAX_BATCH = 1000  # jobs in one submission; Slurm's default limit of an array is 1001
SWEEP_CHECK_SECONDS = 2.0  # seconds between a job's checks whether its sweep is running
LOCK_TIMEOUT = 120.0  # seconds to wait until a lost run has saved, or until its file system has released its lock


class NodeJob:
    """Callable that runs a job's process on a node of the cluster. It is pickled and sent to the node."""

    def __init__(self, spec: LaunchSpec, stop_file: Path | None = None):
        self.spec, self.stop = replace(spec, resumes=True), Stop()  # a cluster may start the job again on its own
        self._stop_file = stop_file  # created by the sweep to stop the job
        self._next_look = math.inf

    def __call__(self) -> JobExit:
        """Run the job and return its exit. Print the job's output, so that the cluster's log has it too."""
        if self._has_sweep():  # if not, the sweep has ended, or locks do not work on this node
            self._next_look = 0.0
        self._wait_for_lock()
        if self.stop.is_requested:
            return JobExit(128 + signal.SIGTERM, "interrupted")
        return run_process(self.spec, self.stop, lambda line, to: print(line, file=to, flush=True), self._poll)

    def _poll(self) -> None:
        """Ask the job to save and exit if the sweep has exited or has created the file that tells jobs to stop."""
        is_gone = False
        if time.monotonic() > self._next_look:
            self._next_look, is_gone = time.monotonic() + SWEEP_CHECK_SECONDS, not self._has_sweep()
        if (is_gone or (self._stop_file and self._stop_file.exists())) and not self.stop.is_requested:
            self.stop.end()

    def _has_sweep(self) -> bool:
        try:
            require_unlocked(self.spec.log.parent.parent)
        except DirectoryLocked:
            return True
        except OSError:
            pass
        return False

    def _wait_for_lock(self) -> None:
        """Wait until no other process uses the run directory, at most LOCK_TIMEOUT seconds.

        After a node or worker was lost, the process of the earlier attempt may still be saving in the run directory.
        """
        until = time.monotonic() + LOCK_TIMEOUT
        while time.monotonic() < until and not self.stop.is_requested:
            try:
                os.close(lock(self.spec.directory))
            except DirectoryLocked:
                time.sleep(POLL)
                self._poll()
            except OSError:  # the run does not exist yet
                return
            else:
                return


@dataclass(frozen=True)
class LostJob:
    """Result of a job whose machine or worker was lost before the job could report its exit; `why` is the reason."""

    why: str


class Cluster(Launcher):
    """Base class of launchers that submit jobs to a cluster. The cluster identifies each job by a handle."""

    is_local = False
    retries = 0  # how often a lost job is submitted again

    def begin(self, folder: Path) -> None:
        """Prepare the launcher before the first job; `folder` is the sweep's directory."""

    @abstractmethod
    def submit(self, specs: Sequence[LaunchSpec]) -> Sequence[tuple[str, Any]]:
        """Submit a NodeJob for each job. Return for each a text, and the handle by which the cluster identifies it.

        The text, such as " as 123" with a leading blank, is printed after the word "submitted". If the submission
        fails, raise the error of the cluster's library.
        """

    @abstractmethod
    def poll(self, handles: Sequence[Any]) -> Sequence[Any]:
        """Return the handles of jobs that have ended; wait briefly if there are none."""

    @abstractmethod
    def result(self, handle: Any) -> JobExit | LostJob:
        """Return how a job ended."""

    @abstractmethod
    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Ask running jobs to save and exit, and cancel waiting jobs.

        `times` is the number of earlier calls of this method.
        """

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, JobExit]]:
        """Submit jobs, and yield each with its exit once it has ended.

        A lost job is resubmitted up to `self.retries` times. If the sweep stops, running jobs save and exit, and
        waiting jobs are cancelled.
        """
        self.begin(watch.folder.path)
        running: dict[Any, Job] = {}
        lost: list[Job] = []
        tries = Counter[int]()  # how often each job was resubmitted
        stops_sent = 0
        while True:
            free = min(max(self.limit() - len(running), 0 if running else 1), MAX_BATCH)
            if watch.stop.is_requested:
                yield from ((job, JobExit(128 + signal.SIGTERM, "interrupted")) for job in lost)
                lost = []
            batch, lost = lost[:free], lost[free:]
            if new := list(itertools.islice(jobs, free - len(batch))):
                watch.begin(new, shown=False)
            yield from self._submit_batch([*batch, *new], watch, running)
            if not running and not batch and not new:
                return
            while stops_sent < watch.stop.ends:
                self.stop(list(running), stops_sent)
                stops_sent += 1
            for handle in self.poll(list(running)):
                job, result = running.pop(handle), self.result(handle)
                if not isinstance(result, LostJob):
                    yield job, result
                elif watch.stop.is_requested:
                    lost.append(job)
                elif tries[job.number] == self.retries:
                    given_up = f", resubmitted {pluralise(self.retries, 'time')}" if self.retries else ""
                    yield job, JobExit(128 + signal.SIGKILL, f"{self.name}: {result.why}{given_up}")
                else:
                    tries[job.number] += 1
                    job.attempts += 1
                    note = f"resubmitted, {tries[job.number]} of {self.retries} times"
                    watch.say(f"[{job.number}] lost ({result.why}): {note}")
                    lost.append(job)

    def _submit_batch(
        self, batch: Sequence[Job], watch: Watch, running: dict[Any, Job]
    ) -> Iterator[tuple[Job, JobExit]]:  # fmt: skip
        """Submit a batch of jobs, and add each under its cluster handle to `running`.

        If the submission fails, yield each job with an exit that holds the error; otherwise yield nothing.
        """
        if not batch:
            return
        try:
            handles = self.submit([watch.launch_spec(job) for job in batch])
        except Exception as error:  # any error of the cluster
            yield from ((job, JobExit(NOT_STARTED, f"{self.name}: {last_line(error)}")) for job in batch)
            return
        for job, (name, handle) in zip(batch, handles, strict=True):
            watch.say(f"[{job.number}] {job.label}".rstrip() + f"  submitted{name}")
            running[handle] = job


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or the name of the error's class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
