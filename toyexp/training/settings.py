"""What a run is told beside its parts: the keys at the top of a configuration."""

from __future__ import annotations

import copy
import functools
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from toyexp.base.bounds import require_float32
from toyexp.base.errors import UserError, choose
from toyexp.contract.planned import changed
from toyexp.contract.registry import conf_dir
from toyexp.training.checkpoint import Interval

NONFINITE = ("stop", "skip")  # what a step whose loss or gradient is no finite number does


@functools.cache
def shipped() -> Mapping[str, Any]:
    """conf/config.yaml as it stands."""
    found: Mapping[str, Any] = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    return found


def default(key: str) -> Any:
    """A field whose default, and what it means, stands in conf/config.yaml under this key and nowhere else."""
    return field(default_factory=lambda: copy.deepcopy(functools.reduce(operator.getitem, key.split("."), shipped())))


@dataclass
class Settings:
    """The keys at the top, but for the parts; what they mean stands in conf/config.yaml, which shows them all."""

    name: str = default("name")
    seed: int = default("seed")
    steps: int = default("steps")
    batch_size: int = default("batch_size")
    lr: float = default("lr")
    eval_every: int = default("eval_every")
    checkpoint_every: str = default("checkpoint_every")
    checkpoint_keep: int = default("checkpoint_keep")
    checkpoint_best: str | None = default("checkpoint_best")
    nonfinite: str = default("nonfinite")
    resume: str | None = default("resume")
    plugins: list[str] = default("plugins")  # noqa: RUF009 - a field, whose value is made anew each time

    def check(self) -> None:
        """Raises UserError for numbers that cannot work."""
        for name, least in (("steps", 1), ("batch_size", 1), ("seed", 0), ("eval_every", 0)):
            value = getattr(self, name)
            if not least <= value < 2**63:
                most = f" to {2**63 - 1}" if value > least else ""
                raise UserError(f"{name}={value}: must be a whole number from {least}{most}")
        Interval.parse(self.checkpoint_every, "checkpoint_every")
        if self.checkpoint_keep < 1:
            raise UserError(
                f"checkpoint_keep={self.checkpoint_keep}: must be at least 1; checkpoint_every=0 writes none"
            )
        if self.checkpoint_best is not None and not self.eval_every:
            raise UserError(f"checkpoint_best={self.checkpoint_best}: needs looks at the held-out data: eval_every=50")
        if self.checkpoint_best is not None and not Interval.parse(self.checkpoint_every, "checkpoint_every"):
            raise UserError(
                f"checkpoint_best={self.checkpoint_best}: checkpoint_every=0 writes none, leave one of them out"
            )
        if self.nonfinite not in NONFINITE:
            raise UserError(f"nonfinite={self.nonfinite}: {choose(self.nonfinite, NONFINITE)}")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: must be a number, 0 or above")
        require_float32("lr", self.lr)
        if not re.fullmatch(r"[^/\\\0]{1,100}", self.name) or self.name.startswith("."):
            raise UserError(f"name={self.name!r}: must be 1 to 100 characters, not start with a dot and hold no slash")

    def warnings(self) -> list[str]:
        """A sentence for each of these settings that has no effect in this run."""
        told = []
        saves = Interval.parse(self.checkpoint_every, "checkpoint_every")
        if changed(self, "eval_every") and self.eval_every > self.steps:
            looks = "the held-out data is looked at before the first and after the last"
            told.append(f"eval_every={self.eval_every}: the run has {self.steps} steps; {looks}")
        if saves.steps > self.steps:
            told.append(f"checkpoint_every={saves.steps}: the run has {self.steps} steps; one is written at the end")
        if changed(self, "checkpoint_keep") and not saves:
            told.append(f"checkpoint_keep={self.checkpoint_keep}: checkpoint_every=0 writes none")
        return told
