"""`--dry-run`: take a few steps to estimate the time and memory of a run or sweep, without writing a run directory."""

from __future__ import annotations

import contextlib
import heapq
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import format_bytes, format_count, format_duration, pluralise, short_path
from toyexp.base.memory import available_bytes, convert_memory_errors
from toyexp.base.ownership import require_empty
from toyexp.base.tables import fit_table
from toyexp.base.terminal import print_error, print_line, print_output, show_status
from toyexp.base.writing import dump_json
from toyexp.cli.bench import step_flops
from toyexp.cli.bench_stepper import EngineStepper, memory_bytes
from toyexp.config.compose import Composition
from toyexp.config.request import Request
from toyexp.config.top_level import GROUPS
from toyexp.config.words import format_override
from toyexp.formats.gguf.open_model import mappable_tensor
from toyexp.interfaces.model import compute_scores
from toyexp.runner.one_run import locate, prepare_run
from toyexp.sweeps.directory import Job, LaunchSpec
from toyexp.sweeps.launchers.gpus import visible_gpus
from toyexp.sweeps.launchers.job_process import Stop, run_process
from toyexp.sweeps.runner import Runner
from toyexp.training import checkpoint
from toyexp.training.memory import check_snapshot, minimum_bytes, snapshot_bytes
from toyexp.training.resume import ResumeState
from toyexp.training.run_config import Prepared, introduction
from toyexp.training.rundir import require_writable
from toyexp.training.settings import Interval, evaluations

WARM_UP_STEPS, WARM_UP = 3, 0.1  # minimum number and seconds of steps that are not timed
STEPS, SLICE = 3, 0.5  # minimum number and seconds of timed steps
PATIENCE = 5.0  # seconds after which a single warm-up or timed step is enough
NOTHING_WRITTEN = "dry run: nothing was trained or written, apart from the data cache"
MAX_SHAPES = 8  # maximum number of groups of jobs to measure; other jobs count as the mean of the measured groups' jobs
COST_NEUTRAL = ("seed", "data_seed", "model_seed", "lr", "steps", "name", "checkpoint_every", "checkpoint_keep",
        "checkpoint_best", "nonfinite")  # fmt: skip
FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=e))(e[+-]?\d+)?", re.IGNORECASE)


def dry_run(request: Request, resume: str | None, as_json: bool) -> int:
    """Estimate the time and memory of a run, print them (as JSON if `as_json` is True) and return exit code 0.

    `resume` is the directory of a run to resume, "auto", or None for a new run. Raise the errors that starting the run
    itself would raise.
    """
    request, composed, saved_run = locate(request, resume)
    prepared, directory, resumed = prepare_run(composed, resume=saved_run)
    show_status("taking a few steps")
    with convert_memory_errors():
        estimate = _estimate_run(request, composed, prepared, directory, resumed)
    show_status("")
    for line in [dump_json(estimate, indent=2)] if as_json else _run_lines(estimate):
        print_output(line)
    return 0


