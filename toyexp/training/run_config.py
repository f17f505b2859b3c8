"""Data structures of a run: its configuration, prepared state, progress and result."""

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
from toyexp.interfaces.objective import Objective
from toyexp.interfaces.optimiser import Optimiser
from toyexp.interfaces.plan import Plan, describe_adapters, idle_group_warnings, sign_flip_warnings
from toyexp.interfaces.recipe import Recipe
from toyexp.interfaces.run import Best
from toyexp.interfaces.run_preview import RunPreview
from toyexp.training.bus import Bus
from toyexp.training.rundir import git_facts, host_facts
from toyexp.training.settings import ASIDE, FREE, Settings, about, keys_by_role


@dataclass
class Config:
    """Configuration of a run: the objects (model, data, engine, ...) that were built from its settings."""

    settings: Settings
    model: Model
    data: Data
    recipe: Recipe
    engine: Engine = field(metadata=about("engine and device that compute the run", FREE))
    optim: Optimiser
    objective: Objective
    callbacks: dict[str, Callback] = field(metadata=about("callbacks that log, stop and export the run", FREE, ASIDE))
    plain: dict[str, Any]  # the resolved settings, for the run directory
    engine_note: str  # name of the engine and why it was chosen
    base: Model | None = None  # the model of the recipe's base file; `model` is the same with the run's context
    default_callbacks: Callable[[], Sequence[str]] = list  # names of the default callbacks
    suggest_command: Callable[[], str] = str  # returns the end of an error about parts that do not fit: what to type
    cwd: Path | None = None  # base of relative paths; None: the working directory
    typed: Sequence[str] = ()  # settings that the user typed, if they repeat the run without a configuration file
    omissions: Sequence[str] = ()  # warnings about plugins and settings that are not used

    def warnings(self, planned: RunPreview) -> list[str]:
        """Return the warnings to print before the first step, such as settings that have no effect."""
        parts: list[Engine | Recipe | Data | Callback] = [
            self.engine, self.recipe, self.data, *self.callbacks.values()
        ]  # fmt: skip
        texts = [text for part in parts for text in call_for_lines(part.warnings, planned)]
        texts += call_for_lines(planned.plan.model.warnings) + call_for_lines(self.objective.warnings)
        if getattr(planned.plan.model, "mup", False) and self.optim.name != "adamw":
            texts.append(
                f"model.mup=true: with optim={self.optim.name} the best lr may change with d_model; muP is for adamw"
            )
        others = [c for c in self.callbacks.values() if sets_lr(c) and not isinstance(c, Schedule)]
        if not (self.settings.lr or others):
            texts.append("lr=0: the weights will not change")
        optim_warnings = [
            *idle_group_warnings(planned.plan, self.optim),
            *sign_flip_warnings(planned.plan, self.settings.lr),
        ]
        return [*self.omissions, *self.settings.warnings(), *texts, *self._unscheduled_warnings(), *optim_warnings]

    def _unscheduled_warnings(self) -> list[str]:
        """Return a warning if the default learning-rate schedule was set to scale another optimiser setting.

        The learning rate then has no schedule.
        """
        if any(sets_lr(callback) for callback in self.callbacks.values()):
            return []
        return [
            f"callbacks.{name}.scales={callback.scales}: lr has no schedule now; by default {name} schedules it"
            for name, callback in self.callbacks.items()
            if isinstance(callback, Schedule) and name in self.default_callbacks()
        ]


FREE_KEYS = keys_by_role(FREE, Settings, Config)  # a resumed run may change these
ASIDE_KEYS = keys_by_role(ASIDE, Settings, Config)  # these do not affect a run's numbers


@dataclass(frozen=True)
class Prepared:
    """A run that was checked and is ready to start: nothing is allocated on the device or written yet."""

    config: Config
    dataset: Dataset
    model: Model
    batches: Batches
    plan: Plan
    optim: Optimiser  # with the mode that the model or recipe chose
    bus: Bus
    warnings: Sequence[str] = ()  # printed before the first step
    recomputed: int | None = None  # blocks that engine.recompute=true computes twice; None: off or unknown

    def omissions(self) -> list[str]:
        """Return sentences for the user about data that the run leaves out, such as examples that are too long."""
        return [*call_for_lines(self.dataset.omissions), *self.batches.omissions]


@dataclass(frozen=True)
class Result:
    """Result of a run: its directory, how training ended, and the files that it exported."""

    name: str
    dir: Path
    outcome: Outcome
    units: str  # of the speed, such as tokens
    artifacts: list[Path] = field(default_factory=list)
    artifact_steps: dict[Path, int] = field(default_factory=dict)  # step of each artifact's weights
    best: Best | None = None  # the best evaluation, with checkpoint_best


