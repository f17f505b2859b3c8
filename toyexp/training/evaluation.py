"""A run's evaluations: on its held-out batches, first, last and every so many steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from toyexp.base.errors import PluginFailed
from toyexp.interfaces.dataset import Batch, Batches
from toyexp.interfaces.run import Metrics, Run
from toyexp.training.bus import Bus
from toyexp.training.driver import Asks, Evaluate
from toyexp.training.run_config import Outcome
from toyexp.training.verdict import boundary


class Evaluations:
    """The evaluations of a run, and their scores in its `outcome`; `every` 0: none."""

    def __init__(self, run: Run, bus: Bus, outcome: Outcome, every: int, stopped: Callable[[], bool]):
        self._run, self._bus, self._outcome, self._every, self._stopped = run, bus, outcome, every, stopped
        self._batches: Sequence[Batch] = ()

    def open(self, batches: Batches) -> None:
        """Take the held-out batches of the data; raises PluginFailed where there are none."""
        if not self._every:
            return
        with boundary(self._run, self._bus, "data"):
            self._batches = batches.held_out()
            if not len(self._batches):  # what has no length is no sequence
                raise PluginFailed(
                    f"data.{self._run.config.get('data', {}).get('name', '?')} holds no batch out, "
                    f"which eval_every={self._every} needs; eval_every=0 trains without"
                )

    def is_due(self, step: int) -> bool:
        """Return True if the run is evaluated after `step`."""
        return bool(self._batches) and (step % self._every == 0 or step == self._run.steps)

    def evaluate_if_due(self) -> Asks[None]:
        """Evaluate the run if it is time; a signal makes it an interrupted one."""
        if self._stopped():
            self._outcome.reason = "interrupted"
        elif self.is_due(self._outcome.steps):
            yield from self.evaluate()

    def evaluate(self) -> Asks[None]:
        """Evaluate the run, unless it has none to be evaluated on or was evaluated after this very step."""
        outcome = self._outcome
        if not self._batches or outcome.eval_step == outcome.steps:
            return
        try:
            with boundary(self._run, self._bus, "engine"):
                loss, scores = yield Evaluate(self._until_stopped)
        except _Stopped:  # it is done again when the run is resumed
            outcome.reason = "interrupted"
            return
        outcome.eval_step, outcome.eval_loss, outcome.eval_scores = outcome.steps, loss, scores
        metrics = Metrics(self.scores(), finite=True)
        self._bus.tell_eval(self._run, outcome.steps, metrics)
        outcome.eval_scores = {**scores, **metrics.logged}
        if outcome.first_eval_loss is None:
            outcome.first_eval_loss, outcome.first_eval_scores = loss, outcome.eval_scores
        self._bus.check()

    def scores(self) -> dict[str, float]:
        """Return the scores of an evaluation after this very step; without one, none."""
        outcome = self._outcome
        if outcome.eval_loss is None or outcome.eval_step != outcome.steps:
            return {}
        return {"loss": outcome.eval_loss, "ppl": math.exp(min(outcome.eval_loss, 700)), **outcome.eval_scores}

    def _until_stopped(self) -> Iterator[Batch]:
        for batch in self._batches:
            if self._stopped():
                raise _Stopped
            yield batch


class _Stopped(BaseException):
    """A signal came in the middle of an evaluation; no error that someone could be blamed for."""
