"""`toyexp parity`: train the same experiment on several engines and compare losses, gradients and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from toyexp.base.attribution import call_for_lines
from toyexp.base.drawing import check_plot_path
from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import align_columns, format_bytes
from toyexp.base.tables import fit_table
from toyexp.base.terminal import print_output
from toyexp.base.writing import dump_json
from toyexp.cli.bench_stepper import RUN_ONLY_KEYS, parse_engines, prepare_runs
from toyexp.cli.parity_plot import sheet
from toyexp.config.request import Request
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.dataset import Batches
from toyexp.interfaces.recipe import start_session
from toyexp.interfaces.run import Run
from toyexp.reference.engine import TOLERANCES, Tolerances, coarser_precision, precision
from toyexp.sweeps.combinations import combinations, experiment_sweep
from toyexp.training.precompute import precompute_arrays
from toyexp.training.run_config import Prepared, introduction

STEPS = 20  # default
LIMITS = ("loss", "gradient", "weights")  # quantities that have a tolerance
TENSORS_SHOWN = 3  # tensors listed for each engine without --all
# The error of a gradient is relative to its norm, or if that is smaller, to this fraction of the norm of all gradients.
SMALL = 1e-6
# A gradient whose norm is below this fraction of the norm of all gradients is only float32 rounding error. An example
# is that of the bias of attention keys without RoPE: the softmax cancels the bias, so the true gradient is zero.
ROUNDING = 2.0**-23

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TensorDifference:
    """Differences between an engine and the reference engine in the gradient and weights of one trainable tensor."""

    name: str
    gradient: float  # |g - g_ref| / |g_ref| on the first batch; for small gradients see tensor_differences
    cosine: float  # cosine similarity of the gradients; 1 if both are zero
    weights: float  # |w - w_ref| / |w_ref - w_start| after training
    of_norm: float  # |w - w_ref| / |w_ref|


@dataclass(frozen=True)
class LossDifference:
    """Differences of an engine's training losses from those of the reference engine, over all steps."""

    largest: float  # largest absolute difference at any step, in nats
    mean: float  # mean absolute difference
    largest_relative: float  # largest ratio of a step's difference to the reference's loss at that step
    mean_relative: float  # mean of these ratios


@dataclass(frozen=True)
class EngineReport:
    """Comparison of one engine with the reference engine, which is the first one that the user names."""

    engine: str  # label as typed
    note: str  # device and version
    losses: list[float]  # one per step
    loss: LossDifference
    tensors: list[TensorDifference]  # worst first, relative to the tolerances
    rounds_to: str  # dtype whose tolerances apply: the coarser of this engine's and the reference's
    tolerances: Tolerances
    exceeded: list[str]  # one sentence per exceeded tolerance


@dataclass(frozen=True)
class Report:
    """Comparison of several engines with the reference engine, which is the first one that the user names."""

    reference: str  # label as typed
    note: str  # device and version of the reference
    losses: list[float]  # of the reference, one per step
    steps: int
    engines: list[EngineReport]  # all engines but the reference

    @property
    def within(self) -> bool:
        """True if no engine exceeds a tolerance."""
        return not any(engine.exceeded for engine in self.engines)

    def plain(self) -> dict[str, Any]:
        """Return the fields of the report and the property `within`, for --json."""
        return {"within": self.within, **asdict(self)}


# -- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Results of training on one engine; arrays are keyed by tensor name."""

    start: Arrays  # values of every tensor before the first step
    gradients: Arrays  # of the trainable tensors, on the first batch before the first step
    losses: list[float]  # one per step
    weights: Arrays  # values of the trainable tensors after the last step


