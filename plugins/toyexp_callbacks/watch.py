"""Warnings about a loss that leaps or climbs; they never stop a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import toyexp
from toyexp import Planned, Run, changed, hookimpl
from toyexp.base import require_within
from toyexp_callbacks.events import Listener

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
        require_within("callbacks.watch", self, warmup="[2,inf)", horizon="[2,inf)", patience="[1,inf)",
                       factor="(0,inf)", rise="(0,inf)")  # fmt: skip

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That it cannot warn in so short a run, where it was told how long it takes."""
        for key, of in (("warmup", "a spike"), ("patience", "a training loss that climbs")):
            if changed(self, key):
                value = getattr(self, key)
                yield from planned.beyond(f"callbacks.watch.{key}", value, f"it never warns of {of}")

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
        self._training, self._held_out = (toyexp.rebuilt(Climb, state[part]) for part in ("training", "held_out"))

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
