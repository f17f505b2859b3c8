"""A callback: what it is asked and told, and what it knows of the run it is in."""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.formatting import format_value
from toyexp.interfaces.hooks import hookimpl
from toyexp.interfaces.model import LOGGED_METRICS
from toyexp.interfaces.run import Run
from toyexp.interfaces.run_preview import RunPreview

if TYPE_CHECKING:
    from toyexp.interfaces.dataset import Dataset
    from toyexp.interfaces.plan import Plan

LOOKED_AT = 1000  # steps of a run, of which it is asked beforehand what a schedule does


@dataclass(eq=False)
class Callback(ABC):
    """Base of all callbacks: subclass it as a `@dataclass(eq=False)` whose fields are its settings.

    Its hook methods, marked `@hookimpl`, are named after those of `RunHooks` in toyexp/interfaces/hooks.py. It observes
    or answers; whatever two callbacks would have to share belongs to the loop.

    It is asked `check`, `check_run`, `check_plan` and `warnings`, in this order and before anything is written; then,
    where a run goes on, `outputs` and `resume` or `join`; and then hears `on_start`.
    """

    plugin_kind: ClassVar[str] = "callbacks"
    name: ClassVar[str]  # what `callbacks=[...]` takes
    logs: ClassVar[tuple[str, ...]] = ()  # scores that `on_eval` reports with run.log: early_stop, ... go by them
    closes_last: ClassVar[bool] = False  # it records how the run ended: its on_end comes after those of others

    def __init_subclass__(cls) -> None:
        LOGGED_METRICS.update(cls.logs)

    def check(self) -> None:  # noqa: B027 - optional on purpose: most callbacks have nothing to check
        """Raises UserError for settings that cannot work, and Unavailable for a missing package."""

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:  # noqa: B027 - optional, as above
        """Raises UserError for what cannot work with this run's configuration and data, before anything is written."""

    def check_plan(self, plan: Plan) -> None:  # noqa: B027 - optional, as above
        """Raises UserError for a model or recipe it cannot work with, before anything is written."""

    def should_wait(self, step: int) -> bool:
        """Whether it needs the run as it stands after `step`: the weights, or a say before the next step begins.

        Where no callback does, and the engine's steps run beside the host's work, `on_step` may come while the next
        step is already under way. Unless told otherwise, one looks that hears of steps or answers about them.
        """
        return any(has_hook(self, hook) for hook in ("on_step", "lr", "factors", "stop_reason"))

    def best_metric(self) -> str | None:
        """The held-out score whose best weights it wants the run to keep, as `checkpoint_best` does."""
        return None

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """A sentence for each of its settings that has no effect in this run, or cannot have the one it is for."""
        return ()

    def outputs(self, plan: Plan) -> Sequence[str]:
        """What it leaves in the run's directory, by name: a run that is resumed begins only if it may replace that."""
        return ()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON takes it: text, finite numbers, lists and dicts of them."""
        return {}

    def sync(self) -> None:  # noqa: B027 - optional, as above
        """Brings to the disk what `state` spoke of, before a checkpoint with it stands there; raises OSError.

        It is called beside the training, in another thread, since a disk takes its time.
        """

    def resume(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional, as above
        """Takes back what `state` gave; called before `on_start` of a run that continues from a checkpoint."""

    def join(self, step: int) -> None:  # noqa: B027 - optional, as above
        """Called in place of `resume` when the run began without it; raises UserError if it cannot join at `step`."""


@dataclass(eq=False)
class Schedule(Callback):
    """Base of the callbacks that scale a number at every step: the learning rate, or another one of the optimiser."""

    scales: str = "lr"  # what it multiplies: lr, weight_decay, or another number of the optimiser, such as momentum

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """What the number is multiplied by at the 0-based `step` of `steps`."""

    def should_wait(self, step: int) -> bool:
        """Only one that hears of steps or stops runs: `factor` goes by the step alone."""
        return has_hook(self, "on_step") or has_hook(self, "stop_reason")

    @final
    def check_scales(self, plan: Plan, steps: int) -> None:
        """Raises UserError for a number that the plan's optimiser does not have, or that would leave its range.

        Its last value counts, which `floor` names, though a run ends one step before. It is asked before `check_plan`.
        """
        known = {"lr"}.union(*(group.scalable for group in plan.updates))
        key = f"callbacks.{self.name}.scales={printable(self.scales)}"
        if self.scales not in known:
            raise UserError(f"{key}: is no number of this optimiser; {suggest(self.scales, known)}")
        if self.scales == "lr":
            return
        asked = {*range(0, steps, max(1, steps // LOOKED_AT)), steps - 1, steps}
        found = [self.factor(step, steps) for step in sorted(asked)]
        factors = [f for f in found if isinstance(f, int | float) and math.isfinite(f)]  # a run refuses the others
        for factor, group in itertools.product({min(factors), max(factors)} if factors else (), plan.updates):
            try:
                group.scale_rule({self.scales: factor}).check()
            except UserError as error:
                own = {
                    f.name: format_value(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "scales"
                }
                of = ", ".join(f"{name}={value}" for name, value in own.items())
                raise UserError(f"{key}: its factor {factor:g}{of and f' ({of})'} cannot be: {error}") from error

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That what it scales is 0."""
        groups = preview.plan.updates
        values = [getattr(g if self.scales == "weight_decay" else g.rule, self.scales, 0) for g in groups]
        if self.scales != "lr" and not any(values):
            yield f"callbacks.{self.name}.scales={self.scales}: scales optim.{self.scales}=0, which stays 0"

    @hookimpl
    def lr(self, run: Run, step: int, steps: int) -> float | None:
        """The base learning rate times `factor`."""
        return run.lr * self.factor(step, steps) if self.scales == "lr" else None

    @hookimpl
    def factors(self, step: int, steps: int) -> Mapping[str, float] | None:
        """`factor`, of what it scales."""
        return None if self.scales == "lr" else {self.scales: self.factor(step, steps)}


def sets_lr(callback: Callback) -> bool:
    """Whether a callback sets the learning rate."""
    return has_hook(callback, "lr") and not (isinstance(callback, Schedule) and callback.scales != "lr")


def has_hook(callback: Callback, hook: str) -> bool:
    """Whether a callback has that hook of `RunHooks`."""
    return getattr(getattr(callback, hook, None), "toyexp_impl", None) is not None
