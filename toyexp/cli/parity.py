"""The same experiment on several engines, from the same bytes and batches: how far apart their numbers are."""

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
from toyexp.training.run_config import Prepared, introduction

STEPS = 20  # unless the user says how many
LIMITS = ("loss", "gradient", "weights")  # what has a tolerance
TENSORS_SHOWN = 3  # tensors listed for each engine without --all
# A gradient below this share of the whole gradient is compared with that.
SMALL = 1e-6
# And below float32's precision it is nothing but rounding: so is the bias of attention's keys without rope, which the
# softmax cancels.
ROUNDING = 2.0**-23

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TensorDifference:
    """How far one trainable tensor is from the reference's."""

    name: str
    gradient: float  # |g - g_ref| / |g_ref|; for small ones see tensor_differences
    cosine: float  # of the two gradients; 1 when both are zero
    weights: float  # |w - w_ref| / |w_ref - w_start|
    of_norm: float  # |w - w_ref| / |w_ref|


@dataclass(frozen=True)
class LossDifference:
    """The losses of all steps against the reference's."""

    largest: float
    mean: float
    largest_relative: float
    mean_relative: float


@dataclass(frozen=True)
class EngineReport:
    """One engine against the reference."""

    engine: str  # as it was typed
    note: str  # device and version
    losses: list[float]  # one a step
    loss: LossDifference
    tensors: list[TensorDifference]  # the furthest from the tolerances first
    rounds_to: str  # by which it is judged: the coarser of what its products and the reference's round to
    tolerances: Tolerances
    exceeded: list[str]  # a sentence for each tolerance that is


@dataclass(frozen=True)
class Report:
    """Every engine against the first."""

    reference: str
    note: str
    losses: list[float]
    steps: int
    engines: list[EngineReport]

    @property
    def within(self) -> bool:
        """Whether no tolerance is exceeded."""
        return not any(engine.exceeded for engine in self.engines)

    def plain(self) -> dict[str, Any]:
        """The report as plain data."""
        return {"within": self.within, **asdict(self)}


# -- the comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What one engine computed."""

    start: Arrays  # every tensor before the first step
    gradients: Arrays  # of the first batch
    losses: list[float]
    weights: Arrays  # the trainable tensors after the last step


def compare(runs: Mapping[str, Prepared], limits: Mapping[str, float], watch: Callable[[str], None]) -> Report:
    """Trains on one engine after another and compares each with the first; `watch` gets a line as each starts.

    Raises UserError for fewer than two engines, RunFailed when they do not start from the same bytes.
    """
    if len(runs) < 2:
        raise UserError(f"engine={','.join(runs)}: parity takes two or more: engine=cpu,ggml")
    notes = {label: run.config.engine_note.removeprefix(f"{label.partition(':')[0]}: ") for label, run in runs.items()}
    rounds = {label: precision(run.config.engine) for label, run in runs.items()}
    (first, prepared), *others = runs.items()
    for line in [f"engine  {first}: {notes[first]}", *introduction(prepared)[1:]]:  # whose notes are of that engine
        watch(line)
    reference, engines = measure(prepared, prepared.batches), []
    for label, run in others:
        watch(f"engine  {label}: {notes[label]}")
        for line in call_for_lines(run.config.engine.advice):
            watch(f"note    {line}")
        measured = measure(run, prepared.batches)
        for name, array in reference.start.items():
            if array.tobytes() != measured.start[name].tobytes():
                raise RunFailed(f"{label}: {name} does not start from the bytes that the reference starts from")
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
    """One run without evaluation: the first batch's gradients, then training with the run's own schedule."""
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


def loss_difference(ours: Sequence[float], theirs: Sequence[float]) -> LossDifference:
    """The differences of two curves, absolute and relative to `theirs`; infinite where a loss is no number."""
    absolute = [_ratio(abs(a - b), 1) for a, b in zip(ours, theirs, strict=True)]
    relative = [_ratio(d, abs(b)) for d, b in zip(absolute, theirs, strict=True)]
    return LossDifference(max(absolute), fmean(absolute), max(relative), fmean(relative))


