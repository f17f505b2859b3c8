"""Engines side by side on this machine: what `toyexp bench` measures and shows.

All of them stand in one process and take turns, so that whatever else the machine does meets them alike.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import toyexp
from toyexp.base.errors import UserError
from toyexp.base.terminal import say
from toyexp.base.threads import available_cores
from toyexp.base.words import count
from toyexp.base.writing import dump_json
from toyexp.commands.bench_stepper import EngineStepper, Entry, Stepper, alone, baselines
from toyexp.commands.options import require_settings, whole
from toyexp.commands.variants import ALONE, Variant, on_engines, prepare_variants
from toyexp.config.request import Request
from toyexp.contract.batch import Batch
from toyexp.contract.command import Arguments
from toyexp.contract.plan import Plan

SLICE = 0.3  # seconds that one takes steps before it is the next one's turn
WARM_UP = 0.1  # seconds of steps before anything counts, and at least so many steps:
WARM_UP_STEPS = 3
BATCHES = 8  # made beforehand, and used over and over

HELP = """\
usage: toyexp bench [key=value ...] [options]

Engines side by side on this machine; ratio is the speed of each over the first one's.
  toyexp bench                                    cpu and ggml, the default model
  toyexp bench engine=cpu,ggml,ggml:blas=false model=small engine.threads=2
  toyexp bench experiment=bench_1m --baseline     1M parameters, random tokens; also bench_100k and bench_6m
  toyexp bench data=random data.vocab=256 model.d_model=32

options
  --rounds N      turns that each of them gets (7)
  --steps N       steps of a turn (as many as take about 0.3 s)
  --baseline      beside them a bare PyTorch loop, eager and compiled, and ggml's own autodiff (on engine.threads)
  --no-memory     leave out what needs a process for each: memory, and the wait for the first step
  --json          everything as JSON

ms/step is the median of the rounds, quartiles are between which their middle half lies. GFLOP/s counts 6 N + 12 L d T
operations for each of the T positions of a row, N being the parameters in matrix products. first step is counted from
the start of a process; toyexp's reading of the settings is in it for the baselines too, and a compiler may find its
work on disk. peak is the most memory that process held, beyond import how much of it came after all was imported."""


@dataclass
class Options:
    """The flags of the command line."""

    rounds: int = 7
    steps: int = 0  # 0: as many as fill a slice
    baseline: bool = False
    memory: bool = True
    json: bool = False


def read(arguments: Arguments) -> Options:
    """The options of a command line; UserError for what is no setting, and for steps, which it chooses itself."""
    require_settings("bench", arguments.rest)
    for setting in arguments.rest:
        key, _, value = setting.partition("=")
        if key == "steps":
            raise UserError(f"{setting}: bench takes the steps that fill its rounds; to fix them: --steps {value}")
    numbers = {flag[2:]: whole(flag, text, 1, 10**6) for flag, text in arguments.values.items()}
    switches = arguments.switches
    return Options(
        **numbers, baseline="--baseline" in switches, memory="--no-memory" not in switches, json="--json" in switches
    )


def run(arguments: Arguments) -> int:
    """Measures the engines, and shows what came out."""
    options = read(arguments)
    request, labels = on_engines("bench", arguments, {*ALONE, "callbacks"})
    report = measure(request, labels, options, (lambda line: None) if options.json else say)
    print(dump_json(report.plain(), indent=2) if options.json else "\n".join(table(report)))
    return 0


# -- what is found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What every engine is given."""

    machine: str
    model: str
    data: str
    unit: str  # what speed is counted in: tokens, images
    units: int  # of them in a step
    flops: float  # in a step