@dataclass
class Outcome:
    """Progress of one run's training: losses, steps and times so far, and how training ended."""

    steps: int = 0  # steps taken
    reason: str = "completed"  # or aborted (by a callback) or interrupted
    train_loss: float | None = None  # smoothed, see smooth_loss()
    first_train_loss: float | None = None  # of the first batch
    eval_loss: float | None = None  # held-out loss of the last evaluation
    first_eval_loss: float | None = None
    seconds: float = 0.0  # total duration
    training_seconds: float = 0.0  # duration of the steps only
    tokens: int = 0  # number of targets (tokens, images) trained on
    skipped: int = 0  # steps without an update, because loss or gradient was not finite
    why: str | None = None  # the reason given by the callback that stopped the run
    eval_step: int | None = None  # step of the last evaluation
    eval_scores: Mapping[str, float] = field(default_factory=dict)  # held-out metrics besides loss and ppl
    first_eval_scores: Mapping[str, float] = field(default_factory=dict)
    edited: int | None = None  # step after which the recipe last edited the weights
    in_nats: bool = True  # the held-out loss is a cross-entropy, which has a perplexity

    def count(self, loss: float, targets: int, seconds: float) -> None:
        """Add one step to the progress: its loss, number of targets and duration in seconds."""
        self.steps += 1
        self.train_loss = smooth_loss(self.train_loss, loss, self.steps)
        if self.steps == 1:
            self.first_train_loss = self.train_loss
        self.tokens += targets
        self.training_seconds += seconds

    def scores(self) -> dict[str, float]:
        """Return the held-out metrics by name, if the current step was evaluated; otherwise {}."""
        if self.eval_loss is None or self.eval_step != self.steps:
            return {}
        ppl = {"ppl": perplexity(self.eval_loss)} if self.in_nats else {}
        return {"loss": self.eval_loss, **ppl, **self.eval_scores}

    @property
    def has_diverged(self) -> bool:
        """Return True if the training loss and the held-out loss (if any) both rose by more than 10 % and 0.1 nats."""
        pairs = [(self.first_train_loss, self.train_loss), (self.first_eval_loss, self.eval_loss)]
        losses = [(first, last) for first, last in pairs if first is not None and last is not None]
        return bool(losses) and all(last > first + max(0.1 * abs(first), 0.1) for first, last in losses)

    @property
    def tokens_per_second(self) -> float | None:
        """Targets (tokens, images) per second of training steps, without evaluations; None before the first step."""
        return self.tokens / self.training_seconds if self.training_seconds else None


class Saver:
    """Checkpointing interface of the training loop; this base class saves nothing."""

    def begin(self, metrics: Mapping[str, float]) -> None:
        """Prepare for training; `metrics` are those of the evaluation before the first step ({} if there was none)."""

    def is_due(self, step: int) -> bool:
        """Return True if the training loop must call `after` for this step before it launches the next step."""
        return False

    def after(self, outcome: Outcome, metrics: Mapping[str, float], last: bool) -> None:
        """Save the run if a checkpoint is due. The loop calls this after each step.

        `metrics` are those of an evaluation at this step ({} if there was none); `last` marks the last step.
        """


def introduction(prepared: Prepared) -> list[str]:
    """Return the lines to print before the first step: they describe engine, model, data and recipe."""
    config, plan = prepared.config, prepared.plan
    total = prepared.model.parameters()
    trainable = sum(t.size for t in plan.trainable)
    share = "" if trainable == total else f", {format_count(trainable)} train"
    units = prepared.model.reads.units
    described = call_checked(Mapping, prepared.dataset.describe, who=f"data.{config.data.name}")
    sizes = {**described, **prepared.batches.facts}
    facts = [f"{format_count(sizes[f'train_{units}'])} {units} to train on"] if f"train_{units}" in sizes else []
    if facts and isinstance(examples := sizes.get("train_examples"), int):
        rows = f", packed into {pluralise(packed, 'row')}" if (packed := sizes.get("packed_rows")) else ""
        facts[0] += f" in {pluralise(examples, 'pair' if 'pairs' in sizes else 'example')}{rows}"
    facts = [*prepared.omissions(), *facts, *call_for_lines(prepared.dataset.remarks)]
    if shares := sizes.get("shares"):  # of a mixture
        facts += [f"rows: {', '.join(f'{share:.1%} {name}' for name, share in shares.items())}"]
    details = f" ({'; '.join(facts)})" if facts else ""
    origin = config.recipe.origin()
    epochs = f" (epochs={config.settings.epochs:g})" if config.settings.epochs else ""
    average = f"averaged weights (optim.ema={prepared.optim.ema:g})" if prepared.optim.ema else ""
    parts = filter(None, (config.recipe.name, describe_adapters(plan), prepared.optim.title, average))
    return [
        f"engine  {config.engine_note}",
        *(f"note    {line}" for line in call_for_lines(config.engine.advice)),
        f"model   {config.model.name}, {format_count(total)} parameters{share}",
        f"data    {config.data.name}{details}",
        f"recipe  {', '.join(parts)}, {pluralise(config.settings.steps, 'step')}{epochs}",
        *(f"group   {line}" for line in _groups(prepared)),
        *([f"{origin[0]:<7} {origin[1]}"] if origin else []),
    ]


def _groups(prepared: Prepared) -> Iterator[str]:
    optim = prepared.optim
    for pattern, group in optim.groups.items():
        tensors = [t for t in prepared.plan.tensors if optim.find_group(t.name)[0] == pattern]
        number = sum(t.trainable or group.get("frozen", False) for t in tensors)
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in group.items())
        yield f"{printable(pattern)}: {settings}; {pluralise(number, 'tensor')}"


def facts(prepared: Prepared, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the event run_start, such as host, model and data; `engine` describes the open session."""
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
            **({"adapters": text} if (text := describe_adapters(prepared.plan)) else {}),
        },
        "data": {"name": prepared.config.data.name, **data, "left_out": prepared.omissions()},
        "config": {"steps": settings.steps, "lr": settings.lr, "seed": settings.seed, "batch": settings.batch_size},
        "config_sha256": config_hash(prepared.config.plain),
        "optim": prepared.optim.describe(settings.lr),
        "objective": {"name": prepared.plan.objective.name, **prepared.plan.objective.settings()},
        "schedules": prepared.bus.schedules,
    }


def config_hash(plain: dict[str, Any]) -> str:
    """Return the SHA-256 of the settings that affect a run's numbers; the name and callbacks, for example, do not."""
    settings = {k: v for k, v in plain.items() if k not in ASIDE_KEYS}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
