"""Jobs one after another in the process of their sweep."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace

from toyexp.base.attribution import of_a_part
from toyexp.base.errors import UserError
from toyexp.base.process_state import contained
from toyexp.base.terminal import silent
from toyexp.config.top_level import Sweep
from toyexp.runner.one_run import PreparedRun, prepare_request, prepare_run
from toyexp.sweeps.directory import Ended, Job, Order
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.search.pruning import taken
from toyexp.sweeps.watch import Watch
from toyexp.training.verdict import print_result

log = logging.getLogger("toyexp")


class InProcess(Launcher):
    """Jobs in this process, which is afterwards as it was before."""

    name = "serial"
    has_several = False

    @classmethod
    def check(cls, settings: Sweep) -> None:
        if settings.launcher != cls.name:
            what = f"runs one job after another in this process, without {settings.launcher}"
            raise UserError(f"sweep.isolate=false: {what}")
        super().check(settings)

    def describe(self, at_once: int) -> str:
        return f"{super().describe(at_once)} in one process"

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        for job in jobs:
            watch.begin([job])
            ended = self._run(job, watch)
            watch.leave(job)
            yield job, ended

    def _run(self, job: Job, watch: Watch) -> Ended:
        try:
            with contained(), silent(watch.board is not None):
                order = watch.order(job)
                os.environ.update(order.environment)
                with of_a_part():
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
