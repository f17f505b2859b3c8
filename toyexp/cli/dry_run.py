"""What a run would be, said before it is one: --dry-run takes a few steps to tell the time, and leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toyexp.base.attribution import given
from toyexp.base.errors import UserError
from toyexp.base.formatting import count, counted, duration, in_bytes, short
from toyexp.base.memory import available_bytes
from toyexp.cli.bench import step_flops
from toyexp.cli.bench_stepper import EngineStepper, memory_bytes
from toyexp.config.top_level import GROUPS
from toyexp.formats.gguf.open_model import in_place
from toyexp.interfaces.command import Answer
from toyexp.interfaces.model import scores_of
from toyexp.training.memory import check_snapshot, least, snapshot_bytes
from toyexp.training.resume import Resumed
from toyexp.training.run_config import Prepared, introduction
from toyexp.training.rundir import require_writable
from toyexp.training.settings import Interval, evaluations

if TYPE_CHECKING:
    from toyexp.config.compose import Composed
    from toyexp.config.request import Request

WARM_UP_STEPS, WARM_UP = 3, 0.1  # that do not count: so many, and so many seconds of them
STEPS, SLICE = 3, 0.5  # that count
PATIENCE = 5.0  # seconds of either after which one step is enough


@dataclass(frozen=True)
class Tried:
    """What a few steps and held-out batches took; times are seconds."""

    ready: float  # from the parts of the run to the end of its first step
    step: float
    evaluation: float  # of all held-out batches, from a few of them
    evaluations: int  # of the whole run
    steps: int  # that were taken, those included that do not count
    learned: float  # targets of a step that count, on average
    seconds: float  # that all this took
    device_bytes: int | None
    process_bytes: int  # the most that the process held

    def of_run(self, steps: int) -> float:
        """Seconds of so many steps, with what comes before the first one."""
        return self.ready + steps * self.step + self.evaluations * self.evaluation


@dataclass(frozen=True)
class DryRun(Answer):
    """All that is said of a run; bytes, seconds and operations without prefixes."""

    settings: list[str]  # that differ from the defaults of what was chosen
    about: list[str]  # a run's introduction
    directory: Path
    begins: int  # the step that it goes on from
    steps: int  # that it would take
    parameters: int
    trainable: int
    units: str
    units_per_step: float  # targets that count; of rows of different lengths, on average of the steps that were tried
    epochs: float | None  # None where data do not say how large they are
    batch_bytes: int
    weights_bytes: int  # of what trains, with gradients and the optimiser's state
    frozen_bytes: int  # of weights that do not train
    checkpoint_bytes: int  # of the copy of a checkpoint; 0: none is written
    free_bytes: int | None
    flops_per_step: float
    tried: Tried
    warnings: list[str]

    def plain(self) -> dict[str, Any]:
        """The same, with what is made of it."""
        steps = self.steps
        made = {"flops": steps * self.flops_per_step, "seconds": self.tried.of_run(steps)}
        return {
            **super().plain(),
            "directory": str(self.directory),
            self.units: round(steps * self.units_per_step),
            **made,
        }

    def lines(self) -> list[str]:
        """For a person."""
        tried, per_step = self.tried, self.units_per_step
        again = "" if self.epochs is None else f", {self.epochs:.3g} times through the data"
        behind = f" behind step {self.begins}" if self.begins else ""
        parts = {"a batch": self.batch_bytes, "weights that train, gradients and optimiser": self.weights_bytes}
        parts |= {"frozen weights": self.frozen_bytes} if self.frozen_bytes else {}
        parts |= {"a checkpoint's copy": self.checkpoint_bytes} if self.checkpoint_bytes else {}
        of = "" if self.free_bytes is None else f" of {in_bytes(self.free_bytes)} that are free"
        device = "" if tried.device_bytes is None else f", and of its device's memory {in_bytes(tried.device_bytes)}"
        evals = ""
        if tried.evaluations:
            evals = f" and {counted(tried.evaluations, 'eval')} of {duration(tried.evaluation)}"
        in_all, flops = count(self.steps * per_step), self.flops_per_step / 1e9
        steps = f"{counted(self.steps, 'step')} of {duration(tried.step)}{evals}"
        told = [
            *([f"settings {' '.join(self.settings)}"] if self.settings else []),
            *(f"{line.split(' ', 1)[0]:<8} {line.split(' ', 1)[1].lstrip()}" for line in self.about),
            f"trains   {count(self.trainable)} parameters; the model, as exported, has {count(self.parameters)}",
            f"steps    {self.steps}{behind}, each of {count(per_step)} {self.units}: {in_all} in all{again}",
            f"memory   at least {in_bytes(sum(parts.values()))}{of}: "
            + ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items()),
            f"         with the steps that were tried the process held {in_bytes(tried.process_bytes)}{device}",
            f"compute  {flops:.3g} GFLOP a step, {self.steps * flops:.3g} in all",
            f"time     about {duration(tried.of_run(self.steps))}: {steps}, {duration(tried.ready)} to begin",
            f"         {counted(tried.steps, 'step')} were tried; callbacks, checkpoints and exports come on top",
            f"writes   {short(self.directory)}",
            *(f"warning  {line}" for line in self.warnings),
            "nothing was trained, and nothing written but what data keep in their cache",
        ]
        return [line.rstrip() for line in told]


def foresee(
    request: Request, composed: Composed, prepared: Prepared, directory: Path, resumed: Resumed | None
) -> DryRun:
    """Takes a few steps of a run that is ready, on its own engine and data; UserError for what it would be refused."""
    config, plan = prepared.config, prepared.plan
    saves = bool(Interval.parse(config.settings.checkpoint_every, "checkpoint_every"))
    if saves:
        check_snapshot(plan, config.engine)
    require_writable(directory)
    about = introduction(prepared) + (resumed.lines() if resumed else [])
    begins = resumed.checkpoint.step if resumed else 0
    steps = config.settings.steps - begins
    tried = try_steps(prepared, begins)
    ended = time.perf_counter()
    settings, flops = differing(request, composed), step_flops(plan)
    tried = replace(tried, seconds=tried.seconds + time.perf_counter() - ended)
    units = prepared.model.reads.units
    known = given(Mapping, prepared.dataset.describe).get(f"train_{units}")
    batch, weights = least(plan, config.engine)
    return DryRun(
        settings=settings, about=about, directory=directory, begins=begins, steps=steps,
        parameters=prepared.model.parameters(), trainable=sum(t.size for t in plan.trainable),
        units=units, units_per_step=tried.learned, epochs=steps * tried.learned / known if known else None,
        batch_bytes=batch, weights_bytes=weights, frozen_bytes=_frozen_bytes(prepared),
        checkpoint_bytes=snapshot_bytes(plan) if saves else 0,
        free_bytes=available_bytes(), flops_per_step=flops, tried=tried, warnings=list(prepared.warnings),
    )  # fmt: skip


def _frozen_bytes(prepared: Prepared) -> int:
    """Return what frozen weights take of the machine's memory at least: in float32, or as they lie in their file."""
    engine, size = prepared.config.engine, 0
    in_files = getattr(engine, "packed", True)  # an engine without this setting uses files in place
    for tensor in prepared.plan.tensors if not engine.own_memory else ():
        info = in_place(tensor) if in_files else None
        whole = 4 * tensor.size
        size += 0 if tensor.trainable else min(info.nbytes // info.shape[0] * tensor.shape[0], whole) if info else whole
    return size


def differing(request: Request, composed: Composed) -> list[str]:
    """The choices that were typed, and each setting that is not the default of what was chosen."""
    chosen = [o for o in request.settings if o.key_or_group in GROUPS and o.key_or_group != "experiment"]
    try:
        usual = replace(request, settings=chosen).compose()
    except UserError:  # choices that only go together with a setting
        return [str(o.input_line) for o in request.settings]
    return [*(str(o.input_line) for o in chosen), *composed.unlike(usual)]


def try_steps(prepared: Prepared, begins: int) -> Tried:
    """A few steps and held-out batches, as the run would take them, on weights that are dropped afterwards."""
    settings, began = prepared.config.settings, time.perf_counter()
    stepper = EngineStepper(prepared)
    try:
        taken = learned = 0

        def step() -> None:
            nonlocal taken, learned
            batch = prepared.batches.batch(begins + taken)
            stepper.step(batch)
            taken += 1
            learned += int(np.count_nonzero(batch["weights"]))

        step()
        stepper.wait()
        ready = warm = time.perf_counter()
        while not _enough(taken, time.perf_counter() - warm, WARM_UP_STEPS, WARM_UP):
            step()
            stepper.wait()
        before, counting = taken, time.perf_counter()
        while not _enough(taken - before, time.perf_counter() - counting, STEPS, SLICE):
            step()
        stepper.wait()
        seconds = (time.perf_counter() - counting) / (taken - before)
        evals = evaluations(begins, settings.steps, settings.eval_every)
        return Tried(
            ready=ready - began,
            step=seconds,
            evaluation=_evaluation(prepared, stepper) if evals else 0.0,
            evaluations=evals,
            steps=taken,
            learned=learned / taken,
            seconds=time.perf_counter() - ready,
            device_bytes=stepper.device_bytes(),
            process_bytes=memory_bytes()[1],
        )
    finally:
        stepper.close()


def _enough(steps: int, seconds: float, least_steps: int, least_seconds: float) -> bool:
    return steps > 0 and (seconds > PATIENCE or (steps >= least_steps and seconds >= least_seconds))


def _evaluation(prepared: Prepared, stepper: EngineStepper) -> float:
    """Seconds of an evaluation, from as many of its batches as take a moment."""
    held_out = prepared.batches.held_out()
    if not len(held_out):  # which the run says of itself
        return 0.0

    def seconds(some: Sequence[Any]) -> float:
        began = time.perf_counter()
        stepper.session.evaluate(some)
        scores_of(prepared.model, stepper.session.logits, some)
        return time.perf_counter() - began

    first = [held_out[0]]
    seconds(first)  # which may build something
    some = [held_out[k] for k in range(min(len(held_out), max(1, int(SLICE / max(seconds(first), 1e-6)))))]
    return seconds(some) / len(some) * len(held_out)
