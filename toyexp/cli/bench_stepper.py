"""Steppers: engines and baseline training loops behind one interface, for `toyexp bench`, `parity` and `doctor`.

Run as a program, this module opens a single stepper, to measure its memory and startup time.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from toyexp.base.errors import RunFailed, UserError
from toyexp.base.formatting import pluralise
from toyexp.config.request import Request, parse_experiment, take_engines
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.dataset import Batch, InputSpec
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.kind import TOKENS, Kind
from toyexp.interfaces.model import Model, TensorSpec
from toyexp.interfaces.ops import Ops, Params, Tensor
from toyexp.interfaces.plan import Plan, PlanTensor
from toyexp.interfaces.recipe import start_session
from toyexp.interfaces.session import StepMetrics
from toyexp.interfaces.stack import Stack
from toyexp.interfaces.values import Normal
from toyexp.training.experiment import prepare
from toyexp.training.run_config import Prepared
from toyexp.training.settings import OF_A_RUN, Settings, keys_by_role

RUN_ONLY_KEYS = {*keys_by_role(OF_A_RUN, Settings), "sweep", "hydra"}  # keys that have no effect outside of a run
FIGURES = ("first_step_seconds", "device_bytes", "peak_rss_bytes", "beyond_import_bytes")
STEPS_ALONE = 3  # later steps may need more memory than the first
SLICE = 0.3  # seconds per round of one stepper
WARM_UP = 0.1  # minimum seconds of steps that are not timed
WARM_UP_STEPS = 3  # minimum number of steps that are not timed
BATCHES = 8  # prepared in advance, and reused
BASELINES = Path(__file__).resolve().parents[2] / "tests" / "benchmarks" / "baselines"


def prepare_runs(request: Request, labels: Sequence[str]) -> dict[str, Prepared]:
    """Prepare the experiment on each engine; keys are the labels as typed, such as ggml or ggml:blas=false."""
    return {label: prepare(for_engine.build_config()) for label, for_engine in request.per_engine(labels).items()}


def parse_engines(
    command: str, arguments: Arguments, ignored: Collection[str], default: str = "cpu,ggml"
) -> tuple[Request, list[str]]:
    """Return the request of one experiment (see `parse_experiment`) and the labels of its engines."""
    labels, settings = take_engines(arguments.settings, default)
    return parse_experiment(command, settings, ignored), labels


class Stepper(Protocol):
    """A model and its optimiser, ready to train."""

    note: str  # versions, device and threads
    devices: int = 1  # number of devices that share the work
    pids: Sequence[int] = ()  # process ids of its other processes on this machine

    def step(self, batch: Batch) -> object:
        """Launch one training step; wait for it, or on an asynchronous device for an earlier one."""

    def wait(self) -> None:
        """Wait until all launched steps are done."""

    def close(self) -> None:
        """Free all resources."""

    def time_steps(self, batches: Sequence[Batch], steps: int) -> float:
        """Train `steps` steps and return the seconds per step."""
        began = time.perf_counter()
        for k in range(steps):
            self.step(batches[k % len(batches)])
        self.wait()
        return (time.perf_counter() - began) / steps

    def device_bytes(self) -> int | None:
        """Return the peak memory used on the device in bytes; None if unknown."""
        return None


class EngineStepper(Stepper):
    """A session of an engine, driven as in a run whose callbacks do not look at steps."""

    def __init__(self, prepared: Prepared):
        self.session = start_session(prepared.config.recipe, prepared.config.engine, prepared.plan)
        self.stack = Stack([self.session])
        self._plan, self._lr = prepared.plan, prepared.config.settings.lr
        self._steps = 0
        self._pending: list[Callable[[], StepMetrics]] = []
        facts = self.session.describe()
        self.devices, self.pids = facts.get("devices", 1), worker_pids(facts.get("ranks", ()))
        facts_note, is_auto, _ = prepared.config.engine_note.partition(" (auto")
        device = facts_note.partition(": ")[2].split(", ")
        threads = [pluralise(facts["threads"])] if "threads" in facts and self.devices == 1 else []
        # An engine may report a fact twice.
        note = ", ".join(dict.fromkeys([facts.get("framework", device[0]), *device, *threads]))
        note = f"{prepared.config.engine.name}: {note}" if is_auto else note
        idle = [text for text in prepared.warnings if text.startswith("engine.")]
        self.note = "; ".join((note, *idle, *prepared.config.engine.advice(), *self.session.notes()))

    def step(self, batch: Batch) -> None:
        """Launch one step with the optimiser's numbers of this step."""
        step_input = self.session.step_input(batch, self._plan.numbers(self._steps, self._lr))
        self._steps += 1
        self._pending.append(self.stack.step({0: step_input})[0])
        if len(self._pending) >= self.session.depth:
            self._pending.pop(0)()

    def wait(self) -> None:
        """Wait for all launched steps."""
        while self._pending:
            self._pending.pop(0)()

    def device_bytes(self) -> int | None:
        """Return the session's peak device memory in bytes."""
        return self.session.device_bytes()

    def close(self) -> None:
        """Close the session."""
        self.session.close()


