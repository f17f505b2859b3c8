"""What a run says of itself: to a person before its first step, and in its record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from toyexp.base.blame import asked, sentences
from toyexp.base.errors import printable
from toyexp.base.words import count, counted, typed
from toyexp.contract.model import sizes_of
from toyexp.training.parts import ASIDE_KEYS, Prepared
from toyexp.training.rundir import git_facts, host_facts


def introduction(prepared: Prepared) -> list[str]:
    """What a person wants to know before the first step."""
    config, plan = prepared.config, prepared.plan
    total = sum(t.size for t in plan.tensors)
    trainable = sum(t.size for t in plan.trainable)
    share = "" if trainable == total else f", {count(trainable)} of them train"
    who, units = f"data.{config.data.name}", prepared.model.reads.units
    sizes = asked(who, "while it was described", Mapping, prepared.dataset.describe)
    known = [f"{count(sizes[f'train_{units}'])} {units} to train on"] if f"train_{units}" in sizes else []
    if known and isinstance(examples := sizes.get("train_examples"), int):
        known[0] += f" in {counted(examples, 'example')}"
    known = [*prepared.left_out(), *known, *sentences(prepared.dataset.remarks)]
    facts = f" ({'; '.join(known)})" if known else ""
    origin = config.recipe.origin()
    return [
        f"engine  {config.engine_note}",
        *(f"note    {line}" for line in sentences(config.engine.advice)),
        f"model   {config.model.name}, {count(total)} parameters{share}",
        f"data    {config.data.name}{facts}",
        f"recipe  {config.recipe.name}, {prepared.optim.title}, {counted(config.settings.steps, 'step')}",
        *(f"group   {line}" for line in _groups(prepared)),
        *([f"{origin[0]:<7} {origin[1]}"] if origin else []),
    ]


def _groups(prepared: Prepared) -> Iterator[str]:
    """What each pattern of `optim.groups` gives its tensors."""
    optim = prepared.optim
    for pattern, own in optim.groups.items():
        tensors = [t for t in prepared.plan.tensors if optim.group_of(t.name)[0] == pattern]
        number = sum(t.trainable or own.get("frozen", False) for t in tensors)
        settings = ", ".join(f"{name}={typed(value)}" for name, value in own.items())
        yield f"{printable(pattern)}: {settings}; {counted(number, 'tensor')}"


def facts(prepared: Prepared, engine: dict[str, Any]) -> dict[str, Any]:
    """What run_start records."""
    settings = prepared.config.settings
    model = prepared.model
    recomputed = {} if prepared.recomputed is None else {"recomputed_blocks": prepared.recomputed}
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "host": host_facts(),
        "git": git_facts(),
        "backend": {"kind": prepared.config.engine.name, **engine, **recomputed},
        "model": {"arch": model.name, **sizes_of(model), "parameters": sum(t.size for t in prepared.plan.tensors)},
        "data": {"name": prepared.config.data.name, **prepared.data_facts(), "left_out": prepared.left_out()},
        "config": {"steps": settings.steps, "lr": settings.lr, "seed": settings.seed, "batch": settings.batch_size},
        "config_sha256": config_hash(prepared.config.plain),
        "optim": prepared.optim.describe(settings.lr),
        "schedules": prepared.bus.scheduled,
    }


def config_hash(plain: dict[str, Any]) -> str:
    """A digest of everything that decides a run's numbers; its name and its callbacks do not."""
    kept = {k: v for k, v in plain.items() if k not in ASIDE_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
