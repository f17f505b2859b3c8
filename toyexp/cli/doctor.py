"""Which engines work here, what they compute and where: what `toyexp doctor` shows."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

import toyexp
from toyexp.base.errors import Unavailable, UserError
from toyexp.base.files import working_directory
from toyexp.base.formatting import align_columns
from toyexp.base.packages import explain_import_error
from toyexp.base.terminal import print_output
from toyexp.cli.bench_stepper import RUN_ONLY_KEYS, parse_engines, prepare_runs
from toyexp.cli.pages import doctor_hints
from toyexp.config.build import build_engine
from toyexp.config.request import take_engines
from toyexp.formats.gguf.quantise import quantiser
from toyexp.inference import llamacpp
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.optimiser import AdamW
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.recipe import start_session
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Offer, Registry
from toyexp.reference.engine import TOLERANCES, precision, reference_adamw, reference_logits, reference_loss
from toyexp.reference.opmodel import CASES, ROWS, case_rows, op_batch, op_plan
from toyexp.results import report
from toyexp.sweeps.begin import LAUNCHERS
from toyexp.sweeps.search import study
from toyexp.tokenizers import chat_template as chat
from toyexp.training.run_config import Prepared

HELP = """\
usage: toyexp doctor [options] [engine=NAME,... key=value ...]

Which engines work here, and why the others do not.
  toyexp doctor --numerics engine=ggml
  toyexp doctor --graph engine=ggml model=gpt2

options
--numerics exits with 1 when something is off. plugins=[my_module] goes with both."""


def run(arguments: Arguments) -> int:
    """Report on the engines, on their numbers, or on their graphs."""
    working_directory()  # or MKL, which looks for itself from there, ends the process
    if arguments.graph:
        request, labels = parse_engines(
            "doctor --graph", arguments, {*RUN_ONLY_KEYS, "steps", "lr", "callbacks"}, "ggml"
        )
        print("\n".join(placement(prepare_runs(request, labels))))
        return 0
    if arguments.numerics:
        return _check_numerics(arguments)
    if word := next(iter(arguments.settings), ""):
        raise UserError(f"doctor {word}: takes --numerics or --graph and settings behind it, or nothing")
    registry = load()
    print_output(
        f"toyexp {toyexp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    width = max((len(n) for n in registry.offers["engine"]), default=0)
    working = []
    for offer in registry.engines():
        told = verdict(offer)
        print_output(f"  {offer.name:<{width}}  {told}")
        working += [offer.name] if told.startswith("PASS") else []
    for line in missing_packages(registry):
        print_output(f"  {line}")
    for problem in registry.problems:
        print_output(f"  broken plugin {problem.plugin} ({problem.package}): {problem.reason}")
    print_output("\n".join(doctor_hints(working)))
    return 0


def _check_numerics(arguments: Arguments) -> int:
    """Check whether the engines compute every op's values and gradients, and a short training, as float64 does."""
    labels, strange = take_engines(arguments.rest, "")
    if strange:
        raise UserError(f"doctor --numerics {strange[0]}: takes engine=name[:key=value],... and plugins=[...]")
    passed = True
    for label, engine in build_engines(labels, load(arguments.modules)):
        lines = list(check_engine(engine, build_references(case_rows(engine))))
        passed = passed and all(line.passed for line in lines)
        print_output("\n".join(format_table(label, engine, lines)))
    return 0 if passed else 1


def placement(runs: Mapping[str, Prepared]) -> list[str]:
    """For each engine, on which device the nodes of its training step run, and which ops they are."""
    lines = []
    for label, prepared in runs.items():
        with start_session(prepared.config.recipe, prepared.config.engine, prepared.plan) as session:
            facts = session.describe()
        where = facts.get("residency")
        if where is None:
            lines.append(f"{label}: builds no graph of its own, so there is nothing to place")
            continue
        size = f"{facts['nodes']} nodes, {facts['off_device']} off the device, {facts['compute_bytes'] / 1e6:.1f} MB"
        lines.append(f"{label}: {facts['profile']}'s graph, {size}")
        for device, ops in where.items():
            named = ", ".join(f"{op} {n}" for op, n in sorted(ops.items(), key=lambda item: -item[1]))
            lines.append(f"  {device:<8} {sum(ops.values()):>5}  {named}")
    return lines


# -- what does not work on this machine, and why ----------------------------------------------------------------------