def compare(runs: Mapping[str, Prepared], limits: Mapping[str, float], watch: Callable[[str], None]) -> Report:
    """Train on each engine, compare each engine with the first one, and return the report.

    The keys of `runs` are engines. `limits` has tolerances that replace the defaults; its keys are names in LIMITS.
    Before an engine starts, call `watch` with lines that describe the engine. Raise UserError for fewer than two
    engines, and RunFailed if initial weights differ between engines.
    """
    if len(runs) < 2:
        raise UserError(f"engine={','.join(runs)}: parity needs two or more engines: engine=cpu,ggml")
    notes = {label: run.config.engine_note.removeprefix(f"{label.partition(':')[0]}: ") for label, run in runs.items()}
    rounds = {label: precision(run.config.engine) for label, run in runs.items()}
    (first, prepared), *others = runs.items()
    for line in [f"engine  {first}: {notes[first]}", *introduction(prepared)[1:]]:  # without the line of the engine
        watch(line)
    batches = precompute_arrays(prepared, watch)
    reference, engines = measure(prepared, batches), []
    for label, run in others:
        watch(f"engine  {label}: {notes[label]}")
        for line in call_for_lines(run.config.engine.advice):
            watch(f"note    {line}")
        measured = measure(run, batches)
        for name, array in reference.start.items():
            if array.tobytes() != measured.start[name].tobytes():
                raise RunFailed(f"{label}: the initial values of {name} differ from those on {first}")
        loss, tensors = loss_difference(measured.losses, reference.losses), tensor_differences(measured, reference)
        judged_by = coarser_precision(rounds[first], rounds[label])
        tolerances = replace(TOLERANCES[judged_by], **limits)
        tensors.sort(key=partial(_tolerance_ratio, tolerances), reverse=True)
        exceeded = list(_exceeded_messages(loss, tensors, tolerances))
        engines.append(
            EngineReport(label, notes[label], measured.losses, loss, tensors, judged_by, tolerances, exceeded)
        )
    return Report(first, notes[first], reference.losses, prepared.config.settings.steps, engines)


def measure(prepared: Prepared, batches: Batches) -> Measured:
    """Train on one engine and return the results.

    The learning rate follows the run's schedule. There are no evaluations.
    """
    plan, config, settings = prepared.plan, prepared.config, prepared.config.settings
    with start_session(config.recipe, config.engine, plan) as session:
        run = Run(settings.name, Path(), settings.seed, settings.steps, settings.lr, config.plain,
                  config.engine.name, plan, session, prepared.dataset)  # fmt: skip
        began = {t.name: session.download(t.name) for t in plan.tensors}
        gradients = session.gradients(batches.batch(0))
        losses = []
        for step in range(settings.steps):
            numbers = plan.numbers(step, prepared.bus.lr(run, step), prepared.bus.factors(run, step))
            losses.append(float(session.step(batches.batch(step), numbers).loss))
        return Measured(began, gradients, losses, {t.name: session.download(t.name) for t in plan.trainable})


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> LossDifference:
    """Compare the losses of two runs step by step, absolutely and relative to the losses in `reference`.

    A loss of NaN counts as an infinite difference.
    """
    absolute = [_ratio(abs(a - b), 1) for a, b in zip(losses, reference, strict=True)]
    relative = [_ratio(d, abs(b)) for d, b in zip(absolute, reference, strict=True)]
    return LossDifference(max(absolute), fmean(absolute), max(relative), fmean(relative))


def tensor_differences(measured: Measured, reference: Measured) -> list[TensorDifference]:
    """Compare the gradient and the weights of every trainable tensor with those of the reference engine.

    A value of NaN counts as an infinite difference. The differences are relative:

    - Weights: the norm of the difference is divided by the norm of the tensor's change in training. This ratio does not
      depend on learning rate, number of steps or initial scale. (If the divisor were the norm of the weights, an engine
      that does not train at all would have a small difference.) If the tensor changes less than the average tensor of
      its size, the divisor is the average change.
    - Gradients: the norm of the difference is divided by the norm of the reference gradient, or by `SMALL` times the
      norm of all gradients if that is larger.
    - If a gradient is below `ROUNDING` times the norm of all gradients on both engines, the true gradient is zero and
      both are rounding errors. Then the divisor of the gradient is the norm of all gradients. The weights count as
      equal, because AdamW and similar rules take full steps even from rounding errors.
    """
    moved = {name: _distance(w, reference.start[name]) for name, w in reference.weights.items()}
    numbers = sum(w.size for w in reference.weights.values())
    typical = math.hypot(*moved.values()) / math.sqrt(max(numbers, 1))  # typical change of one number
    total_norm = math.hypot(*(_norm(g) for g in reference.gradients.values()))
    differences = []
    for name, w_ref in reference.weights.items():
        g, g_ref = measured.gradients[name], reference.gradients[name]
        off = _distance(measured.weights[name], w_ref)
        rounding = 0 < max(_norm(g), _norm(g_ref)) < ROUNDING * total_norm
        differences.append(
            TensorDifference(
                name,
                _ratio(_distance(g, g_ref), total_norm if rounding else max(_norm(g_ref), SMALL * total_norm)),
                _cosine(g, g_ref),
                0.0 if rounding else _ratio(off, max(moved[name], typical * math.sqrt(w_ref.size))),
                _ratio(off, _norm(w_ref)),
            )
        )
    return differences


