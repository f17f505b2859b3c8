"""One experiment from its configuration to its result: open the data, plan, realize, train, close."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from toyexp.bus import Bus, Run
from toyexp.data import Batches, Dataset, Dropout
from toyexp.engine import Session
from toyexp.errors import RunFailed, ToyexpError, UserError
from toyexp.loop import Outcome, train
from toyexp.matrix import refusal
from toyexp.model import Model
from toyexp.optim import AdamW
from toyexp.plan import Plan
from toyexp.recipe import Setup, start
from toyexp.run import RunDir, git_facts, host_facts

if TYPE_CHECKING:
    from toyexp.config import Config

log = logging.getLogger("toyexp")


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked, with nothing allocated and nothing written yet."""

    config: Config
    dataset: Dataset
    model: Model
    batches: Batches
    plan: Plan
    adamw: AdamW
    bus: Bus


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    name: str
    dir: Path
    outcome: Outcome
    reads: str  # what the model reads, and the run's speed is counted in
    artifacts: list[Path] = field(default_factory=list)


def prepare(config: Config) -> Prepared:
    """Opens the data and plans the run; raises UserError for whatever cannot work."""
    settings, recipe, optim = config.settings, config.recipe, config.optim
    reason = refusal(recipe, config.model, config.engine)
    if reason:
        raise UserError(reason)
    if config.data.gives != config.model.reads:
        raise UserError(
            f"model={config.model.name} reads {config.model.reads}; data={config.data.name} gives {config.data.gives}"
        )
    bus = Bus(config.callbacks)
    dataset = config.data.open(recipe.vocabulary())
    for callback in config.callbacks.values():
        callback.check_run(config.plain, dataset)
    tokens = getattr(config.base, "vocab", dataset.vocab)
    if dataset.vocab > tokens:
        raise UserError(
            f"the data's token ids go up to {dataset.vocab - 1}, and the base has {tokens} tokens; "
            "leave data.tokenizer out, which is then the base's own"
        )
    fitted = config.model.fit(dataset)
    batches = fitted.batches(dataset, settings.batch_size, settings.seed)
    model = config.base or fitted
    setup = Setup(
        batches.inputs, settings.batch_size // optim.accumulate, optim.accumulate, optim.grad_clip, settings.seed
    )
    plan = recipe.plan(model, setup)
    adamw = optim.adamw(settings.lr, model.optim_mode or recipe.optim_mode)
    return Prepared(config, dataset, model, Dropout(batches, plan) if plan.drops else batches, plan, adamw, bus)


def execute(prepared: Prepared, directory: Path, say: Callable[[str], None] = lambda line: None) -> Result:
    """Runs a prepared experiment in its directory; `say` gets lines for the person who watches."""
    config, bus = prepared.config, prepared.bus
    run_dir = RunDir(directory, config.plain)
    try:
        for line in introduction(prepared):
            log.info(line)
            say(line)
        with start(config.recipe, config.engine, prepared.plan) as session:
            outcome, failures = _live(prepared, _run(prepared, directory, session))
        result = Result(config.settings.name, directory, outcome, prepared.model.reads, list(bus.artifacts))
        summary = {**asdict(outcome), "artifacts": [str(p) for p in result.artifacts]}
        run_dir.result({**summary, "error": str(failures[0])} if failures else summary)
        if failures and isinstance(failures[0], ToyexpError):
            raise failures[0]
        if failures:
            raise RunFailed(f"a callback failed at the end of the run: {failures[0]!r}; see {directory / 'log.txt'}")
        return result
    except BaseException as error:
        log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        if not (directory / "result.json").exists():
            run_dir.result({"reason": _reason(error), "error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        run_dir.close()


def _run(prepared: Prepared, directory: Path, session: Session) -> Run:
    settings = prepared.config.settings
    return Run(
        name=settings.name,
        dir=directory,
        seed=settings.seed,
        steps=settings.steps,
        lr=settings.lr,
        config=prepared.config.plain,
        engine=prepared.config.engine.name,
        plan=prepared.plan,
        session=session,
        dataset=prepared.dataset,
        facts=facts(prepared, session.describe()),
        bus=prepared.bus,
    )


def _live(prepared: Prepared, run: Run) -> tuple[Outcome, list[Exception]]:
    """From on_start to on_end, which is always called; returns what on_end raised beside the outcome."""
    bus, error = prepared.bus, None
    reason = "errored"
    try:
        bus.hook.on_start(run=run)
        with stop_signals() as stopped:
            outcome = train(run, bus, prepared.batches, prepared.adamw, prepared.config.settings.eval_every, stopped)
        reason = outcome.reason
    except BaseException as caught:
        error, reason = caught, _reason(caught)
        raise
    finally:
        failures = bus.end(run, reason, error)
    return outcome, failures


def _reason(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "errored"


def introduction(prepared: Prepared) -> list[str]:
    """What a person wants to know before the first step."""
    config, plan = prepared.config, prepared.plan
    total = sum(t.size for t in plan.tensors)
    trainable = sum(t.size for t in plan.trainable)
    share = "" if trainable == total else f", {count(trainable)} of them train"
    sizes, reads = prepared.dataset.describe(), prepared.model.reads
    known = [f"{count(sizes[f'train_{reads}'])} {reads} to train on"] if f"train_{reads}" in sizes else []
    named = sizes.get("skipped_files") or sizes.get("skipped_lines")
    known += [f"{sizes['skipped']} skipped, such as {named[0]}"] if named else []
    known += [f"{sizes['truncated']} cut to the context"] if sizes.get("truncated") else []
    known += [f"{sizes['too_long']} left out, prompts longer than the context"] if sizes.get("too_long") else []
    facts = f" ({'; '.join(known)})" if known else ""
    return [
        f"engine  {config.engine_note}",
        f"model   {config.model.name}, {count(total)} parameters{share}",
        f"data    {config.data.name}{facts}",
        f"recipe  {config.recipe.name}, AdamW mode {prepared.adamw.mode}, {config.settings.steps} steps",
    ]


def count(n: float) -> str:
    """A number as people say it: 950, 12.3k, 4.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


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
        "data": {"name": prepared.config.data.name, **prepared.dataset.describe()},
        "config": {"steps": settings.steps, "lr": settings.lr, "seed": settings.seed, "batch": settings.batch_size},
        "config_sha256": config_hash(prepared.config.plain),
        "optim": asdict(prepared.adamw),
    }


def config_hash(plain: dict[str, Any]) -> str:
    """A digest of everything that decides a run's numbers; its name and its callbacks do not."""
    kept = {k: v for k, v in plain.items() if k not in ("name", "callbacks", "plugins")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into an answer of True, so that the step in hand is finished.

    A second signal acts at once. Outside the main thread signals belong to someone else and are left alone.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if caught:
        raise Interrupted(caught[0])


class Interrupted(KeyboardInterrupt):
    """A signal ended the run after its last step was finished."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number
