"""The callback that stops runs of a search early, in the process of the run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from toyexp.base.errors import UserError
from toyexp.base.formatting import format_value
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.hooks import hookimpl
from toyexp.interfaces.run import Run
from toyexp.results.run_dirs import PRUNED_PREFIX
from toyexp.sweeps.combinations import TRIAL
from toyexp.sweeps.search.study import Judge

log = logging.getLogger("toyexp")


def first_pruning_step(steps: int, eval_every: int) -> int:
    """Return the first step at which a run may be stopped: the first evaluation after a quarter of its steps.

    Earlier, schedules have hardly lowered the learning rate and scores mislead: the runs that end best, with a high
    learning rate or a long warmup, are still behind.
    """
    return -(-steps // (4 * eval_every)) * eval_every


def pruning_environment(journal: Path, trial: int, prune: str, metric: str, first: int) -> dict[str, str]:
    """Return the environment variable that configures pruning in the process of a run."""
    options = {"journal": str(journal), "trial": trial, "prune": prune, "metric": metric, "first": first}
    return {TRIAL: json.dumps(options)}


def pop_pruning_callback() -> dict[str, Callback]:
    """Return the pruning callback if a search started this process, otherwise no callback.

    It is not among the run's settings.
    """
    if TRIAL not in os.environ:
        return {}
    options = json.loads(os.environ.pop(TRIAL))  # removed, so that child processes do not inherit it
    return {Pruning.name: Pruning(**{**options, "journal": Path(options["journal"])})}


@dataclass(eq=False)
class Pruning(Callback):
    """Stops a run whose held-out metric is worse than that of other trials."""

    name: ClassVar[str] = "sweep.prune"

    journal: Path
    trial: int
    prune: str  # asha | median
    metric: str
    first: int  # first step at which the run may be stopped
    _judge: Judge | None = field(default=None, init=False)
    _why: str | None = field(default=None, init=False)

    def should_wait(self, step: int) -> bool:
        """Return False: it stops a run only after an evaluation, when no step is queued."""
        return False

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Open the journal of the search."""
        self._judge = Judge(self.journal, self.trial, self.prune, self.first)

    @hookimpl(trylast=True)  # after callbacks that log the evaluation
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Report the metric and decide whether to stop; not at step 0, where all runs are equal."""
        if step == 0 or self._judge is None:
            return
        if self.metric not in metrics:
            raise UserError(f"sweep.metric={self.metric}: unknown metric; evaluations have {', '.join(metrics)}")
        score = metrics[self.metric]
        try:
            stops = self._judge.should_stop(step, score)
        except OSError as error:
            log.warning("%s: not written (%s); the run goes on", self.journal, error.strerror)
            return
        if stops and step < run.steps:
            score_text = f"the held-out {self.metric} {format_value(round(score, 4))} after step {step}"
            self._why = f"{PRUNED_PREFIX}{self.prune}: {score_text} is worse than that of other trials"

    @hookimpl
    def stop_reason(self) -> str | None:
        """Return the reason to stop, if there is one."""
        return self._why
