"""What ends a run early, and what judges it at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Dataset, Plan, Planned, Run, RunFailed, UserError, choose, hookimpl, lower_is_better, printable
from toyexp.base import counted, require_within
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
            raise UserError(f"callbacks.{self.name}.metric={printable(self.metric)}: {choose(self.metric, metrics)}")
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
        require_within("callbacks.early_stop", self, patience="[1,inf)", min_delta="[0,inf]")

    def best_by(self) -> str | None:
        """The run keeps the weights that were best: they are what is exported."""
        return self.metric

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That the run is over before its patience is."""
        first = self.patience * planned.config["eval_every"]
        if first >= planned.steps:
            yield (
                f"callbacks.early_stop.patience={self.patience}: with eval_every={planned.config['eval_every']} it can "
                f"stop a run at step {first} at the earliest; this one has {planned.steps} steps"
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
        return f"early_stop: {counted(self._waited, 'eval')} without a held-out {self.metric} {better}"


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
        require_within("callbacks.quality_gate", self, max_ratio="(0,inf]")
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
