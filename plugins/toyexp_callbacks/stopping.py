"""Callbacks that end a run early, judge it at its end, or warn about its loss."""

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
from toyexp.base import pluralise, require_range
from toyexp_callbacks.events import Listener


@dataclass(eq=False)
class Scored(Listener):
    """What goes by a score of the held-out data."""

    metric: str = "loss"  # loss or ppl, which should fall; or a score of the model's that should rise: accuracy

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:
        """Refuses a run without evals: there would be nothing to go by."""
        if not config["eval_every"]:
            raise UserError(f"callbacks.{self.name} needs evals of the held-out data: eval_every must be above 0")

    def check_plan(self, plan: Plan) -> None:
        """Refuses a metric that the model does not report."""
        plan.model.require_metric(f"callbacks.{self.name}.metric", self.metric)

    def score(self, metrics: Mapping[str, float]) -> float:
        """The metric of an eval; UserError when the run has none of that name."""
        if self.metric not in metrics:
            raise UserError(f"callbacks.{self.name}.metric={printable(self.metric)}: {suggest(self.metric, metrics)}")
        return metrics[self.metric]


@dataclass(eq=False)
class EarlyStop(Scored):
    """Ends the run when the held-out loss, or another score, no longer gets better."""

    name: ClassVar[str] = "early_stop"

    patience: int = 3  # evals without improvement
    min_delta: float = 0.0  # what counts as improvement

    def __post_init__(self) -> None:
        self._best, self._waited = math.inf, 0  # the best as a cost: a score that should rise is negative

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        require_range("callbacks.early_stop", self, patience="[1,inf)", min_delta="[0,inf]")

    def best_metric(self) -> str | None:
        """The run keeps the weights that were best: they are what is exported."""
        return self.metric

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That the run is over before its patience is."""
        first = self.patience * preview.config["eval_every"]
        if first >= preview.steps:
            yield (
                f"callbacks.early_stop.patience={self.patience}: with eval_every={preview.config['eval_every']} it can "
                f"stop a run at step {first} at the earliest; this one has {preview.steps} steps"
            )

    def state(self) -> dict[str, Any]:
        """The best so far and the evals since."""
        return {"best": self._best, "waited": self._waited} if self._best < math.inf else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on counting."""
        self._best, self._waited = float(state["best"]), int(state["waited"])

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, metrics: Mapping[str, float]) -> None:
        """Counts the evals since the last improvement."""
        # The best moves only when it is beaten by min_delta, so that many small gains together are an improvement.
        value = self.score(metrics)
        cost = value if lower_is_better(self.metric) else -value
        if cost < self._best - self.min_delta:
            self._best, self._waited = cost, 0
        else:
            self._waited += 1

    @hookimpl
    def stop_reason(self) -> str | None:
        """Once patience has run out."""
        if self._waited < self.patience:
            return None
        wanted = self._best - self.min_delta
        better = f"below {wanted:.4f}" if lower_is_better(self.metric) else f"above {-wanted:.4f}"
        return f"early_stop: {pluralise(self._waited, 'eval')} without a held-out {self.metric} {better}"


@dataclass(eq=False)
class QualityGate(Scored):
    """Fails the run (exit 1) when its held-out loss, or another score, did not get good enough."""

    name: ClassVar[str] = "quality_gate"

    max_ratio: float = 0.95  # largest final / initial value that passes; of a metric that should rise, initial / final
    max_loss: float | None = None  # with metric=loss: largest final value that passes; null: any
    least: float | None = None  # with a metric that should rise: smallest final value that passes; null: any

    def __post_init__(self) -> None:
        self._values: list[float] = []

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        require_range("callbacks.quality_gate", self, max_ratio="(0,inf]")
        if self.max_loss is not None and not self.max_loss > 0:
            raise UserError(f"callbacks.quality_gate.max_loss={self.max_loss}: must be above 0, or null")
        for key, given, fits in (
            ("max_loss", self.max_loss, self.metric == "loss"),
            ("least", self.least, not lower_is_better(self.metric)),
        ):
            if given is not None and not fits:
                raise UserError(f"callbacks.quality_gate.{key}={given}: does not go with metric={self.metric}")

    def state(self) -> dict[str, Any]:
        """The first value and the last."""
        return {"values": [self._values[0], self._values[-1]]} if self._values else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes them back."""
        first, last = map(float, state["values"])
        self._values = [first, last]

    def join(self, step: int) -> None:
        """Refuses to judge a run by an eval in its middle."""
        raise UserError(
            f"callbacks.{self.name} judges by the first eval, and step {step} is past it: leave "
            "it out, or begin a new run"
        )

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, metrics: Mapping[str, float]) -> None:
        """Notes the value."""
        self._values.append(self.score(metrics))

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Judges a finished run; raises RunFailed when it misses the gate."""
        if reason not in ("completed", "aborted"):
            return
        first, last = self._values[0], self._values[-1]
        above, below = (last, first) if lower_is_better(self.metric) else (first, last)
        judged = [(f"{self.metric}_ratio", above / below if below else math.inf, self.max_ratio)]
        if self.max_loss is not None:
            judged.append((self.metric, last, self.max_loss))
        metric, value, threshold = max(judged, key=lambda j: j[1] / j[2])
        passed, limit = value <= threshold, "at most"
        if passed and self.least is not None:
            metric, value, threshold, limit = self.metric, last, self.least, "at least"
            passed = value >= threshold
        run.emit("quality_gate", passed=passed, metric=metric, value=value, threshold=threshold)
        if not passed:
            raise RunFailed(f"quality gate: held-out {metric} is {value:.4f}, it must be {limit} {threshold:g}")