def _estimate_run(
    request: Request, composed: Composition, prepared: Prepared, directory: Path, resumed: ResumeState | None
) -> dict[str, Any]:
    """Take a few steps of a prepared run and return the estimate as the dict that --json prints.

    Sizes are in bytes, times in seconds, and compute in floating-point operations. Raise UserError for a checkpoint or
    a directory that the run could not write.
    """
    config, plan = prepared.config, prepared.plan
    saves = bool(Interval.parse(config.settings.checkpoint_every, "checkpoint_every"))
    if saves:
        check_snapshot(plan, config.engine)
    require_writable(directory)
    about = introduction(prepared) + (resumed.lines() if resumed else [])
    begins = resumed.checkpoint.step if resumed else 0
    steps = config.settings.steps - begins
    tried = _try_steps(prepared, begins)
    ended = time.perf_counter()
    settings, flops = _changed_settings(request, composed), step_flops(plan)
    tried["seconds"] += time.perf_counter() - ended
    units, learned = prepared.model.reads.units, tried["learned"]
    rows = prepared.batches.rows_per_epoch
    batch, weights = minimum_bytes(plan, config.engine)
    return {
        "settings": settings,  # overrides that differ from the defaults of the chosen parts
        "about": about, "directory": str(directory), "begins": begins, "steps": steps,
        "parameters": prepared.model.parameters(), "trainable": sum(t.size for t in plan.trainable),
        "units": units,
        "units_per_step": learned,  # targets with a loss, mean over the measured steps
        units: round(steps * learned),
        "epochs": steps * config.settings.batch_size / rows if rows else None,  # None: unknown size of the data
        "batch_bytes": batch,
        "weights_bytes": weights,  # trainable weights, gradients and optimiser state
        "frozen_bytes": _frozen_bytes(prepared),
        "checkpoint_bytes": snapshot_bytes(plan) if saves else 0,  # size of the copy in memory from which it is written
        "free_bytes": available_bytes(),
        "flops_per_step": flops, "flops": steps * flops,
        "tried": tried,
        "seconds": tried["ready"] + steps * tried["step"] + tried["evaluations"] * tried["evaluation"],
        "warnings": list(prepared.warnings),
    }  # fmt: skip


def _run_lines(estimate: Mapping[str, Any]) -> list[str]:
    """Return the estimate of a run as lines of text to print."""
    tried, units, epochs, free = estimate["tried"], estimate["units"], estimate["epochs"], estimate["free_bytes"]
    in_about = any(word.startswith("epochs=") for word in estimate["settings"])
    in_epochs = "" if epochs is None or in_about else f" ({epochs:.3g} epochs)"
    after = f" (after step {estimate['begins']})" if estimate["begins"] else ""
    parts = {
        "batch": estimate["batch_bytes"],
        "trainable weights, gradients and optimiser state": estimate["weights_bytes"],
    }
    parts |= {"frozen weights": estimate["frozen_bytes"]} if estimate["frozen_bytes"] else {}
    parts |= {"checkpoint copy": estimate["checkpoint_bytes"]} if estimate["checkpoint_bytes"] else {}
    free_text = "" if free is None else f" of {format_bytes(free)} free"
    measured = format_bytes(tried["process_bytes"])
    measured += f", plus device memory {format_bytes(tried['device_bytes'])}" if tried["device_bytes"] else ""
    took = f"{pluralise(estimate['steps'], 'step')} of {format_duration(tried['step'])}"
    if tried["evaluations"]:
        took += f" and {pluralise(tried['evaluations'], 'eval')} of {format_duration(tried['evaluation'])}"
    per_step = format_count(estimate["units_per_step"])
    in_all = format_count(estimate["steps"] * estimate["units_per_step"])
    lines = [
        *([f"settings {' '.join(estimate['settings'])}"] if estimate["settings"] else []),
        *map(_align, estimate["about"]),
        f"trains   {format_count(estimate['trainable'])} parameters; "
        f"the exported model has {format_count(estimate['parameters'])}",
        f"steps    {estimate['steps']}{after}, {per_step} {units} each: {in_all} in total{in_epochs}",
        f"memory   at least {format_bytes(sum(parts.values()))}{free_text}: "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items()),
        f"         measured peak of the process: {measured}",
        f"compute  {estimate['flops_per_step'] / 1e9:.3g} GFLOP per step, {estimate['flops'] / 1e9:.3g} in total",
        f"time     about {format_duration(estimate['seconds'])}: {took}",
        f"         {format_duration(tried['ready'])} to start the engine and take the first step, without imports",
        f"         {pluralise(tried['steps'], 'step')} measured; callbacks, checkpoints and exports take extra time",
        f"writes   {short_path(Path(estimate['directory']))}",
        *(f"warning  {line}" for line in estimate["warnings"]),
        NOTHING_WRITTEN,
    ]
    return [line.rstrip() for line in lines]


