"""The training loop, once, for every recipe and engine. It trains correctly with no callback at all.

It is a generator: it asks for steps and evaluations, and the driver answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toyexp.interfaces.dataset import Batch, Batches, batch_digest
from toyexp.interfaces.run import Metrics, Run
from toyexp.interfaces.session import StepMetrics
from toyexp.interfaces.stack import Stack
from toyexp.training.bus import Bus
from toyexp.training.driver import Asks, Step, drive
from toyexp.training.evaluation import Evaluations
from toyexp.training.next_steps import NextStep, NextSteps
from toyexp.training.run_config import Outcome, Saver
from toyexp.training.verdict import boundary, gave_up

log = logging.getLogger("toyexp")

SKIPPED_IN_A_ROW = 20  # steps after which a run that skips bad numbers is given up: nothing changes any more


@dataclass
class Training:
    """One run's training: its parts, and how far it has come in `outcome`, which a resumed run brings along."""

    run: Run
    bus: Bus
    batches: Batches
    eval_every: int  # steps between evaluations; 0: never
    stopped: Callable[[], bool] = lambda: False  # asked after every step and every held-out batch
    saver: Saver = field(default_factory=Saver)
    outcome: Outcome = field(default_factory=Outcome)

    def train(self) -> Outcome:
        """Take the steps that are left on the run's own session."""
        (end,) = drive([self.asks()], Stack([self.run.session]))
        if isinstance(end, Exception):
            raise end
        return end

    def asks(self) -> Asks[Outcome]:
        """Take the steps that are left of `run.steps`, evaluating on the way, first and last.

        Raises RunFailed when the loss or the gradient is no finite number, unless the plan skips such steps.
        """
        run, bus, outcome, began = self.run, self.bus, self.outcome, time.perf_counter()
        before = outcome.seconds
        self._whole = True  # False while nobody knows how much of a step the weights have
        self._bad_in_a_row = 0
        self._engine = boundary(run, bus, "engine")
        self._next = NextSteps(run, bus, self.batches)
        self._under_way: list[_Launched] = []
        self._ended_at = began  # the step before
        bus.step = outcome.steps
        self._evals = Evaluations(run, bus, outcome, self.eval_every, self.stopped)
        try:
            self._evals.open(self.batches)
            outcome.reason, outcome.why = "completed", None
            yield from self._evals.evaluate_if_due()  # of a resumed run too: it may have been stopped in the middle
            self.saver.begin(self._evals.scores())
            while outcome.steps < run.steps and outcome.reason == "completed":
                yield from self._launch_steps()
                metrics, batch = self._take_step()
                bus.check()
                self._check_numbers(metrics, batch)
                if self._under_way:  # nobody looks at the run here
                    continue
                yield from self._evals.evaluate_if_due()
                yield from self._end_if_asked(metrics)
                outcome.seconds = before + time.perf_counter() - began
                ends = outcome.steps == run.steps or outcome.reason != "completed"
                self.saver.after(outcome, self._evals.scores(), last=ends)
                bus.check()
        except Exception:
            outcome.seconds = before + time.perf_counter() - began
            if self._whole:
                self._save_anyway()
            raise
        return outcome

    def _launch_steps(self) -> Asks[None]:
        """Launch the next steps, and those behind them too where the session can and nobody looks in between."""
        if not self._under_way:
            yield from self._launch(self.outcome.steps)
        if self.run.session.depth > 1 and len(self._under_way) == 1:
            behind = self.outcome.steps + len(self._under_way[0].steps)
            if not self._looked_at(behind):
                yield from self._launch(behind)

    def _looked_at(self, step: int) -> bool:
        """Return True if someone needs the run as it stands after `step`."""
        ends = step == self.run.steps or self.stopped()
        return ends or self._evals.is_due(step) or self.saver.wants(step) or self.bus.looks(step)

    def _launch(self, step: int) -> Asks[None]:
        """Launch a step, and as many behind it as the session takes at once and nobody looks at."""
        began, count, made = time.perf_counter(), 1, self._next
        made.make(step)
        while count < self.run.session.depth // 2 and not self._looked_at(step + count) and made.can_make(step + count):
            count += 1
        self.bus.step = step + 1
        try:
            with self._engine:
                waits = yield Step([each.input for each in made.ready[:count]])
        except Exception:
            self._whole = False
            raise
        self._under_way.append(_Launched(made.take(len(waits)), began, waits))

    def _take_step(self) -> tuple[Metrics, Batch]:
        """Tell of the first step that is under way; wait for all that were launched with it."""
        outcome, launched = self.outcome, self._under_way[0]
        self.bus.step = outcome.steps + 1
        if not launched.found:
            self._whole = False
            with self._engine:
                launched.found = [wait() for wait in launched.waits]
            self._whole = True
            ended = time.perf_counter()
            launched.seconds = (ended - max(launched.began, self._ended_at)) / len(launched.steps)
            self._ended_at = ended
        step, (loss, grad_norm) = launched.steps.pop(0), launched.found.pop(0)
        if not launched.steps:
            self._under_way.pop(0)
        targets = int(np.count_nonzero(step.batch["weights"]))
        outcome.count(loss, targets, launched.seconds)
        metrics = {"loss": loss, "lr": step.lr, "grad_norm": grad_norm, "tokens": targets}
        metrics["wall_us"] = launched.seconds * 1e6
        if step.factors:
            scaled = {f"{name}_factor": factor for name, factor in step.factors.items()}
            metrics = {**scaled, **self.run.plan.scaled(step.factors), **metrics}
        told = Metrics(metrics)
        self.bus.tell_step(self.run, outcome.steps, told, step.batch)
        return told, step.batch

    def _check_numbers(self, metrics: Mapping[str, float], batch: Batch) -> None:
        """Raise RunFailed for bad numbers, unless they are to be skipped."""
        run, outcome, loss, norm = self.run, self.outcome, metrics["loss"], metrics["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        if not run.plan.skip_nonfinite or self._bad_in_a_row == SKIPPED_IN_A_ROW:
            self._whole = False
            raise gave_up(run, outcome.steps, metrics, batch, self._bad_in_a_row)
        outcome.skipped += 1
        digest = batch_digest(batch)
        run.emit("skipped", step=outcome.steps, loss=loss, grad_norm=norm, batch=digest, skipped=outcome.skipped)

    def _end_if_asked(self, metrics: Mapping[str, float]) -> Asks[None]:
        """End the run if a callback has a reason for that, after one more evaluation."""
        outcome, bus = self.outcome, self.bus
        if outcome.reason == "completed":  # no signal has
            outcome.why = bus.why = bus.hook.stop_reason(run=self.run, step=outcome.steps, metrics=metrics)
        if outcome.why:
            outcome.reason = "aborted"
            yield from self._evals.evaluate()

    def _save_anyway(self) -> None:
        """Save what was trained before a plugin failed, as far as that can be saved."""
        try:
            while self._under_way:
                self._check_numbers(*self._take_step())
            if self.outcome.steps:
                self.saver.after(self.outcome, self._evals.scores(), last=True)
        except Exception as error:
            log.error("what was trained could not be saved: %s", error)


@dataclass
class _Launched:
    """Steps that are under way together, those that were told of left out."""

    steps: list[NextStep]
    began: float
    waits: Sequence[Callable[[], StepMetrics]]  # for each of them
    found: list[StepMetrics] = field(default_factory=list)  # of each, once they were waited for
    seconds: float = 0.0  # each has taken
