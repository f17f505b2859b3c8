"""Runs the jobs of a sweep to their ends, whatever becomes of one of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toyexp.base.errors import ToyexpError
from toyexp.base.formatting import short
from toyexp.base.ownership import Owned, require_left
from toyexp.base.signals import stop_signals
from toyexp.base.terminal import in_notebook, on_terminal, say, silent, status
from toyexp.base.threads import of_cores
from toyexp.results.ranking import Ranking, ranked
from toyexp.results.report import SweepReport, draw_sweep
from toyexp.sweeps.board import Board, board_for
from toyexp.sweeps.directory import ANSWERED, FAILURES, UNFINISHED, Ended, Job, Status, SweepDir
from toyexp.sweeps.launchers.forking import FORKED, PLATFORMS, Forks, spawned
from toyexp.sweeps.launchers.gpus import Gpus, visible
from toyexp.sweeps.launchers.processes import AT_ONCE, NOT_STARTED, Order, Stop, run_process, side_by_side
from toyexp.sweeps.process_state import contained
from toyexp.sweeps.resources import share_of
from toyexp.sweeps.summary_table import outcome, print_table
from toyexp.training.checkpoint import result_of
from toyexp.training.verdict import print_result

if TYPE_CHECKING:
    from toyexp.config.compose import Composed
    from toyexp.config.request import Request
    from toyexp.config.top_level import Sweep
    from toyexp.sweeps.launchers.cluster import Cluster
    from toyexp.training.run_config import Result

log = logging.getLogger("toyexp")

MANY = 100  # jobs that it takes a moment to look at


@dataclass(frozen=True)
class Asked:
    """A command line that was read, and how one run of it is done in this process."""

    flags: Mapping[str, str]
    request: Request
    experiment: Callable[[Composed, Path], Result]  # in a directory
    run: Callable[[Sequence[str]], int]  # a command line


class Runner:
    """A sweep that runs."""

    def __init__(
        self, asked: Asked, request: Request, settings: Sweep, jobs: list[Job], memory: Mapping[str, Any],
        values: Mapping[str, Any], folder: SweepDir | None = None,
    ):  # fmt: skip
        from toyexp.sweeps.job_configs import Lookahead, Places  # deferred, as Hydra is everywhere here

        self._ahead = Lookahead(request, values)
        self.asked, self._request, self._settings, self._jobs, self._memory = asked, request, settings, jobs, memory
        self._folder = folder  # made once a first configuration has said where
        self.how_chosen = ""  # of a search: its points
        self._report_page = SweepReport()
        self._cluster: Cluster | None = None  # that the jobs are handed to
        self._stop = Stop()
        self._forks: Forks | None = None
        self._places = Places(jobs)
        self._printing = threading.Lock()
        self._refused: dict[str, int] = {}  # the first job that was refused with these words
        self._board: Board | None = None  # of a sweep whose jobs run side by side before a terminal
        self._gpus = Gpus(visible())
        self._share = share_of(settings, jobs, self._ahead, self._gpus)
        self._limit, self._cores, self._most_gpus = self._share.jobs, self._share.cores, self._share.gpus

    @property
    def place(self) -> Path | None:
        """The sweep's directory, once there is one."""
        return self._folder.path if self._folder else None

    @property
    def jobs(self) -> Sequence[Job]:
        """All jobs that there are so far."""
        return self._jobs

    # -- what there is to do --

    def unfinished(self) -> list[Job]:
        """The jobs to go on with. Of those that ran when the sweep itself was killed, their directories tell."""
        assert self._folder is not None
        for job in self._jobs:
            if job.status != Status.RUNNING and job.code != NOT_STARTED:
                continue
            directory = self._folder.run(job)
            found = {} if self._ahead.other_run(job, directory) else result_of(directory)
            if found.get("error") and found.get("reason") != "interrupted":
                job.end(Ended(1, str(found["error"])), directory)
            elif found.get("reason") in ("completed", "aborted"):
                job.end(Ended(0), directory)
            else:
                try:
                    require_left(directory)
                    job.status = Status.KILLED
                except Owned as owner:
                    say(f"[{job.number}] {job.label}: {owner}")
        self._miss()
        left = [j for j in self._jobs if j.status in UNFINISHED or (self._settings.retry and self._may_retry(j))]
        return [job for job in left if job.status != Status.RUNNING]

    def _may_retry(self, job: Job) -> bool:
        return job.status in (Status.FAILED, Status.REFUSED)

    def _miss(self) -> None:
        """Tell of jobs whose runs hold another result, or are not there any more, and how one is trained again."""
        from toyexp.config.words import setting

        assert self._folder is not None
        if "--json" in self.asked.flags:
            return
        placed = [(job, self._folder.run(job)) for job in self._jobs if job.directory]
        for job, run in placed:
            if run.is_dir() and (other := job.difference(result_of(run))):
                say(f"[{job.number}] {job.label}: {short(run)} is not the run that the sweep recorded: {other}")
        gone = [job for job, run in placed if job.status == Status.COMPLETED and not run.is_dir()]
        if not gone:
            return
        place, words = self._folder.run(gone[0]), [*self._shared(), *gone[0].overrides]
        again = shlex.join(["toyexp", *words, setting("hydra.run.dir", short(place))])
        more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
        move = "move that file away, and " if os.path.lexists(place) else ""
        say(f"[{gone[0].number}] is completed, but its run {short(place)} is not there{more}; {move}train it: {again}")

    def _placed(self, job: Job) -> bool:
        """Whether it is known where a job runs; one that has no place has ended."""
        if job.directory is not None and self._folder:
            run = self._folder.run(job)
            if other := self._ahead.other_run(job, run):
                what = "put the job's own run back, or move this one away, then go on with the sweep"
                self._end(job, Ended(NOT_STARTED, f"{short(run)}: holds another run: {other}; {what}"))
            return not other
        try:
            root, directory = self._ahead.directory(job, self._folder.path if self._folder else None)
            self._places.give(job, root, directory)
        except Exception as error:
            self._end(job, failure(error))
            return False
        if self._folder is None:  # what is wrong with it is no fault of the job's
            self._folder = SweepDir.create(root, self._jobs, self._memory)
            many = "s" if len(self._jobs) > 1 else "" if self._jobs[0].overrides else "; no key has several values"
            say(f"sweep   {short(root)}, {len(self._jobs)} job{many}")
        return True

    # -- running --

    def run(self, jobs: Sequence[Job]) -> int:
        """Runs these jobs; returns the exit code of the sweep."""
        try:
            self._forks = self._forks_of_jobs()
            jobs = self._look_ahead(jobs)
            self._advise(jobs)
            self._board = board_for(self._in_sight, self._ranking, self._limit, self._settings.launcher)
            with self._signals():
                for job, ended in self._launch(self._waiting(jobs)):
                    self._end(job, ended)
            self._unwatched()
            code = self._report()
            self._look_back()
            if self._folder and len(self._jobs) > 1 and not self._stop.number:
                draw_sweep(self._folder.path)
            return code
        finally:
            self._unwatched()
            self._close()

    def _close(self) -> None:
        for held in (self._forks, self._cluster, self._folder):
            if held:
                held.close()

    def _forks_of_jobs(self) -> Forks | None:
        """What the jobs that run here are forked from, where that is possible."""
        launcher = self._settings.launcher
        if launcher not in FORKED or not self._settings.isolate or sys.platform not in PLATFORMS:
            return None
        environment = {**os.environ, **of_cores(self._cores)}
        return Forks(environment, self._shared(), lambda: self._stop.requested, launcher == "stacked")

    def _shared(self) -> list[str]:
        """The words of all jobs."""
        return [*(word for flag in self._memory["flags"].items() for word in flag), *self._memory["settings"]]

    def _reach(self) -> None:
        """Has the cluster of jobs that are handed to one; UserError where there is none, before anything is written."""
        settings = self._settings
        if settings.launcher == "submitit":
            from toyexp.sweeps.launchers.on_submitit import OnSubmitit

            self._cluster = OnSubmitit(settings.submitit, self._most_gpus, self._limit)
        if settings.launcher == "ray":
            from toyexp.sweeps.launchers.on_ray import OnRay

            self._cluster = OnRay(settings, self._share, say)
            self._limit = self._cluster.limit()

    def _advise(self, jobs: Sequence[Job]) -> None:
        if self._settings.launcher == "joblib" and self._limit > AT_ONCE:
            say(f"sweep.jobs={self._settings.jobs}: {AT_ONCE} run at once, more are not started on one machine")
            self._limit = AT_ONCE
        if self._settings.launcher in ("serial", "joblib") and self._settings.search is None and len(jobs) > 1:
            from toyexp.sweeps.launchers.stacked import advice

            if line := advice(jobs, self._ahead):
                say(line)

    def _ranking(self) -> Ranking[Job]:
        return self._folder.ranking() if self._folder else ranked(self._jobs)

    def _in_sight(self) -> list[Job]:
        """The jobs that there are, and will be."""
        return self._jobs

    def _unwatched(self) -> None:
        if self._board:
            self._board.clear()
        self._board = None

    def foresee(self, jobs: Sequence[Job]) -> int:
        """Says what these jobs would be; returns the exit code, which is not 0 where one of them cannot be."""
        from toyexp.sweeps.dry_run import Foresight

        try:
            self._forks = self._forks_of_jobs()
            left = self._checked(jobs)
            how = (self._settings, self._limit, self._cores, self._most_gpus, self._memory, self._folder, self._forks)
            code = Foresight(self._ahead, *how, self.how_chosen).show(left, "--json" in self.asked.flags)
            return code or (2 if len(left) < len(jobs) else 0)
        finally:
            self._close()

    def _look_ahead(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs to run, of which the first says where all of them are."""
        left = self._checked(jobs)
        if left:
            self._reach()
        while left and self._folder is None and not self._placed(left[0]):
            left.pop(0)
        return left

    def _checked(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that can be. Each value is looked at before the first one starts, and what is wrong is told."""
        from toyexp.sweeps.job_configs import first_look, require_directories

        new = [job for job in jobs if job.directory is None]
        if not new:
            return list(jobs)
        if len(new) > MANY and "--json" not in self.asked.flags:
            say(f"sweep   {len(new)} jobs; their settings are checked, each value once")
        status("checking the settings of the jobs")
        wrong = first_look(new, self._ahead)
        if self._folder is None:
            require_directories(new, self._ahead)
        for job in new:
            if job.number in wrong:
                self._end(job, failure(wrong[job.number]))
        return [job for job in jobs if job.number not in wrong]

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if self._settings.isolate:
            with self._stop.handling():
                yield
            return
        try:
            with stop_signals():
                yield
        except KeyboardInterrupt as error:  # between two jobs
            self._stop.number = getattr(error, "exit_code", 130) - 128

    def _waiting(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            if self._stop.requested:
                return
            if self._placed(job):
                if self._settings.launcher != "stacked":  # where many are ready before the first begins
                    self._begin([job])
                yield job

    def _begin(self, jobs: Sequence[Job]) -> None:
        assert self._folder is not None
        for job in jobs:
            job.status, job.attempts = Status.RUNNING, job.attempts + 1
        self._folder.note(jobs)
        for job in jobs if self._settings.launcher == "stacked" else ():
            if self._board is None:
                self._say_it(f"[{job.number}] {job.label}".rstrip() + "  begins")
                continue
            with self._printing:
                self._board.begin(job)

    def _launch(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Ended]]:
        settings = self._settings
        if settings.launcher == "joblib":
            return side_by_side(jobs, lambda job, hand_on: hand_on((job, self._process(job))), self._limit)
        if settings.launcher == "stacked":
            return self._in_stacks(jobs)
        if self._cluster and self._folder:
            from toyexp.sweeps.launchers.cluster import on_cluster

            self._cluster.begin(self._folder.path)
            return on_cluster(jobs, self._order, self._cluster, self._stop, self._say_it)
        return ((job, (self._process if settings.isolate else self._here)(job)) for job in jobs)

    def _order(self, job: Job) -> Order:
        from toyexp.config.words import setting

        assert self._folder is not None
        directory = self._folder.run(job)
        where = [setting("hydra.run.dir", directory), f"hydra.job.num={job.number}"]
        plugins = [word for word in self._memory["settings"] if word.startswith("plugins=")]
        return Order(
            directory, self._folder.log(job), [*self._shared(), *job.overrides, *where],
            [f"resume={directory}", *plugins], job.attempts > (self._settings.launcher != "stacked"), self._cores,
        )  # fmt: skip

    def _in_stacks(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Ended]]:
        """Trains jobs together, those of a search a generation at a time."""
        from toyexp.sweeps.launchers.stacked import Stacked  # deferred: the other launchers need none of it

        stacked = Stacked(
            self._order, self._begin, self._shared(), self._settings.jobs, self._share.stacks, self._stop, self._show,
            self._forks.start if self._forks else spawned,
        )  # fmt: skip
        generation = (self._settings.search and self._settings.jobs) or None  # of points that learn of none: all
        while batch := list(itertools.islice(jobs, generation)):
            for job, ended in stacked.run(batch, self._limit, partial(self._gpus.some, self._most_gpus)):
                if self._board:
                    with self._printing:
                        self._board.leave(job)
                yield job, ended

    def _show(self, job: Job | None, line: str, stream: IO[str]) -> None:
        """A line of a process, which a job printed, or none that is known."""
        if self._board is None or job is None:
            self._say_it(line, stream)
            return
        with self._printing:
            self._board.hear(job, line.partition("] ")[2])

    def _process(self, job: Job) -> Ended:
        """Runs a job in a process of its own, with its output before us."""
        alone, board = self._limit == 1, self._board

        def show(line: str, stream: IO[str]) -> None:
            if board is None:
                self._say_it(line if alone else f"[{job.number}] {line}", stream)
                return
            with self._printing:
                board.hear(job, line)

        head = f"[{job.number}] {job.label}".rstrip()
        if board is None:
            self._say_it(f"\n{head}" if alone else f"{head}  begins")
        with self._gpus.some(self._most_gpus if self._settings.launcher == "joblib" else 0) as gpus:
            order = replace(self._order(job), gpus=gpus)
            with self._printing:
                if board:
                    board.begin(job)
            start = self._forks.start if self._forks else spawned
            ended = run_process(order, self._stop, show, terminal=alone and on_terminal(), start=start)
            with self._printing:
                if board:
                    board.leave(job)
            return ended

    def _say_it(self, line: str, stream: IO[str] | None = None) -> None:
        board = self._board.away() if self._board else contextlib.nullcontext()
        with self._printing, contextlib.suppress(OSError), board:  # a reader, or a terminal, that is gone
            if stream is sys.stderr:
                print(line, file=stream, flush=True)
            else:
                say(line)

    def _here(self, job: Job) -> Ended:
        """Runs a job in this process, which afterwards is as it was before."""
        assert self._folder is not None
        if self._board:  # which alone shows the job
            self._board.begin(job)
        try:
            with contained(), silent(self._board is not None):
                say(f"\n[{job.number}] {job.label}".rstrip())
                words = Runner._order(self, job).words()  # what a search tells its process, it tells ours elsewhere
                if job.attempts > 1:
                    self.asked.run(words)
                    return Ended(0)
                cfg = self._ahead.of_a_run(job)
                print_result(self.asked.experiment(cfg, self._folder.run(job)))
        except KeyboardInterrupt as error:
            code = getattr(error, "exit_code", 130)
            self._stop.number = code - 128
            self._stop.end()
            return Ended(code, str(error))
        except (Exception, SystemExit) as error:
            log.debug("job failed", exc_info=error)
            return failure(error)
        finally:
            if self._board:
                self._board.leave(job)
        return Ended(0)

    # -- how it ended --

    def _end(self, job: Job, ended: Ended) -> None:
        """Takes down how a job ended, and tells of a failure at once."""
        self._take_down(job, ended)
        if self._folder:
            self._folder.note([job])
        self._look_back(job)
        if self._board:
            with self._printing:
                self._board.ended(job)
            if job.status in ANSWERED:
                self._say_it(f"[{job.number}] {job.label}".rstrip() + f"  {outcome(job)}")
        if job.status in ANSWERED and self._cluster:  # it printed elsewhere
            self._say_it(f"[{job.number}] {job.status} after {job.result.get('steps')} steps")
        if job.status in FAILURES:
            first = self._refused.setdefault(str(job.error), job.number) if job.status == Status.REFUSED else job.number
            told = f"{job.error}{self._details(job)}" if first == job.number else f"as in job {first}"
            self._say_it(f"toyexp: error in job {job.number}: {told}", sys.stderr)
            if self._settings.fail_fast:
                self._stop.end()

    def _take_down(self, job: Job, ended: Ended) -> None:
        job.end(ended, self._folder.run(job) if self._folder and job.directory else None)

    def _details(self, job: Job) -> str:
        """The exit code of a job's process, and where the rest of what it said is."""
        if self._folder is None or job.directory is None or job.code is None:
            return ""
        logs = [path for path in (self._folder.run(job) / "log.txt", self._folder.log(job)) if path.exists()]
        if not logs:
            return ""
        told, log_file = job.code < 0 or f"exit code {job.code}" in str(job.error), short(logs[0])
        details = [] if told else [f"exit code {job.code}"]
        details += [] if log_file in str(job.error) else [f"log: {log_file}"]
        return f" ({'; '.join(details)})" if details else ""

    def _look_back(self, job: Job | None = None) -> None:
        """The runs side by side in report.html, now that a job has ended or all have; none of one that ends at once."""
        if self._folder and self._settings.report and len(self._jobs) > 1 and not self._stop.number:
            if job and job.directory:
                self._report_page.read(self._folder.run(job), len(self._jobs))
            self._report_page(self._folder.path, job is None)

    def _report(self) -> int:
        jobs, folder = self._jobs, self._folder
        statuses = {job.status for job in jobs}
        if len(jobs) > 1 and not in_notebook():  # there the result shows it
            print_table(jobs, folder)
        done, left = self._standing()
        command = ""
        retry = ["sweep.retry=true"] if any(job.hindered for job in jobs) else []
        if (left or retry) and folder:
            from toyexp.config.words import setting

            plugins = [f"plugins=[{','.join(self._request.modules)}]"] if self._request.modules else []
            command = shlex.join(["toyexp", setting("sweep.resume", short(folder.path)), *retry, *plugins])
        if number := self._stop.number:
            from signal import Signals

            self._say_it(f"toyexp: interrupted by {Signals(number).name}; {done}; go on: {command}", sys.stderr)
            return 128 + number
        if command:
            say(f"{done}; go on: {command}")
        if statuses <= {Status.COMPLETED, Status.PRUNED}:
            return 0
        return 2 if statuses <= {Status.COMPLETED, Status.PRUNED, Status.REFUSED, Status.WAITING} else 1

    def _standing(self) -> tuple[str, bool]:
        """How much is done, in words, and whether something is left."""
        done = sum(job.status == Status.COMPLETED for job in self._jobs)
        return f"{done} of {len(self._jobs)} jobs are completed", any(job.status in UNFINISHED for job in self._jobs)


def failure(error: BaseException) -> Ended:
    """How a job ended that raised in this process."""
    text = str(error) if isinstance(error, ToyexpError) else f"{type(error).__name__}: {error}"
    return Ended(getattr(error, "exit_code", 1), text)
