"""Measurements for `toyexp bench`. Also prepares a run on several engines, for `bench`, `parity` and `doctor`.

A stepper takes training steps, either on an engine or with a baseline such as nanoGPT. If this module is run as a
program, it measures the memory and the startup time of a single stepper.
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

RUN_ONLY_KEYS = {*keys_by_role(OF_A_RUN, Settings), "sweep", "hydra"}  # have no effect in bench, parity and doctor
FIGURES = ("first_step_seconds", "device_bytes", "peak_rss_bytes", "beyond_import_bytes")  # see measure_alone
STEPS_ALONE = 3  # steps taken to measure memory; later steps may need more than the first
SLICE = 0.3  # seconds per round of one stepper
WARM_UP = 0.1  # minimum seconds of steps that are not timed
WARM_UP_STEPS = 3  # minimum number of steps that are not timed
BATCHES = 8  # number of batches, which are prepared in advance and reused
BASELINES = Path(__file__).resolve().parents[2] / "tests" / "benchmarks" / "baselines"


def prepare_runs(request: Request, labels: Sequence[str]) -> dict[str, Prepared]:
    """Prepare a run of the experiment on each engine and return {label: prepared run}.

    `labels` are engines as typed, such as ggml or ggml:products=ggml.
    """
    return {label: prepare(for_engine.build_config()) for label, for_engine in request.per_engine(labels).items()}


def parse_engines(
    command: str, arguments: Arguments, ignored: Collection[str], default: str = "cpu,ggml"
) -> tuple[Request, list[str]]:
    """Return the settings of the experiment without `engine=`, and the engines that `engine=` lists, as typed.

    `default` lists the engines if the user typed no `engine=`. `ignored` has the keys that have no effect in `command`.
    Raise UserError for a setting with such a key, and for a setting with several values.
    """
    labels, settings = take_engines(arguments.settings, default)
    return parse_experiment(command, settings, ignored), labels


class Stepper(Protocol):
    """Protocol of an object that takes and times training steps, on an engine or with a baseline such as nanoGPT."""

    note: str  # versions, device and threads, for the report
    devices: int = 1  # number of devices that share the work
    pids: Sequence[int] = ()  # process ids of its other processes on this machine

    def step(self, batch: Batch) -> object:
        """Launch one training step.

        Return when this step has finished. On an asynchronous device, return when an earlier step has finished.
        """

    def wait(self) -> None:
        """Wait until all launched steps are done."""

    def close(self) -> None:
        """Free the memory of the model and optimiser, and end the processes that the stepper started."""

    def time_steps(self, batches: Sequence[Batch], steps: int) -> float:
        """Take `steps` steps, reusing `batches` in turn, and return the mean seconds per step."""
        began = time.perf_counter()
        for k in range(steps):
            self.step(batches[k % len(batches)])
        self.wait()
        return (time.perf_counter() - began) / steps

    def device_bytes(self) -> int | None:
        """Return the peak memory used on the device in bytes; None if unknown."""
        return None


class EngineStepper(Stepper):
    """Stepper of an engine. It launches steps without waiting, as the training loop does between evaluations."""

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
        # dict.fromkeys drops repetitions: an engine may report a fact twice.
        note = ", ".join(dict.fromkeys([facts.get("framework", device[0]), *device, *threads]))
        note = f"{prepared.config.engine.name}: {note}" if is_auto else note
        idle = [text for text in prepared.warnings if text.startswith("engine.")]
        self.note = "; ".join((note, *idle, *prepared.config.engine.advice(), *self.session.notes()))

    def step(self, batch: Batch) -> None:
        """Launch one step. Its learning rate is always the setting `lr`.

        If the session's queue of launched steps is full, wait for the oldest step.
        """
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
        """Return the session's peak memory on the device in bytes; None if unknown."""
        return self.session.device_bytes()

    def close(self) -> None:
        """Close the session."""
        self.session.close()


def worker_pids(ranks: Sequence[str]) -> list[int]:
    """Return the ids of a distributed run's processes on this machine, except this process.

    `ranks` describes each process of the run, such as `pid 12 on host`.
    """
    matches = [re.fullmatch(r"pid (\d+) on (.*)", rank) for rank in ranks]
    return [int(rank[1]) for rank in matches if rank and rank[2] == platform.node() and int(rank[1]) != os.getpid()]


def warm_up(open_stepper: Callable[[], Stepper], batches: Sequence[Batch], steps: int) -> tuple[Stepper, int]:
    """Open a stepper and take a few steps that are not reported. Return the stepper and its number of steps per round.

    The number of steps per round is `steps`. If `steps` is 0, a round has as many steps as fit into about SLICE
    seconds.
    """
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
    """Name and settings of an engine or baseline to measure. Creating an Entry imports none of its libraries."""

    name: str
    settings: list[str]  # overrides as typed, without engine=
    engine: str  # as typed, such as ggml:threads=1
    file: str = ""  # path of the baseline's Python file; empty for an engine

    def prepare(self) -> tuple[Prepared, Callable[[], Stepper]]:
        """Prepare a run of the experiment; return the run, and a function that opens the stepper for it."""
        prepared = prepare_runs(Request.parse(self.settings), [self.engine])[self.engine]
        if not self.file:
            return prepared, partial(EngineStepper, prepared)
        index = runpy.run_path(str(Path(self.file).with_name("__init__.py")))
        return prepared, partial(index["opened"], self, prepared)


