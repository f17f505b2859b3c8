"""A run's parts, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toyexp.base.blame import given, sentences
from toyexp.contract.callback import Callback, Schedule, answers_lr
from toyexp.contract.data import Data
from toyexp.contract.dataset import Batches, Dataset
from toyexp.contract.engine import Engine
from toyexp.contract.model import Model
from toyexp.contract.optimiser import Optimiser
from toyexp.contract.plan import Plan, idle_groups, turning_decay
from toyexp.contract.planned import Planned
from toyexp.contract.recipe import Recipe
from toyexp.contract.run import Best
from toyexp.training.bus import Bus
from toyexp.training.outcome import Outcome
from toyexp.training.settings import ASIDE, FREE, Settings, about, keys_with


@dataclass
class Config:
    """A run's parts, each built from its own settings; no part sees another's."""

    settings: Settings
    model: Model
    data: Data
    recipe: Recipe
    engine: Engine = field(metadata=about("what computes", FREE))
    optim: Optimiser
    callbacks: dict[str, Callback] = field(metadata=about("what watches, steers and exports", FREE, ASIDE))
    plain: dict[str, Any]  # the same as resolved plain data, for the run directory
    engine_note: str  # which engine, and why that one
    base: Model | None = None  # the model of the recipe's base file; `model` is the same at the run's own context
    by_default: Callable[[], Sequence[str]] = list  # the callbacks that a run has unless told otherwise
    suited: Callable[[], str] = str  # how an error about a model or data of another kind ends: what to type
    left_out: Sequence[str] = ()  # a sentence about each thing that is not in use, and may have been meant to be

    def warnings(self, planned: Planned) -> list[str]:
        """What is told before the first step: what was left out, and the settings that have no effect."""
        parts: list[Engine | Recipe | Data | Callback] = [
            self.engine, self.recipe, self.data, *self.callbacks.values()
        ]  # fmt: skip
        told = [text for part in parts for text in sentences(part.warnings, planned)]
        of_optim = [*idle_groups(planned.plan, self.optim), *turning_decay(planned.plan, self.settings.lr)]
        return [*self.left_out, *self.settings.warnings(), *told, *self._no_rate(), *self._unscheduled(), *of_optim]

    def _no_rate(self) -> list[str]:
        """That the weights stay as they are, where no callback has a rate of its own in place of that of the run."""
        others = [c for c in self.callbacks.values() if answers_lr(c) and not isinstance(c, Schedule)]
        return [] if self.settings.lr or others else ["lr=0: nothing will be learned, the weights stay as they are"]

    def _unscheduled(self) -> list[str]:
        """That the schedule which a run has by default was given another number, and the rate is left without one."""
        if any(answers_lr(callback) for callback in self.callbacks.values()):
            return []
        return [
            f"callbacks.{name}.scales={callback.scales}: nothing schedules lr now, which {name} does by default"
            for name, callback in self.callbacks.items()
            if isinstance(callback, Schedule) and name in self.by_default()
        ]


FREE_KEYS = keys_with(FREE, Settings, Config)  # what a resumed run may change
ASIDE_KEYS = keys_with(ASIDE, Settings, Config)  # what changes no number of a run


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked, with nothing allocated and nothing written yet."""

    config: Config
    dataset: Dataset
    model: Model
    batches: Batches
    plan: Plan
    optim: Optimiser  # with what model and recipe decide of it
    bus: Bus
    warnings: Sequence[str] = ()  # of settings that have no effect, told before the first step
    recomputed: int | None = None  # blocks that engine.recompute=true computes twice; None: not asked for, or not known

    def data_facts(self) -> dict[str, Any]:
        """What the run's record says of its data, and a run that goes on has to share."""
        return {**given(Mapping, self.dataset.describe), **self.batches.facts}

    def left_out(self) -> list[str]:
        """What of the data is not learned from."""
        return [*sentences(self.dataset.left_out), *self.batches.left_out]


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    name: str
    dir: Path
    outcome: Outcome
    units: str  # what the run's speed is counted in
    artifacts: list[Path] = field(default_factory=list)
    steps_of: dict[Path, int] = field(default_factory=dict)  # of artifacts: which step's weights are in them
    best: Best | None = None  # the best eval, of a run that keeps it