@dataclass(frozen=True)
class Result:
    """What was measured of one engine."""

    name: str
    note: str  # versions, device and threads
    steps: int  # of a turn
    seconds: list[float]  # a step took, one of each round
    memory: Mapping[str, float] = field(default_factory=dict)  # what toyexp.commands.bench_stepper.alone tells

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds of a step, between which the middle half of the rounds lies."""
        low, high = np.percentile(self.seconds, (25, 75))
        return float(low), float(high)


@dataclass(frozen=True)
class Report:
    """All of it; the first result is what the others are compared with."""

    work: Work
    results: list[Result]
    left_out: dict[str, str]  # baselines, and why

    def plain(self) -> dict[str, Any]:
        """As plain data; seconds, bytes and operations without prefixes."""
        work = self.work
        engines = [
            {
                "name": r.name,
                "note": r.note,
                "steps_per_round": r.steps,
                "seconds_per_step": r.median,
                "quartiles": r.quartiles,
                "rounds": r.seconds,
                f"{work.unit}_per_second": work.units / r.median,
                "flops_per_second": work.flops / r.median,
                "ratio": self.results[0].median / r.median,
                **r.memory,
            }
            for r in self.results
        ]
        return {
            **{name: getattr(work, name) for name in ("machine", "model", "data")},
            f"{work.unit}_per_step": work.units,
            "flops_per_step": work.flops,
            "engines": engines,
            "left_out": self.left_out,
        }


def work_of(variant: Variant) -> Work:
    """What a variant computes, and where."""
    prepared, cores = variant.prepared, available_cores()
    plan, flops = prepared.plan, step_flops(prepared.plan)
    rows = plan.rows * plan.accumulate
    machine = [f"{cores} cores", f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    size = count(sum(t.size for t in plan.tensors))
    per_step = f"{rows} x {positions(plan)} positions and {flops / 1e9:.3g} GFLOP a step"
    kind = prepared.model.reads
    return Work(
        machine=", ".join([*machine, f"toyexp {toyexp.__version__}"]),
        model=f"{prepared.model.name}, {size} parameters, {per_step}",
        data=f"{prepared.config.data.name}, {prepared.dataset.vocab} {kind.targets}",
        unit=kind.units,
        units=rows * math.prod(plan.inputs["targets"].shape),
        flops=flops,
    )


def positions(plan: Plan) -> int:
    """Positions of a row: the first axis of what the model reads, where that is a sequence or has several."""
    name, spec = next((n, spec) for n, spec in plan.inputs.items() if n not in ("targets", "weights"))
    return spec.shape[0] if name == plan.model.reads.sequence or len(spec.shape) > 1 else 1


def step_flops(plan: Plan) -> float:
    """Floating-point operations of a training step: 6 N + 12 L d T for each of a row's T positions.

    The estimate of PaLM (Chowdhery et al. 2022, appendix B), which nanoGPT uses too. N are the parameters in matrix
    products, with 2 operations forward and 4 backward. A table that is only looked up is not among them; the
    embedding is where it is the output layer too. Attention's two products are counted in full though half of them
    is masked, and d is the width of all heads; a model without n_layers and d_model has N alone. Adapters and frozen
    tensors are not told apart.
    """
    model, length = plan.model, positions(plan)
    sizes = {t.name: math.prod(t.shape) for t in model.tensors() if len(t.shape) > 1}
    only_looked_up = {name for name in sizes if name.endswith("position_embd.weight")}
    if "output.weight" in sizes:
        only_looked_up.add("token_embd.weight")
    n = sum(size for name, size in sizes.items() if name not in only_looked_up)
    width = getattr(model, "n_heads", 0) * getattr(model, "head_size", 0) or getattr(model, "d_model", 0)
    attention = 12 * getattr(model, "n_layers", 0) * width * length
    return float((6 * n + attention) * length * plan.rows * plan.accumulate)


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(request: Request, labels: Sequence[str], options: Options, watch: Callable[[str], None]) -> Report:
    """Runs the benchmark; `watch` gets a line each about machine, model and data before it begins."""
    variants = prepare_variants(request, labels)
    settings = [str(override.input_line) for override in request.settings]
    entries = [Entry(label, settings, label) for label in labels]
    added = list(baselines(settings)) if options.baseline else []
    work = work_of(variants[0])
    for name in ("machine", "model", "data"):
        watch(f"{name:<8} {getattr(work, name)}")

    batches = [variants[0].prepared.batches.batch(k) for k in range(BATCHES)]
    ready: dict[str, tuple[Stepper, int]] = {}  # with the steps of a turn
    left_out: dict[str, str] = {}
    try:
        for variant in variants:
            ready[variant.label] = warm_up(partial(EngineStepper, variant), batches, options.steps)
        for name, entry in added:
            try:
                if isinstance(entry, str):
                    raise UserError(entry)
                ready[name] = warm_up(entry.prepare()[1], batches, options.steps)
                entries.append(entry)
            except Exception as error:  # whatever a baseline lacks here, the engines are measured
                left_out[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        seconds = take_turns(ready, batches, options.rounds)
    finally:
        for stepper, _ in ready.values():
            stepper.close()
    results = []
    for entry in entries:  # now that the machine's memory is free again
        stepper, steps = ready[entry.name]
        memory = alone(entry) if options.memory else {}
        results.append(Result(entry.name, stepper.note, steps, seconds[entry.name], memory))
    return Report(work, results, left_out)


def warm_up(open_stepper: Callable[[], Stepper], batches: Sequence[Batch], steps: int) -> tuple[Stepper, int]:
    """An open stepper after steps that do not count, and how many steps make a turn: `steps`, or a slice full."""
    stepper = open_stepper()
    try:
        times: list[float] = []
        while len(times) < WARM_UP_STEPS or sum(times) < WARM_UP:
            began = time.perf_counter()
            stepper.step(batches[len(times) % BATCHES])
            times.append(time.perf_counter() - began)
    except BaseException:
        stepper.close()
        raise
    return stepper, steps or max(1, round(SLICE / statistics.median(times)))


def take_turns(
    ready: Mapping[str, tuple[Stepper, int]], batches: Sequence[Batch], rounds: int
) -> dict[str, list[float]]:
    """Seconds a step of each in every round; who begins changes from round to round."""
    names = list(ready)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            stepper, steps = ready[name]
            began = time.perf_counter()
            for k in range(steps):
                stepper.step(batches[k % BATCHES])
            seconds[name].append((time.perf_counter() - began) / steps)
    return seconds


# -- what a person sees ---------------------------------------------------------------------------------------------


def table(report: Report) -> list[str]:
    """The report as lines."""
    work, results = report.work, report.results
    rows = [["engine", "ms/step", "quartiles", f"{work.unit}/s", "GFLOP/s", "ratio"]]
    rows[0] += ["first step", "peak", "beyond import"] if results[0].memory else []
    notes = []
    for r in results:
        low, high = (f"{1e3 * seconds:.3g}" for seconds in r.quartiles)
        ratio = results[0].median / r.median
        row = [r.name, f"{1e3 * r.median:.3g}", f"{low}..{high}", count(work.units / r.median)]
        row += [f"{work.flops / r.median / 1e9:.3g}", f"{ratio:.2f}"]
        own = dict(r.memory)
        if own:
            row.append(f"{own.pop('first_step_seconds'):.1f} s")
            row += [f"{own.pop(name) / 1e6:.0f} MB" for name in ("peak_rss_bytes", "beyond_import_bytes")]
        rows.append(row)
        told = [f"{name.removesuffix('_bytes')} memory {size / 1e6:.1f} MB" for name, size in own.items()]
        notes.append((r.name, ", ".join([r.note, *told])))
    notes += [(name, f"left out: {reason}") for name, reason in report.left_out.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    width = max(len(name) for name, _ in notes)
    return ["", *lines, "", *(f"{name:<{width}}  {note}" for name, note in notes)]