def _tolerance_ratio(limits: Tolerances, tensor: TensorDifference) -> float:
    return max(_ratio(tensor.gradient, limits.gradient), _ratio(tensor.weights, limits.weights))


def _exceeded_messages(loss: LossDifference, tensors: Sequence[TensorDifference], limits: Tolerances) -> Iterator[str]:
    """Yield a sentence for each tolerance that an engine exceeds, with the name and error of its worst tensor."""

    def excess(value: float, limit: float) -> str:
        return f"{value:.1e}, {_ratio(value, limit):.3g} times the tolerance {limit:g}"

    if loss.largest > limits.loss:
        yield f"loss: at one step it differs by {excess(loss.largest, limits.loss)}"
    for quantity in ("gradient", "weights"):
        limit = getattr(limits, quantity)
        off = {t.name: getattr(t, quantity) for t in tensors if getattr(t, quantity) > limit}
        if off:
            worst = max(off, key=lambda name: off[name])
            more = f"; {len(off)} of {len(tensors)} tensors exceed it" if len(off) > 1 else ""
            yield f"{quantity}: {worst} differs by {excess(off[worst], limit)}{more}"


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def _distance(array: np.ndarray, reference: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # inf - inf
        return _norm(array.astype(np.float64) - reference)


def _cosine(array: np.ndarray, reference: np.ndarray) -> float:
    norms = _norm(array), _norm(reference)
    if not all(norms):
        return float(norms == (0, 0))
    return float(np.vdot(array.astype(np.float64), reference.astype(np.float64))) / norms[0] / norms[1]


def _ratio(difference: float, scale: float) -> float:
    """Return difference / scale: 0 if the difference is 0, otherwise infinity if the scale is 0 or the result NaN."""
    if difference == 0:
        return 0.0
    ratio = difference / scale if scale else math.inf
    return math.inf if math.isnan(ratio) else ratio


# -- command line ------------------------------------------------------------------------------------


def run(arguments: Arguments) -> int:
    """Compare the engines and print the report; if the experiment is a sweep, do so for each of its jobs.

    Return the exit code: 1 if an engine exceeds a tolerance, otherwise 0.
    """
    plot, as_json = arguments.plot, arguments.json
    picture = check_plot_path("--plot", plot) if plot else None
    typed = {name: getattr(arguments, name) for name in LIMITS}
    limits = {name: limit for name, limit in typed.items() if limit is not None}
    request, labels = parse_engines("parity", arguments, RUN_ONLY_KEYS)
    _require_schedules(request)
    sweep = experiment_sweep(request)
    fixed = [str(o.input_line) for o in sweep if not o.is_sweep_override()]
    request = request.with_defaults(f"steps={STEPS}").with_overrides(*fixed)
    watch: Callable[[str], None] = (lambda line: None) if as_json else print_output
    reports: dict[str, Report] = {}
    if picture and (several := [o.key_or_group for o in sweep if o.is_sweep_override()]):
        problem = f"plots a single experiment, but this one sweeps over {', '.join(several)}"
        raise UserError(f"--plot {plot}: {problem}; leave it out")
    for varied in combinations(sweep):
        label = " ".join(varied)
        if varied:
            watch(f"\n[{len(reports)}] {label}")
        runs = prepare_runs(request.with_overrides(*varied), labels)
        reports[label] = report = compare(runs, limits, watch)
        for line in summary(report, arguments.all):
            watch(line)
        if picture:
            lines = [line.partition(" ") for line in introduction(runs[labels[0]])]
            details = [about.strip() for name, _, about in lines if name in ("model", "data", "recipe")]
            figure = sheet(report.plain(), f"{' and '.join(labels[1:])} against {report.reference}", details)
            watch(f"plot    {plot}, {format_bytes(figure.write(picture, arguments.column))}")
    within = sum(report.within for report in reports.values())
    if as_json:
        jobs = [{"overrides": label, **report.plain()} for label, report in reports.items()]
        print(dump_json({"within": within == len(jobs), "jobs": jobs} if sweep else reports[""].plain(), indent=2))
    if len(reports) > 1:
        watch(f"\n{within} of {len(reports)} within the tolerances")
    return 0 if within == len(reports) else 1


def _require_schedules(request: Request) -> None:
    """Raise UserError if the user set an option of a callback that does not change the learning rate.

    Such callbacks have no effect in `toyexp parity`.
    """
    for override in request.settings:
        kind, _, rest = override.key_or_group.partition(".")
        offer = request.registry.offers["callbacks"].get(rest.partition(".")[0]) if kind == "callbacks" else None
        if offer is not None and "lr" not in dir(offer.cls):
            raise UserError(f"{override.input_line}: only learning rate schedules have an effect here; leave it out")


_ROWS = [(name, *(f"{getattr(limits, quantity):g}" for quantity in LIMITS)) for name, limits in TOLERANCES.items()]
_TABLE = "\n".join(f"  {row}" for row in align_columns([("products in", *LIMITS), *_ROWS], right=range(1, 4)))
HELP = f"""\
usage: toyexp parity [engine=NAME,NAME,...] [key=value ...] [options]

Train one experiment on several engines, with the same initial weights and batches, and compare each engine with the
first. The default is engine=cpu,ggml. Settings of one engine follow its name: engine=cpu,ggml:products=ggml, or
engine=cuda,cuda:capture=false.
Other settings are those of a run, with steps={STEPS} by default. There is no evaluation and no output, so these
settings are rejected: {", ".join(sorted(RUN_ONLY_KEYS))}.
An experiment with a sweep, such as parity_all, is compared job by job.
Sign-based optimisers (optim=lion) turn rounding errors into full steps where gradients are near 0; raise the tolerance
with --weights X.

options
Tolerances, by the coarser dtype of the two engines' matrix products:
{_TABLE}

Exit code 0: all engines are within the tolerances; 1: at least one is not; 2: invalid input."""


def summary(report: Report, every_tensor: bool = False) -> list[str]:
    """Return the report as lines of text: a row per engine, a table of tensors for each engine, and the verdict.

    The tables list the tensors that differ most, or all trainable tensors if `every_tensor` is True.
    """
    head = ("loss, largest", "loss, mean", "relative", "relative, mean", "gradient", "weights", "of norm")
    rows: list[tuple[str, ...]] = [(f"against {report.reference}", *head)]
    for engine in report.engines:
        worst = [max((getattr(t, w) for t in engine.tensors), default=0.0) for w in ("gradient", "weights", "of_norm")]
        rows.append((engine.engine, *(f"{n:.1e}" for n in (*astuple(engine.loss), *worst))))
    for rounds_to, limits in {engine.rounds_to: engine.tolerances for engine in report.engines}.items():
        loss, gradient, weights = (f"{getattr(limits, quantity):.1e}" for quantity in LIMITS)
        rows.append((f"tolerance, {rounds_to}", loss, "", "", "", gradient, weights, ""))
    lines = ["", *fit_table(rows, head, ["of norm", "relative, mean", "loss, mean", "relative"])]
    for engine in report.engines:
        shown = engine.tensors if every_tensor else engine.tensors[:TENSORS_SHOWN]
        count = f"{len(shown)} of {len(engine.tensors)} tensors"
        rows = [(f"{engine.engine}, {count}", "gradient", "cosine", "weights", "of norm")]
        for t in shown:
            rows.append((t.name, f"{t.gradient:.1e}", f"{t.cosine:.6f}", f"{t.weights:.1e}", f"{t.of_norm:.1e}"))
        lines += ["", *fit_table(rows, rows[0][1:], ["of norm", "cosine"])]
    lines.append("")
    if report.within:
        return [*lines, f"within the tolerances, {report.steps} steps"]
    return lines + [
        f"{engine.engine} exceeds the tolerance of the {words}"
        for engine in report.engines
        for words in engine.exceeded
    ]
