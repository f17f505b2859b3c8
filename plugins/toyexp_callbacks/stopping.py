"""Callbacks that stop a run early, check its final result, or warn about its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import toyexp
from toyexp import (
    Dataset,
    Plan,
    Run,
    RunFailed,
    RunPreview,
    UserError,
    hookimpl,
    is_changed,
    lower_is_better,
    printable,
    suggest,
)
from toyexp.base import format_loss, pluralise, require_range
from toyexp_callbacks.events import Listener


@dataclass(eq=False)
class MetricListener(Listener):
    """Base of callbacks that depend on a held-out metric."""

    metric: str = "loss"  # held-out metric: loss or ppl (lower is better), or a metric of the model (higher is better)

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:
        """Raise UserError for a run without evaluations."""
        if not config["eval_every"]:
            raise UserError(f"callbacks.{self.name} needs evaluations of the held-out data: eval_every must be above 0")

    def check_plan(self, plan: Plan) -> None:
        """Raise UserError for a metric that the model does not report."""
        plan.model.require_metric(f"callbacks.{self.name}.metric", self.metric)

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return the value of the setting `metric` among an evaluation's metrics. Raise UserError if it is missing."""
        if self.metric not in metrics:
            raise UserError(f"callbacks.{self.name}.metric={printable(self.metric)}: {suggest(self.metric, metrics)}")
        return metrics[self.metric]


