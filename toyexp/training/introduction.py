"""What a run says of itself: to a person before its first step and after its last, and in its record."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from toyexp.base.terminal import say
from toyexp.base.words import count, short
from toyexp.training.parts import ASIDE_KEYS, Prepared, Result
from toyexp.training.rundir import git_facts, host_facts


def introduction(prepared: Prepared) -> list[str]:
    """What a person wants to know before the first step."""
    config, plan = prepared.config, prepared.plan
    total = sum(t.size for t in plan.tensors)
    trainable = sum(t.size for t in plan.trainable)
    share = "" if trainable == total else f", {count(trainable)} of them train"
    sizes, units = prepared.dataset.describe(), prepared.model.reads.units
    known = [f"{count(sizes[f'train_{units}'])} {units} to train on"] if f"train_{units}" in sizes else []
    known = [*prepared.left_out(), *known, *prepared.dataset.remarks()]
    facts = f" ({'; '.join(known)})" if known else ""
    origin = config.recipe.origin()
    return [
        f"engine  {config.engine_note}",
        *(f"note    {line}" for line in config.engine.advice()),
        f"model   {config.model.name}, {count(total)} parameters{share}",
        f"data    {config.data.name}{facts}",
        f"recipe  {config.recipe.name}, {prepared.optim.title}, {config.settings.steps} steps",
        *([f"{origin[0]:<7} {origin[1]}"] if origin else []),
    ]


def facts(prepared: Prepared, engine: dict[str, Any]) -> dict[str, Any]:
    """What run_start records."""
    settings = prepared.config.settings
    model = prepared.model
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "host": host_facts(),
        "git": git_facts(),
        "backend": {"kind": prepared.config.engine.name, **engine},
        "model": {"arch": model.name, **model.settings(), "parameters": sum(t.size for t in prepared.plan.tensors)},
        "data": {
            "name": prepared.config.data.name,
            **prepared.data_facts(),
            "left_out": prepared.left_out(),
        },
        "config": {"steps": settings.steps, "lr": settings.lr, "seed": settings.seed, "batch": settings.batch_size},
        "config_sha256": config_hash(prepared.config.plain),
        "optim": prepared.optim.describe(settings.lr),
    }


def config_hash(plain: dict[str, Any]) -> str:
    """A digest of everything that decides a run's numbers; its name and its callbacks do not."""
    kept = {k: v for k, v in plain.items() if k not in ASIDE_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def print_result(result: Result) -> None:
    """The outcome of one run, and where everything is."""
    from toyexp.base.words import count
    from toyexp.base.writing import bytes_in

    outcome = result.outcome
    speed = f" · {count(outcome.tokens_per_second)} {result.units}/s" if outcome.tokens_per_second else ""
    say(f"{outcome.reason} after {outcome.steps} steps in {outcome.seconds:.1f} s{speed}")
    if outcome.why:
        say(f"stopped because {outcome.why}")
    if outcome.skipped:
        say(f"{outcome.skipped} of these steps were skipped: their loss or gradient was no finite number")
    if outcome.eval_loss is not None and outcome.first_eval_loss is not None:
        say(f"held-out loss {outcome.first_eval_loss:.4f} -> {outcome.eval_loss:.4f}")
    for name, value in outcome.eval_scores.items():
        say(f"held-out {name} {outcome.first_eval_scores[name]:.4f} -> {value:.4f}")
    if result.best and result.best.step != outcome.steps:
        say(f"best held-out {result.best.metric} {result.best.score:.4f} after step {result.best.step}")
    say(f"run     {short(result.dir)}")
    for path in result.artifacts:
        shown = path.relative_to(result.dir) if path.is_relative_to(result.dir) else path
        step, best = result.steps_of.get(path, outcome.steps), result.best and result.best.step
        last = ", the last" if best not in (None, step) else ""
        of = f"  of step {step}{', the best' if step == best else last}" if step != outcome.steps or last else ""
        say(f"        {shown}  {bytes_in(path) / 1e6:.2f} MB{of}")
