"""Every extension point of toyexp, in one file.

A plugin module marks functions with `@hookimpl` and names them after a hook of `Registration`; a callback is an
object whose methods are marked the same way and named after a hook of `RunHooks`. Both name only the arguments
they use, so a hook that gains an argument breaks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from toyexp.interfaces.dataset import Batch
    from toyexp.interfaces.run import Run

hookspec = pluggy.HookspecMarker("toyexp")
hookimpl = pluggy.HookimplMarker("toyexp")

Register = Callable[[type], None]


class Registration:
    """What a plugin module may offer. Each hook calls `register(cls)` once per dataclass."""

    @hookspec
    def register_engines(self, register: Register) -> None:
        """Offer subclasses of toyexp.Engine: ways to run a Plan (`engine=<name>`)."""

    @hookspec
    def register_recipes(self, register: Register) -> None:
        """Offer subclasses of toyexp.Recipe: what is trained and from where (`recipe=<name>`)."""

    @hookspec
    def register_optimisers(self, register: Register) -> None:
        """Offer subclasses of toyexp.Optimiser: how gradients change weights (`optim=<name>`)."""

    @hookspec
    def register_models(self, register: Register) -> None:
        """Offer subclasses of toyexp.Model: architectures (`model=<name>`)."""

    @hookspec
    def register_data(self, register: Register) -> None:
        """Offer subclasses of toyexp.Data: what to learn from (`data=<name>`)."""

    @hookspec
    def register_callbacks(self, register: Register) -> None:
        """Offer subclasses of toyexp.Callback: what watches and steers a run (`callbacks=[<name>]`)."""

    @hookspec
    def register_formats(self, register: Register) -> None:
        """Offer subclasses of toyexp.Format: files of models (`export --type <name>`, `callbacks=[<name>_export]`)."""

    @hookspec
    def register_commands(self, register: Register) -> None:
        """Offer subclasses of toyexp.Command: sub-commands (`toyexp <name> ...`)."""


class RunHooks:
    """What a callback may hear (`on_...`) and answer during a run; callbacks come in the order of the configuration.

    `step` counts the steps that were taken; for `lr` and `factors` it is the 0-based number of the one to come. What
    an `on_...` hook raises ends the run once the others have heard of the same; what an answering one raises, at once.
    """

    @hookspec
    def on_start(self, run: Run) -> None:
        """The run is about to take its first step; an error raised here ends it."""

    @hookspec
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """A step was taken on `batch`: metrics hold loss, lr, grad_norm, tokens (its targets) and wall_us.

        What a schedule multiplied beside lr is there too: `<name>`, such as weight_decay, the largest where tensors
        have several; and `<name>_factor`.
        """

    @hookspec
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out data was evaluated: metrics hold loss, ppl and the model's scores, such as accuracy."""

    @hookspec
    def on_checkpoint(self, run: Run, step: int, path: Path) -> None:
        """A checkpoint of the state after `step` stands on the disk, whole; a few steps may have been taken since."""

    @hookspec
    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Someone said something with `run.emit(kind, **fields)`: a sample, an export, a note."""

    @hookspec
    def on_end(self, run: Run, reason: str, error: BaseException | None) -> None:
        """The run is over, always called: reason is completed, interrupted, aborted (a callback) or errored."""

    @hookspec(firstresult=True)
    def lr(self, run: Run, step: int, steps: int) -> float | None:
        """The learning rate for the 0-based `step` of `steps`, or None for the base one; one callback a run has it."""

    @hookspec
    def factors(self, run: Run, step: int, steps: int) -> Mapping[str, float] | None:
        """What numbers of the optimiser are multiplied by at the 0-based `step`: {"weight_decay": 0.5}; None: none."""

    @hookspec(firstresult=True)
    def stop_reason(self, run: Run, step: int, metrics: Mapping[str, float]) -> str | None:
        """A sentence to end the run after `step` with, or None; asked in config order, the first answer counts."""
