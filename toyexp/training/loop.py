"""The training loop, once, for every recipe and engine. It trains correctly with no callback at all.

It is a generator: it asks for a step or an evaluation and is sent what came of it, by whatever drives it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from toyexp.base.blame import batches_of, blamed
from toyexp.contract.batch import Batch, batch_digest
from toyexp.contract.dataset import Batches
from toyexp.contract.run import Run
from toyexp.training.bad_numbers import gave_up
from toyexp.training.bus import Bus
from toyexp.training.driver import Asks, Evaluate, Step, drive
from toyexp.training.outcome import Outcome, Saver

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
        """Takes all steps that are left on the run's own session."""
        return drive(self.asks(), self.run.session)

    def asks(self) -> Asks[Outcome]:
        """Takes the steps that are left of `run.steps`, evaluating on the way, first and last.

        Raises RunFailed when the loss or the gradient is no finite number, unless the plan skips such steps.
        """
        outcome, began = self.outcome, time.perf_counter()
        before, self._whole = outcome.seconds, True
        self.bus.step = outcome.steps
        try:
            with self._blamed("data"):
                self._held_out: Sequence[Batch] = self.batches.held_out() if self.eval_every else ()
                len(self._held_out)  # what has no length is no sequence
            yield from self._steps(before, began)
        except Exception:
            outcome.seconds = before + time.perf_counter() - began
            if self._whole and outcome.steps:
                self._save_anyway()
            raise
        return outcome

    def _steps(self, before: float, began: float) -> Asks[None]:
        run, bus, outcome = self.run, self.bus, self.outcome
        outcome.reason, outcome.why = "completed", None
        bad_in_a_row = 0
        finished = yield from self._evaluate_if_due()  # of a resumed run too: it may have been stopped in the middle
        self.saver.begin(self._scores())

        while outcome.steps < run.steps and not finished:
            metrics, batch = yield from self._step()
            bus.hook.on_step(run=run, step=outcome.steps, metrics=metrics, batch=batch)
            bus.check()
            if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
                bad_in_a_row = 0
            else:
                bad_in_a_row += 1
                self._bad_numbers(metrics, batch, bad_in_a_row)
            finished = (yield from self._evaluate_if_due()) or (yield from self._ended(metrics))
            outcome.seconds = before + time.perf_counter() - began
            self.saver.after(outcome, self._scores(), last=finished or outcome.steps == run.steps)
            bus.check()

    def _save_anyway(self) -> None:
        """What was trained before a plugin failed, as far as that can be saved."""
        try:
            self.saver.after(self.outcome, self._scores(), last=True)
        except Exception as error:
            log.error("what was trained could not be saved: %s", error)

    @contextlib.contextmanager
    def _blamed(self, kind: str) -> Iterator[None]:
        """Tells what goes wrong inside as an error of the run's data or optimiser, or of its engine or model."""
        run, plan, when = self.run, self.run.plan, f"at step {self.bus.step}"
        names = {"engine": run.engine} | {k: run.config.get(k, {}).get("name", "?") for k in ("data", "optim")}
        others = plan.parts if kind == "engine" else {}
        with batches_of(names["data"], when), blamed(f"{kind}.{names[kind]}", when, self.bus.log, **others):
            yield

    def _step(self) -> Asks[tuple[dict[str, float], Batch]]:
        run, step = self.run, self.outcome.steps
        started = time.perf_counter()
        self.bus.step = step + 1
        lr = self.bus.lr(run, step)
        factors = self.bus.factors(run, step)
        with self._blamed("optim"):
            numbers = run.plan.numbers(step, lr, factors)
        with self._blamed("data"):
            batch = self.batches.batch(step)
        self._whole = False
        with self._blamed("engine"):
            loss, grad_norm = yield Step(batch, numbers)
        self._whole = True
        seconds = time.perf_counter() - started
        count = int(batch["weights"].astype(bool).sum())
        self.outcome.steps, self.outcome.train_loss = step + 1, loss
        self.outcome.tokens += count
        self.outcome.training_seconds += seconds
        return {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": count, "wall_us": seconds * 1e6}, batch

    def _evaluate_if_due(self) -> Asks[bool]:
        """Evaluates when it is time and was not done; whether a signal came meanwhile."""
        outcome = self.outcome
        due = outcome.steps % self.eval_every == 0 or outcome.steps == self.run.steps if self._held_out else False
        if self.stopped():
            outcome.reason = "interrupted"
        elif due and outcome.eval_step != outcome.steps:
            yield from self._evaluate()
        return outcome.reason == "interrupted"

    def _evaluate(self) -> Asks[None]:
        outcome = self.outcome
        try:
            with self._blamed("engine"):
                loss, scores = yield Evaluate(self._until_stopped)
        except _Stopped:  # it is done again when the run is resumed
            outcome.reason = "interrupted"
            return
        outcome.eval_step, outcome.eval_loss, outcome.eval_scores = outcome.steps, loss, scores
        if outcome.first_eval_loss is None:
            outcome.first_eval_loss, outcome.first_eval_scores = loss, scores
        self.bus.hook.on_eval(run=self.run, step=outcome.steps, metrics=self._scores())
        self.bus.check()

    def _until_stopped(self) -> Iterator[Batch]:
        for batch in self._held_out:
            if self.stopped():
                raise _Stopped
            yield batch

    def _scores(self) -> dict[str, float]:
        """Of an evaluation after this very step; empty without one."""
        outcome = self.outcome
        if outcome.eval_loss is None or outcome.eval_step != outcome.steps:
            return {}
        return {"loss": outcome.eval_loss, "ppl": math.exp(min(outcome.eval_loss, 700)), **outcome.eval_scores}

    def _ended(self, metrics: Mapping[str, float]) -> Asks[bool]:
        """Whether a callback ends the run here; then it is evaluated once more."""
        outcome = self.outcome
        outcome.why = self.bus.hook.stop_reason(run=self.run, step=outcome.steps, metrics=metrics)
        if outcome.why:
            outcome.reason = "aborted"
            if self._held_out and outcome.eval_step != outcome.steps:
                yield from self._evaluate()
        return bool(outcome.why)

    def _bad_numbers(self, metrics: Mapping[str, float], batch: Batch, in_a_row: int) -> None:
        run, outcome = self.run, self.outcome
        place = f"step {outcome.steps} (batch {outcome.steps - 1}, digest {batch_digest(batch)})"
        what = f"the loss is {metrics['loss']} and the gradient norm {metrics['grad_norm']}"
        if run.plan.skip_nonfinite and in_a_row < SKIPPED_IN_A_ROW:
            outcome.skipped += 1
            numbers = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
            run.emit("skipped", step=outcome.steps, **numbers, batch=batch_digest(batch), skipped=outcome.skipped)
            return
        self._whole = False
        raise gave_up(run, place, what, batch, in_a_row)


class _Stopped(BaseException):
    """A signal came in the middle of an evaluation; no error that someone could be blamed for."""
