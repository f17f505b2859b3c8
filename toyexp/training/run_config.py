"""A run's parts, what it says of itself before its first step, how far it has come, and what comes out of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toyexp.base.attribution import call_checked, call_for_lines
from toyexp.base.errors import printable
from toyexp.base.formatting import format_count, format_value, pluralise, smooth_loss
from toyexp.interfaces.callback import Callback, Schedule, sets_lr
from toyexp.interfaces.data import Data
from toyexp.interfaces.dataset import Batches, Dataset
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import perplexity
from toyexp.interfaces.model import Model, model_settings
from toyexp.interfaces.optimiser import Optimiser
from toyexp.interfaces.plan import Plan, idle_group_warnings, sign_flip_warnings
from toyexp.interfaces.recipe import Recipe
from toyexp.interfaces.run import Best
from toyexp.interfaces.run_preview import RunPreview
from toyexp.training.bus import Bus
from toyexp.training.rundir import git_facts, host_facts
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
    default_callbacks: Callable[[], Sequence[str]] = list  # the callbacks that a run has unless told otherwise
    suggest_command: Callable[[], str] = str  # how an error about a model or data of another kind ends: what to type
    cwd: Path | None = None  # where relative paths lead from, if not from the working directory
    omissions: Sequence[str] = ()  # a sentence about each thing that is not in use, and may have been meant to be

    def warnings(self, planned: RunPreview) -> list[str]:
        """What is told before the first step: what was left out, and the settings that have no effect."""
        parts: list[Engine | Recipe | Data | Callback] = [
            self.engine, self.recipe, self.data, *self.callbacks.values()
        ]  # fmt: skip
        told = [text for part in parts for text in call_for_lines(part.warnings, planned)]
        others = [c for c in self.callbacks.values() if sets_lr(c) and not isinstance(c, Schedule)]
        if not (self.settings.lr or others):
            told.append("lr=0: nothing will be learned, the weights stay as they are")
        of_optim = [*idle_group_warnings(planned.plan, self.optim), *sign_flip_warnings(planned.plan, self.settings.lr)]
        return [*self.omissions, *self.settings.warnings(), *told, *self._unscheduled_warnings(), *of_optim]

    def _unscheduled_warnings(self) -> list[str]:
        """That the schedule which a run has by default was given another number, and the rate is left without one."""
        if any(sets_lr(callback) for callback in self.callbacks.values()):
            return []
        return [
            f"callbacks.{name}.scales={callback.scales}: nothing schedules lr now, which {name} does by default"
            for name, callback in self.callbacks.items()
            if isinstance(callback, Schedule) and name in self.default_callbacks()
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

    def omissions(self) -> list[str]:
        """What of the data is not learned from."""
        return [*call_for_lines(self.dataset.omissions), *self.batches.omissions]


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    name: str
    dir: Path
    outcome: Outcome
    units: str  # what the run's speed is counted in
    artifacts: list[Path] = field(default_factory=list)
    artifact_steps: dict[Path, int] = field(default_factory=dict)  # of artifacts: which step's weights are in them
    best: Best | None = None  # the best eval, of a run that keeps it


@dataclass
class Outcome:
    """How far training has come, and how it ended."""

    steps: int = 0  # steps taken
    reason: str = "completed"  # or aborted (a callback asked for it), or interrupted
    train_loss: float | None = None  # smoothed, see smooth_loss()
    first_train_loss: float | None = None  # of the first batch
    eval_loss: float | None = None  # of the held-out data, last evaluated
    first_eval_loss: float | None = None
    seconds: float = 0.0  # in all
    training_seconds: float = 0.0  # of them in steps
    tokens: int = 0  # targets learned from
    skipped: int = 0  # steps that changed nothing, because their numbers were not finite
    why: str | None = None  # the sentence of the callback that ended it
    eval_step: int | None = None  # the step after which the held-out data was last evaluated
    eval_scores: Mapping[str, float] = field(default_factory=dict)  # what the model reports beside eval_loss
    first_eval_scores: Mapping[str, float] = field(default_factory=dict)

    def count(self, loss: float, targets: int, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.train_loss = smooth_loss(self.train_loss, loss, self.steps)
        if self.steps == 1:
            self.first_train_loss = self.train_loss
        self.tokens += targets
        self.training_seconds += seconds

    def scores(self) -> dict[str, float]:
        """Return the scores of an evaluation after this very step; without one, none."""
        if self.eval_loss is None or self.eval_step != self.steps:
            return {}
        return {"loss": self.eval_loss, "ppl": perplexity(self.eval_loss), **self.eval_scores}

    @property
    def diverged(self) -> bool:
        """Return True if training and held-out loss (if any) end a tenth and 0.1 nats above where they began."""
        pairs = [(self.first_train_loss, self.train_loss), (self.first_eval_loss, self.eval_loss)]
        known = [(first, last) for first, last in pairs if first is not None and last is not None]
        return bool(known) and all(last > first + max(0.1 * abs(first), 0.1) for first, last in known)

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the steps alone."""
        return self.tokens / self.training_seconds if self.training_seconds else None