def tensor_differences(measured: Measured, reference: Measured) -> list[TensorDifference]:
    """Every trainable tensor against the reference's; infinite where one holds what is no number.

    Weights are compared relative to how far training moved them, which means the same for any learning rate, number
    of steps and initial size; relative to their norm, an engine that does not train at all would come near. One that
    moved less than the typical tensor counts as having moved as far, and gradients below `SMALL` of the whole are
    compared with that. Where the true gradient is zero and both engines have mere rounding instead, it is compared with
    the whole, and the weights are not: AdamW and its kin make whole steps even of rounding.
    """
    moved = {name: _distance(w, reference.start[name]) for name, w in reference.weights.items()}
    numbers = sum(w.size for w in reference.weights.values())
    typical = math.hypot(*moved.values()) / math.sqrt(max(numbers, 1))  # of one number
    whole = math.hypot(*(_norm(g) for g in reference.gradients.values()))
    differences = []
    for name, w_ref in reference.weights.items():
        g, g_ref = measured.gradients[name], reference.gradients[name]
        off = _distance(measured.weights[name], w_ref)
        rounding = 0 < max(_norm(g), _norm(g_ref)) < ROUNDING * whole
        differences.append(
            TensorDifference(
                name,
                _ratio(_distance(g, g_ref), whole if rounding else max(_norm(g_ref), SMALL * whole)),
                _cosine(g, g_ref),
                0.0 if rounding else _ratio(off, max(moved[name], typical * math.sqrt(w_ref.size))),
                _ratio(off, _norm(w_ref)),
            )
        )
    return differences


def _tolerance_ratio(limits: Tolerances, tensor: TensorDifference) -> float:
    return max(_ratio(tensor.gradient, limits.gradient), _ratio(tensor.weights, limits.weights))


def _exceeded_messages(loss: LossDifference, tensors: Sequence[TensorDifference], limits: Tolerances) -> Iterator[str]:
    """A sentence for each exceeded tolerance: where it is worst, and by how much."""

    def by(value: float, limit: float) -> str:
        return f"{value:.1e}, {_ratio(value, limit):.3g} times the tolerance {limit:g}"

    if loss.largest > limits.loss:
        yield f"loss: one step's differs by {by(loss.largest, limits.loss)}"
    for what in ("gradient", "weights"):
        limit = getattr(limits, what)
        off = {t.name: getattr(t, what) for t in tensors if getattr(t, what) > limit}
        if off:
            worst = max(off, key=lambda name: off[name])
            more = f"; {len(off)} of {len(tensors)} tensors exceed it" if len(off) > 1 else ""
            yield f"{what}: that of {worst} differs by {by(off[worst], limit)}{more}"


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # infinity less infinity
        return _norm(ours.astype(np.float64) - theirs)


def _cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    norms = _norm(ours), _norm(theirs)
    if not all(norms):
        return float(norms == (0, 0))
    return float(np.vdot(ours.astype(np.float64), theirs.astype(np.float64))) / norms[0] / norms[1]


def _ratio(difference: float, scale: float) -> float:
    """0 for no difference, and infinite where it is no number or there is nothing to compare with."""
    if difference == 0:
        return 0.0
    ratio = difference / scale if scale else math.inf
    return math.inf if math.isnan(ratio) else ratio


# -- what a person types and reads ------------------------------------------------------------------------------------


def run(arguments: Arguments) -> int:
    """Compares the engines, of an experiment that sweeps job by job; exit code 1 where a tolerance is exceeded."""
    plot, as_json = arguments.plot, arguments.json
    picture = check_plot_path("--plot", plot) if plot else None
    typed = {name: getattr(arguments, name) for name in LIMITS}
    limits = {name: limit for name, limit in typed.items() if limit is not None}
    request, labels = parse_engines("parity", arguments, RUN_ONLY_KEYS)
    _require_schedules(request)
    own = experiment_sweep(request)
    fixed = [str(o.input_line) for o in own if not o.is_sweep_override()]
    request = request.with_defaults(f"steps={STEPS}").with_overrides(*fixed)
    watch: Callable[[str], None] = (lambda line: None) if as_json else print_output
    reports: dict[str, Report] = {}
    if picture and (several := [o.key_or_group for o in own if o.is_sweep_override()]):
        what = f"draws one experiment, and this one sweeps over {', '.join(several)}"
        raise UserError(f"--plot {plot}: {what}; leave it out")
    for varied in combinations(own):
        label = " ".join(varied)
        if varied:
            watch(f"\n[{len(reports)}] {label}")
        runs = prepare_runs(request.with_overrides(*varied), labels)
        reports[label] = report = compare(runs, limits, watch)
        for line in summary(report, arguments.all):
            watch(line)
        if picture:
            lines = [line.partition(" ") for line in introduction(runs[labels[0]])]
            told = [about.strip() for what, _, about in lines if what in ("model", "data", "recipe")]
            drawn = sheet(report.plain(), f"{' and '.join(labels[1:])} against {report.reference}", told)
            watch(f"plot    {plot}, {format_bytes(drawn.write(picture))}")
    within = sum(report.within for report in reports.values())
    if as_json:
        jobs = [{"overrides": label, **report.plain()} for label, report in reports.items()]
        print(dump_json({"within": within == len(jobs), "jobs": jobs} if own else reports[""].plain(), indent=2))
    if len(reports) > 1:
        watch(f"\n{within} of {len(reports)} within the tolerances")
    return 0 if within == len(reports) else 1


