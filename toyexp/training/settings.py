"""The top-level settings of a run, such as steps and lr."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from toyexp.base.errors import UserError, printable, require_visible, suggest
from toyexp.base.formatting import pluralise
from toyexp.base.validators import require_float32, require_positive
from toyexp.interfaces.run_preview import is_changed

NONFINITE = ("stop", "skip")  # actions after a step whose loss or gradient is NaN or infinite

# Roles of settings. A setting without a role affects a run's numbers, and a resumed run must keep it.
FREE = "free"  # a resumed run may change it
ASIDE = "aside"  # it does not affect a run's numbers
OF_A_RUN = "of a run"  # used by training only, for the run's directory, evaluations and checkpoints


def about(text: str, *roles: str) -> dict[str, Any]:
    """Return the metadata of a setting: its help text, and roles such as FREE (a resumed run may change it)."""
    return {"help": text, "roles": roles}


def setting(default: Any, text: str, *roles: str) -> Any:
    """Return the dataclass field of a setting with a default, a help text and roles such as FREE."""
    return field(default=default, metadata=about(text, *roles))


def keys_by_role(role: str, *classes: type) -> set[str]:
    """Return the names of the settings in `classes` that have `role`, such as FREE."""
    return {f.name for cls in classes for f in fields(cls) if role in f.metadata.get("roles", ())}


@dataclass(frozen=True)
class Interval:
    """Interval in steps or seconds. If both are 0, the interval never passes."""

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str, key: str) -> Interval:
        """Parse `0`, `500` (steps), `30s`, `10min` or `2h`. Raise UserError for other texts."""
        match = re.fullmatch(r"(\d{1,12})(s|min|h)?", text.strip())
        if match is None:
            expected = "must be a number of steps, or a time in s, min or h"
            raise UserError(f"{key}={printable(text)}: {expected}: {key}=500, {key}=10min, {key}=0 for never")
        number, unit = int(match[1]), match[2]
        return cls(seconds=number * {"s": 1, "min": 60, "h": 3600}[unit]) if unit else cls(steps=number)

    def __bool__(self) -> bool:
        return bool(self.steps or self.seconds)

    def due(self, step: int, waited: float) -> bool:
        """Return True if the interval has passed.

        An interval in steps passes at each multiple of its steps. An interval in seconds passes when `waited` is at
        least that number of seconds.
        """
        return bool(self.steps and step % self.steps == 0) or bool(self.seconds and waited >= self.seconds)


def require_utf8(value: Any, key: str = "") -> None:
    """Raise UserError if a string in nested settings is not valid UTF-8, which config.yaml cannot hold.

    Such strings come from file names; `key` is the key of `value`.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            require_utf8(item, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for item in value:
            require_utf8(item, key)
    elif isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
        encoding = sys.getfilesystemencoding()  # that of the locale
        hint = "choose another name" if encoding == "utf-8" else "set LC_ALL=C.UTF-8"
        raise UserError(f"{key}={printable(value)}: is not valid {encoding.upper()}; {hint}")


def evaluations(begins: int, steps: int, every: int) -> int:
    """Return the number of evaluations of a run from step `begins` to `steps`.

    The run is evaluated at each multiple of `every` from `begins` on (never if `every` is 0) and after the last step.
    """
    if not every:
        return 0
    return steps // every - -(-begins // every) + 1 + (steps % every != 0)


@dataclass
class Settings:
    """Top-level settings of a run, without its parts. conf/config.yaml lists them in this order."""

    name: str = setting(
        "${recipe.name}-${model.name}", "name of the run, its directory and its GGUF file", FREE, ASIDE, OF_A_RUN
    )
    seed: int = setting(0, "random seed of initial weights, data order and dropout")
    data_seed: int | None = setting(None, "random seed of data order and image augmentation; null: the value of seed")
    model_seed: int | None = setting(None, "random seed of initial weights; null: the value of seed")
    steps: int = setting(200, "number of optimiser steps", FREE)
    epochs: float | None = setting(
        None, "number of passes over the training data, to give instead of steps", FREE, ASIDE, OF_A_RUN
    )
    batch_size: int = setting(8, "number of sequences (or images) per step")
    lr: float = setting(0.003, "base learning rate, which the schedule multiplies by a factor at each step", FREE)
    eval_every: int = setting(50, "steps between evaluations on held-out data; 0: never", FREE, OF_A_RUN)
    checkpoint_every: str = setting(
        "10min", "steps or time (30s, 10min, 2h) between checkpoints; 0: no checkpoints", FREE, ASIDE, OF_A_RUN
    )
    checkpoint_keep: int = setting(2, "number of latest checkpoints to keep", FREE, ASIDE, OF_A_RUN)
    checkpoint_best: str | None = setting(
        None,
        "metric (loss, ppl, accuracy, ...): also keep the checkpoint where it is best, and export it",
        FREE,
        ASIDE,
        OF_A_RUN,
    )
    nonfinite: str = setting(
        "stop", "action if a loss or gradient is NaN or infinite: stop (end the run) | skip (leave out the step)", FREE
    )
    resume: str | None = setting(
        None,
        "run to resume: auto (the newest run of this name) | a run's directory; null: start a new run",
        FREE,
        ASIDE,
        OF_A_RUN,
    )
    plugins: list[str] = field(
        default_factory=list,
        metadata=about(
            "local plugin modules to import: plugins=[my_module]; only allowed on the command line", FREE, ASIDE
        ),
    )

    def check(self) -> None:
        """Raise UserError for invalid values."""
        seeds = (("seed", 0), ("data_seed", 0), ("model_seed", 0))
        for name, least in (("steps", 1), ("batch_size", 1), *seeds, ("eval_every", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**63:
                most = " to 2^63 - 1" if value > least else ""
                raise UserError(f"{name}={value}: must be a whole number from {least}{most}")
        saves = Interval.parse(self.checkpoint_every, "checkpoint_every")
        if self.checkpoint_keep < 1:
            override = f"checkpoint_keep={self.checkpoint_keep}"
            raise UserError(f"{override}: must be at least 1; checkpoint_every=0 disables checkpoints")
        if self.checkpoint_best is not None and not self.eval_every:
            override = f"checkpoint_best={self.checkpoint_best}"
            raise UserError(f"{override}: needs evaluations of the held-out data: eval_every must be above 0")
        if self.checkpoint_best is not None and not saves:
            override = f"checkpoint_best={self.checkpoint_best}"
            raise UserError(f"{override}: has no effect with checkpoint_every=0; leave one of them out")
        if self.nonfinite not in NONFINITE:
            raise UserError(f"nonfinite={self.nonfinite}: {suggest(self.nonfinite, NONFINITE)}")
        if self.epochs is not None:
            require_positive("epochs", self.epochs)
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: must be a finite number >= 0")
        require_float32("lr", self.lr)
        require_visible("name", self.name)
        if not re.fullmatch(r"[^/\\\0-\x1f]{1,100}", self.name) or self.name.startswith(".") or not self.name.strip():
            name = f"name='{printable(self.name)}'"
            raise UserError(f"{name}: must be 1 to 100 characters, without slash or backslash, not starting with a dot")

    def warnings(self) -> list[str]:
        """Return a warning for each setting that has no effect in this run, such as an interval above `steps`."""
        texts = []
        saves = Interval.parse(self.checkpoint_every, "checkpoint_every")
        if is_changed(self, "eval_every") and self.eval_every > self.steps:
            evals = "it is only evaluated before the first and after the last step"
            texts.append(f"eval_every={self.eval_every}: the run has {pluralise(self.steps, 'step')}; {evals}")
        if saves.steps > self.steps:
            texts.append(
                f"checkpoint_every={saves.steps}: the run has {pluralise(self.steps, 'step')}; "
                "the only checkpoint is written at the end"
            )
        if is_changed(self, "checkpoint_keep") and not saves:
            texts.append(f"checkpoint_keep={self.checkpoint_keep}: has no effect with checkpoint_every=0")
        return texts
