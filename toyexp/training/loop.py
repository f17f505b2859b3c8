"""The training loop, once, for every recipe and engine. It trains correctly with no callback at all.

It is a generator: it asks for a step or an evaluation and is sent what came of it, by whatever drives it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toyexp.base.attribution import attributed
from toyexp.base.errors import BadBatch, PluginFailed, RunFailed
from toyexp.base.formatting import smooth_loss
from toyexp.interfaces.dataset import Batch, Batches, batch_digest
from toyexp.interfaces.micro_batches import Ready, readied
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run import Metrics, Run
from toyexp.interfaces.session import Session, StepMetrics
from toyexp.training.bus import Bus
from toyexp.training.driver import Asks, Begun, Evaluate, Step, drive
from toyexp.training.run_config import Outcome, Saver

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
        """Takes all steps that are left on the run's own session."""
        return drive(self.asks(), self.run.session)

    def asks(self) -> Asks[Outcome]:
        """Takes the steps that are left of `run.steps`, evaluating on the way, first and last.

        Raises RunFailed when the loss or the gradient is no finite number, unless the plan skips such steps.
        """
        outcome, began = self.outcome, time.perf_counter()
        before, self._whole = outcome.seconds, True
        self._ready: list[_Next] = []  # the next steps, as far as they were made
        self._under_way: list[_Launched] = []
        self._ended_at = began  # the step before
        self._attributed = {kind: self._boundary(kind) for kind in ("data", "optim", "engine")}
        self._ahead = Ahead(self.batches, self.run.plan, self.run.steps)
        self.bus.step = outcome.steps
        try:
            with self._attributed["data"]:
                self._held_out: Sequence[Batch] = self.batches.held_out() if self.eval_every else ()
                if not len(self._held_out) and self.eval_every:  # what has no length is no sequence
                    raise PluginFailed(
                        f"data.{self.run.config.get('data', {}).get('name', '?')} holds no batch out, "
                        f"which eval_every={self.eval_every} needs; eval_every=0 trains without"
                    )
            yield from self._steps(before, began)
        except Exception:
            outcome.seconds = before + time.perf_counter() - began
            if self._whole:
                self._save_anyway()
            raise
        return outcome

    def _steps(self, before: float, began: float) -> Asks[None]:
        run, bus, outcome = self.run, self.bus, self.outcome
        outcome.reason, outcome.why = "completed", None
        self._bad_in_a_row = 0
        finished = yield from self._evaluate_if_due()  # of a resumed run too: it may have been stopped in the middle
        self.saver.begin(self._scores())

        while outcome.steps < run.steps and not finished:
            yield from self._launch_steps()
            metrics, batch = self._taken()
            self._tell(metrics, batch)
            bus.check()
            self._check_numbers(metrics, batch)
            if self._under_way:  # nobody looks at the run here
                continue
            finished = (yield from self._evaluate_if_due()) or (yield from self._ended(metrics))
            outcome.seconds = before + time.perf_counter() - began
            self.saver.after(outcome, self._scores(), last=finished or outcome.steps == run.steps)
            bus.check()

    def _save_anyway(self) -> None:
        """What was trained before a plugin failed, as far as that can be saved."""
        try:
            while self._under_way:
                metrics, batch = self._taken()
                self._tell(metrics, batch)
                self._check_numbers(metrics, batch)
            if self.outcome.steps:
                self.saver.after(self.outcome, self._scores(), last=True)
        except Exception as error:
            log.error("what was trained could not be saved: %s", error)

    def _boundary(self, kind: str) -> attributed:
        """What tells an error inside as one of the run's data or optimiser, or of its engine or model."""
        run = self.run
        names = {"engine": run.engine} | {k: run.config.get(k, {}).get("name", "?") for k in ("data", "optim")}
        return attributed(f"{kind}.{names[kind]}", lambda: f"at step {self.bus.step}", self.bus.log, names["data"])

    def _launch_steps(self) -> Asks[None]:
        """Launches the next step; what comes behind it too where the session can and nobody looks in between."""
        if not self._under_way:
            yield from self._launch(self.outcome.steps)
        if self.run.session.runs_ahead and len(self._under_way) == 1:
            behind = self.outcome.steps + len(self._under_way[0].steps)
            if not self._looked_at(behind):
                yield from self._launch(behind)

    def _looked_at(self, step: int) -> bool:
        """Whether someone needs the run as it stands after `step`."""
        ends = step == self.run.steps or self.stopped()
        return ends or self._is_due(step) or self.saver.wants(step) or self.bus.looks(step)

    def _launch(self, step: int) -> Asks[None]:
        """Launches a step, and as many behind it as the session takes at once and nobody looks at."""
        began, ready, most = time.perf_counter(), self._ready, self.run.session.steps_at_once
        if not ready:
            ready.append(self._made(step))
        count = 1
        while count < most and not self._looked_at(step + count) and self._is_made(step + count):
            count += 1
        self.bus.step = step + 1
        with self._attributed["engine"]:
            try:
                answer = yield Step(ready[0].batch, ready[0].numbers, [(r.batch, r.numbers) for r in ready[1:count]])
            except Exception as error:
                self._whole = isinstance(error, BadBatch)  # which is found before anything changes
                raise
        begun = answer if isinstance(answer, Begun) else Begun(1, lambda: [answer()])
        self._under_way.append(_Launched(ready[: begun.count], began, begun.wait))
        del ready[: begun.count]

    def _made(self, step: int) -> _Next:
        """What a step takes."""
        run = self.run
        self.bus.step = step + 1
        lr = self.bus.lr(run, step)
        factors = self.bus.factors(run, step)
        with self._attributed["optim"]:
            numbers = run.plan.numbers(step, lr, factors)
        with self._attributed["data"]:
            batch = self._ahead.batch(step)
        return _Next(step, batch, lr, factors, numbers)

    def _is_made(self, step: int) -> bool:
        """Whether a step behind others is ready. What is wrong with it is told when its turn comes."""
        if self._ready[-1].step >= step:
            return True
        try:
            made = self._made(step)
        except Exception:
            return False
        if isinstance(made.batch, Ready):  # another one may be refused
            self._ready.append(made)
        return isinstance(made.batch, Ready)

    def _taken(self) -> tuple[Metrics, Batch]:
        """The first of the steps that are under way; waits for those that were launched together."""
        outcome, launched = self.outcome, self._under_way[0]
        self.bus.step = outcome.steps + 1
        if not launched.found:
            self._whole = False
            with self._attributed["engine"]:
                launched.found = [*launched.wait()]
            self._whole = True
            ended = time.perf_counter()
            launched.seconds = (ended - max(launched.began, self._ended_at)) / len(launched.steps)
            self._ended_at = ended
        step, (loss, grad_norm) = launched.steps.pop(0), launched.found.pop(0)
        if not launched.steps:
            self._under_way.pop(0)
        count = int(np.count_nonzero(step.batch["weights"]))
        outcome.steps += 1
        outcome.train_loss = smooth_loss(outcome.train_loss, loss, outcome.steps)
        if outcome.steps == 1:
            outcome.first_train_loss = outcome.train_loss
        outcome.tokens += count
        outcome.training_seconds += launched.seconds
        metrics = {"loss": loss, "lr": step.lr, "grad_norm": grad_norm, "tokens": count}
        metrics["wall_us"] = launched.seconds * 1e6
        if step.factors:
            scaled = {f"{name}_factor": factor for name, factor in step.factors.items()}
            metrics = {**scaled, **self.run.plan.scaled(step.factors), **metrics}
        return Metrics(metrics), step.batch

    def _tell(self, metrics: Metrics, batch: Batch) -> None:
        self.bus.tell_step(self.run, self.outcome.steps, metrics, batch)

    def _evaluate_if_due(self) -> Asks[bool]:
        """Evaluates when it is time and was not done; whether a signal came meanwhile."""
        outcome = self.outcome
        if self.stopped():
            outcome.reason = "interrupted"
        elif self._is_due(outcome.steps) and outcome.eval_step != outcome.steps:
            yield from self._evaluate()
        return outcome.reason == "interrupted"

    def _is_due(self, step: int) -> bool:
        return bool(self._held_out) and (step % self.eval_every == 0 or step == self.run.steps)

    def _evaluate(self) -> Asks[None]:
        outcome = self.outcome
        try:
            with self._attributed["engine"]:
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
        outcome.why = self.bus.why = self.bus.hook.stop_reason(run=self.run, step=outcome.steps, metrics=metrics)
        if outcome.why:
            outcome.reason = "aborted"
            if self._held_out and outcome.eval_step != outcome.steps:
                yield from self._evaluate()
        return bool(outcome.why)

    def _check_numbers(self, metrics: Mapping[str, float], batch: Batch) -> None:
        """Raises RunFailed for bad numbers, unless they are to be skipped."""
        run, outcome = self.run, self.outcome
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            self._bad_in_a_row = 0
            return
        self._bad_in_a_row += 1
        place = f"step {outcome.steps} (batch {outcome.steps - 1}, digest {batch_digest(batch)})"
        what = f"the loss is {metrics['loss']} and the gradient norm {metrics['grad_norm']}"
        if run.plan.skip_nonfinite and self._bad_in_a_row < SKIPPED_IN_A_ROW:
            outcome.skipped += 1
            numbers = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
            run.emit("skipped", step=outcome.steps, **numbers, batch=batch_digest(batch), skipped=outcome.skipped)
            return
        self._whole = False
        raise gave_up(run, place, what, batch, self._bad_in_a_row)