def _require_schedules(request: Request) -> None:
    """Raises UserError for a callback's setting that has no effect here: they are asked for the learning rate alone."""
    for override in request.settings:
        kind, _, rest = override.key_or_group.partition(".")
        offer = request.registry.offers["callbacks"].get(rest.partition(".")[0]) if kind == "callbacks" else None
        if offer is not None and "lr" not in dir(offer.cls):
            raise UserError(f"{override.input_line}: parity asks callbacks for the learning rate alone; leave it out")


_ROWS = [(name, *(f"{getattr(limits, what):g}" for what in LIMITS)) for name, limits in TOLERANCES.items()]
_TABLE = "\n".join(f"  {row}" for row in align_columns([("products in", *LIMITS), *_ROWS], right=range(1, 4)))
HELP = f"""\
usage: toyexp parity [engine=NAME,NAME,...] [key=value ...] [options]

Trains one experiment on several engines, from the same bytes and batches, and compares each with the first.
engine=cpu,ggml is the default; a setting of one engine stands behind its name: engine=cpu,ggml:blas=false, or
engine=cuda,cuda:capture=false.
All other settings are those of a run; steps={STEPS} unless given. Nothing is evaluated or written: refused are
{", ".join(sorted(RUN_ONLY_KEYS))}.
An experiment that sweeps, such as parity_all, is compared job by job.
Optimisers that go by signs (optim=lion) make whole steps of rounding errors: weights differ where gradients are near 0;
--weights X allows for it.

options
The tolerances, by the coarser of what the two engines' products round to:
{_TABLE}

Exit code 0: every engine is within the tolerances; 1: one is not; 2: bad input."""


def summary(report: Report, every_tensor: bool = False) -> list[str]:
    """The report in lines: a row per engine, the tensors furthest apart, and the verdict."""
    head = ("loss, largest", "mean", "relative", "mean", "gradient", "weights", "of norm")
    rows: list[tuple[str, ...]] = [(f"against {report.reference}", *head)]
    for engine in report.engines:
        worst = [max((getattr(t, w) for t in engine.tensors), default=0.0) for w in ("gradient", "weights", "of_norm")]
        rows.append((engine.engine, *(f"{n:.1e}" for n in (*astuple(engine.loss), *worst))))
    for rounds_to, limits in {engine.rounds_to: engine.tolerances for engine in report.engines}.items():
        loss, gradient, weights = (f"{getattr(limits, what):.1e}" for what in LIMITS)
        rows.append((f"tolerance, {rounds_to}", loss, "", "", "", gradient, weights, ""))
    lines = ["", *align_columns(rows, right=range(1, 8))]
    for engine in report.engines:
        shown = engine.tensors if every_tensor else engine.tensors[:TENSORS_SHOWN]
        of = f"{len(shown)} of {len(engine.tensors)} tensors"
        rows = [(f"{engine.engine}, {of}", "gradient", "cosine", "weights", "of norm")]
        for t in shown:
            rows.append((t.name, f"{t.gradient:.1e}", f"{t.cosine:.6f}", f"{t.weights:.1e}", f"{t.of_norm:.1e}"))
        lines += ["", *align_columns(rows, right=range(1, 8))]
    lines.append("")
    if report.within:
        return [*lines, f"within the tolerances, {report.steps} steps"]
    return lines + [f"{engine.engine} exceeds {words}" for engine in report.engines for words in engine.exceeded]
