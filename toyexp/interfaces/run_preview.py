"""Preview of a run before it starts. Plugins use it to warn of settings that have no effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toyexp.base.formatting import pluralise
from toyexp.interfaces.dataset import Batches, Dataset
from toyexp.interfaces.plan import Plan


@dataclass(frozen=True)
class RunPreview:
    """Configuration, data and plan of a run before it starts. Each plugin's method `warnings` receives it."""

    config: Mapping[str, Any]  # the resolved configuration
    dataset: Dataset
    batches: Batches
    plan: Plan

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return int(self.config["steps"])

    def interval_warnings(self, key: str, every: int, effect: str) -> list[str]:
        """Return a list with one warning if the interval `every` exceeds the run's steps, else an empty list.

        `key` is the setting's name. `effect` ends the warning and says what happens, such as "nothing is saved".
        """
        return [f"{key}={every}: the run has {pluralise(self.steps, 'step')}; {effect}"] if every > self.steps else []


def default_settings(part: Any) -> dict[str, Any]:
    """Return the default values of the fields of a dataclass or of its instance, keyed by field name."""
    return {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in dataclasses.fields(part)}


def is_changed(part: Any, name: str) -> bool:
    """Return True if the setting `name` of `part`, an instance of a plugin class, differs from its default."""
    return bool(getattr(part, name) != default_settings(part)[name])
