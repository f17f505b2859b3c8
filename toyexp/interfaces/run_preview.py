"""A run that was planned and has not begun: what its parts look at to say which of their settings have no effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toyexp.base.formatting import pluralise

if TYPE_CHECKING:
    from toyexp.interfaces.dataset import Batches, Dataset
    from toyexp.interfaces.plan import Plan


@dataclass(frozen=True)
class RunPreview:
    """What engine, recipe, model, data and callbacks may know of the run they are in."""

    config: Mapping[str, Any]  # the resolved configuration
    dataset: Dataset
    batches: Batches
    plan: Plan

    @property
    def steps(self) -> int:
        """How many steps the run takes."""
        return int(self.config["steps"])

    def interval_warnings(self, key: str, every: int, instead: str) -> list[str]:
        """A warning where the run has fewer than `every` steps, as a list: `instead` says what happens then."""
        return [f"{key}={every}: the run has {pluralise(self.steps, 'step')}; {instead}"] if every > self.steps else []


def defaults(part: Any) -> dict[str, Any]:
    """The default of each setting of a part, which is a dataclass, or its class."""
    return {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in dataclasses.fields(part)}


def changed(part: Any, name: str) -> bool:
    """Whether a setting of a part is another than its default."""
    return bool(getattr(part, name) != defaults(part)[name])
