"""Jobs on this machine, side by side or one after another: each in a process of its own, or all in this one."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from toyexp.base.attribution import attribute_part_errors
from toyexp.base.process_state import restore_process_state
from toyexp.base.terminal import is_terminal, print_line, silence
from toyexp.runner.one_run import PreparedRun, prepare_request, prepare_run
from toyexp.sweeps.directory import Ended, Job, Order
from toyexp.sweeps.launchers.gpus import visible
from toyexp.sweeps.launchers.job_process import run_process
from toyexp.sweeps.launchers.launcher import Launcher, Resources
from toyexp.sweeps.search.pruning import taken
from toyexp.sweeps.watch import Watch
from toyexp.training.verdict import print_result

log = logging.getLogger("toyexp")

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 1000  # processes of jobs on one machine: each has a thread and four open files here


class Processes(Launcher):
    """Jobs side by side on this machine, each with its share of the cores and, if it takes any, GPUs of its own."""

    name = "processes"
    is_forked = True
    shares_gpus = True

    def resources(self, jobs: Sequence[Job]) -> Resources:
        share = self.on_this_machine(self.demand(jobs, len(visible())))
        if share.jobs > AT_ONCE:
            print_line(f"sweep.jobs={self.settings.jobs}: {AT_ONCE} run at once, more are not started on one machine")
        return share._replace(jobs=min(share.jobs, AT_ONCE))

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        def work(job: Job, hand_on: Callable[[tuple[Job, Ended]], None]) -> None:
            with self.gpus.some(self.share.gpus) as gpus:
                watch.begin([job])
                order = replace(watch.order(job), gpus=gpus, cores=self.share.cores)
                terminal = self.alone and is_terminal()
                ended = run_process(order, watch.stop, partial(watch.hear, job), terminal=terminal, start=self.start)
            hand_on((job, ended))

        return side_by_side(jobs, work, self.limit())


class Serial(Processes):
    """Jobs one after another, each in a process of its own."""

    name = "serial"
    has_several = False
    shares_gpus = False

    def resources(self, jobs: Sequence[Job]) -> Resources:
        return Resources(1, 0, 0)


class InProcess(Launcher):
    """Jobs in this process, which is afterwards as it was before."""

    name = "serial"
    has_several = False

    def describe(self, at_once: int) -> str:
        return f"{super().describe(at_once)} in one process"

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        for job in jobs:
            watch.begin([job])
            yield job, self._run(job, watch)

    def _run(self, job: Job, watch: Watch) -> Ended:
        try:
            with restore_process_state(), silence(watch.board is not None):
                order = watch.order(job)
                os.environ.update(order.environment)
                with attribute_part_errors():
                    print_result(self._prepared(job, order).run())
        except KeyboardInterrupt as error:
            code = getattr(error, "exit_code", 130)
            watch.stop.number = code - 128
            watch.stop.end()
            return Ended(code, str(error))
        except (Exception, SystemExit) as error:
            log.debug("job failed", exc_info=error)
            return Ended.of(error)
        return Ended(0)

    def _prepared(self, job: Job, order: Order) -> PreparedRun:
        if order.words() is order.again:
            return prepare_request(replace(self.configs.request, settings=[]), str(order.directory), taken())
        return prepare_run(self.configs.of_a_run(job), order.directory, callbacks=taken())


def side_by_side(items: Iterator[T], work: Callable[[T, Callable[[R], None]], None], limit: int) -> Iterator[R]:
    """Work on at most `limit` items at once, each in a thread; yield what `work` hands on, and raise its errors.

    The next item is taken once what came of the one before was looked at: it may depend on that.
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
        while running < limit and (taken := list(itertools.islice(items, 1))):
            threading.Thread(target=run, args=taken, name="jobs", daemon=True).start()
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
