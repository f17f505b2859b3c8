"""Every extension point of toyexp, in one file.

A plugin module marks functions with `@hookimpl` and names them after a hook of `Registration`. A callback is an object
whose methods are marked in the same way and named after a hook of `RunHooks`. These functions and methods declare only
the arguments they use, so adding an argument to a hook breaks no plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pluggy

from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.run import Run

hookspec = pluggy.HookspecMarker("toyexp")
hookimpl = pluggy.HookimplMarker("toyexp")

Register = Callable[[type], None]


class Registration:
    """Hooks through which a plugin module registers its parts. Each hook calls `register(cls)` once per dataclass."""

    @hookspec
    def register_engines(self, register: Register) -> None:
        """Register subclasses of toyexp.Engine, which execute plans (`engine=<name>`)."""

    @hookspec
    def register_recipes(self, register: Register) -> None:
        """Register subclasses of toyexp.Recipe, which plan the training (`recipe=<name>`)."""

    @hookspec
    def register_optimisers(self, register: Register) -> None:
        """Register subclasses of toyexp.Optimiser, which update the weights (`optim=<name>`)."""

    @hookspec
    def register_objectives(self, register: Register) -> None:
        """Register subclasses of toyexp.Objective, which define the loss (`objective=<name>`)."""

    @hookspec
    def register_models(self, register: Register) -> None:
        """Register subclasses of toyexp.Model, which are model architectures (`model=<name>`)."""

    @hookspec
    def register_data(self, register: Register) -> None:
        """Register subclasses of toyexp.Data, which provide training data (`data=<name>`)."""

    @hookspec
    def register_callbacks(self, register: Register) -> None:
        """Register subclasses of toyexp.Callback, which observe and control a run (`callbacks=[<name>]`)."""

    @hookspec
    def register_formats(self, register: Register) -> None:
        """Register subclasses of toyexp.Format, which write model files, and some of which also read them.

        The user selects a format with `toyexp export --type <name>` or `callbacks=[<name>_export]`.
        """

    @hookspec
    def register_commands(self, register: Register) -> None:
        """Register subclasses of toyexp.Command, which are sub-commands (`toyexp <name> ...`)."""


class RunHooks:
    """Hooks that toyexp calls on each callback during a run, in the order of the setting `callbacks`.

    The `on_...` hooks report events; the others return a value to the training loop. `step` counts completed steps; in
    `lr` and `factors` it is the 0-based number of the next step. An error raised by an `on_...` hook ends the run after
    the other callbacks have received the same event. An error raised by another hook ends the run at once.
    """

    @hookspec
    def on_start(self, run: Run) -> None:
        """Handle the start of the run, before its first step. An error raised here ends the run."""

    @hookspec
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """Handle a completed step on `batch`.

        `metrics` holds loss, lr, grad_norm, tokens (the number of targets) and wall_us (microseconds). For each other
        setting that a schedule scales, such as weight_decay, it also holds two numbers: `<name>`, the setting's largest
        value over the parameter groups, and `<name>_factor`, the schedule's factor.
        """

    @hookspec
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Handle an evaluation. `metrics` holds the held-out loss, ppl and the model's metrics, such as accuracy."""

    @hookspec
    def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
        """Handle a checkpoint of the state after `step`, which is complete on disk at `path`.

        The run may have taken more steps since that state.
        """

    @hookspec
    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Handle an event that a callback sent with `run.emit(kind, **fields)`, such as a sample or an export."""

    @hookspec
    def on_end(self, run: Run, reason: str, error: BaseException | None) -> None:
        """Handle the end of the run. This hook is always called.

        `reason` is completed, interrupted, aborted (by a callback) or errored.
        """

    @hookspec(firstresult=True)
    def lr(self, run: Run, step: int, steps: int) -> float | None:
        """Return the learning rate of `step`, or None for the base learning rate.

        `step` counts from 0 to `steps` - 1. Only one callback of a run may set the learning rate.
        """

    @hookspec
    def factors(self, run: Run, step: int, steps: int) -> Mapping[str, float] | None:
        """Return factors for optimiser settings at `step`, keyed by setting, or None.

        For example, {"weight_decay": 0.5} halves the weight decay. `step` counts from 0 to `steps` - 1.
        """

    @hookspec(firstresult=True)
    def stop_reason(self, run: Run, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return a sentence to end the run after `step`, or None to continue.

        The sentence says why the run ends. Callbacks are called in the configured order; the first sentence ends the
        run.
        """
