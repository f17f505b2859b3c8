"""The training loop of all recipes and engines. It needs no callbacks.

The loop is a generator: it yields requests for steps and evaluations, which the driver answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from toyexp.base.errors import PluginFailed
from toyexp.interfaces.dataset import Batch, Batches, batch_digest
from toyexp.interfaces.recipe import Recipe
from toyexp.interfaces.run import Metrics, Run
from toyexp.interfaces.snapshot import state_misfit
from toyexp.interfaces.stack import Stack
from toyexp.training.bus import Bus
from toyexp.training.driver import Evaluate, Requests, Step, drive
from toyexp.training.next_steps import Launched, NextSteps, held_out
from toyexp.training.run_config import Outcome, Saver
from toyexp.training.verdict import boundary, nonfinite_error

log = logging.getLogger("toyexp")

MAX_CONSECUTIVE_SKIPS = 20  # with nonfinite=skip: a run that skips this number of steps in a row is stopped


@dataclass
class Training:
    """Training of one run. `outcome` holds its progress. A resumed run begins with the progress in its checkpoint."""

    run: Run
    bus: Bus
    batches: Batches
    eval_every: int  # steps between evaluations; 0: never
    should_stop: Callable[[], bool] = lambda: False  # called after every step and every held-out batch
    saver: Saver = field(default_factory=Saver)
    outcome: Outcome = field(default_factory=Outcome)
    recipe: Recipe | None = None  # may edit weights between steps

    def train(self) -> Outcome:
        """Take the remaining steps on `run.session` and return the outcome."""
        (end,) = drive([self.requests()], Stack([self.run.session]))
        if isinstance(end, Exception):
            raise end
        return end

    def requests(self) -> Requests[Outcome]:
        """Yield requests for steps and evaluations; return the outcome. Raise RunFailed for a non-finite loss."""
        run, bus, outcome, began = self.run, self.bus, self.outcome, time.perf_counter()
        before = outcome.seconds
        self._weights_known = True  # False while a step may be half applied
        self._consecutive_skips = 0
        self._in_engine, self._in_recipe = (boundary(run, bus, kind) for kind in ("engine", "recipe"))
        self._next = NextSteps(run, bus, self.batches)
        self._under_way: list[Launched] = []
        self._ended_at = began  # of the previous step
        bus.step = outcome.steps
        try:
            with self._in_recipe:
                self._edit_steps = frozenset(self.recipe.edit_steps(run.steps) if self.recipe else ())
            self._held_out, self._held_out_sets = held_out(run, bus, self.batches, self.eval_every)
            outcome.reason, outcome.why = "completed", None
            yield from self._evaluate_if_due()  # a resumed run may have stopped during an evaluation
            self.saver.begin(outcome.scores())
            while outcome.steps < run.steps and outcome.reason == "completed":
                self._edit_weights()
                yield from self._launch_steps()
                metrics, batch = self._take_step()
                bus.check()
                self._check_numbers(metrics, batch)
                if self._under_way:  # the weights are already those of a later step
                    continue
                yield from self._evaluate_if_due()
                yield from self._check_stop_request(metrics)
                outcome.seconds = before + time.perf_counter() - began
                ends = outcome.steps == run.steps or outcome.reason != "completed"
                self.saver.after(outcome, outcome.scores(), last=ends)
                bus.check()
        except Exception:
            outcome.seconds = before + time.perf_counter() - began
            if self._weights_known:
                self._save_anyway()
            raise
        return outcome

    def _edit_weights(self) -> None:
        """Let the recipe edit weights and optimiser state, if it asked for an edit after the present step."""
        outcome, session = self.outcome, self.run.session
        if self.recipe is None or outcome.steps not in self._edit_steps or outcome.edited == outcome.steps:
            return
        arrays = dict(session.snapshot())
        with self._in_recipe:
            self.recipe.edit(outcome.steps, arrays)
        if misfit := state_misfit(session.plan, arrays):
            raise PluginFailed(f"recipe.{self.recipe.name}: after edit() at step {outcome.steps}, {misfit}")
        session.restore(arrays)
        outcome.edited = outcome.steps

    def _launch_steps(self) -> Requests[None]:
        if not self._under_way:
            yield from self._launch(self.outcome.steps)
        if self.run.session.depth > 1 and len(self._under_way) == 1:
            following = self.outcome.steps + len(self._under_way[0].steps)
            if not self._needs_weights(following):
                yield from self._launch(following)

    def _needs_weights(self, step: int) -> bool:
        """Return True if an evaluation, an edit, a checkpoint, a callback or the end of the run needs these weights."""
        ends = step == self.run.steps or step in self._edit_steps or self.should_stop()
        return ends or self._eval_is_due(step) or self.saver.is_due(step) or self.bus.should_wait(step)

    def _launch(self, step: int) -> Requests[None]:
        """Launch the step `step`, and also later steps if the session can queue them.

        A later step is not launched if the weights are needed before it, for example for an evaluation.
        """
        began, count, most, upcoming = time.perf_counter(), 1, self.run.session.depth // 2, self._next
        upcoming.make(step)
        while count < most and not self._needs_weights(step + count) and upcoming.try_make(step + count):
            count += 1
        self.bus.step = step + 1
        try:
            with self._in_engine:
                waits = yield Step([entry.input for entry in upcoming.ready[:count]])
        except Exception:
            self._weights_known = False
            raise
        steps, upcoming.ready = upcoming.ready[: len(waits)], upcoming.ready[len(waits) :]
        self._under_way.append(Launched(steps, began, waits))

    def _take_step(self) -> tuple[Metrics, Batch]:
        """Return the metrics and batch of the first launched step that is not yet reported to the callbacks.

        Wait for this step if necessary, and report it to the callbacks.
        """
        outcome, launched = self.outcome, self._under_way[0]
        self.bus.step = outcome.steps + 1
        if not launched.metrics:
            self._weights_known = False
            with self._in_engine:
                self._ended_at = launched.wait(self._ended_at)
            self._weights_known = True
        step, (loss, grad_norm) = launched.steps.pop(0), launched.metrics.pop(0)
        if not launched.steps:
            self._under_way.pop(0)
        counted = step.batch.get("mask", step.batch["weights"])  # `mask` of pairs has an element for each token
        targets = int(np.count_nonzero(counted))
        outcome.count(loss, targets, launched.seconds)
        numbers = {"loss": loss, "lr": step.lr, "grad_norm": grad_norm, "tokens": targets}
        metrics = Metrics({**step.scaled_settings(self.run.plan), **numbers, "wall_us": launched.seconds * 1e6})
        self.bus.call_on_step(self.run, outcome.steps, metrics, step.batch)
        return metrics, step.batch

    def _check_numbers(self, metrics: Mapping[str, float], batch: Batch) -> None:
        run, outcome, loss, norm = self.run, self.outcome, metrics["loss"], metrics["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            self._consecutive_skips = 0
            return
        self._consecutive_skips += 1
        if not run.plan.skip_nonfinite or self._consecutive_skips == MAX_CONSECUTIVE_SKIPS:
            self._weights_known = False
            raise nonfinite_error(run, outcome.steps, metrics, batch, self._consecutive_skips)
        outcome.skipped += 1
        digest = batch_digest(batch)
        run.emit("skipped", step=outcome.steps, loss=loss, grad_norm=norm, batch=digest, skipped=outcome.skipped)

    def _check_stop_request(self, metrics: Mapping[str, float]) -> Requests[None]:
        outcome, bus = self.outcome, self.bus
        if outcome.reason == "completed":  # not stopped by a signal
            outcome.why = bus.stop_reason = bus.hook.stop_reason(run=self.run, step=outcome.steps, metrics=metrics)
        if outcome.why:
            outcome.reason = "aborted"
            yield from self._evaluate()

    def _eval_is_due(self, step: int) -> bool:
        return bool(self._held_out) and (step % self.eval_every == 0 or step == self.run.steps)

    def _evaluate_if_due(self) -> Requests[None]:
        if self.should_stop():
            self.outcome.reason = "interrupted"
        elif self._eval_is_due(self.outcome.steps):
            yield from self._evaluate()

    def _evaluate(self) -> Requests[None]:
        """Evaluate the run, unless nothing is held out or this step was evaluated already."""
        outcome = self.outcome
        if not self._held_out or outcome.eval_step == outcome.steps:
            return
        try:
            with self._in_engine:
                loss, scores = yield Evaluate(self._batches_until_stop)
                for name, part in self._held_out_sets.items():
                    scores = {**scores, f"loss/{name}": (yield Evaluate(partial(iter, part)))[0]}
        except _Stopped:  # repeated when the run is resumed
            outcome.reason = "interrupted"
            return
        outcome.eval_step, outcome.eval_loss, outcome.eval_scores = outcome.steps, loss, scores
        metrics = Metrics(outcome.scores(), finite=True)
        self.bus.call_on_eval(self.run, outcome.steps, metrics)
        outcome.eval_scores = {**scores, **metrics.logged}
        if outcome.first_eval_loss is None:
            outcome.first_eval_loss, outcome.first_eval_scores = loss, outcome.eval_scores
        self.bus.check()

    def _batches_until_stop(self) -> Iterator[Batch]:
        for batch in self._held_out:
            if self.should_stop():
                raise _Stopped
            yield batch

    def _save_anyway(self) -> None:
        try:
            while self._under_way:
                self._check_numbers(*self._take_step())
            if self.outcome.steps:
                self.saver.after(self.outcome, self.outcome.scores(), last=True)
        except Exception as error:
            log.error("could not save a checkpoint after the error: %s", error)


class _Stopped(BaseException):
    """Exception that ends an evaluation when a signal asks the run to stop.

    It is a BaseException, because toyexp reports an Exception as the error of a plugin.
    """