@dataclass(eq=False)
class EarlyStop(MetricListener):
    """Stop the run when the held-out loss, or another metric, no longer improves."""

    name: ClassVar[str] = "early_stop"

    patience: int = 3  # stop after this many evaluations without improvement
    min_delta: float = 0.0  # minimum change that counts as improvement

    def __post_init__(self) -> None:
        self._best, self._waited = math.inf, 0  # _best is a cost: the metric, negated if higher is better

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_range("callbacks.early_stop", self, patience="[1,inf)", min_delta="[0,inf]")

    def best_metric(self) -> str | None:
        """Return the name of the metric. The run then keeps and exports the weights with its best value."""
        return self.metric

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the run is too short to be stopped early."""
        earliest = self.patience * preview.config["eval_every"]
        if earliest >= preview.steps:
            yield (
                f"callbacks.early_stop.patience={self.patience}: with eval_every={preview.config['eval_every']} it can "
                f"stop a run at step {earliest} at the earliest; this run has {preview.steps} steps"
            )

    def state(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since then; {} before the first evaluation."""
        return {"best": self._best, "waited": self._waited} if self._best < math.inf else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the best value and the number of evaluations since then."""
        self._best, self._waited = float(state["best"]), int(state["waited"])

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_eval(self, metrics: Mapping[str, float]) -> None:
        """Count the evaluations since the last improvement."""
        # Compare with the last improvement, so that several small gains can add up to min_delta.
        value = self.score(metrics)
        cost = value if lower_is_better(self.metric) else -value
        if cost < self._best - self.min_delta:
            self._best, self._waited = cost, 0
        else:
            self._waited += 1

    @hookimpl
    def stop_reason(self) -> str | None:
        """Return why the run must stop if none of the last `patience` evaluations was an improvement, else None."""
        if self._waited < self.patience:
            return None
        target = self._best - self.min_delta
        text = f"below {target:.4f}" if lower_is_better(self.metric) else f"above {-target:.4f}"
        return f"early_stop: {pluralise(self._waited, 'eval')} without a held-out {self.metric} {text}"


@dataclass(eq=False)
class QualityGate(MetricListener):
    """Fail the run (exit code 1) if its final held-out loss, or another metric, is not good enough."""

    name: ClassVar[str] = "quality_gate"

    max_ratio: float = 0.95  # maximum of final value / first value; if higher is better, of first value / final value
    max_loss: float | None = None  # maximum final loss, only with metric=loss; null: no limit
    least: float | None = None  # minimum final value, only for a metric where higher is better; null: no limit

    def __post_init__(self) -> None:
        self._values: list[float] = []

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_range("callbacks.quality_gate", self, max_ratio="(0,inf]")
        if self.max_loss is not None and not self.max_loss > 0:
            raise UserError(f"callbacks.quality_gate.max_loss={self.max_loss}: must be above 0, or null")
        for key, value, applies in (
            ("max_loss", self.max_loss, self.metric == "loss"),
            ("least", self.least, not lower_is_better(self.metric)),
        ):
            if value is not None and not applies:
                metric = f"callbacks.quality_gate.metric={self.metric}"
                raise UserError(f"callbacks.quality_gate.{key}={value}: has no effect with {metric}; leave it out")

    def state(self) -> dict[str, Any]:
        """Return the first and the last value of the metric, to be saved in a checkpoint."""
        return {"values": [self._values[0], self._values[-1]]} if self._values else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the first and the last value of the metric from a checkpoint."""
        first, last = map(float, state["values"])
        self._values = [first, last]

    def join(self, step: int) -> None:
        """Raise UserError: this callback cannot join a run at `step`, because it needs the run's first evaluation."""
        raise UserError(
            f"callbacks.{self.name} needs the first evaluation, but the run resumes at step {step}; "
            "leave the callback out, or start a new run"
        )

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_eval(self, metrics: Mapping[str, float]) -> None:
        """Record the value of the metric."""
        self._values.append(self.score(metrics))

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Check a finished run. Raise RunFailed if it misses a threshold."""
        if reason not in ("completed", "aborted"):
            return
        first, last = self._values[0], self._values[-1]
        numerator, denominator = (last, first) if lower_is_better(self.metric) else (first, last)
        ratio = numerator / denominator if denominator else math.inf
        checks = [(f"{self.metric}_ratio", ratio, self.max_ratio)]
        if self.max_loss is not None:
            checks.append((self.metric, last, self.max_loss))
        metric, value, threshold = max(checks, key=lambda check: check[1] / check[2])
        has_passed, limit = value <= threshold, "at most"
        if has_passed and self.least is not None:
            metric, value, threshold, limit = self.metric, last, self.least, "at least"
            has_passed = value >= threshold
        run.emit("quality_gate", passed=has_passed, metric=metric, value=value, threshold=threshold)
        if not has_passed:
            raise RunFailed(f"quality gate: held-out {metric} is {value:.4f}; it must be {limit} {threshold:g}")


# -- warnings about loss spikes and divergence -------------------------------------------------------------------------


MIN_SPIKE = 0.01  # minimum size of a spike, as a fraction of the mean
EVALS = 2  # number of high evaluations in a row that count as divergence


@dataclass
class Climb:
    """Detector of a lasting rise of a loss.

    A value counts as high if it meets two conditions. It exceeds the best value by a given fraction, and it is nearer
    to the first value than to the best.
    """

    first: float | None = None  # None: no value yet
    best: float = 0.0
    high: int = 0  # number of values in a row above the limit

    def limit(self, rise: float) -> float:
        """Return the value above which a loss counts as high; `rise` is a fraction of the best value.

        A high loss is above two values: the best value plus this fraction of it, and the mean of the best and the first
        value. The second one avoids false alarms for losses near zero, whose relative changes are large.
        """
        assert self.first is not None
        return max(self.best * (1 + rise), (self.best + self.first) / 2)

    def update(self, loss: float, rise: float, patience: int) -> bool:
        """Process the next loss. Return True only if it is the `patience`-th high loss in a row."""
        if self.first is None:
            self.first = self.best = loss
        self.best = min(self.best, loss)
        self.high = self.high + 1 if loss > self.limit(rise) else 0
        return self.high == patience


@dataclass(eq=False)
class Watch(Listener):
    """Warn about loss spikes and divergence; never stop the run."""

    name: ClassVar[str] = "watch"

    factor: float = 6.0  # a loss this many standard deviations above the running mean is a spike
    warmup: int = 50  # number of first steps without spike detection
    horizon: int = 50  # averaging window of the running mean and deviation, in steps
    rise: float = 0.1  # divergence: the loss exceeds its best by this fraction and is half way back to its first value
    patience: int = 50  # divergence: the training loss stays high for this many steps (held-out loss: two evaluations)

    def __post_init__(self) -> None:
        self._steps = 0
        self._mean = self._variance = self._smooth = 0.0
        self._in_spike = False
        self._training, self._held_out = Climb(), Climb()

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_range("callbacks.watch", self, warmup="[2,inf)", horizon="[2,inf)", patience="[1,inf)",
                       factor="(0,inf)", rise="(0,inf)")  # fmt: skip

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if `warmup` or `patience` is longer than the run and is not the default."""
        for key, event in (("warmup", "a spike"), ("patience", "a diverging training loss")):
            if is_changed(self, key):
                value = getattr(self, key)
                yield from preview.interval_warnings(f"callbacks.watch.{key}", value, f"it cannot warn about {event}")

    def state(self) -> dict[str, Any]:
        """Return the state of the detectors of spikes and of divergence, to be saved in a checkpoint."""
        return {
            "steps": self._steps,
            "mean": self._mean,
            "variance": self._variance,
            "smooth": self._smooth,
            "in_spike": self._in_spike,
            "training": asdict(self._training),
            "held_out": asdict(self._held_out),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the detectors of spikes and of divergence."""
        self._steps, self._in_spike = int(state["steps"]), bool(state["in_spike"])
        self._mean, self._variance, self._smooth = (float(state[key]) for key in ("mean", "variance", "smooth"))
        self._training = toyexp.rebuild_dataclass(Climb, state["training"])
        self._held_out = toyexp.rebuild_dataclass(Climb, state["held_out"])

    @hookimpl
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if the loss jumps far above its running mean (a spike), or keeps rising (divergence).

        Spikes are detected as ZClip (Kumar et al. 2025) detects them in gradient norms: by a z-score from exponential
        moving averages of mean and variance. A spike enters these averages as the largest loss that would not be a
        spike.
        """
        loss = metrics["loss"]
        if not math.isfinite(loss):  # the run itself reports it
            return
        limit = self._mean + max(self.factor * math.sqrt(self._variance), MIN_SPIKE * abs(self._mean))
        is_spike = self._steps >= self.warmup and loss > limit
        if is_spike and not self._in_spike:
            deviation = math.sqrt(self._variance)
            mean = f"{format_loss(self._mean)} +- {format_loss(deviation)}"
            text = f"step {step}: the loss jumped to {format_loss(loss)}; its recent mean is {mean}"
            run.emit(
                "warning", about="loss_spike", step=step, loss=loss, mean=self._mean, deviation=deviation, text=text
            )
        self._in_spike = is_spike
        weight = max(1 / (self._steps + 1), 1 / self.horizon)  # a plain mean during the first `horizon` steps
        distance = (limit if is_spike else loss) - self._mean
        self._mean += weight * distance
        self._variance = (1 - weight) * (self._variance + weight * distance**2)
        self._smooth += weight * (loss - self._smooth)
        self._steps += 1
        if self._training.update(self._smooth, self.rise, self.patience):
            self._warn_divergence(run, step, "smoothed training loss", self._smooth, self._training)

    @hookimpl
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Check the held-out loss for divergence.

        The loss must be high in two evaluations in a row. At the run's last evaluation, a single loss far above the
        first one is enough for a warning.
        """
        loss, climb = metrics["loss"], self._held_out
        if not math.isfinite(loss):
            return
        is_diverging = climb.update(loss, self.rise, EVALS)
        assert climb.first is not None
        if is_diverging or (step == run.steps and climb.high == 1 and loss > climb.first * (1 + self.rise)):
            self._warn_divergence(run, step, "held-out loss", loss, climb)

    def _warn_divergence(self, run: Run, step: int, loss_name: str, loss: float, climb: Climb) -> None:
        rise = f"from {format_loss(climb.best)} to {format_loss(loss)}"
        text = f"step {step}: the {loss_name} has risen {rise}; {run.remedy}"
        run.emit("warning", about="divergence", step=step, loss=loss, best=climb.best, text=text)