def verdict(offer: Offer) -> str:
    """Whether an engine works here: PASS with its facts and advice, or no or FAIL with the reason."""
    try:
        engine = offer.cls()
        return "; ".join((f"PASS  {engine.check()}", *engine.remedies()))
    except Unavailable as reason:
        return f"no    {reason}"
    except Exception as error:  # whatever a plugin raises, the others are still reported
        return f"FAIL  {explain_import_error(error)}"


def missing_packages(registry: Registry) -> Iterator[str]:
    """A line about each thing but engines that needs a package which is missing or broken."""
    for label, check in _checks(registry):
        try:
            check()
        except Unavailable as reason:
            yield f"{label}: {reason}" if label else str(reason)
        except UserError:  # a setting that has to be given
            continue
        except Exception as error:  # of a plugin
            yield f"{label}: its check failed ({explain_import_error(error)})"


def _check(cls: type) -> None:
    cls().check()


def _checks(registry: Registry) -> Iterator[tuple[str, Callable[[], object]]]:
    for kind, form in (("data", "data={}"), ("callbacks", "callbacks.{}")):
        for name, offer in sorted(registry.offers[kind].items()):
            yield form.format(name), functools.partial(_check, offer.cls)
    for launcher in LAUNCHERS.values():
        yield "", launcher.require
    yield "", lambda: study.require_optuna("cmaes")
    yield "compare --html", report.require_plotly
    yield "the chat template of a GGUF", chat.require_jinja
    yield "", llamacpp.find_package
    yield "", lambda: quantiser("a K-quant")


# -- whether an engine computes as float64 does -----------------------------------------------------------------------


Arrays = Mapping[str, np.ndarray]

STEPS, CLIP = 3, 0.5
TRAINING_CASE = "rope"  # the case that the short training takes: attention with grouped heads and positions


@dataclass(frozen=True)
class Line:
    """How far an engine was off."""

    name: str
    values: float  # relative to the largest
    gradients: float  # of the worst tensor, in norm; of a training, the weights, relative to how far they moved
    tolerances: tuple[float, float]  # of values, and of gradients or weights
    failure: str = ""  # what it raised instead

    @property
    def passed(self) -> bool:
        """Whether it was within the tolerances; what is no number was not."""
        return not self.failure and self.values <= self.tolerances[0] and self.gradients <= self.tolerances[1]


def build_engines(labels: Sequence[str], registry: Registry) -> list[tuple[str, Engine]]:
    """Return the named engines; without any, all that work here, and the first other one that is emulated."""
    if labels:
        return [(label, build_engine(label, registry)) for label in labels]
    found: list[tuple[str, Engine]] = []
    for offer in registry.engines():
        try:
            found.append((offer.name, build_engine(offer.name, registry)))
        except Unavailable:
            emulated = f"{offer.name}:emulate=true"
            if "emulate" in dir(offer.cls) and not any(label.endswith("emulate=true") for label, _ in found):
                found.append((emulated, build_engine(emulated, registry)))
    if not found:
        command = f"`toyexp doctor{registry.loading}`"
        raise UserError(f"doctor --numerics: no engine works here; {command} says why and what to install")
    return found


@dataclass(frozen=True)
class Op:
    """Values and gradients of an op on a batch, in float64."""

    tolerance_name: ClassVar[str] = "slopes"

    name: str
    plan: Plan
    batch: Batch
    loss: float
    logits: np.ndarray
    gradients: Arrays

    def errors(self, engine: Engine) -> tuple[float, float]:
        """Return how far an engine's values are off, and the gradient of its worst tensor."""
        with engine.realize(self.plan) as session:
            session.build()
            logits, loss = session.logits(self.batch), session.evaluate([self.batch])
            gradients = session.gradients(self.batch)
        values = np.abs(logits - self.logits).max() / np.abs(self.logits).max(), abs(loss - self.loss) / self.loss
        small = 1e-3 * norm(*self.gradients.values())  # what a gradient that is next to nothing is held against
        off = [norm(gradients[n] - g) / max(norm(g), small) for n, g in self.gradients.items()]
        return float(np.max(values)), float(np.max(off))  # NaN if one is


@dataclass(frozen=True)
class Training:
    """A short training by AdamW in float64."""

    tolerance_name: ClassVar[str] = "weights"

    name: str
    plan: Plan
    adamw: AdamW
    losses: list[float]
    start: Arrays
    end: Arrays

    def errors(self, engine: Engine) -> tuple[float, float]:
        """Return how far an engine's losses are off, and the weights of its worst tensor by how far they moved."""
        steps = range(len(self.losses))
        with engine.realize(self.plan) as session:
            session.build()
            batches = [(op_batch(self.plan.rows, step, TRAINING_CASE), self.adamw.hp_for_step(step)) for step in steps]
            losses = [session.step(batch, hp).loss for batch, hp in batches]
            weights = {name: session.download(name) for name in self.start}
        off = [norm(weights[n] - w) / norm(w - self.start[n]) for n, w in self.end.items()]
        return float(np.max(np.abs(np.array(losses) - self.losses) / self.losses)), float(np.max(off))


