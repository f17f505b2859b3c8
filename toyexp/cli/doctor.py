"""`toyexp doctor`: check which engines work here and whether their numbers are right, and which device runs each op."""

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
from toyexp.base.packages import explain_import_error
from toyexp.base.tables import fit_table
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

Check which engines work on this machine, and why others do not.
  toyexp doctor --numerics engine=ggml
  toyexp doctor --graph engine=ggml model=gpt2

options
--numerics exits with 1 if a check fails. Both options accept plugins=[my_module]."""


def run(arguments: Arguments) -> int:
    """Print the status of each engine, or with --numerics its numerical errors, or with --graph the device of each op.

    Return the exit code: 1 if a numerical check fails, otherwise 0.
    """
    working_directory()  # raises if the directory was deleted; importing MKL would then end the process
    if arguments.graph:
        request, labels = parse_engines(
            "doctor --graph", arguments, {*RUN_ONLY_KEYS, "steps", "lr", "callbacks"}, "ggml"
        )
        print_output("\n".join(placement(prepare_runs(request, labels))))
        return 0
    if arguments.numerics:
        return _check_numerics(arguments)
    if word := next(iter(arguments.settings), ""):
        if "=" not in word:
            raise UserError(f"doctor {word}: takes no names; to test an engine: toyexp doctor --numerics engine={word}")
        raise UserError(f"doctor {word}: settings only have an effect with --numerics or --graph; leave {word} out")
    registry = load()
    print_output(
        f"toyexp {toyexp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    width = max((len(n) for n in registry.offers["engine"]), default=0)
    working = []
    for offer in registry.engines():
        status = verdict(offer)
        print_output(f"  {offer.name:<{width}}  {status}")
        working += [offer.name] if status.startswith("PASS") else []
    for line in missing_packages(registry):
        print_output(f"  {line}")
    for problem in registry.problems:
        print_output(f"  broken plugin {problem.plugin} ({problem.package}): {problem.reason}")
    print_output("\n".join(doctor_hints(working)))
    return 0


def _check_numerics(arguments: Arguments) -> int:
    """Compare each engine's ops, gradients and a short training with float64, and print a table for each engine.

    Return the exit code: 0 if all checks pass, otherwise 1.
    """
    labels, others = take_engines(arguments.rest, "")
    if others:
        raise UserError(f"doctor --numerics {others[0]}: only takes engine=name[:key=value],... and plugins=[...]")
    passed = True
    for label, engine in build_engines(labels, load(arguments.modules)):
        lines = list(check_engine(engine, build_references(case_rows(engine))))
        passed = passed and all(line.passed for line in lines)
        print_output("\n".join(format_table(label, engine, lines)))
    return 0 if passed else 1


def placement(runs: Mapping[str, Prepared]) -> list[str]:
    """Return lines of text that say where each engine runs a training step.

    For each device of an engine, a line lists the ops that run on the device, and how many there are. `runs` maps each
    engine, as typed, to its prepared run. An engine without a static graph gets a line that says so.
    """
    lines = []
    for label, prepared in runs.items():
        with start_session(prepared.config.recipe, prepared.config.engine, prepared.plan) as session:
            facts = session.describe()
        placement_counts = facts.get("residency")
        if placement_counts is None:
            lines.append(f"{label}: has no static graph, so there is no placement to show")
            continue
        size = f"{facts['nodes']} nodes, {facts['off_device']} not on the device, {facts['compute_bytes'] / 1e6:.1f} MB"
        lines.append(f"{label}: graph of {facts['profile']}, {size}")
        for device, ops in placement_counts.items():
            named = ", ".join(f"{op} {n}" for op, n in sorted(ops.items(), key=lambda item: -item[1]))
            lines.append(f"  {device:<8} {sum(ops.values()):>5}  {named}")
    return lines


# -- status of engines and packages ----------------------------------------------------------------------


def verdict(offer: Offer) -> str:
    """Return one line that says whether an engine works here.

    - PASS, followed by its device and tips, if it works
    - "no", followed by the reason and a remedy, if its device or a package is missing
    - FAIL, followed by the error, if the engine itself is broken
    """
    try:
        engine = offer.cls()
        return "; ".join((f"PASS  {engine.check()}", *engine.remedies()))
    except Unavailable as reason:
        return f"no    {reason}"
    except Exception as error:  # of a plugin; the other engines are still reported
        return f"FAIL  {explain_import_error(error)}"


def missing_packages(registry: Registry) -> Iterator[str]:
    """Yield a line for each feature that does not work because its package is missing or broken.

    Features are, for example, data and callback plugins, sweep launchers and K-quants. Engines are not included.
    """
    for label, check in _checks(registry):
        try:
            check()
        except Unavailable as reason:
            yield f"{label}: {str(reason).removeprefix(f'{label}: ')}" if label else str(reason)
        except UserError:  # a required setting has no default
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


# -- numerics, compared with float64 -----------------------------------------------------------------------


Arrays = Mapping[str, np.ndarray]

STEPS, CLIP = 3, 0.5
TRAINING_CASE = "rope"  # case of the short training: grouped-query attention with RoPE


@dataclass(frozen=True)
class Line:
    """Result of one numerical check of an engine. The check covers either a single op or a short training."""

    name: str
    values: float  # largest error of logits and loss, relative to the largest logit or the loss
    gradients: float  # relative error (norm) of the worst gradient; for a training, error of the worst tensor's change
    tolerances: tuple[float, float]  # maximum of `values`, and of `gradients`
    failure: str = ""  # error message of the engine, if it raised

    @property
    def passed(self) -> bool:
        """True if both errors are within their tolerances. False if an error is NaN or the engine raised."""
        return not self.failure and self.values <= self.tolerances[0] and self.gradients <= self.tolerances[1]


def build_engines(labels: Sequence[str], registry: Registry) -> list[tuple[str, Engine]]:
    """Return (label, engine) for each label, such as ggml:threads=1.

    If `labels` is empty, return every engine that works here. Some engines that do not work here can be emulated on the
    CPU; also return the first of them, with the setting emulate=true. Raise UserError if there is no engine to return.
    """
    if labels:
        return [(label, build_engine(label, registry)) for label in labels]
    results: list[tuple[str, Engine]] = []
    for offer in registry.engines():
        try:
            results.append((offer.name, build_engine(offer.name, registry)))
        except Unavailable:
            emulated = f"{offer.name}:emulate=true"
            if "emulate" in dir(offer.cls) and not any(label.endswith("emulate=true") for label, _ in results):
                results.append((emulated, build_engine(emulated, registry)))
    if not results:
        command = f"`toyexp doctor{registry.plugins_override}`"
        raise UserError(f"doctor --numerics: no engine works here; {command} shows the reasons and what to install")
    return results


@dataclass(frozen=True)
class Op:
    """Correct values for the check of one op, in float64: loss, logits and gradients of a small model with that op."""

    tolerance_name: ClassVar[str] = "slopes"

    name: str
    plan: Plan
    batch: Batch
    loss: float
    logits: np.ndarray
    gradients: Arrays  # keyed by tensor

    def errors(self, engine: Engine) -> tuple[float, float]:
        """Return two relative errors of an engine on this op: that of its outputs, and that of its worst gradient.

        The first is the largest error of a logit divided by the largest logit, or the relative error of the loss if
        that is larger. The second is the norm of the gradient's error divided by the gradient's norm. An error is NaN
        if the engine computes a NaN.
        """
        with engine.realize(self.plan) as session:
            session.build()
            logits, loss = session.logits(self.batch), session.evaluate([self.batch])
            gradients = session.gradients(self.batch)
        values = np.abs(logits - self.logits).max() / np.abs(self.logits).max(), abs(loss - self.loss) / self.loss
        small = 1e-3 * norm(*self.gradients.values())  # scale for near-zero gradients
        off = [norm(gradients[n] - g) / max(norm(g), small) for n, g in self.gradients.items()]
        return float(np.max(values)), float(np.max(off))  # NaN if any value is NaN


@dataclass(frozen=True)
class Training:
    """Correct values for the check of a short training with AdamW, in float64: the losses and weights."""

    tolerance_name: ClassVar[str] = "weights"

    name: str
    plan: Plan
    adamw: AdamW
    losses: list[float]  # one per step
    start: Arrays  # initial weights, keyed by tensor
    end: Arrays  # weights after the last step

    def errors(self, engine: Engine) -> tuple[float, float]:
        """Return two errors of an engine: the largest relative error of a loss, and the largest error of a tensor.

        The error of a tensor is a ratio of two norms. The numerator is the tensor's difference from the correct tensor
        after the last step; the denominator is the correct tensor's change in training.
        """
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
    """Compute the correct values for each check of `toyexp doctor --numerics`, in float64.

    There is a check for every op, for both kinds of adapter, and for a short training in each mode of AdamW. One kind
    of adapter is LoRA. The other is the lens: the matrix that recipe=warm trains to map a copied embedding to the
    model's width. `rows` is the number of rows in a batch.
    """
    results: list[Op | Training] = []
    for case, adapter in [*((case, None) for case in CASES), ("matmul", "lens"), ("bias", "lora")]:
        plan, batch = op_plan(case, adapter, rows=rows), op_batch(rows, case=case)
        values = {t.name: plan.initial_values(t) for t in plan.tensors}
        gradients = {t.name: gradient(plan, values, batch, t.name) for t in plan.trainable}
        loss, logits = reference_loss(plan, values, batch), reference_logits(plan, values, batch)
        results.append(Op(f"{case} ({adapter})" if adapter else case, plan, batch, loss, logits, gradients))
    modes = AdamW.for_from_scratch(), AdamW.for_lora()
    return [*results, *(training(replace(mode, lr=0.01, weight_decay=0.1), rows) for mode in modes)]


def gradient(plan: Plan, values: Arrays, batch: Batch, name: str, h: float = 1e-5) -> np.ndarray:
    """Return the gradient of the loss with respect to the tensor `name`.

    It is computed in float64 by central differences with step `h`. `values` holds all tensors of the plan.
    """
    wide = {**values, name: values[name].astype(np.float64)}
    moved, results = wide[name].reshape(-1), np.empty(wide[name].shape)
    for i, value in enumerate(moved.copy()):
        losses = []
        for moved[i] in (value + h, value - h):
            losses.append(reference_loss(plan, wide, batch))
        moved[i], results.flat[i] = value, (losses[0] - losses[1]) / (2 * h)
    return results


def training(adamw: AdamW, rows: int) -> Training:
    """Train STEPS steps in float64, with gradient clipping and weight decay. Return the losses and weights."""
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
    """Run each check on an engine and yield its result. If the engine raises an error, only that check fails."""
    limits = TOLERANCES[precision(engine)]
    for check in checks:
        tolerances = limits.values, getattr(limits, check.tolerance_name)
        try:
            yield Line(check.name, *check.errors(engine), tolerances)
        except Exception as error:  # of an engine plugin; the other checks still run
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Line(check.name, math.inf, math.inf, tolerances, failure)


def norm(*arrays: np.ndarray) -> float:
    """Return the Euclidean norm of the values of all arrays together."""
    return math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays))


def format_table(label: str, engine: Engine, lines: Sequence[Line]) -> list[str]:
    """Return the results of one engine as lines: how many checks pass, a table with a row per check, and errors."""
    rows = [("op", "values", "at most", "gradients", "at most", "")]
    for line in lines:
        values, gradients = line.tolerances
        figures = f"{line.values:.1e}", f"{values:.0e}", f"{line.gradients:.1e}", f"{gradients:.0e}"
        rows.append((line.name, *figures, "PASS" if line.passed else "FAIL"))
    passed = sum(line.passed for line in lines)
    head = f"{label}: {passed} of {len(lines)} checks pass; matrix products in {engine.product_dtype()}"
    failures = [f"{line.name}: {line.failure}" for line in lines if line.failure]
    return [head, *fit_table(rows, rows[0][1:], ["at most", "at most"]), *failures]
