"""`toyexp bench`: compare the speed and memory of engines on this machine.

All engines are loaded in one process and take turns, so that other load on the machine affects them equally.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import toyexp
from toyexp.base.drawing import BLUE, INK, PALE, SMALL, Sheet, check_plot_path, fit_text, use_plot_style
from toyexp.base.errors import UserError
from toyexp.base.formatting import align_columns, format_bytes, format_count, pluralise
from toyexp.base.tables import fit_table
from toyexp.base.terminal import print_output
from toyexp.base.threads import available_cores
from toyexp.cli.bench_stepper import (
    BATCHES,
    FIGURES,
    RUN_ONLY_KEYS,
    EngineStepper,
    Entry,
    Stepper,
    baselines,
    measure_alone,
    measure_peak,
    parse_engines,
    prepare_runs,
    warm_up,
)
from toyexp.config.request import Request
from toyexp.interfaces.command import Answer, Arguments
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.plan import Plan
from toyexp.training.run_config import Prepared

SECONDS, *BYTES = FIGURES

HELP = """\
usage: toyexp bench [key=value ...] [options]

Time training steps of several engines on this machine. The engines take turns in one process. A setting after an
engine's name applies to that engine only. If a library reads a setting only once per process, type two commands (one
for vulkan:half=true, one for vulkan).
  toyexp bench                                    engines cpu and ggml, default model
  toyexp bench engine=cpu,ggml,ggml:products=ggml model=small engine.threads=2
  toyexp bench engine=cuda,cuda:capture=false,cuda:devices=2 engine.tf32=true
  toyexp bench experiment=bench_1m --baseline     1M parameters, random tokens; or bench_100k, bench_6m

options
--baseline times nanoGPT for model=gpt2, eager and compiled; on a CPU also a PyTorch loop for model=llama, eager and
compiled, and ggml's autodiff; on a GPU also PEFT for recipe=lora. Baselines use engine.threads and engine.dtype.

Columns of the report
ms/step        median over the rounds
quartiles      interquartile range of ms/step over the rounds
ratio          speed relative to the first engine
GFLOP/s        speed in 10^9 floating-point operations per second. The number of operations per position (token) is
               estimated as 6 N + 12 L d T (PaLM, appendix B) for N parameters in matrix products, L layers of width d,
               and T positions. Frozen parameters count 4 instead of 6.
of peak        GFLOP/s divided by the speed of large matrix products on the same engine in the same dtype
first step     seconds from process start to the end of the first step, including imports
on device      peak GPU memory allocated by PyTorch, or size of ggml's buffers, on the first device
peak           peak host memory of all processes of the engine
beyond import  by how much the peak exceeds the memory after imports, in the first process"""


def run(arguments: Arguments) -> int:
    """Time training steps on each engine and print the report; with --plot also write a plot. Return 0."""
    if word := next((word for word in arguments.rest if word.startswith("steps=")), None):
        how = f"--{word.replace('=', ' ', 1)}"
        raise UserError(f"{word}: has no effect in bench, which chooses the steps per round; to set them: {how}")
    picture = check_plot_path("--plot", arguments.plot) if arguments.plot else None
    request, labels = parse_engines("bench", arguments, {*RUN_ONLY_KEYS, "callbacks"})
    watch: Callable[[str], None] = (lambda line: None) if arguments.json else print_output
    report = measure(request, labels, arguments, watch)
    code, work = report.show(arguments), report.work
    if picture:
        name, size, workload = (*work.model.split(", ", 2), "", "")[:3]
        plot = sheet(report.engines, work.unit, f"Speed of {name}, {size}", [workload, work.data, work.machine])
        watch(f"\nplot    {arguments.plot}, {format_bytes(plot.write(picture, arguments.column))}")
    return code


# -- results --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Description of a benchmark's machine, and of the model and data with which every engine trains."""

    machine: str  # cores, operating system and versions
    model: str  # name, number of parameters, and size of a step
    data: str  # name, and number of tokens in the vocabulary or of classes
    unit: str  # "tokens" or "images": the unit of speeds, per second
    units: int  # number of tokens or images per step
    flops: float  # floating-point operations per step


