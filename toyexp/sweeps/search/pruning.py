"""What stops a run of a search at an eval, in the process of that run."""

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
from toyexp.results.found import PRUNES
from toyexp.sweeps.combinations import TRIAL
from toyexp.sweeps.search.study import Judge

log = logging.getLogger("toyexp")


def first_asked(steps: int, eval_every: int) -> int:
    """The step from which on a run of so many may be stopped: its first eval in the second quarter.

    Before it, a schedule has hardly begun to lower the learning rate, and what a run is worth does not show yet: runs
    that come out best, of a high rate or a long warm-up, stand behind others.
    """
    return -(-steps // (4 * eval_every)) * eval_every


def ordered(journal: Path, trial: int, prune: str, metric: str, first: int) -> dict[str, str]:
    """What the process of a run is told in its environment."""
    told = {"journal": str(journal), "trial": trial, "prune": prune, "metric": metric, "first": first}
    return {TRIAL: json.dumps(told)}


def taken() -> dict[str, Callback]:
    """Return the callback by which the search that started this process may stop its run, if one did.

    It is no setting of the run.
    """
    if TRIAL not in os.environ:
        return {}
    asked = json.loads(os.environ.pop(TRIAL))  # nor is it handed on to this process's children
    return {Pruning.name: Pruning(**{**asked, "journal": Path(asked["journal"])})}


@dataclass(eq=False)
class Pruning(Callback):
    """Ends a run whose held-out score is bad beside those of other points."""

    name: ClassVar[str] = "sweep.prune"

    journal: Path
    trial: int
    prune: str  # asha | median
    metric: str
    first: int  # the step from which on it is asked
    _judge: Judge | None = field(default=None, init=False)
    _why: str | None = field(default=None, init=False)

    def should_wait(self, step: int) -> bool:
        """Never: it ends a run after an eval, where nothing is under way."""
        return False

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Opens the journal."""
        self._judge = Judge(self.journal, self.trial, self.prune, self.first)

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Tells the score; before the first step no run is better than another, and after the last nothing is saved."""
        if step == 0 or self._judge is None:
            return
        if self.metric not in metrics:
            raise UserError(f"sweep.metric={self.metric}: an eval has {', '.join(metrics)}")
        score = metrics[self.metric]
        try:
            stops = self._judge.stops(step, score)
        except OSError as error:
            log.warning("%s: not written (%s); the run goes on", self.journal, error.strerror)
            return
        if stops and step < run.steps:
            told = f"the held-out {self.metric} {format_value(round(score, 4))} after step {step}"
            self._why = f"{PRUNES}{self.prune}: {told} is bad beside that of other points"

    @hookimpl
    def stop_reason(self) -> str | None:
        """After such an eval."""
        return self._why
