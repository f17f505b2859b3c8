"""Run jobs on this machine, in parallel or one after another, in their own processes or in this one."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from toyexp.base.attribution import attribute_part_errors
from toyexp.base.process_state import restore_process_state
from toyexp.base.terminal import is_notebook, is_terminal, print_line, silence
from toyexp.base.writing import make_directory, open_for_writing
from toyexp.runner.one_run import PreparedRun, prepare_request, prepare_run
from toyexp.sweeps.directory import Job, JobExit, LaunchSpec
from toyexp.sweeps.launchers.gpus import visible_gpus
from toyexp.sweeps.launchers.job_process import run_process
from toyexp.sweeps.launchers.launcher import Launcher, Resources
from toyexp.sweeps.search.pruning import pop_pruning_callback
from toyexp.sweeps.watch import Watch
from toyexp.training.verdict import print_result

log = logging.getLogger("toyexp")

T = TypeVar("T")
R = TypeVar("R")

MAX_PROCESSES = 1000  # job processes on one machine; each needs a thread and four open files here


class Processes(Launcher):
    """Launcher of parallel jobs. Each job gets a share of the cores and, if it uses GPUs, its own GPUs."""

    name = "processes"
    shares_gpus = True

    def resources(self, jobs: Sequence[Job]) -> Resources:
        share = self.limit_to_machine(self.requested_resources(jobs, len(visible_gpus())))
        if share.jobs > MAX_PROCESSES:
            print_line(f"sweep.jobs={self.settings.jobs}: at most {MAX_PROCESSES} jobs can run at once")
        return share._replace(jobs=min(share.jobs, MAX_PROCESSES))

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, JobExit]]:
        def work(job: Job, hand_on: Callable[[tuple[Job, JobExit]], None]) -> None:
            with self.gpus.reserve(self.share.gpus) as gpus:
                watch.begin([job])
                spec = replace(watch.launch_spec(job), gpus=gpus, cores=self.share.cores)
                terminal = self.runs_singly and watch.verbose and is_terminal()
                ended = run_process(spec, watch.stop, partial(watch.hear, job), terminal=terminal, start=self.start)
            hand_on((job, ended))

        return run_in_threads(jobs, work, self.limit())


class Serial(Processes):
    """Launcher that runs one job after another, each in its own process."""

    name = "serial"
    shares_gpus = False
    resources = Launcher.resources


class InProcess(Launcher):
    """Launcher that runs jobs in this process and restores the process's state after each."""

    name = "serial"

    def describe(self, at_once: int) -> str:
        return f"{super().describe(at_once)} in one process"

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, JobExit]]:
        for job in jobs:
            watch.begin([job])
            yield job, self._run(job, watch)

    def _run(self, job: Job, watch: Watch) -> JobExit:
        try:
            spec = watch.launch_spec(job)
            with restore_process_state(), self._redirect(spec, watch), attribute_part_errors():
                os.environ.update(spec.environment)
                print_result(self._prepare(job, spec).run())
        except KeyboardInterrupt as error:
            ended = JobExit.from_error(error)
            watch.stop.number = ended.code - 128
            watch.stop.end()
            return ended
        except (Exception, SystemExit) as error:
            log.debug("job failed", exc_info=error)
            return JobExit.from_error(error)
        return JobExit(0)

    @contextlib.contextmanager
    def _redirect(self, spec: LaunchSpec, watch: Watch) -> Iterator[None]:
        """Redirect a job's standard output to its log if the sweep does not print this output.

        If a board is shown, redirect standard error (notes and warnings) too.
        """
        if watch.verbose and not watch.board:
            yield
            return
        os.environ["NO_COLOR"] = "1"
        make_directory(spec.log.parent)
        with (
            open(open_for_writing(spec.log, os.O_APPEND), "a", encoding="utf-8") as output,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output if watch.board else sys.stderr),
            silence(is_notebook()),
        ):
            yield

    def _prepare(self, job: Job, spec: LaunchSpec) -> PreparedRun:
        if spec.args() is spec.resume_args:
            return prepare_request(
                replace(self.configs.request, settings=[]), str(spec.directory), pop_pruning_callback()
            )
        return prepare_run(self.configs.run_config(job), spec.directory, callbacks=pop_pruning_callback())


def run_in_threads(items: Iterator[T], work: Callable[[T, Callable[[R], None]], None], limit: int) -> Iterator[R]:
    """Call `work` for each item in a thread of its own, with at most `limit` threads at once, and yield the results.

    `work` receives an item and a function, which it calls with each result. If `work` raises an error in a thread, this
    function raises the same error. Items may depend on earlier results. Therefore, the next item is taken from `items`
    only after the caller has consumed the last result.
    """
    results: queue.SimpleQueue[tuple[R] | BaseException | None] = queue.SimpleQueue()

    def run(item: T) -> None:
        try:
            work(item, lambda result: results.put((result,)))
            results.put(None)
        except BaseException as error:
            results.put(error)

    running = 0
    while True:
        for item in itertools.islice(items, limit - running):
            threading.Thread(target=run, args=(item,), name="jobs", daemon=True).start()
            running += 1
        if not running:
            return
        match results.get():
            case None:
                running -= 1
            case BaseException() as error:
                raise error
            case (result,):
                yield result
