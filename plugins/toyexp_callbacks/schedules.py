"""Schedules: pure functions of the step that scale the base learning rate, or another optimiser setting."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import ClassVar

from toyexp import RunPreview, Schedule, UserError, is_changed
from toyexp.base import pluralise, require_range

FRACTIONS = ("decay", "floor")  # settings from 0 to 1


@dataclass(eq=False)
class WarmupSchedule(Schedule):
    """Base of this module's schedules: a linear warmup to the base value, then the base value times `decay_factor`."""

    warmup: int | float = 0  # warmup steps, in which the factor rises linearly to 1; below 1: fraction of the run

    def check(self) -> None:
        """Raise UserError for values out of range."""
        fractions = {key: "[0,1]" for key in FRACTIONS if key in vars(self)}
        require_range(f"callbacks.{self.name}", self, warmup="[0,inf)", **fractions)
        if self.warmup > 1 and self.warmup % 1:
            setting = f"callbacks.{self.name}.warmup={self.warmup:g}"
            raise UserError(f"{setting}: must be a whole number of steps, or a fraction of the run below 1")

    def warmup_steps(self, steps: int) -> int:
        """Return the number of warmup steps in a run of `steps`."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)

    def factor(self, step: int, steps: int) -> float:
        """Return the factor by which the base value is multiplied at `step`, which counts from 0."""
        warmup = self.warmup_steps(steps)
        return (step + 1) / warmup if step < warmup else self.decay_factor(step, steps)

    def decay_factor(self, step: int, steps: int) -> float:
        """Return the factor by which the base value is multiplied at a step after the warmup."""
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """Return the fraction of the steps after the warmup that is completed; 1 if no step follows the warmup."""
        warmup = self.warmup_steps(steps)
        return min((step - warmup) / (steps - warmup), 1) if steps > warmup else 1

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the run ends during the warmup."""
        yield from super().warnings(preview)
        if self.scales == "lr" and self.warmup >= preview.steps:
            yield (
                f"callbacks.{self.name}.warmup={self.warmup:g}: the run has {pluralise(preview.steps, 'step')}, so it "
                f"ends in the warmup, at {preview.steps / self.warmup:.3g} times lr; "
                f"for a tenth of the run, type callbacks.{self.name}.warmup=0.1"
            )


@dataclass(eq=False)
class Constant(WarmupSchedule):
    """Schedule of lr or another setting: warmup, then constant."""

    name: ClassVar[str] = "constant"

    def decay_factor(self, step: int, steps: int) -> float:
        """Return 1: the value stays constant after the warmup."""
        return 1.0


@dataclass(eq=False)
class Linear(WarmupSchedule):
    """Schedule of lr or another setting: warmup, then linear decay."""

    name: ClassVar[str] = "linear"

    floor: float = 0.0  # final value, as a fraction of the base value

    def decay_factor(self, step: int, steps: int) -> float:
        """Return the factor at a step after the warmup. It falls linearly from 1 to `floor`."""
        return 1 - (1 - self.floor) * self.progress(step, steps)


@dataclass(eq=False)
class Cosine(WarmupSchedule):
    """Schedule of lr or another setting: warmup, then cosine decay."""

    name: ClassVar[str] = "cosine"

    warmup: int | float = 5  # warmup steps, in which the factor rises linearly to 1; below 1: fraction of the run
    floor: float = 0.01  # final value, as a fraction of the base value

    def decay_factor(self, step: int, steps: int) -> float:
        """Return the factor at a step after the warmup. It falls from 1 to `floor` along half a cosine wave."""
        return self.floor + 0.5 * (1 - self.floor) * (1 + math.cos(math.pi * self.progress(step, steps)))


@dataclass(eq=False)
class WarmupStableDecay(WarmupSchedule):
    """Schedule of lr or another setting: warmup, a constant phase, then linear decay (Hu et al. 2024)."""

    name: ClassVar[str] = "wsd"

    decay: float = 0.2  # length of the decay, as a fraction of the run
    floor: float = 0.0  # final value, as a fraction of the base value

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the warmup overlaps the decay, or `floor` has no effect."""
        yield from super().warnings(preview)
        length, warmup = self.decay * preview.steps, self.warmup_steps(preview.steps)
        if warmup < preview.steps < warmup + length:
            yield (
                f"callbacks.wsd.warmup={self.warmup:g}: overlaps the decay, the last {length:g} of "
                f"{preview.steps} steps; lower it, or callbacks.wsd.decay"
            )
        if is_changed(self, "floor") and not self.decay:
            yield f"callbacks.wsd.floor={self.floor}: has no effect with callbacks.wsd.decay=0"

    def decay_factor(self, step: int, steps: int) -> float:
        """Return 1 in the constant phase, and after it the linear interpolation from 1 to `floor`."""
        length = self.decay * steps
        steps_left = steps - step
        return 1.0 if steps_left >= length else self.floor + (1 - self.floor) * steps_left / length


@cache
def make_second(schedule: type[Schedule]) -> type[Schedule]:
    """Return a copy of the schedule with the name `<name>_2`, so that one run can schedule two settings."""
    doc = f"{(schedule.__doc__ or '').strip()} A second instance, for another setting."
    namespace = {"name": f"{schedule.name}_2", "__doc__": doc, "__module__": __name__}
    return make_dataclass(f"{schedule.__name__}2", [], bases=(schedule,), namespace=namespace, eq=False)
