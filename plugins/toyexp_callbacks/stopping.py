"""What ends a run early, and what judges it at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Callback, Dataset, Run, RunFailed, UserError, hookimpl


def require_looks(name: str, config: Mapping[str, Any]) -> None:
    """Raises UserError for a run that never looks at its held-out data."""
    if not config["eval_every"]:
        raise UserError(f"callbacks.{name} needs looks at the held-out data: eval_every must be above 0")


@dataclass(eq=False)
class EarlyStop(Callback):
    """Ends the run when the held-out loss no longer falls."""

    name: ClassVar[str] = "early_stop"

    patience: int = 3  # looks at the held-out data without improvement
    min_delta: float = 0.0  # what counts as improvement

    def __post_init__(self) -> None:
        self._best, self._waited = math.inf, 0

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        if self.patience < 1:
            raise UserError(f"callbacks.early_stop.patience={self.patience}: must be at least 1")
        if not self.min_delta >= 0:
            raise UserError(f"callbacks.early_stop.min_delta={self.min_delta}: must be 0 or above")

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:
        """Refuses a run without held-out looks: it would never be stopped."""
        require_looks(self.name, config)

    def state(self) -> dict[str, Any]:
        """The best loss and the looks since."""
        return {"best": self._best, "waited": self._waited} if self._best < math.inf else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on counting."""
        self._best, self._waited = float(state["best"]), int(state["waited"])

    @hookimpl
    def on_eval(self, metrics: Mapping[str, float]) -> None:
        """Counts the looks since the last improvement."""
        # The best moves only when it is beaten by min_delta, so that many small gains together are an improvement.
        if metrics["loss"] < self._best - self.min_delta:
            self._best, self._waited = metrics["loss"], 0
        else:
            self._waited += 1

    @hookimpl
    def stop_reason(self) -> str | None:
        """Once patience has run out."""
        if self._waited < self.patience:
            return None
        return f"early_stop: {self._waited} looks without a held-out loss below {self._best - self.min_delta:.4f}"


@dataclass(eq=False)
class QualityGate(Callback):
    """Fails the run (exit 1) when its held-out loss did not fall enough."""

    name: ClassVar[str] = "quality_gate"

    max_ratio: float = 0.95  # largest final / initial held-out loss that passes
    max_loss: float | None = None  # largest final held-out loss that passes; null: any

    def __post_init__(self) -> None:
        self._losses: list[float] = []

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        if not self.max_ratio > 0:
            raise UserError(f"callbacks.quality_gate.max_ratio={self.max_ratio}: must be above 0")
        if self.max_loss is not None and not self.max_loss > 0:
            raise UserError(f"callbacks.quality_gate.max_loss={self.max_loss}: must be above 0, or null")

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:
        """Refuses a run without held-out looks: there would be nothing to judge."""
        require_looks(self.name, config)

    def state(self) -> dict[str, Any]:
        """The first loss and the last."""
        return {"losses": [self._losses[0], self._losses[-1]]} if self._losses else {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes them back."""
        first, last = state["losses"]
        self._losses = [float(first), float(last)]

    @hookimpl
    def on_eval(self, metrics: Mapping[str, float]) -> None:
        """Notes the held-out loss."""
        self._losses.append(metrics["loss"])

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Judges a finished run; raises RunFailed when it misses the gate."""
        if reason not in ("completed", "aborted"):
            return
        first, last = self._losses[0], self._losses[-1]
        judged = [("loss_ratio", last / first, self.max_ratio)]
        if self.max_loss is not None:
            judged.append(("loss", last, self.max_loss))
        metric, value, threshold = max(judged, key=lambda j: j[1] / j[2])
        passed = value <= threshold
        run.emit("quality_gate", passed=passed, metric=metric, value=value, threshold=threshold)
        if not passed:
            raise RunFailed(f"quality gate: held-out {metric} is {value:.4f}, it must be at most {threshold:g}")