def _align(line: str) -> str:
    """Pad the first word of a line, such as `model`, so that the text after it begins in the same column everywhere."""
    name, _, rest = line.partition(" ")
    return f"{name:<8} {rest.lstrip()}"


def _frozen_bytes(prepared: Prepared) -> int:
    """Return the minimum host memory, in bytes, that the frozen weights need.

    An engine may read a tensor directly from the memory-mapped GGUF file. Such a tensor counts with its size in the
    file. Any other tensor counts 4 bytes per value. Return 0 for an engine whose device has its own memory.
    """
    engine, size = prepared.config.engine, 0
    in_files = getattr(engine, "packed", True)  # an engine without this setting uses files in place
    for tensor in prepared.plan.tensors if not engine.own_memory else ():
        info = mappable_tensor(tensor) if in_files else None
        full = 4 * tensor.size
        size += 0 if tensor.trainable else min(info.nbytes // info.shape[0] * tensor.shape[0], full) if info else full
    return size


def _changed_settings(request: Request, composed: Composition) -> list[str]:
    """Return the overrides to print: the parts that the user chose, and each setting that differs from its default.

    If the user chose a part, such as model=gpt2, its settings are compared with the defaults of this part.
    """
    chosen = [o for o in request.settings if o.key_or_group in GROUPS and o.key_or_group != "experiment"]
    try:
        defaults = replace(request, settings=chosen).compose()
    except UserError:  # some choices need a setting
        return [str(o.input_line) for o in request.settings]
    return [*(str(o.input_line) for o in chosen), *composed.diff(defaults)]


def _try_steps(prepared: Prepared, begins: int) -> dict[str, Any]:
    """Take a few steps and evaluate a few held-out batches. Return the times and the memory; discard the weights.

    `begins` is the step at which the run starts. The keys of the result are:

    - `ready`: seconds to start the engine and take the first step, without imports
    - `step`, `evaluation`: seconds per step and per evaluation
    - `seconds`: seconds for everything after the first step
    - `evaluations`, `steps`: number of evaluations in the whole run, and number of steps taken here
    - `learned`: mean number of targets per step that count in the loss
    - `device_bytes`, `process_bytes`: peak memory on the device, and of this process
    """
    settings, began = prepared.config.settings, time.perf_counter()
    learned: list[int] = []
    with contextlib.closing(EngineStepper(prepared)) as stepper:

        def seconds_of_a_step(least: int, slice_full: float) -> float:
            """Take steps and return the seconds per step.

            Stop after `least` steps or `slice_full` seconds, whichever comes later, but at the latest after PATIENCE
            seconds.
            """
            began, before = time.perf_counter(), len(learned)
            while True:
                batch = prepared.batches.batch(begins + len(learned))
                stepper.step(batch)
                learned.append(int(np.count_nonzero(batch["weights"])))
                count, seconds = len(learned) - before, time.perf_counter() - began
                if seconds > PATIENCE or (count >= least and seconds >= slice_full):
                    stepper.wait()
                    return (time.perf_counter() - began) / count

        seconds_of_a_step(1, 0)
        ready = time.perf_counter()
        seconds_of_a_step(WARM_UP_STEPS, WARM_UP)
        step = seconds_of_a_step(STEPS, SLICE)
        evals = evaluations(begins, settings.steps, settings.eval_every)
        return {
            "ready": ready - began, "step": step,
            "evaluation": _time_evaluation(prepared, stepper) if evals else 0.0,
            "evaluations": evals,  # in the whole run
            "steps": len(learned), "learned": sum(learned) / len(learned), "seconds": time.perf_counter() - ready,
            "device_bytes": stepper.device_bytes(), "process_bytes": memory_bytes()[1],
        }  # fmt: skip


def _time_evaluation(prepared: Prepared, stepper: EngineStepper) -> float:
    """Time the evaluation of some held-out batches. Return an estimate of the seconds for all held-out batches."""
    held_out = prepared.batches.held_out()
    if not len(held_out):  # the warnings of the run say that there is no held-out data
        return 0.0

    def seconds(batches: Sequence[Any]) -> float:
        began = time.perf_counter()
        stepper.session.evaluate(batches)
        compute_scores(prepared.model, stepper.session.logits, batches)
        return time.perf_counter() - began

    first = [held_out[0]]
    seconds(first)  # warm-up
    batches = [held_out[k] for k in range(min(len(held_out), max(1, int(SLICE / max(seconds(first), 1e-6)))))]
    return seconds(batches) / len(batches) * len(held_out)


# -- a sweep ----------------------------------------------------------------------------------------------------------


@dataclass
class Shape:
    """Group of jobs whose steps should need equal time and memory.

    The jobs of a group differ only in settings that do not change time or memory, such as the seed.
    """

    settings: list[str]  # overrides that distinguish this group from others
    jobs: list[Job]
    start: float = 0.0  # seconds from the start of a job's process to the end of its first step
    estimate: Mapping[str, Any] | None = None  # output of --dry-run --json for the first job; None: not measured


def dry_run_sweep(runner: Runner, as_json: bool) -> int:
    """Measure one job of each group of similar jobs, and print an estimate of the whole sweep.

    Return the exit code: 1 if a measured job fails, otherwise 2 if the settings of a job are invalid, otherwise 0.
    """
    try:
        codes = [2 * runner.prepare()]
        by_settings: dict[tuple[str, ...], Shape] = {}
        for job in runner.source.remaining_jobs():
            settings = [word for word in job.overrides if not _is_cost_neutral(word)]
            by_settings.setdefault(tuple(settings), Shape(settings, [])).jobs.append(job)
        shapes = list(by_settings.values())
        if not shapes:
            print_line(dump_json({"jobs": 0}) if as_json else "no job would run")
            return max(codes)
        root = _sweep_directory(runner, [shape.jobs[0] for shape in shapes])
        for shape in shapes[:MAX_SHAPES]:
            show_status(f"taking a few steps of job {shape.jobs[0].number}")
            try:
                _try_job(shape, runner, root)
            except (UserError, RunFailed) as error:
                print_error(f"error in job {shape.jobs[0].number}: {error}")
                codes.append(error.exit_code)
        show_status("")
        if any(shape.estimate for shape in shapes):
            estimate = _sum_jobs(shapes, runner, root)
            for line in [dump_json(estimate, indent=2)] if as_json else _sweep_lines(estimate, runner):
                print_output(line)
        return 1 if 1 in codes else max(codes)
    finally:
        runner.close()


def _is_cost_neutral(word: str) -> bool:
    """Return True if an override does not change the time or memory of a step.

    This holds for the keys in COST_NEUTRAL, such as `seed` and `lr`. It also holds for a setting of the optimiser or a
    callback whose value is a fractional number, such as 0.9.
    """
    key, _, value = word.partition("=")
    kind = key.split(".")[0]
    return key in COST_NEUTRAL or (
        kind in ("optim", "callbacks") and key != kind and FRACTION.fullmatch(value) is not None
    )


def _sweep_directory(runner: Runner, jobs: Sequence[Job]) -> Path:
    """Return the sweep's directory, as set by hydra.sweep.dir in the configuration of the first valid job.

    If the sweep is resumed, return its existing directory. If no job is valid, return the working directory. Raise
    UserError if the directory of a new sweep is not empty or cannot be written.
    """
    if runner.folder:
        return runner.folder.path
    for job in jobs:
        try:
            root = runner.configs.directory(job, None)[0]
        except UserError:  # reported when the job is measured
            continue
        require_empty(root, "hydra.sweep.dir")
        require_writable(root, "hydra.sweep.dir")
        return root
    return Path.cwd()


def _try_job(shape: Shape, runner: Runner, root: Path) -> None:
    """Run `--dry-run` for a job in its own process, and store its estimates of time and memory in `shape`.

    The estimates hold for all jobs with models of the same shape, of which this is the first.

    Raise UserError if the job's settings are invalid, RunFailed if it fails. `root` is the sweep's directory.
    """
    launcher, out = runner.launcher, list[str]()
    of_machine = launcher.is_local and not launcher.trains_stacks
    words = [*_trial_words(shape.jobs[0], runner, root), "--dry-run", "--json"]
    gpus = visible_gpus()[: launcher.share.gpus] if of_machine else ()
    launcher.wait()

    def take(line: str, to: IO[str]) -> None:
        if to is sys.stdout:
            out.append(line)

    with tempfile.TemporaryDirectory() as folder:
        spec = LaunchSpec(
            root, Path(folder, "log"), words, [], False, launcher.share.cores * of_machine, gpus, is_stack=True
        )
        began = time.perf_counter()
        ended = run_process(spec, Stop(), take, start=launcher.start)
        seconds = time.perf_counter() - began
    if ended.code:
        raise UserError(ended.error) if ended.code == 2 else RunFailed(str(ended))
    shape.estimate = json.loads("\n".join(out))
    shape.start = seconds - shape.estimate["tried"]["seconds"]


def _trial_words(job: Job, runner: Runner, root: Path) -> list[str]:
    """Return the words of the command line that runs a job, without --dry-run.

    If the job has a checkpoint in the sweep's directory `root`, this command line resumes the job. Otherwise it starts
    the job with its overrides.
    """
    spec = runner.spec
    if job.directory and checkpoint.list_checkpoints(root / job.directory / "checkpoints"):
        return [f"resume={root / job.directory}", *(word for word in spec.settings if word.startswith("plugins="))]
    directory = root / job.directory if job.directory else runner.configs.directory(job, root)[1]
    directory_override = [] if directory.exists() else [format_override("hydra.run.dir", directory)]
    return [*spec.shared_args, *job.overrides, *directory_override, f"hydra.job.num={job.number}"]


def _sum_jobs(shapes: Sequence[Shape], runner: Runner, root: Path) -> dict[str, Any]:
    """Combine the estimates of the groups into an estimate of the sweep; return the dict that --json prints.

    A job in a group that was not measured counts as the mean of the jobs in measured groups. The total time assumes
    that a waiting job starts as soon as one of the running jobs ends.
    """
    launcher, search = runner.launcher, runner.source.description
    seconds, flops = dict[int, float](), dict[int, float]()
    unmeasured, groups = list[int](), list[dict[str, Any]]()
    for shape in shapes:
        if not (estimate := shape.estimate):
            unmeasured += [job.number for job in shape.jobs]
            continue
        tried, every = estimate["tried"], int(runner.configs.config(shape.jobs[0]).cfg.eval_every)
        for job in shape.jobs:
            begins, end = 0, estimate["begins"] + estimate["steps"]
            if job.directory:
                begins = next(iter(checkpoint.list_checkpoints(root / job.directory / "checkpoints")), 0)
            if any(word.startswith("steps=") for word in job.overrides):
                end = int(runner.configs.config(job).cfg.steps)
            is_first = (runner.settings.isolate and not launcher.trains_stacks) or not seconds  # of its process
            seconds[job.number] = (
                (shape.start if is_first else tried["ready"])
                + (end - begins) * tried["step"]
                + evaluations(begins, end, every) * tried["evaluation"]
            )
            flops[job.number] = (end - begins) * estimate["flops_per_step"]
        groups.append({"jobs": [j.number for j in shape.jobs], "own": shape.settings, "start": shape.start, **estimate})
    seconds |= dict.fromkeys(unmeasured, statistics.mean(seconds.values()))
    flops |= dict.fromkeys(unmeasured, statistics.mean(flops.values()))
    at_once = max(min(launcher.limit(), len(seconds)), 1)
    free = [0.0] * at_once
    for number in sorted(seconds):  # each job starts when a slot is free
        heapq.heapreplace(free, free[0] + seconds[number])
    varied: dict[str, dict[str, None]] = {}  # the values of each key that varies, in the order of the jobs
    for job in sorted((job for shape in shapes for job in shape.jobs), key=lambda job: job.number):
        for key, _, value in (word.partition("=") for word in job.overrides):
            varied.setdefault(key, {})[value] = None
    return {
        "directory": str(root), "settings": runner.spec.settings,
        "varied": {key: list(values) for key, values in varied.items()}, "search": search, "jobs": len(seconds),
        "launcher": launcher.name, "at_once": at_once, "cores": launcher.share.cores, "shapes": groups,
        "not_tried": unmeasured, "flops": sum(flops.values()), "seconds": max(free), "seconds_of_jobs": seconds,
    }  # fmt: skip


def _sweep_lines(estimate: Mapping[str, Any], runner: Runner) -> list[str]:
    """Return the estimate of a sweep as lines of text to print."""
    shapes, search, unmeasured = estimate["shapes"], estimate["search"], estimate["not_tried"]
    prune = runner.settings.prune
    jobs, how = pluralise(estimate["jobs"], "job"), runner.launcher.describe(estimate["at_once"])
    lines = [f"sweep    {short_path(Path(estimate['directory']))}, {jobs}, {how} ({estimate['launcher']})"]
    lines += [f"settings {' '.join(estimate['settings'])}"] if estimate["settings"] else []
    lines += [f"search   {search}"] if search else []
    for key, values in estimate["varied"].items() if not search else ():
        more = f",... ({len(values)} values)" if len(values) > 12 else ""
        lines.append(f"varies   {key}={','.join(values[:12])}{more}")
    lines += map(_align, shapes[0]["about"])
    head = ["jobs", "parameters", "trainable", "memory", "peak", "step", "eval", "GFLOP/step", "start", "settings"]
    expendable = ["GFLOP/step", "trainable", "start", "eval", "peak", "parameters"]
    lines += ["", *fit_table([head, *map(_row, shapes)], head[:9], expendable), ""]
    if unmeasured:
        mean = f"each counts as the mean job of the {len(shapes)} measured groups"
        lines.append(f"guessed  {pluralise(len(unmeasured), 'job')} in other groups were not measured: {mean}")
    seconds = estimate["seconds_of_jobs"].values()
    per_job = format_duration(min(seconds))
    per_job += "" if max(seconds) < 1.05 * min(seconds) else f" to {format_duration(max(seconds))}"
    points = "the search has chosen no trials yet: the jobs above have the ends of each interval and each listed value"
    notes = [
        runner.launcher.caveat(estimate["at_once"]),
        points if search else "",
        f"without the time that sweep.prune={prune} will save" if prune else "",
        "callbacks, checkpoints and exports take extra time",
    ]
    return [
        *lines,
        f"compute  {estimate['flops'] / 1e9:.3g} GFLOP in total",
        f"time     about {format_duration(estimate['seconds'])}: {jobs}, {per_job} each, {how}",
        *(f"         {note}" for note in notes if note),
        NOTHING_WRITTEN,
    ]


def _row(shape: Mapping[str, Any]) -> list[str]:
    tried = shape["tried"]
    least = sum(shape[f"{part}_bytes"] for part in ("batch", "weights", "frozen", "checkpoint"))
    return [
        str(len(shape["jobs"])), format_count(shape["parameters"]), format_count(shape["trainable"]),
        format_bytes(least),
        format_bytes(tried["device_bytes"] or tried["process_bytes"]), format_duration(tried["step"]),
        format_duration(tried["evaluation"]) if tried["evaluations"] else "-", f"{shape['flops_per_step'] / 1e9:.3g}",
        format_duration(shape["start"]), " ".join(shape["own"]) or "(all equal)",
    ]  # fmt: skip