@dataclass(frozen=True)
class Report(Answer):
    """Results of a benchmark: the speed and memory of each engine and baseline.

    The speed is also given relative to that of the first engine.
    """

    work: Work
    engines: list[dict[str, Any]]  # measurements in seconds, bytes and operations
    left_out: dict[str, str]  # {name of a baseline that could not run: reason}

    def plain(self) -> dict[str, Any]:
        """Return the report as a dict for --json: machine, model, data, and the measurements of each engine."""
        work = asdict(self.work)
        counts = {f"{work.pop('unit')}_per_step": work.pop("units"), "flops_per_step": work.pop("flops")}
        return {**work, **counts, "engines": self.engines, "left_out": self.left_out}

    def lines(self) -> list[str]:
        """Return the report as lines of text.

        The report is a table of speeds, a table of memory (not with --no-memory), and notes about engines and
        baselines, such as their versions and devices.
        """
        speed = [["engine", "ms/step", "quartiles", f"{self.work.unit}/s", "GFLOP/s", "of peak", "ratio"]]
        memory = [["engine", "first step", "on device", "peak", "beyond import"]]
        notes = []
        for e in self.engines:
            low, high = (f"{1e3 * seconds:.3g}" for seconds in e["quartiles"])
            row = [e["name"], f"{1e3 * e['seconds_per_step']:.3g}", f"{low}..{high}"]
            row += [format_count(e[f"{self.work.unit}_per_second"]), f"{e['flops_per_second'] / 1e9:.3g}"]
            share = e.get("share_of_peak")
            speed.append([*row, "" if share is None else f"{100 * share:.3g} %", f"{e['ratio']:.2f}"])
            if SECONDS in e:
                sizes = ("" if e[name] is None else f"{e[name] / 1e6:.0f} MB" for name in BYTES)
                memory.append([e["name"], f"{e[SECONDS]:.1f} s", *sizes])
            notes.append([e["name"], e["note"]])
            if SECONDS in e and e["devices"] > 1:
                notes.append(["", f"peak: all {e['devices']} processes; on device and beyond import: first process"])
            if share is not None and e["name"] == e["engine"]:
                reached = f"{e['peak_flops_per_second'] / 1e9:.3g} GFLOP/s"
                notes.append(["", f"peak speed {reached}, in products of {e['peak_size']} x {e['peak_size']} matrices"])
        notes += [[name, f"not measured: {reason}"] for name, reason in self.left_out.items()]
        if all("share_of_peak" not in e for e in self.engines):
            speed = [[*row[:5], row[6]] for row in speed]
        tables = [speed, memory] if len(memory) > 1 else [speed]
        expendable = ["quartiles", "GFLOP/s", "of peak", "beyond import", "first step"]
        lines = [line for table in tables for line in ("", *fit_table(table, table[0][1:], expendable))]
        return [*lines, "", *align_columns(notes)]