@dataclass(frozen=True)
class _Next:
    """What a step takes."""

    step: int  # from 0
    batch: Batch
    lr: float
    factors: Mapping[str, float]  # of the optimiser's other numbers
    numbers: Sequence[np.ndarray]


@dataclass
class _Launched:
    """Steps that are under way together, those that were told of left out."""

    steps: list[_Next]
    began: float
    wait: Callable[[], Sequence[StepMetrics]]  # for all of them
    found: list[StepMetrics] = field(default_factory=list)  # of each, once they were waited for
    seconds: float = 0.0  # each has taken


class _Stopped(BaseException):
    """A signal came in the middle of an evaluation; no error that someone could be blamed for."""


class Ahead:
    """Gives batch k of a stream, which is a function of k alone, so that none depends on when it was made."""

    def __init__(self, batches: Batches, plan: Plan, steps: int):
        self._batches, self._plan, self._steps = batches, plan, steps
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        few = min(MOST, BYTES // max(row * plan.rows * plan.accumulate, 1))
        self._count = few if _blocks_are_batches(batches) else 1
        self._first, self._ready = 0, list[Batch]()

    def batch(self, k: int) -> Batch:
        """Batch `k`, counted from 0."""
        if not self._first <= k < self._first + len(self._ready):
            self._first, self._ready = k, [*self._made(k)]
        return self._ready[k - self._first]

    def _made(self, k: int) -> Sequence[Batch]:
        count = min(self._count, self._steps - k)
        block = self._batches.block(k, count) if count > 1 else None
        if block is not None:
            try:
                return readied(self._plan, block, count)
            except BadBatch:  # each is refused, or not, when its turn comes
                self._count = 1
        return [self._batches.batch(k)]


def _blocks_are_batches(batches: Batches) -> bool:
    """Whether what makes blocks knows what makes batches: another `batch`, put over it, is in no block."""
    for kind in type(batches).__mro__:
        if "block" in vars(kind):
            return kind is not Batches and "batch" not in vars(batches)
        if "batch" in vars(kind):
            break
    return False


def gave_up(run: Run, place: str, what: str, batch: Batch, in_a_row: int) -> RunFailed:
    """The error of the run's last step, with the first tensor that is no number and what may help."""
    skipped = f"; {in_a_row} steps in a row were skipped" if in_a_row > 1 else ""
    skip = "" if run.plan.skip_nonfinite else ", or nonfinite=skip"
    first = first_bad_tensor(run.session, batch)
    return RunFailed(f"{place}: {what}{skipped}; {first}; {run.remedy}, optim.grad_clip=1{skip}")


def first_bad_tensor(session: Session, batch: Batch) -> str:
    """Words for where numbers are not finite: the first such weight in the model's order, else the first gradient.

    An engine may have taken the bad step before it was seen, and then weights are no numbers either.
    """
    for kind, values in (("weight", session.download), ("gradient", session.gradients(batch).__getitem__)):
        for tensor in session.plan.tensors if kind == "weight" else session.plan.trainable:
            bad = int((~np.isfinite(values(tensor.name))).sum())
            if bad:
                return f"the first {kind} that is not finite is {tensor.name} ({bad} of {tensor.size} numbers)"
    return "all weights and gradients are finite, so the loss or the norm itself overflowed"