def worker_pids(ranks: Sequence[str]) -> list[int]:
    """Return the process ids of other ranks on this machine, from descriptions such as `pid 12 on host`."""
    matches = [re.fullmatch(r"pid (\d+) on (.*)", rank) for rank in ranks]
    return [int(rank[1]) for rank in matches if rank and rank[2] == platform.node() and int(rank[1]) != os.getpid()]


def warm_up(open_stepper: Callable[[], Stepper], batches: Sequence[Batch], steps: int) -> tuple[Stepper, int]:
    """Open a stepper and warm it up; return it and the steps per round: `steps`, or if 0 enough for SLICE seconds."""
    stepper = open_stepper()
    try:
        times: list[float] = []
        while len(times) < WARM_UP_STEPS or sum(times) < WARM_UP:
            began = time.perf_counter()
            stepper.step(batches[len(times) % len(batches)])
            stepper.wait()
            times.append(time.perf_counter() - began)
    except BaseException:
        stepper.close()
        raise
    return stepper, steps or max(1, round(SLICE / statistics.median(times)))


@dataclass(frozen=True)
class Entry:
    """An engine or baseline to measure, before it is imported."""

    name: str
    settings: list[str]  # as typed, without the engine
    engine: str  # label, such as ggml:threads=1
    file: str = ""  # path of the baseline; empty for an engine

    def prepare(self) -> tuple[Prepared, Callable[[], Stepper]]:
        """Prepare the experiment; return it with a function that opens the stepper."""
        prepared = prepare_runs(Request.parse(self.settings), [self.engine])[self.engine]
        if not self.file:
            return prepared, partial(EngineStepper, prepared)
        index = runpy.run_path(str(Path(self.file).with_name("__init__.py")))
        return prepared, partial(index["opened"], self, prepared)


def baselines(settings: Sequence[str], engines: Iterable[str]) -> Iterable[tuple[str, Entry | str]]:
    """Return the baselines for these engines: each name with its entry, or with the reason why it cannot run.

    Raise UserError outside of a source checkout.
    """
    if not BASELINES.is_dir():
        raise UserError(
            "--baseline: an installed toyexp has no baselines; run bench in a checkout of its source code, "
            "where they are in tests/benchmarks/baselines/"
        )
    entries: Iterable[tuple[str, Entry | str]] = runpy.run_path(str(BASELINES / "__init__.py"))["entries"](
        settings, engines
    )
    return entries


# -- peak speed of matrix products -----------------------------------------------------------------------------


SIZES = ((256, 4), (1024, 8), (4096, 16), (8192, 16))  # matrix size, number of products
LONG_ENOUGH = 0.02  # seconds after which no larger size is tried: call overhead is negligible
REPETITIONS = 5


@dataclass(frozen=True)
class Peak:
    """Highest measured speed, and the matrix size n that reached it."""

    flops_per_second: float
    size: int


def measure_peak(engine: Engine, max_rows: int) -> Peak:
    """Measure the peak floating-point operations per second of an engine in products of n x n matrices.

    The products run in the forward pass of an evaluation, with the engine's own op and dtype; each counts 2 n^3
    operations. The result is measured at the current clock with the installed libraries, not a data sheet's value.
    An engine on several devices gets one row per device, up to `max_rows`. Errors of the engine, such as too little
    memory, are raised.
    """
    best = Peak(0.0, 0)
    for size, products in SIZES:
        plan = _plan(engine, size, products, max_rows)
        seconds = _median_seconds(engine, plan)
        reached = Peak(2 * plan.rows * products * size**3 / seconds, size)
        best = max(best, reached, key=lambda peak: peak.flops_per_second)
        if seconds > LONG_ENOUGH:
            break
    return best


