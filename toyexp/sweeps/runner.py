"""Runs a sweep: a source gives jobs, a launcher runs them, and the sweep's directory keeps what became of each."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toyexp.base.formatting import short_path
from toyexp.base.ownership import DirectoryLocked, require_unlocked
from toyexp.base.signals import catch_signals
from toyexp.base.terminal import is_notebook, print_line
from toyexp.config.top_level import Sweep
from toyexp.config.words import format_override
from toyexp.results.ranking import Ranking, ranked
from toyexp.results.report import SweepReport, draw_sweep
from toyexp.sweeps.board import board_for
from toyexp.sweeps.directory import ANSWERED, FAILURES, UNFINISHED, Ended, Job, Status, SweepDir, shared_words
from toyexp.sweeps.job_configs import JobConfigs, Places
from toyexp.sweeps.launchers.job_process import NOT_STARTED, Stop
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.launchers.stacks import advice
from toyexp.sweeps.sources import JobSource
from toyexp.sweeps.summary_table import print_table
from toyexp.sweeps.watch import Watch
from toyexp.training.checkpoint import read_result


@dataclass(frozen=True)
class Asked:
    """A sweep as it was asked for."""

    flags: Mapping[str, str]  # of the command line
    modules: Sequence[str]  # local plugins that were named
    settings: Sweep
    memory: Mapping[str, Any]  # what its directory remembers: see SweepDir


class Runner:
    """A sweep that runs."""

    def __init__(
        self, asked: Asked, source: JobSource, launcher: Launcher, configs: JobConfigs, folder: SweepDir | None = None
    ):
        """Go on with the sweep in a directory, or make one once the first job has said where."""
        self.asked, self.source, self.launcher, self.configs, self.folder = asked, source, launcher, configs, folder
        self._stop = Stop()
        self._watch = Watch(source.environment, self._stop, launcher.alone)
        self._places = Places(source.jobs)
        self._report_page = SweepReport()
        self._refused: dict[str, int] = {}  # the first job that was refused with these words
        if folder:
            self._watch.folder = folder
            source.resume(self._unfinished(folder))

    def run(self) -> int:
        """Run the jobs; return the exit code of the sweep."""
        try:
            self.prepare()
            if self.source.peek() or self.source.probe:
                self.launcher.connect()
            folder = self._open()
            self._advise()
            several = self.launcher.is_forked and not self.launcher.alone  # lines at the same time
            self._watch.board = board_for(self.source.in_sight, self._ranking, self.launcher.limit(), several)
            if folder:
                with self._signals():
                    for job, ended in self.launcher.run(self._placed(), self._watch):
                        self._end(job, ended)
            self._watch.close()
            code = self._summarise()
            if folder:
                self.source.summarise(folder)
            self._update_report(last=True)
            if folder and len(self.source.jobs) > 1 and not self._stop.number:
                draw_sweep(folder.path)
            return code
        finally:
            self.close()

    def close(self) -> None:
        """Let others have the sweep's directory, and end what its jobs start from."""
        self._watch.close()
        self.launcher.close()
        if self.folder:
            self.folder.close()

    # -- before the first job ------------------------------------------------------------------------------------------

    def _unfinished(self, folder: SweepDir) -> list[Job]:
        """Return the jobs to go on with. Runs tell what became of jobs that ran when the sweep itself was killed."""
        for job in self.source.jobs:
            if job.status != Status.RUNNING and job.code != NOT_STARTED:
                continue
            directory = folder.run(job)
            found = {} if self.configs.other_run(job, directory) else read_result(directory)
            if found.get("error") and found.get("reason") != "interrupted":
                job.end(Ended(1, str(found["error"])), directory)
            elif found.get("reason") in ("completed", "aborted"):
                job.end(Ended(0), directory)
            else:
                try:
                    require_unlocked(directory)
                    job.status = Status.KILLED
                except DirectoryLocked as owner:
                    print_line(f"[{job.number}] {job.label}: {owner}")
        if "--json" not in self.asked.flags:
            self._say_missing(folder)
        retry = self.asked.settings.retry
        left = [j for j in self.source.jobs if j.status in UNFINISHED or (retry and self.source.may_retry(j))]
        return [job for job in left if job.status != Status.RUNNING]

    def _say_missing(self, folder: SweepDir) -> None:
        """Tell of jobs whose runs hold another result, or are missing, and how one is trained again."""
        placed = [(job, folder.run(job)) for job in self.source.jobs if job.directory]
        for job, run in placed:
            if run.is_dir() and (other := job.difference(read_result(run))):
                print_line(
                    f"[{job.number}] {job.label}: {short_path(run)} is not the run that the sweep recorded: {other}"
                )
        gone = [job for job, run in placed if job.status == Status.COMPLETED and not run.is_dir()]
        if not gone:
            return
        place, shared = folder.run(gone[0]), shared_words(folder.asked)
        words = [*(word for word in shared if not word.startswith("hydra.sweep.")), *gone[0].overrides]
        again = shlex.join(["toyexp", *words, format_override("hydra.run.dir", short_path(place))])
        more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
        move = "move that file away, and " if os.path.lexists(place) else ""
        print_line(
            f"[{gone[0].number}] is completed, but its run {short_path(place)} is not there{more}; "
            f"{move}train it: {again}"
        )

    def prepare(self) -> bool:
        """Check each value before the first job starts; return whether a job cannot be, which has ended."""
        self.launcher.preload(shared_words(self.asked.memory), self._stop)
        wrong = self.source.check(self.configs, self.folder is None)
        for job in [job for job in self.source.jobs if job.number in wrong]:
            self._end(job, Ended.of(wrong[job.number]))
        return bool(wrong)

    def _open(self) -> SweepDir | None:
        """Return the sweep's directory, which the first job says that can be; None if no job can be."""
        if is_new := self.folder is None:
            if self.source.probe:
                self._create(self.configs.directory(self.source.probe, None)[0])
            while self.folder is None and (job := self.source.peek()):
                self._place(job)
        if self.folder:
            self.source.open(self.folder, is_new)
        return self.folder

    def _advise(self) -> None:
        """Say that jobs which run one by one could train together, if that is worth it."""
        here, settings = self.launcher.is_forked or not self.asked.settings.isolate, self.asked.settings
        jobs = self.source.foreseen()
        apart = here and not self.launcher.is_stacked and not settings.search and len(jobs) > 1
        if apart and (line := advice(jobs, self.configs)):
            print_line(line)

    def _create(self, root: Path) -> None:
        self.folder = self._watch.folder = SweepDir.create(root, self.source.jobs, self.asked.memory)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _placed(self) -> Iterator[Job]:
        while not self._stop.requested and (job := self.source.next()):
            if self._place(job):
                yield job

    def _place(self, job: Job) -> bool:
        """Give a job its directory; return whether it has one, else it has ended."""
        if job.directory is not None and self.folder:
            run = self.folder.run(job)
            if other := self.configs.other_run(job, run):
                what = "put the job's own run back, or move this one away, then go on with the sweep"
                self._end(job, Ended(NOT_STARTED, f"{short_path(run)}: holds another run: {other}; {what}"))
            return not other
        try:
            root, directory = self.configs.directory(job, self.folder.path if self.folder else None)
            self._places.give(job, root, directory)
        except Exception as error:
            self._end(job, Ended.of(error))
            return False
        if self.folder is None:  # what is wrong with it is no fault of the job's
            self._create(root)
        return True

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if self.asked.settings.isolate:
            with self._stop.handling():
                yield
            return
        try:
            with catch_signals():
                yield
        except KeyboardInterrupt as error:  # between two jobs
            self._stop.number = getattr(error, "exit_code", 130) - 128

    def _end(self, job: Job, ended: Ended) -> None:
        """Note how a job ended, and tell of a failure at once."""
        job.end(ended, self.folder.run(job) if self.folder and job.directory else None)
        self.source.told(job)
        if self.folder:
            self.folder.note([job])
        self._update_report(last=False)
        self._watch.ended(job)
        if job.status in FAILURES:
            first = self._refused.setdefault(str(job.error), job.number) if job.status == Status.REFUSED else job.number
            told = f"{job.error}{self._details(job)}" if first == job.number else f"as in job {first}"
            self._watch.say(f"toyexp: error in job {job.number}: {told}", sys.stderr)
            if self.asked.settings.fail_fast:
                self._stop.end()

    def _details(self, job: Job) -> str:
        """Return the exit code of a job's process, and where the rest of its output is."""
        if self.folder is None or job.directory is None or job.code is None:
            return ""
        logs = [path for path in (self.folder.run(job) / "log.txt", self.folder.log(job)) if path.exists()]
        if not logs:
            return ""
        told, log_file = job.code < 0 or f"exit code {job.code}" in str(job.error), short_path(logs[0])
        details = [] if told else [f"exit code {job.code}"]
        details += [] if log_file in str(job.error) else [f"log: {log_file}"]
        return f" ({'; '.join(details)})" if details else ""

    # -- what came out -------------------------------------------------------------------------------------------------

    def _ranking(self) -> Ranking[Job]:
        return self.folder.ranking() if self.folder else ranked(self.source.jobs)

    def _update_report(self, last: bool) -> None:
        """Write report.html, now that a job has ended or, at `last`, all have; none of a run that is alone."""
        several = len(self.source.jobs) > 1
        if self.folder and self.asked.settings.report and several and not self._stop.number:
            self._report_page(self.folder.path, last)

    def _summarise(self) -> int:
        """Print the table, and how to go on; return the exit code."""
        jobs, folder = self.source.jobs, self.folder
        statuses = {job.status for job in jobs}
        if len(jobs) > 1 and not is_notebook():  # there the result shows it
            print_table(jobs, folder)
        done, left = self.source.standing()
        command = ""
        retry = ["sweep.retry=true"] if any(job.hindered for job in jobs) else []
        if (left or retry) and folder:
            plugins = [f"plugins=[{','.join(self.asked.modules)}]"] if self.asked.modules else []
            command = shlex.join(["toyexp", format_override("sweep.resume", short_path(folder.path)), *retry, *plugins])
        if number := self._stop.number:
            name = signal.Signals(number).name
            self._watch.say(f"toyexp: interrupted by {name}; {done}; go on: {command}", sys.stderr)
            return 128 + number
        if command:
            print_line(f"{done}; go on: {command}")
        if statuses <= {*ANSWERED}:
            return 0
        return 2 if statuses <= {*ANSWERED, Status.REFUSED, Status.WAITING} else 1