def baselines(settings: Sequence[str], engines: Iterable[str]) -> Iterable[tuple[str, Entry | str]]:
    """Return a pair for each baseline that can be compared with these engines: its name, and its Entry.

    If the baseline's library cannot be imported, the second value is a string with the reason. Raise UserError if
    toyexp does not run from a checkout of its source code, because only a checkout has the baselines.
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
LONG_ENOUGH = 0.02  # seconds of a batch after which no larger size is tried, because call overhead is negligible
REPETITIONS = 5


@dataclass(frozen=True)
class Peak:
    """Highest measured speed of matrix products, and the `size` n of the n x n matrices that reached it."""

    flops_per_second: float
    size: int


def measure_peak(engine: Engine, max_rows: int) -> Peak:
    """Measure an engine's highest speed, in operations per second, in products of n x n matrices for several n.

    The products are part of the forward pass of an evaluation, so the engine uses its own matrix op and dtype. Each
    product counts as 2 n^3 operations. Unlike the peak in a data sheet, the result depends on the current clock and the
    installed libraries. An engine on several devices gets the smallest batch that it can split; this batch has at most
    `max_rows` rows. Errors of the engine, such as too little memory, are raised.
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
    """Return a plan that computes `products` products of size x size matrices and has no trainable tensors.

    Its batch has the smallest number of rows, from 1 to `max_rows`, that the engine can split among its devices.
    """
    model = Products(size=size, products=products)
    ids = InputSpec((size,), "int32", below=CLASSES)
    inputs = {"tokens": ids, "targets": ids, "weights": InputSpec((size,), "float32")}
    tensors = tuple(PlanTensor.from_spec(t, trainable=False) for t in model.tensors())
    for rows in range(1, max_rows + 1):
        plan = Plan(model, tensors, inputs, rows)
        with contextlib.suppress(UserError):  # rows do not divide among the devices
            engine.check_plan(plan)
            break
    return plan


def _median_seconds(engine: Engine, plan: Plan) -> float:
    """Return the median duration in seconds of an evaluation of one batch, after two warm-up evaluations."""
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
    """Initial values that repeat 2^20 normal samples.

    Drawing all values of an 8192 x 8192 matrix would take longer than the products that are to be timed.
    """

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Draw 2^20 normal values and repeat them until they fill `shape`."""
        return np.resize(super().draw((1 << 20,), seed, name), shape)


@dataclass
class Products(Model):
    """Model whose forward pass is a chain of products of [size, size] matrices, to measure their speed."""

    name: ClassVar[str] = "products"
    reads: ClassVar[Kind] = TOKENS

    size: int = 1024
    products: int = 4

    def check(self) -> None:
        """Do nothing: every size is valid."""

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors: an embedding, one matrix that is used in all products, and an output matrix.

        The standard deviation of the matrices is such that each product keeps the scale of the activations.
        """
        size, std = self.size, self.size**-0.5
        return [
            TensorSpec("table", (CLASSES, size), RepeatedNormal(1.0)),
            TensorSpec("w", (size, size), RepeatedNormal(std)),
            TensorSpec("out", (CLASSES, size), RepeatedNormal(std)),
        ]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the products on the embedded tokens and return logits of shape [rows, size, CLASSES]."""
        x = ops.embed(p["table"], batch["tokens"])
        for _ in range(self.products):
            x = ops.linear(x, p["w"])
        return ops.linear(x, p["out"])


# -- one stepper in its own process ------------------------------------------------------------------------------------


def measure_alone(entry: Entry, environment: Mapping[str, str] | None = None) -> dict[str, float | None]:
    """Measure startup time and memory of an engine or baseline in a new process; raise RunFailed if that fails.

    The keys of the result are the names in FIGURES:

    - first_step_seconds: from the start of the process to the end of the first step, including imports
    - device_bytes: peak memory on the device; None if unknown
    - peak_rss_bytes: peak host memory of the process and its workers; None if the system does not report it
    - beyond_import_bytes: peak host memory of the process (without workers) minus its memory after imports
    """
    command = [sys.executable, "-m", "toyexp.cli.bench_stepper", json.dumps(asdict(entry)), str(time.monotonic())]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        why = re.sub(r"^toyexp\.base\.errors\.\w+: ", "", last)
        raise RunFailed(f"{entry.name}: measuring its memory failed: {why}; to skip that: --no-memory")
    figures: dict[str, float | None] = json.loads(process.stdout)
    return figures


def main(words: Sequence[str]) -> None:
    """Measure one engine or baseline in this process and print the values named in FIGURES as JSON.

    `measure_alone` starts this function in a new process. `words` are an Entry as JSON, and the value of
    time.monotonic() when the process was started.
    """
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
    """Return the current and the peak memory of this process in bytes.

    On systems that report only the peak, both values are the peak.
    """
    if fields := _linux_memory("self"):  # getrusage on Linux starts at the peak of the parent process
        return fields
    import resource  # deferred: not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def _linux_memory(pid: int | str) -> tuple[int, int] | None:
    """Return the current and the peak memory of a process in bytes; None on other systems, or if it has ended."""
    try:
        fields = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    except OSError:
        return None
    return 1024 * int(fields["VmRSS"]), 1024 * int(fields["VmHWM"])


def reset_peak() -> None:
    """On Linux, set the recorded peak memory of this process to its current memory. Elsewhere do nothing.

    Without this call, the peak could be that of reading the data, which may need more memory than training.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(sys.argv[1:])
