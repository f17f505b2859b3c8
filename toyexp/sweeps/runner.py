"""Run a sweep: a JobSource yields its jobs, a launcher runs them, and the sweep's directory records how they end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from toyexp.base.formatting import short_path
from toyexp.base.ownership import DirectoryLocked, require_unlocked
from toyexp.base.signals import catch_signals
from toyexp.base.terminal import is_notebook, print_line
from toyexp.config.words import format_override
from toyexp.results.ranking import Ranking, rank_jobs
from toyexp.results.report import SweepReport, draw_sweep
from toyexp.sweeps.board import make_board
from toyexp.sweeps.directory import FAILURES, SUCCEEDED, UNFINISHED, Job, JobExit, Status, SweepDir, SweepSpec
from toyexp.sweeps.job_configs import JobDirectories
from toyexp.sweeps.launchers.job_process import NOT_STARTED, Stop
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.launchers.stacks import advice
from toyexp.sweeps.sources import JobSource
from toyexp.sweeps.summary_table import print_table
from toyexp.sweeps.watch import Watch
from toyexp.training.checkpoint import read_result


class Runner:
    """Runner of one sweep. It checks the jobs before the first one starts, runs them, and prints a summary."""

    def __init__(self, spec: SweepSpec, source: JobSource, launcher: Launcher, folder: SweepDir | None = None):
        """Prepare to resume the sweep in `folder`, or to start a new one if `folder` is None.

        The directory of a new sweep is created later, when the configuration of its first job is composed.
        """
        self.spec, self.source, self.launcher, self.folder = spec, source, launcher, folder
        self.settings, self.configs = launcher.settings, launcher.configs
        self._stop = Stop()
        verbose = self.settings.verbose and launcher.is_local  # jobs of a cluster print on other machines
        self._watch = Watch(source.environment, self._stop, launcher.runs_singly, launcher.total, verbose)
        self._places = JobDirectories(source.jobs)
        self._report_page = SweepReport()
        self._refused: dict[str, int] = {}  # error message -> number of the first job with it
        if folder:
            self._watch.folder = folder
            source.resume(self._unfinished_jobs(folder))

    def run(self) -> int:
        """Run the jobs; return the exit code of the sweep."""
        try:
            self.prepare()
            if self.source.remaining_jobs():
                self.launcher.connect()
            folder = self._open()
            self._advise()
            launcher = self.launcher
            is_taken = self.settings.verbose and launcher.runs_singly  # a job has the terminal
            shown = launcher.is_local and not is_taken
            self._watch.board = make_board(self.source.all_jobs, self._ranking, launcher.limit(), shown)
            if folder:
                with self._signals():
                    for job, ended in self.launcher.run(self._assign_jobs(), self._watch):
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

    def best_model(self) -> Path | None:
        """Return the directory of the best run if it has a model file."""
        best = self._ranking().best
        run = self.folder.run_dir(best.jobs[0]) if best and self.folder else None
        return run if run and any(run.glob("*.gguf")) else None

    def close(self) -> None:
        """Release the sweep's directory and stop the fork server."""
        self._watch.close()
        self.launcher.close()
        if self.folder:
            self.folder.close()

    # -- before the first job ------------------------------------------------------------------------------------------

    def _unfinished_jobs(self, folder: SweepDir) -> list[Job]:
        """Return the jobs that a resumed sweep has to run.

        First update the jobs that were running when the sweep was killed: their run directories show how they ended.
        """
        for job in self.source.jobs:
            if job.status != Status.RUNNING and job.code != NOT_STARTED:
                continue
            directory = folder.run_dir(job)
            result = {} if self.configs.other_run(job, directory) else read_result(directory)
            if result.get("error") and result.get("reason") != "interrupted":
                job.record_exit(JobExit(1, str(result["error"])), directory)
            elif result.get("reason") in ("completed", "aborted"):
                job.record_exit(JobExit(0), directory)
            else:
                try:
                    require_unlocked(directory)
                    job.status = Status.KILLED
                except DirectoryLocked as owner:
                    print_line(f"[{job.number}] {job.label}: {owner}")
        self._report_missing(folder)
        retry = self.settings.retry
        jobs = [j for j in self.source.jobs if j.status in UNFINISHED or (retry and self.source.may_retry(j))]
        return [job for job in jobs if job.status != Status.RUNNING]

    def _report_missing(self, folder: SweepDir) -> None:
        placed = [(job, folder.run_dir(job)) for job in self.source.jobs if job.directory]
        for job, run in placed:
            if run.is_dir() and (difference := job.difference(read_result(run))):
                other = f"{short_path(run)} is not the run that the sweep recorded: {difference}"
                print_line(f"[{job.number}] {job.label}: {other}")
        deleted_jobs = [job for job, run in placed if job.status == Status.COMPLETED and not run.is_dir()]
        if not deleted_jobs:
            return
        directory, shared = folder.run_dir(deleted_jobs[0]), folder.spec.shared_args
        args = [*(word for word in shared if not word.startswith("hydra.sweep.")), *deleted_jobs[0].overrides]
        command = shlex.join(["toyexp", *args, format_override("hydra.run.dir", short_path(directory))])
        more = f", and {len(deleted_jobs) - 1} more" if len(deleted_jobs) > 1 else ""
        move = "move the file with that name away, then " if os.path.lexists(directory) else ""
        print_line(
            f"[{deleted_jobs[0].number}] is completed, but its run {short_path(directory)} is missing{more}; "
            f"{move}train it again: {command}"
        )

    def prepare(self) -> bool:
        """Start the fork server, and check every value of every swept key before the first job starts.

        Record jobs with an invalid value as ended. Return True if there are such jobs.
        """
        self.launcher.preload(self.spec.shared_args, self._stop)
        errors = self.source.check(self.configs, self.folder is None)
        for job in [job for job in self.source.jobs if job.number in errors]:
            self._end(job, JobExit.from_error(errors[job.number]))
        return bool(errors)

    def _open(self) -> SweepDir | None:
        """Create the directory of a new sweep, or open that of a resumed sweep, and return it.

        The path of a new directory comes from the configuration of the first valid job. Return None if no job is valid.
        """
        if is_new := self.folder is None:
            if self.source.probe:
                self._create(self.configs.directory(self.source.probe, None)[0])
            else:  # the first valid job creates the directory
                any(map(self._assign_directory, self.source.remaining_jobs()))
        if self.folder:
            self.source.open(self.folder, is_new)
        return self.folder

    def _advise(self) -> None:
        """Suggest sweep.launcher=stacked if jobs would train faster together."""
        jobs = self.source.remaining_jobs()
        runs_separately = self.launcher.is_local and not self.launcher.trains_stacks and not self.settings.search
        if runs_separately and len(jobs) > 1 and (line := advice(jobs, self.configs)):
            print_line(line)

    def _create(self, root: Path) -> None:
        self.folder = self._watch.folder = SweepDir.create(root, self.source.jobs, self.spec)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _assign_jobs(self) -> Iterator[Job]:
        while not self._stop.is_requested and (job := self.source.next()):
            if self._assign_directory(job):
                yield job

    def _assign_directory(self, job: Job) -> bool:
        """Assign a run directory to a job. If the job has a directory already, check that it does not hold another run.

        Return True if the directory can be used. Otherwise record the job as ended, with the error, and return False.
        """
        if job.directory is not None and self.folder:
            run = self.folder.run_dir(job)
            if difference := self.configs.other_run(job, run):
                remedy = "put the job's own run back, or move this one away, then resume the sweep"
                self._end(job, JobExit(NOT_STARTED, f"{short_path(run)}: holds another run: {difference}; {remedy}"))
            return not difference
        try:
            root, directory = self.configs.directory(job, self.folder.path if self.folder else None)
            self._places.assign(job, root, directory)
        except Exception as error:
            self._end(job, JobExit.from_error(error))
            return False
        if self.folder is None:  # errors of this call concern the sweep, not this job
            self._create(root)
        return True

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if self.settings.isolate:
            with self._stop.handle_signals():
                yield
            return
        try:
            with catch_signals():
                yield
        except KeyboardInterrupt as error:  # Ctrl-C between two jobs
            self._stop.number = JobExit.from_error(error).code - 128

    def _end(self, job: Job, ended: JobExit) -> None:
        """Record how a job ended, and report a failure at once."""
        job.record_exit(ended, self.folder.run_dir(job) if self.folder and job.directory else None)
        self.source.record_end(job)
        if self.folder:
            self.folder.record([job])
        self._update_report(last=False)
        self._watch.end(job)
        if job.status in FAILURES:
            first = self._refused.setdefault(str(job.error), job.number) if job.status == Status.REFUSED else job.number
            message = f"{job.error}{self._details(job)}" if first == job.number else f"as in job {first}"
            self._watch.say(f"toyexp: error in job {job.number}: {message}", sys.stderr)
            if self.settings.fail_fast:
                self._stop.end()

    def _details(self, job: Job) -> str:
        """Return text to append to a job's error: the exit code, and the path of the job's log.

        Leave out the exit code or the path if the error message contains it already.
        """
        if self.folder is None or job.directory is None or job.code is None:
            return ""
        logs = [path for path in (self.folder.run_dir(job) / "log.txt", self.folder.log_path(job)) if path.exists()]
        if not logs:
            return ""
        is_code_known, log_file = job.code < 0 or f"exit code {job.code}" in str(job.error), short_path(logs[0])
        details = [] if is_code_known else [f"exit code {job.code}"]
        details += [] if log_file in str(job.error) else [f"log: {log_file}"]
        return f" ({'; '.join(details)})" if details else ""

    # -- results -------------------------------------------------------------------------------------------------------

    def _ranking(self) -> Ranking[Job]:
        return self.folder.rank() if self.folder else rank_jobs(self.source.jobs)

    def _update_report(self, last: bool) -> None:
        """Update report.html after a job has ended.

        `last` is True for the final update. A sweep of one job has no report.
        """
        several = len(self.source.jobs) > 1
        if self.folder and self.settings.report and several and (last or not self._stop.number):
            self._report_page(self.folder.path, last)

    def _summarise(self) -> int:
        """Print the table of jobs and the command that resumes the sweep; return the exit code.

        After a signal, the code is 128 plus the signal's number. Otherwise it is 0 if all jobs succeeded. It is 2 if
        every job that did not succeed has invalid settings or has not started, and 1 in all other cases.
        """
        jobs, folder = self.source.jobs, self.folder
        statuses = {job.status for job in jobs}
        if len(jobs) > 1 and not is_notebook():  # a notebook shows the result object
            print_table(jobs, folder)
        progress, has_jobs_left = self.source.progress()
        command = ""
        retry = ["sweep.retry=true"] if any(job.is_machine_error for job in jobs) else []
        if (has_jobs_left or retry) and folder:
            modules = self.configs.request.modules
            plugins = [f"plugins=[{','.join(modules)}]"] if modules else []
            command = shlex.join(["toyexp", format_override("sweep.resume", short_path(folder.path)), *retry, *plugins])
        if number := self._stop.number:
            name = signal.Signals(number).name
            self._watch.say(f"toyexp: interrupted by {name}; {progress}; to resume: {command}", sys.stderr)
            return 128 + number
        if command:
            print_line(f"{progress}; to resume: {command}")
        if statuses <= {*SUCCEEDED}:
            return 0
        return 2 if statuses <= {*SUCCEEDED, Status.REFUSED, Status.WAITING} else 1