# -- warnings about a loss that leaps or climbs, which never stop a run ------------------------------------------------


LEAST_SPIKE = 0.01  # of the mean: a loss that hardly varies has no spikes of a ten-thousandth
EVALS = 2  # in a row whose loss has to be high


@dataclass
class Climb:
    """Whether a loss has climbed for good: above its best by a share, and half the way back to where it began."""

    first: float | None = None
    best: float = 0.0
    high: int = 0  # observations in a row above the limit

    def limit(self, rise: float) -> float:
        """What is too high. A loss near zero varies by multiples of itself, hence the way back as well."""
        assert self.first is not None
        return max(self.best * (1 + rise), (self.best + self.first) / 2)

    def see(self, loss: float, rise: float, patience: int) -> bool:
        """Takes the next value; True once when it was too high `patience` times in a row."""
        if self.first is None:
            self.first = self.best = loss
        self.best = min(self.best, loss)
        self.high = self.high + 1 if loss > self.limit(rise) else 0
        return self.high == patience


@dataclass(eq=False)
class Watch(Listener):
    """Warns of loss spikes and of divergence, and never stops the run."""

    name: ClassVar[str] = "watch"

    factor: float = 6.0  # standard deviations above the running mean that make a loss a spike
    warmup: int = 50  # steps before anything is a spike
    horizon: int = 50  # steps that the running mean and deviation reach back
    rise: float = 0.1  # diverging: above the best smoothed loss by this share, and half the way back to the first,
    patience: int = 50  # for so many steps; or two evals

    def __post_init__(self) -> None:
        self._steps = 0
        self._mean = self._variance = self._smooth = 0.0
        self._in_spike = False
        self._training, self._held_out = Climb(), Climb()

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        require_range("callbacks.watch", self, warmup="[2,inf)", horizon="[2,inf)", patience="[1,inf)",
                       factor="(0,inf)", rise="(0,inf)")  # fmt: skip

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That it cannot warn in so short a run, where it was told how long it takes."""
        for key, of in (("warmup", "a spike"), ("patience", "a training loss that climbs")):
            if is_changed(self, key):
                value = getattr(self, key)
                yield from preview.interval_warnings(f"callbacks.watch.{key}", value, f"it never warns of {of}")

    def state(self) -> dict[str, Any]:
        """Everything that it goes by."""
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
        """Takes it back."""
        self._steps, self._in_spike = int(state["steps"]), bool(state["in_spike"])
        self._mean, self._variance, self._smooth = (float(state[key]) for key in ("mean", "variance", "smooth"))
        self._training = toyexp.rebuild_dataclass(Climb, state["training"])
        self._held_out = toyexp.rebuild_dataclass(Climb, state["held_out"])

    @hookimpl
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Holds the loss against what went before.

        The rule is that of ZClip (Kumar et al. 2025) for gradient norms: a z-score by exponential means of value and
        variance, which a spike enters only as far as the limit it has crossed.
        """
        loss = metrics["loss"]
        if not math.isfinite(loss):  # which is told by the run itself
            return
        limit = self._mean + max(self.factor * math.sqrt(self._variance), LEAST_SPIKE * abs(self._mean))
        spike = self._steps >= self.warmup and loss > limit
        if spike and not self._in_spike:
            deviation = math.sqrt(self._variance)
            text = f"step {step}: the loss leapt to {loss:.4f}; lately it was {self._mean:.4f} +- {deviation:.4f}"
            run.emit(
                "warning", about="loss_spike", step=step, loss=loss, mean=self._mean, deviation=deviation, text=text
            )
        self._in_spike = spike
        share = max(1 / (self._steps + 1), 1 / self.horizon)  # all steps count alike until there are enough
        distance = (limit if spike else loss) - self._mean
        self._mean += share * distance
        self._variance = (1 - share) * (self._variance + share * distance**2)
        self._smooth += share * (loss - self._smooth)
        self._steps += 1
        if self._training.see(self._smooth, self.rise, self.patience):
            self._diverging(run, step, "training loss, smoothed,", self._smooth, self._training)

    @hookimpl
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """The same for the held-out loss; the last one is told where the run ends worse than it began."""
        loss, climb = metrics["loss"], self._held_out
        if not math.isfinite(loss):
            return
        told = climb.see(loss, self.rise, EVALS)
        assert climb.first is not None
        if told or (step == run.steps and climb.high == 1 and loss > climb.first * (1 + self.rise)):
            self._diverging(run, step, "held-out loss", loss, climb)

    def _diverging(self, run: Run, step: int, what: str, loss: float, climb: Climb) -> None:
        text = f"step {step}: the {what} has climbed from {climb.best:.4f} to {loss:.4f}; {run.remedy}"
        run.emit("warning", about="divergence", step=step, loss=loss, best=climb.best, text=text)
