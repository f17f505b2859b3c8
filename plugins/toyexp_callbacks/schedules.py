"""Schedules: pure functions of the step, which scale the run's base lr or another number of the optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from functools import cache
from typing import ClassVar

from toyexp import RunPreview, Schedule, UserError, is_changed
from toyexp.base import pluralise, require_range

SHARES = ("decay", "floor")  # settings from 0 to 1


@dataclass(eq=False)
class WarmupSchedule(Schedule):
    """What the schedules share: a straight line up to the base value, and then `after`."""

    warmup: int | float = 0  # steps in which the number rises linearly to its base value; below 1: a share of the run's

    def check(self) -> None:
        """Raise UserError for values out of range."""
        shares = {key: "[0,1]" for key in SHARES if key in vars(self)}
        require_range(f"callbacks.{self.name}", self, warmup="[0,inf)", **shares)
        if self.warmup > 1 and self.warmup % 1:
            what = f"callbacks.{self.name}.warmup={self.warmup:g}"
            raise UserError(f"{what}: must be a whole number of steps, or below 1: a share of the run's steps")

    def rising(self, steps: int) -> int:
        """Return the number of warmup steps in a run of `steps`."""
        return math.ceil(self.warmup * steps) if self.warmup < 1 else int(self.warmup)

    def factor(self, step: int, steps: int) -> float:
        """The share of the base value at the 0-based `step`."""
        warmup = self.rising(steps)
        return (step + 1) / warmup if step < warmup else self.after(step, steps)

    def after(self, step: int, steps: int) -> float:
        """The same, once it is warm."""
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """Return the share of the steps after the warmup that are over; 1 if there are none."""
        warmup = self.rising(steps)
        return min((step - warmup) / (steps - warmup), 1) if steps > warmup else 1

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That the run ends in its warm-up, beside what any schedule warns of."""
        yield from super().warnings(preview)
        if self.scales == "lr" and self.warmup >= preview.steps:
            yield (
                f"callbacks.{self.name}.warmup={self.warmup:g}: the run has {pluralise(preview.steps, 'step')}, "
                "in which the learning rate only rises, "
                f"to {preview.steps / self.warmup:.3g} times lr; warm up for fewer"
            )


@dataclass(eq=False)
class Constant(WarmupSchedule):
    """Schedule, of lr or another number: always the base value."""

    name: ClassVar[str] = "constant"

    def after(self, step: int, steps: int) -> float:
        """All of it."""
        return 1.0


@dataclass(eq=False)
class Linear(WarmupSchedule):
    """Schedule, of lr or another number: a straight line down."""

    name: ClassVar[str] = "linear"

    floor: float = 0.0  # final value, as a share of the base value

    def after(self, step: int, steps: int) -> float:
        """From 1 to `floor` at the end."""
        return 1 - (1 - self.floor) * self.progress(step, steps)


@dataclass(eq=False)
class Cosine(WarmupSchedule):
    """Schedule, of lr or another number: warm-up, then half a cosine down."""

    name: ClassVar[str] = "cosine"

    warmup: int | float = 5  # steps in which the number rises linearly to its base value; below 1: a share of the run's
    floor: float = 0.01  # final value, as a share of the base value

    def after(self, step: int, steps: int) -> float:
        """The cosine between 1 and `floor`."""
        return self.floor + 0.5 * (1 - self.floor) * (1 + math.cos(math.pi * self.progress(step, steps)))


@dataclass(eq=False)
class WarmupStableDecay(WarmupSchedule):
    """Schedule, of lr or another number: warm-up, a long plateau, then a straight line down (Hu et al. 2024)."""

    name: ClassVar[str] = "wsd"

    decay: float = 0.2  # share of the run that the final descent takes
    floor: float = 0.0  # final value, as a share of the base value

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That the warm-up leaves no plateau, or that there is no descent to the floor."""
        yield from super().warnings(preview)
        descent = self.decay * preview.steps
        if self.rising(preview.steps) < preview.steps < self.rising(preview.steps) + descent:
            yield (
                f"callbacks.wsd.warmup={self.warmup:g}: reaches into the descent, the last {descent:g} of "
                f"{preview.steps} steps; lower it, or callbacks.wsd.decay"
            )
        if is_changed(self, "floor") and not self.decay:
            yield f"callbacks.wsd.floor={self.floor}: with callbacks.wsd.decay=0 the learning rate never falls"

    def after(self, step: int, steps: int) -> float:
        """1 on the plateau, `floor` at the last step's end."""
        length = self.decay * steps
        left = steps - step
        return 1.0 if left >= length else self.floor + (1 - self.floor) * left / length


@cache
def second(schedule: type[Schedule]) -> type[Schedule]:
    """Return the schedule under a second name, so that one run can have it for two numbers."""
    about = f"{(schedule.__doc__ or '').strip()} A second one, for another number."
    own = {"name": f"{schedule.name}_2", "__doc__": about, "__module__": __name__}
    return make_dataclass(f"{schedule.__name__}2", [], bases=(schedule,), namespace=own, eq=False)