def describe_work(prepared: Prepared) -> Work:
    """Return the description of this machine, and of the model and data of a prepared run."""
    plan, flops, cores = prepared.plan, step_flops(prepared.plan), available_cores()
    rows = plan.rows * plan.accumulate
    machine = [f"{cores} cores", f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    size = format_count(prepared.model.parameters())
    per_step = f"{rows} x {row_positions(plan)} positions and {flops / 1e9:.3g} GFLOP per step"
    kind = prepared.model.reads
    return Work(
        machine=", ".join([*machine, f"toyexp {toyexp.__version__}"]),
        model=f"{prepared.model.name}, {size} parameters, {per_step}",
        data=f"{prepared.config.data.name}, {prepared.dataset.vocab} {kind.targets}",
        unit=kind.units,
        units=rows * math.prod(plan.inputs["weights"].shape),
        flops=flops,
    )


def row_positions(plan: Plan) -> int:
    """Return how many positions (tokens) the model computes for one row of a batch, as `step_flops` counts them.

    For a sequence, this is its length. For another input with several axes, it is the size of the first axis. For all
    other inputs it is 1.
    """
    name, spec = next((n, spec) for n, spec in plan.inputs.items() if n not in ("targets", "weights"))
    return spec.shape[0] if name == plan.model.reads.sequence or len(spec.shape) > 1 else 1


def step_flops(plan: Plan) -> float:
    """Return an estimate of the floating-point operations of a training step: 6 N + 12 L d T per position.

    This is the estimate of PaLM (Chowdhery et al. 2022, appendix B), which nanoGPT uses too.

    - N is the number of parameters in matrix products. Each takes 2 operations forward and 4 backward. A frozen weight
      takes only 2 backward, because its own gradient is not computed. N includes adapters and a tied embedding, but
      not a table whose rows are only looked up, such as position embeddings.
    - L is the number of layers, d the total width of a layer's attention heads, and T the number of positions in a row.
      Attention counts as if every position attended to all T. A model without n_layers or d_model counts 6 N only.
    """
    model, length = plan.model, row_positions(plan)
    sizes = {t.name: math.prod(t.shape) for t in model.tensors() if len(t.shape) > 1}
    only_looked_up = {name for name in sizes if name.endswith("position_embd.weight")}
    if "output.weight" in sizes:
        only_looked_up.add("token_embd.weight")
    sizes |= {t.name: t.size for t in plan.trainable if t.name not in sizes and len(t.shape) > 1}
    frozen = {t.name for t in plan.tensors if not t.trainable}
    products = sum((4 if name in frozen else 6) * n for name, n in sizes.items() if name not in only_looked_up)
    width = getattr(model, "n_heads", 0) * getattr(model, "head_size", 0) or getattr(model, "d_model", 0)
    attention = 12 * getattr(model, "n_layers", 0) * width * length
    return float((products + attention) * length * plan.rows * plan.accumulate)


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(request: Request, labels: Sequence[str], arguments: Arguments, watch: Callable[[str], None]) -> Report:
    """Time every engine, and the baselines with --baseline, and return the report.

    `labels` are the engines as typed, such as ggml:products=ggml. Before the first step, call `watch` three times: with
    a line about the machine, one about the model and one about the data.
    """
    environment = dict(os.environ)  # a copy, because engines set variables for libraries that read them only once
    runs = prepare_runs(request, labels)
    first = runs[labels[0]]
    settings = [str(override.input_line) for override in request.settings]
    names = [prepared.config.engine.name for prepared in runs.values()]
    baseline_entries = list(baselines(settings, names)) if arguments.baseline else []
    work = describe_work(first)
    for name in ("machine", "model", "data"):
        watch(f"{name:<8} {getattr(work, name)}")

    entries = [Entry(label, settings, label) for label in labels]
    batches = [first.batches.batch(k) for k in range(BATCHES)]
    ready: dict[str, tuple[Stepper, int]] = {}  # by name: the open stepper, and its number of steps per round
    left_out: dict[str, str] = {}
    measured = {} if arguments.no_peak else runs
    peaks = {label: measure_peak(prepared.config.engine, prepared.plan.rows) for label, prepared in measured.items()}
    with contextlib.ExitStack() as last:

        def begin(name: str, open_stepper: Callable[[], Stepper]) -> None:
            ready[name] = warm_up(open_stepper, batches, arguments.steps or 0)
            last.callback(ready[name][0].close)

        for label in labels:
            begin(label, partial(EngineStepper, runs[label]))
        for name, entry in baseline_entries:
            try:
                if isinstance(entry, str):
                    raise UserError(entry)
                begin(name, entry.prepare()[1])
                entries.append(entry)
            except Exception as error:  # a failing baseline must not stop the benchmark
                left_out[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        seconds = take_turns(ready, batches, arguments.rounds or 7)
    engines = []
    for entry in entries:  # after the steppers are closed, so that memory is free
        (stepper, steps), times = ready[entry.name], seconds[entry.name]
        median = statistics.median(times)
        row: dict[str, Any] = {
            "name": entry.name, "engine": entry.engine, "note": stepper.note, "devices": stepper.devices,
            "steps_per_round": steps, "seconds_per_step": median,
            "quartiles": np.percentile(times, (25, 75)), "rounds": times,
            f"{work.unit}_per_second": work.units / median, "flops_per_second": work.flops / median,
            "ratio": statistics.median(seconds[entries[0].name]) / median,
        }  # fmt: skip
        if peak := peaks.get(entry.engine):
            row["share_of_peak"] = row["flops_per_second"] / peak.flops_per_second
            row |= {"peak_flops_per_second": peak.flops_per_second, "peak_size": peak.size}
        engines.append(row if arguments.no_memory else row | measure_alone(entry, environment))
    return Report(work, engines, left_out)


def take_turns(
    ready: Mapping[str, tuple[Stepper, int]], batches: Sequence[Batch], rounds: int
) -> dict[str, list[float]]:
    """Time the steppers in turn, and return {name: seconds per step in each round}.

    In a round, each stepper takes some training steps; there are `rounds` rounds. `ready` holds each stepper (an engine
    or baseline that is ready to train) and its number of steps per round. Each round begins with another stepper, so
    that none is always first.
    """
    names = list(ready)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            stepper, steps = ready[name]
            seconds[name].append(stepper.time_steps(batches, steps))
    return seconds


# -- plot --------------------------------------------------------------------------------------------


ROW = 0.5  # inches


@use_plot_style()
def sheet(engines: Sequence[Mapping[str, Any]], unit: str, title: str, below: Sequence[str]) -> Sheet:
    """Return a plot with a bar for the speed of each engine, in `unit` (tokens or images) per second.

    `engines` is the field `engines` of a Report, and `below` are the parts of the subtitle. The length of a bar is the
    median over the rounds of the benchmark. A line in the bar spans the interquartile range, and each round has a mark.
    """
    rounds = len(engines[0]["rounds"])
    how = f"bars: median of {pluralise(rounds, 'round')}, lines: interquartile range" if rounds > 1 else ""
    figure = Sheet(1.3 + ROW * max(len(engines), 2), title, " · ".join(filter(None, [*below, how])))
    (axes,) = figure.panels
    axes.grid(visible=False)
    axes.grid(axis="x")
    for row, engine in enumerate(engines):
        units = engine[f"{unit}_per_second"] * engine["seconds_per_step"]  # per step
        speed, (low, high) = units / engine["seconds_per_step"], (units / seconds for seconds in engine["quartiles"])
        is_engine = engine["name"] == engine["engine"]  # not a baseline
        axes.barh(row, speed, height=0.5, color=BLUE if is_engine else PALE, alpha=0.45 if is_engine else 0.6)
        if rounds > 1:
            axes.plot([units / seconds for seconds in engine["rounds"]], [row] * rounds, color=INK, marker="|",
                      markersize=9, markeredgewidth=0.6, alpha=0.5, linestyle="none")  # fmt: skip
            axes.plot([low, high], [row, row], color=INK, linewidth=2, solid_capstyle="butt")
        label = f"{format_count(speed)} {unit}/s, {1e3 * engine['seconds_per_step']:.3g} ms per step"
        ratio = "" if row == 0 and len(engines) > 1 else f"{engine['ratio']:.2f} times {engines[0]['name']}"
        axes.text(1.01, row, f"{label}\n{fit_text(ratio, 34)}".strip() if len(engines) > 1 else label, va="center",
                  transform=axes.get_yaxis_transform(), fontsize=SMALL, color=INK)  # fmt: skip
    lines = [textwrap.wrap(engine["name"], 26, max_lines=2, placeholder="…") for engine in engines]
    names = ["\n".join(fit_text(line, 26) for line in wrapped) for wrapped in lines]
    axes.set_yticks(range(len(engines)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(engines) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.set_xlabel(f"{unit} per second")
    return figure