class Saver:
    """What saves a run on its way; this one does not."""

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Called before the first step, with the scores of an evaluation then."""

    def is_due(self, step: int) -> bool:
        """Whether it must be called after `step`, with the session as it stands then, whatever that step gives."""
        return False

    def after(self, outcome: Outcome, metrics: Mapping[str, float], last: bool) -> None:
        """Called at the end of each step, with the scores of an evaluation after this very step."""


def introduction(prepared: Prepared) -> list[str]:
    """What a person wants to know before the first step."""
    config, plan = prepared.config, prepared.plan
    total = prepared.model.parameters()
    trainable = sum(t.size for t in plan.trainable)
    share = "" if trainable == total else f", {format_count(trainable)} train"
    units = prepared.model.reads.units
    sizes = call_checked(Mapping, prepared.dataset.describe, who=f"data.{config.data.name}")
    known = [f"{format_count(sizes[f'train_{units}'])} {units} to train on"] if f"train_{units}" in sizes else []
    if known and isinstance(examples := sizes.get("train_examples"), int):
        known[0] += f" in {pluralise(examples, 'example')}"
    known = [*prepared.omissions(), *known, *call_for_lines(prepared.dataset.remarks)]
    facts = f" ({'; '.join(known)})" if known else ""
    origin = config.recipe.origin()
    epochs = f" (epochs={config.settings.epochs:g})" if config.settings.epochs else ""
    return [
        f"engine  {config.engine_note}",
        *(f"note    {line}" for line in call_for_lines(config.engine.advice)),
        f"model   {config.model.name}, {format_count(total)} parameters{share}",
        f"data    {config.data.name}{facts}",
        f"recipe  {config.recipe.name}, {prepared.optim.title}, {pluralise(config.settings.steps, 'step')}{epochs}",
        *(f"group   {line}" for line in _groups(prepared)),
        *([f"{origin[0]:<7} {origin[1]}"] if origin else []),
    ]


def _groups(prepared: Prepared) -> Iterator[str]:
    optim = prepared.optim
    for pattern, own in optim.groups.items():
        tensors = [t for t in prepared.plan.tensors if optim.find_group(t.name)[0] == pattern]
        number = sum(t.trainable or own.get("frozen", False) for t in tensors)
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in own.items())
        yield f"{printable(pattern)}: {settings}; {pluralise(number, 'tensor')}"


def facts(prepared: Prepared, engine: dict[str, Any]) -> dict[str, Any]:
    """What run_start records."""
    settings = prepared.config.settings
    model, data = prepared.model, {**call_checked(Mapping, prepared.dataset.describe), **prepared.batches.facts}
    recomputed = {} if prepared.recomputed is None else {"recomputed_blocks": prepared.recomputed}
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "host": host_facts(),
        "git": git_facts(),
        "backend": {"kind": prepared.config.engine.name, **engine, **recomputed},
        "model": {
            "arch": model.name,
            **model_settings(model),
            "parameters": model.parameters(),
            "trainable": sum(t.size for t in prepared.plan.trainable),
        },
        "data": {"name": prepared.config.data.name, **data, "left_out": prepared.omissions()},
        "config": {"steps": settings.steps, "lr": settings.lr, "seed": settings.seed, "batch": settings.batch_size},
        "config_sha256": config_hash(prepared.config.plain),
        "optim": prepared.optim.describe(settings.lr),
        "schedules": prepared.bus.schedules,
    }


def config_hash(plain: dict[str, Any]) -> str:
    """A digest of everything that decides a run's numbers; its name and its callbacks do not."""
    kept = {k: v for k, v in plain.items() if k not in ASIDE_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
