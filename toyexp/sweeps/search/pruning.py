"""The callback that prunes runs of a search: it stops a run early, in the process that trains the run."""

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

    Metrics of earlier steps are misleading, because the schedule has hardly lowered the learning rate yet. Runs with a
    high learning rate or a long warmup often end best, but are still worse than others at that time.
    """
    return -(-steps // (4 * eval_every)) * eval_every


def pop_pruning_callback() -> dict[str, Callback]:
    """Return {name: pruning callback}, or an empty dict if no search with pruning started this process.

    The callback is not part of the run's settings, so the search passes its options, as JSON, in an environment
    variable. This function removes the variable.
    """
    if TRIAL not in os.environ:
        return {}
    options = json.loads(os.environ.pop(TRIAL))  # removed, so that child processes do not inherit it
    return {Pruning.name: Pruning(**{**options, "journal": Path(options["journal"])})}


@dataclass(eq=False)
class Pruning(Callback):
    """Callback that stops a run if its held-out metric is worse than the metric of other trials."""

    name: ClassVar[str] = "sweep.prune"

    journal: Path
    trial: int
    prune: str  # asha | median
    metric: str
    first: int  # first step at which the run may be stopped
    _judge: Judge | None = field(default=None, init=False)
    _why: str | None = field(default=None, init=False)

    def should_wait(self, step: int) -> bool:
        """Return False: the next step may be launched before the current one has ended.

        This callback stops a run only after an evaluation.
        """
        return False

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Open the journal of the search."""
        self._judge = Judge(self.journal, self.trial, self.prune, self.first)

    @hookimpl(trylast=True)  # after callbacks that log the evaluation
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metric in the search's journal, and decide whether to stop the run. Step 0 is skipped."""
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
        """Return why this callback stops the run, or None to continue the run."""
        return self._why