@functools.cache
def build_references(rows: int = ROWS) -> list[Op | Training]:
    """Return every op, the adapters, and a training in both modes of AdamW, on batches of so many rows."""
    found: list[Op | Training] = []
    for case, adapter in [*((case, None) for case in CASES), ("matmul", "lens"), ("bias", "lora")]:
        plan, batch = op_plan(case, adapter, rows=rows), op_batch(rows, case=case)
        values = {t.name: plan.initial_values(t) for t in plan.tensors}
        gradients = {t.name: gradient(plan, values, batch, t.name) for t in plan.trainable}
        loss, logits = reference_loss(plan, values, batch), reference_logits(plan, values, batch)
        found.append(Op(f"{case} ({adapter})" if adapter else case, plan, batch, loss, logits, gradients))
    modes = AdamW.for_from_scratch(), AdamW.for_lora()
    return [*found, *(training(replace(mode, lr=0.01, weight_decay=0.1), rows) for mode in modes)]


def gradient(plan: Plan, values: Arrays, batch: Batch, name: str, h: float = 1e-5) -> np.ndarray:
    """Return the loss's gradient by one tensor, number by number, by central differences in float64."""
    wide = {**values, name: values[name].astype(np.float64)}
    moved, found = wide[name].reshape(-1), np.empty(wide[name].shape)
    for i, value in enumerate(moved.copy()):
        losses = []
        for moved[i] in (value + h, value - h):
            losses.append(reference_loss(plan, wide, batch))
        moved[i], found.flat[i] = value, (losses[0] - losses[1]) / (2 * h)
    return found


def training(adamw: AdamW, rows: int) -> Training:
    """Train a few steps in float64, with a gradient that is clipped and weights that decay."""
    plan = op_plan(TRAINING_CASE, rows=rows, grad_clip=CLIP)
    start = {t.name: plan.initial_values(t).astype(np.float64) for t in plan.tensors}
    weights = dict(start)
    moments = {n: (np.zeros_like(w), np.zeros_like(w)) for n, w in start.items()}
    losses = []
    for step in range(STEPS):
        batch, hp = op_batch(rows, step, TRAINING_CASE), adamw.hp_for_step(step)
        losses.append(reference_loss(plan, weights, batch))
        gradients = {n: gradient(plan, weights, batch, n) for n in weights}
        clip = min(1.0, CLIP / (norm(*gradients.values()) + 1e-6))
        for name, g in gradients.items():
            weights[name], first, second = reference_adamw(weights[name], clip * g, *moments[name], hp)
            moments[name] = first, second
    return Training(f"{STEPS} steps, {adamw.mode}", plan, adamw, losses, start, weights)


def check_engine(engine: Engine, checks: Sequence[Op | Training]) -> Iterator[Line]:
    """Yield a line for each op and training; an error of the engine fails its line and no other."""
    limits = TOLERANCES[precision(engine)]
    for check in checks:
        tolerances = limits.values, getattr(limits, check.tolerance_name)
        try:
            yield Line(check.name, *check.errors(engine), tolerances)
        except Exception as error:  # whatever an engine raises, the other lines are still worth reading
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Line(check.name, math.inf, math.inf, tolerances, failure)


def norm(*arrays: np.ndarray) -> float:
    """Return the Euclidean norm of all numbers together."""
    return math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays))


def format_table(label: str, engine: Engine, lines: Sequence[Line]) -> list[str]:
    """For a person."""
    rows = [("op", "values", "at most", "gradients", "at most", "")]
    for line in lines:
        (values, gradients), verdict = line.tolerances, "PASS" if line.passed else f"FAIL  {line.failure}"
        figures = f"{line.values:.1e}", f"{values:.0e}", f"{line.gradients:.1e}", f"{gradients:.0e}"
        rows.append((line.name, *figures, verdict))
    head = f"{label}: {sum(line.passed for line in lines)} of {len(lines)} pass, products in {engine.rounds_to()}"
    return [head, *(f"  {row}" for row in align_columns(rows, right=range(1, 5)))]
