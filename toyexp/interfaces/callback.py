"""Base classes of callbacks and of schedules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.formatting import format_value
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.hooks import hookimpl
from toyexp.interfaces.model import LOGGED_METRICS
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.run import Run
from toyexp.interfaces.run_preview import RunPreview

SCHEDULE_SAMPLES = 1000  # steps of a run at which a schedule is checked in advance


@dataclass(eq=False)
class Callback(ABC):
    """Base of all callbacks: subclass it as a `@dataclass(eq=False)` whose fields are its settings.

    A hook method is marked `@hookimpl` and named after a method of `RunHooks` in toyexp/interfaces/hooks.py. Hooks
    observe the run or return values to it. Callbacks do not share state with each other: the training loop keeps the
    state that several callbacks need.

    Before anything is written, toyexp calls `check`, `check_run`, `check_plan` and `warnings`, in this order. For a
    resumed run, it then calls `outputs`. After `outputs`, it calls `resume` if the checkpoint has the callback's state,
    or `join` if the run started without the callback. Every run then calls `on_start`.
    """

    plugin_kind: ClassVar[str] = "callbacks"
    name: ClassVar[str]  # the name that `callbacks=[...]` lists
    logs: ClassVar[tuple[str, ...]] = ()  # metrics that its `on_eval` logs with run.log; settings may name them
    closes_last: ClassVar[bool] = False  # True: its on_end is called after those of the others

    def __init_subclass__(cls) -> None:
        LOGGED_METRICS.update(cls.logs)

    def check(self) -> None:  # noqa: B027 - optional on purpose: most callbacks have nothing to check
        """Raise UserError for invalid settings, and Unavailable if a required Python package is missing."""

    def check_run(self, config: Mapping[str, Any], dataset: Dataset) -> None:  # noqa: B027 - optional, as above
        """Raise UserError if the callback cannot work with this configuration and data.

        Called before anything is written.
        """

    def check_plan(self, plan: Plan) -> None:  # noqa: B027 - optional, as above
        """Raise UserError if the callback cannot work with this plan. Called before anything is written."""

    def should_wait(self, step: int) -> bool:
        """Return True if the next step must not start before this callback has handled `step`.

        A callback must wait if it reads the weights or influences the next step. If no callback waits, `on_step` may be
        called while the device already computes the next step. By default, callbacks with the hook `on_step`, `lr`,
        `factors` or `stop_reason` wait.
        """
        return any(has_hook(self, hook) for hook in ("on_step", "lr", "factors", "stop_reason"))

    def best_metric(self) -> str | None:
        """Return the name of a held-out metric, or None.

        The run then keeps the weights with the best value of this metric, as if the setting `checkpoint_best` named it.
        """
        return None

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Return a one-sentence warning for each setting that has no effect, or an unintended one, in this run."""
        return ()

    def outputs(self, plan: Plan) -> Sequence[str]:
        """Return the names of the files that the callback writes to the run's directory.

        When a run is resumed, toyexp checks these files before the callback overwrites them: it raises UserError if one
        of them exists and was not written by the run itself.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """Return the callback's state to save in a checkpoint, as JSON data: text, finite numbers, lists and dicts."""
        return {}

    def sync(self) -> None:  # noqa: B027 - optional, as above
        """Flush to disk (fsync) the files that the callback's `state` refers to. May raise OSError.

        Called in a background thread while the run trains, because disks are slow. A checkpoint with this state does
        not count as complete before this method has returned.
        """

    def resume(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional, as above
        """Restore the callback from `state`, which its method `state` returned when the checkpoint was saved."""

    def join(self, step: int) -> None:  # noqa: B027 - optional, as above
        """Join a resumed run that started without this callback. Raise UserError if that is impossible at `step`."""


@dataclass(eq=False)
class Schedule(Callback):
    """Base of callbacks that multiply the learning rate or another optimiser setting by a factor at every step."""

    scales: str = "lr"  # setting to scale: lr, weight_decay, or another optimiser setting, such as momentum

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor for `step`, which counts from 0 to `steps` - 1."""

    def should_wait(self, step: int) -> bool:
        """Return True if the schedule has the hook `on_step` or `stop_reason`.

        Other schedules need not wait for a step, because `factor` depends on the step number only.
        """
        return has_hook(self, "on_step") or has_hook(self, "stop_reason")

    @final
    def check_scales(self, plan: Plan, steps: int) -> None:
        """Raise UserError if the optimiser lacks the setting to scale, or if a factor makes its value invalid.

        Called before `check_plan`. The last step is `steps` - 1, but the factor for `steps` is checked, too.
        """
        scalable = {"lr"}.union(*(group.scalable for group in plan.updates))
        key = f"callbacks.{self.name}.scales={printable(self.scales)}"
        if self.scales not in scalable:
            raise UserError(f"{key}: this optimiser has no setting of that name; {suggest(self.scales, scalable)}")
        if self.scales == "lr":
            return
        samples = {*range(0, steps, max(1, steps // SCHEDULE_SAMPLES)), steps - 1, steps}
        results = [self.factor(step, steps) for step in sorted(samples)]
        factors = [f for f in results if isinstance(f, int | float) and math.isfinite(f)]  # others fail in the run
        for factor, group in itertools.product({min(factors), max(factors)} if factors else (), plan.updates):
            try:
                group.scale_rule({self.scales: factor}).check()
            except UserError as error:
                values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "scales"}
                text = ", ".join(f"{name}={format_value(value)}" for name, value in values.items())
                raise UserError(f"{key}: invalid factor {factor:g}{text and f' ({text})'}: {error}") from error

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the setting to scale is 0, because scaling then has no effect."""
        groups = preview.plan.updates
        values = [getattr(g if self.scales == "weight_decay" else g.rule, self.scales, 0) for g in groups]
        if self.scales != "lr" and not any(values):
            yield f"callbacks.{self.name}.scales={self.scales}: has no effect with optim.{self.scales}=0"

    @hookimpl
    def lr(self, run: Run, step: int, steps: int) -> float | None:
        """Return the base learning rate times `factor`, or None if the schedule scales another setting."""
        return run.lr * self.factor(step, steps) if self.scales == "lr" else None

    @hookimpl
    def factors(self, step: int, steps: int) -> Mapping[str, float] | None:
        """Return {setting: factor} for the setting that the schedule scales; None if it scales the learning rate."""
        return None if self.scales == "lr" else {self.scales: self.factor(step, steps)}


def sets_lr(callback: Callback) -> bool:
    """Return True if a callback sets the learning rate; a schedule of another setting does not."""
    return has_hook(callback, "lr") and not (isinstance(callback, Schedule) and callback.scales != "lr")


def has_hook(callback: Callback, hook: str) -> bool:
    """Return True if a callback implements a hook of `RunHooks`."""
    return getattr(getattr(callback, hook, None), "toyexp_impl", None) is not None