def _plan(engine: Engine, size: int, products: int, max_rows: int) -> Plan:
    """Return a plan of `products` matrix products without trainable tensors."""
    model = Products(size=size, products=products)
    ids = InputSpec((size,), "int32", below=CLASSES)
    inputs = {"tokens": ids, "targets": ids, "weights": InputSpec((size,), "float32")}
    tensors = tuple(PlanTensor(t.name, t.shape, t.init, trainable=False) for t in model.tensors())
    for rows in range(1, max_rows + 1):
        plan = Plan(model, tensors, inputs, rows)
        with contextlib.suppress(UserError):  # rows do not divide among the devices
            engine.check_plan(plan)
            break
    return plan


def _median_seconds(engine: Engine, plan: Plan) -> float:
    """Return the median seconds of an evaluation, after two warm-up evaluations."""
    length = plan.inputs["tokens"].shape[0]
    ids = np.tile(np.arange(length, dtype=np.int32) % CLASSES, (plan.rows, 1))
    batch = {"tokens": ids, "targets": ids, "weights": np.ones(ids.shape, np.float32)}
    times = []
    with engine.realize(plan) as session:
        session.build()
        for _ in range(2 + REPETITIONS):
            began = time.perf_counter()
            session.evaluate([batch])
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


CLASSES = 8


class RepeatedNormal(Normal):
    """Normal values, repeated: drawing 8192 x 8192 values would take longer than the products."""

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return 2^20 values, repeated to fill the shape."""
        return np.resize(super().draw((1 << 20,), seed, name), shape)


@dataclass
class Products(Model):
    """A chain of products of [size, size] matrices."""

    name: ClassVar[str] = "products"
    reads: ClassVar[Kind] = TOKENS

    size: int = 1024
    products: int = 4

    def check(self) -> None:
        """Do nothing."""

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors. Their scale preserves the scale of activations."""
        size, std = self.size, self.size**-0.5
        return [
            TensorSpec("table", (CLASSES, size), RepeatedNormal(1.0)),
            TensorSpec("w", (size, size), RepeatedNormal(std)),
            TensorSpec("out", (CLASSES, size), RepeatedNormal(std)),
        ]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits [rows, size, CLASSES] after all products."""
        x = ops.embed(p["table"], batch["tokens"])
        for _ in range(self.products):
            x = ops.linear(x, p["w"])
        return ops.linear(x, p["out"])


# -- one stepper in its own process ------------------------------------------------------------------------------------


def measure_alone(entry: Entry, environment: Mapping[str, str] | None = None) -> dict[str, float | None]:
    """Measure startup time and memory of an entry in a new process; raise RunFailed if it fails.

    Return by FIGURES: seconds from process start to the end of the first step; peak device memory in bytes, None if
    unknown; peak memory of the process and its workers in bytes, None if the system does not report it; and the
    process's own memory used after imports, in bytes.
    """
    command = [sys.executable, "-m", "toyexp.cli.bench_stepper", json.dumps(asdict(entry)), str(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        why = re.sub(r"^toyexp\.base\.errors\.\w+: ", "", last)
        raise RunFailed(f"{entry.name}: failed in its own process: {why}; skip this measurement with --no-memory")
    figures: dict[str, float | None] = json.loads(done.stdout)
    return figures


def main(words: Sequence[str]) -> None:
    """Open the entry given as JSON in `words[0]`, run a few steps and print FIGURES; `words[1]` is the start time."""
    entry, began = Entry(**json.loads(words[0])), float(words[1])
    prepared, open_stepper = entry.prepare()
    imported, before = memory_bytes()
    reset_peak()
    stepper = open_stepper()
    for k in range(STEPS_ALONE):
        stepper.step(prepared.batches.batch(k))
        stepper.wait()
        if k == 0:
            seconds = time.monotonic() - began
    _, peak = memory_bytes()
    others = [_linux_memory(pid) for pid in stepper.pids]
    total = max(peak, before) + sum(most for _, most in filter(None, others)) if all(others) else None
    figures = seconds, stepper.device_bytes(), total, peak - imported
    json.dump(dict(zip(FIGURES, figures, strict=True)), sys.stdout)
    stepper.close()


def memory_bytes() -> tuple[int, int]:
    """Return the current and peak memory of this process in bytes; where only the peak is known, return it twice."""
    if fields := _linux_memory("self"):  # getrusage on Linux starts at the peak of the parent process
        return fields
    import resource  # deferred: not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def _linux_memory(pid: int | str) -> tuple[int, int] | None:
    """Return current and peak memory of a process in bytes, on Linux; None elsewhere."""
    try:
        fields = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    except OSError:
        return None
    return 1024 * int(fields["VmRSS"]), 1024 * int(fields["VmHWM"])


def reset_peak() -> None:
    """Reset the peak memory counter, on Linux: reading data may have needed more memory than training."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(sys.argv[1:])
