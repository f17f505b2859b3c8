"""The training loop, once, for every recipe and engine. It trains correctly with no callback at all.

It is a generator: it asks for steps and evaluations, and the driver answers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toyexp.base.errors import BadBatch, PluginFailed
from toyexp.interfaces.dataset import Batch, Batches, batch_digest
from toyexp.interfaces.micro_batches import readied
from toyexp.interfaces.run import Metrics, Run
from toyexp.interfaces.session import StepInput, StepMetrics
from toyexp.interfaces.stack import Stack
from toyexp.training.bus import Bus
from toyexp.training.driver import Asks, Evaluate, Step, drive
from toyexp.training.run_config import Outcome, Saver
from toyexp.training.verdict import boundary, gave_up

log = logging.getLogger("toyexp")

SKIPPED_IN_A_ROW = 20  # steps after which a run that skips bad numbers is given up: nothing changes any more
MOST, BYTES = 32, 1 << 19  # batches made at once, and what they may take


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
        """Take the steps that are left, and evaluate; RunFailed for bad numbers, unless they are skipped."""
        run, bus, outcome, began = self.run, self.bus, self.outcome, time.perf_counter()
        before = outcome.seconds
        self._whole = True  # False while nobody knows how much of a step the weights have
        self._bad_in_a_row = 0
        self._engine = boundary(run, bus, "engine")
        self._next = NextSteps(run, bus, self.batches)
        self._under_way: list[_Launched] = []
        self._ended_at = began  # the step before
        bus.step = outcome.steps
        try:
            self._held_out = self._held_out_batches()
            outcome.reason, outcome.why = "completed", None
            yield from self._evaluate_if_due()  # of a resumed run too: it may have been stopped in the middle
            self.saver.begin(self._scores())
            while outcome.steps < run.steps and outcome.reason == "completed":
                yield from self._launch_steps()
                metrics, batch = self._take_step()
                bus.check()
                self._check_numbers(metrics, batch)
                if self._under_way:  # nobody looks at the run here
                    continue
                yield from self._evaluate_if_due()
                yield from self._end_if_asked(metrics)
                outcome.seconds = before + time.perf_counter() - began
                ends = outcome.steps == run.steps or outcome.reason != "completed"
                self.saver.after(outcome, self._scores(), last=ends)
                bus.check()
        except Exception:
            outcome.seconds = before + time.perf_counter() - began
            if self._whole:
                self._save_anyway()
            raise
        return outcome

    def _launch_steps(self) -> Asks[None]:
        if not self._under_way:
            yield from self._launch(self.outcome.steps)
        if self.run.session.depth > 1 and len(self._under_way) == 1:
            behind = self.outcome.steps + len(self._under_way[0].steps)
            if not self._looked_at(behind):
                yield from self._launch(behind)

    def _looked_at(self, step: int) -> bool:
        ends = step == self.run.steps or self.stopped()
        return ends or self._eval_is_due(step) or self.saver.wants(step) or self.bus.looks(step)

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
        steps, made.ready = made.ready[: len(waits)], made.ready[len(waits) :]
        self._under_way.append(_Launched(steps, began, waits))

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
        outcome, bus = self.outcome, self.bus
        if outcome.reason == "completed":  # no signal has
            outcome.why = bus.why = bus.hook.stop_reason(run=self.run, step=outcome.steps, metrics=metrics)
        if outcome.why:
            outcome.reason = "aborted"
            yield from self._evaluate()

    def _held_out_batches(self) -> Sequence[Batch]:
        """Return what the run is evaluated on; raise PluginFailed if the data hold nothing out."""
        if not self.eval_every:
            return ()
        with boundary(self.run, self.bus, "data"):
            batches = self.batches.held_out()
            if not len(batches):  # what has no length is no sequence
                name, needs = self.run.config.get("data", {}).get("name", "?"), f"eval_every={self.eval_every} needs"
                raise PluginFailed(f"data.{name} holds no batch out, which {needs}; eval_every=0 trains without")
            return batches

    def _eval_is_due(self, step: int) -> bool:
        return bool(self._held_out) and (step % self.eval_every == 0 or step == self.run.steps)

    def _evaluate_if_due(self) -> Asks[None]:
        if self.stopped():
            self.outcome.reason = "interrupted"
        elif self._eval_is_due(self.outcome.steps):
            yield from self._evaluate()

    def _evaluate(self) -> Asks[None]:
        """Evaluate the run, unless nothing is held out or it was evaluated after this very step."""
        outcome = self.outcome
        if not self._held_out or outcome.eval_step == outcome.steps:
            return
        try:
            with self._engine:
                loss, scores = yield Evaluate(self._until_stopped)
        except _Stopped:  # it is done again when the run is resumed
            outcome.reason = "interrupted"
            return
        outcome.eval_step, outcome.eval_loss, outcome.eval_scores = outcome.steps, loss, scores
        metrics = Metrics(self._scores(), finite=True)
        self.bus.tell_eval(self.run, outcome.steps, metrics)
        outcome.eval_scores = {**scores, **metrics.logged}
        if outcome.first_eval_loss is None:
            outcome.first_eval_loss, outcome.first_eval_scores = loss, outcome.eval_scores
        self.bus.check()

    def _scores(self) -> dict[str, float]:
        """Return the scores of an evaluation after this very step; without one, none."""
        outcome = self.outcome
        if outcome.eval_loss is None or outcome.eval_step != outcome.steps:
            return {}
        return {"loss": outcome.eval_loss, "ppl": math.exp(min(outcome.eval_loss, 700)), **outcome.eval_scores}

    def _until_stopped(self) -> Iterator[Batch]:
        for batch in self._held_out:
            if self.stopped():
                raise _Stopped
            yield batch

    def _save_anyway(self) -> None:
        try:
            while self._under_way:
                self._check_numbers(*self._take_step())
            if self.outcome.steps:
                self.saver.after(self.outcome, self._scores(), last=True)
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


class _Stopped(BaseException):
    """A signal came in the middle of an evaluation; no error that someone could be blamed for."""


# -- what the next steps take ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NextStep:
    """What a step takes."""

    step: int  # from 0
    batch: Batch
    lr: float
    factors: Mapping[str, float]  # of the optimiser's other numbers
    input: StepInput


class NextSteps:
    """The next steps of a run, as far as they were made, from batches made several at a time if the data can.

    Batch k is a function of k alone, so making it early changes nothing; a block takes little longer than a batch.
    """

    def __init__(self, run: Run, bus: Bus, batches: Batches):
        self._run, self._bus, self._batches, plan = run, bus, batches, run.plan
        self._optim, self._data, self._engine = (boundary(run, bus, kind) for kind in ("optim", "data", "engine"))
        self.ready: list[NextStep] = []
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        few = min(MOST, BYTES // max(row * plan.rows * plan.accumulate, 1))
        self._count = few if _blocks_are_batches(batches) else 1
        self._first, self._made = 0, list[Batch]()

    def make(self, step: int) -> None:
        """Make a step, which follows those that are ready, unless it was made."""
        if self.ready and self.ready[-1].step >= step:
            return
        run, bus = self._run, self._bus
        bus.step = step + 1
        lr, factors = bus.lr(run, step), bus.factors(run, step)
        with self._optim:
            numbers = run.plan.numbers(step, lr, factors)
        with self._data:
            batch = self.batch(step)
        with self._engine:
            self.ready.append(NextStep(step, batch, lr, factors, run.session.step_input(batch, numbers)))

    def can_make(self, step: int) -> bool:
        """Make a step behind others; return False for one that is wrong, which is told when its turn comes."""
        with contextlib.suppress(Exception):
            self.make(step)
        return self.ready[-1].step >= step

    def batch(self, k: int) -> Batch:
        """Return batch `k`, counted from 0."""
        if not self._first <= k < self._first + len(self._made):
            self._first, self._made = k, [*self._block(k)]
        return self._made[k - self._first]

    def _block(self, k: int) -> Sequence[Batch]:
        count = min(self._count, self._run.steps - k)
        block = self._batches.block(k, count) if count > 1 else None
        if block is not None:
            try:
                return readied(self._run.plan, block, count)
            except BadBatch:  # each is refused, or not, when its turn comes
                self._count = 1
        return [self._batches.batch(k)]


def _blocks_are_batches(batches: Batches) -> bool:
    """Return True if the class with `block` also has `batch`: one that overrides `batch` alone is in no block."""
    for kind in type(batches).__mro__:
        if "block" in vars(kind):
            return kind is not Batches and "batch" not in vars(batches)
        if "batch" in vars(kind):
            break
    return False
