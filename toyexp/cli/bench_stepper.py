"""One experiment on several engines, and what `toyexp bench` compares: engines and bare loops, as steppers.

Run as a program it opens one of them alone, so that memory and the wait for the first step can be told apart.
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

RUN_ONLY_KEYS = {*keys_by_role(OF_A_RUN, Settings), "sweep", "hydra"}  # keys that only a run takes
FIGURES = ("first_step_seconds", "device_bytes", "peak_rss_bytes", "beyond_import_bytes")  # of one alone
STEPS_ALONE = 3  # the later ones may want memory that the first did not
SLICE = 0.3  # seconds that one takes steps before it is the next one's turn
WARM_UP = 0.1  # seconds of steps before anything counts, and at least so many steps:
WARM_UP_STEPS = 3
BATCHES = 8  # made beforehand, and used over and over
BASELINES = Path(__file__).resolve().parents[2] / "tests" / "benchmarks" / "baselines"


def prepare_runs(request: Request, labels: Sequence[str]) -> dict[str, Prepared]:
    """Return the experiment on each engine, by its label as it was typed: ggml, ggml:blas=false."""
    return {label: prepare(asked.build_config()) for label, asked in request.per_engine(labels).items()}


def parse_engines(
    command: str, arguments: Arguments, ignored: Collection[str], default: str = "cpu,ggml"
) -> tuple[Request, list[str]]:
    """Return the request of one experiment, see `one_experiment`, and the labels of its engines."""
    labels, settings = take_engines(arguments.settings, default)
    return parse_experiment(command, settings, ignored), labels


class Stepper(Protocol):
    """A model and its optimiser, ready to train."""

    note: str  # versions, device and threads
    devices: int = 1  # that compute together
    pids: Sequence[int] = ()  # of other processes on this machine that compute with this one

    def step(self, batch: Batch) -> object:
        """Begin one training step, and wait for one: this, or where the device computes by itself the one before."""

    def wait(self) -> None:
        """Wait until every step that was begun is taken."""

    def close(self) -> None:
        """Free everything."""

    def time_steps(self, batches: Sequence[Batch], steps: int) -> float:
        """Take so many training steps, and return the seconds of one."""
        began = time.perf_counter()
        for k in range(steps):
            self.step(batches[k % len(batches)])
        self.wait()
        return (time.perf_counter() - began) / steps

    def device_bytes(self) -> int | None:
        """The most that it has taken of its device's memory, if that is counted."""
        return None


class EngineStepper(Stepper):
    """An engine's session, driven as a run without callbacks that look drives it."""

    def __init__(self, prepared: Prepared):
        self.session = start_session(prepared.config.recipe, prepared.config.engine, prepared.plan)
        self.stack = Stack([self.session])
        self._plan, self._lr = prepared.plan, prepared.config.settings.lr
        self._steps = 0
        self._pending: list[Callable[[], StepMetrics]] = []
        facts = self.session.describe()
        self.devices, self.pids = facts.get("devices", 1), worker_pids(facts.get("ranks", ()))
        told, of_auto, _ = prepared.config.engine_note.partition(" (auto")
        device = told.partition(": ")[2].split(", ")
        threads = [pluralise(facts["threads"])] if "threads" in facts and self.devices == 1 else []
        # An engine may say the same twice.
        note = ", ".join(dict.fromkeys([facts.get("framework", device[0]), *device, *threads]))
        note = f"{prepared.config.engine.name}: {note}" if of_auto else note
        idle = [text for text in prepared.warnings if text.startswith("engine.")]
        self.note = "; ".join((note, *idle, *prepared.config.engine.advice(), *self.session.notes()))

    def step(self, batch: Batch) -> None:
        """One step, with the numbers that the optimiser has for it."""
        given = self.session.step_input(batch, self._plan.numbers(self._steps, self._lr))
        self._steps += 1
        self._pending.append(self.stack.step({0: given})[0])
        if len(self._pending) >= self.session.depth:
            self._pending.pop(0)()

    def wait(self) -> None:
        """Until the last step is taken."""
        while self._pending:
            self._pending.pop(0)()

    def device_bytes(self) -> int | None:
        """Return the session's."""
        return self.session.device_bytes()

    def close(self) -> None:
        """Close the session."""
        self.session.close()


def worker_pids(ranks: Sequence[str]) -> list[int]:
    """The other processes of a run on this machine, of ranks as a session tells them: `pid 12 on host`."""
    told = [re.fullmatch(r"pid (\d+) on (.*)", rank) for rank in ranks]
    return [int(rank[1]) for rank in told if rank and rank[2] == platform.node() and int(rank[1]) != os.getpid()]


def warm_up(open_stepper: Callable[[], Stepper], batches: Sequence[Batch], steps: int) -> tuple[Stepper, int]:
    """An open stepper after steps that do not count, and how many steps make a turn: `steps`, or a slice full."""
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
    """An engine or a baseline, before anything of it is read or imported."""

    name: str
    settings: list[str]  # as they were typed, without the engine
    engine: str  # by its label
    file: str = ""  # of a baseline

    def prepare(self) -> tuple[Prepared, Callable[[], Stepper]]:
        """Reads the settings and imports what they need; what is returned beside the experiment opens it."""
        prepared = prepare_runs(Request.parse(self.settings), [self.engine])[self.engine]
        if not self.file:
            return prepared, partial(EngineStepper, prepared)
        index = runpy.run_path(str(Path(self.file).with_name("__init__.py")))
        return prepared, partial(index["opened"], self, prepared)


def baselines(settings: Sequence[str], engines: Iterable[str]) -> Iterable[tuple[str, Entry | str]]:
    """The baselines beside these engines by name, each as an entry or as the reason why there is none.

    Raises UserError outside of a checkout.
    """
    if not BASELINES.is_dir():
        raise UserError(
            "--baseline: the baselines are no part of an installed toyexp; run bench in a checkout of its source, "
            "where they are tests/benchmarks/baselines/"
        )
    found: Iterable[tuple[str, Entry | str]] = runpy.run_path(str(BASELINES / "__init__.py"))["entries"](
        settings, engines
    )
    return found


# -- the peak that a step is held against -----------------------------------------------------------------------------


SIZES = ((256, 4), (1024, 8), (4096, 16), (8192, 16))  # of the matrices, and how many products follow one another
LONG_ENOUGH = 0.02  # seconds of them beside which a call's own time is nothing: no larger ones are tried
REPETITIONS = 5


@dataclass(frozen=True)
class Peak:
    """The speed of the fastest products, and how large they were."""

    flops_per_second: float
    size: int


def measure_peak(engine: Engine, most_rows: int) -> Peak:
    """The most floating-point operations a second in products of n x n matrices by this engine, here and now.

    They are computed as in a held-out loss, in the type that the engine's products have, through its own op; a product
    counts 2 n^3. It is a figure that was reached, and no data sheet's: what a device can do at its present clock and
    with the libraries that are there. An engine of several devices computes one such product on each: a batch has as
    few rows as it takes, up to `most_rows`. Raises what the engine raises where it cannot hold them.
    """
    best = Peak(0.0, 0)
    for size, products in SIZES:
        plan = _plan(engine, size, products, most_rows)
        seconds = _median_seconds(engine, plan)
        reached = Peak(2 * plan.rows * products * size**3 / seconds, size)
        best = max(best, reached, key=lambda peak: peak.flops_per_second)
        if seconds > LONG_ENOUGH:
            break
    return best


def _plan(engine: Engine, size: int, products: int, most_rows: int) -> Plan:
    """The products as a plan that trains nothing."""
    model = Products(size=size, products=products)
    ids = InputSpec((size,), "int32", below=CLASSES)
    inputs = {"tokens": ids, "targets": ids, "weights": InputSpec((size,), "float32")}
    tensors = tuple(PlanTensor(t.name, t.shape, t.init, trainable=False) for t in model.tensors())
    for rows in range(1, most_rows + 1):
        plan = Plan(model, tensors, inputs, rows)
        with contextlib.suppress(UserError):  # its devices would have no equal shares
            engine.check_plan(plan)
            break
    return plan


def _median_seconds(engine: Engine, plan: Plan) -> float:
    """The median of some held-out losses, after those that warm up."""
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
    """Normal values that come again and again: to draw 8192 x 8192 of them would take longer than to use them."""

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return a million values, as often as they are needed."""
        return np.resize(super().draw((1 << 20,), seed, name), shape)


@dataclass
class Products(Model):
    """A matrix [size, size] by another one, over and over."""

    name: ClassVar[str] = "products"
    reads: ClassVar[Kind] = TOKENS

    size: int = 1024
    products: int = 4

    def check(self) -> None:
        """Nothing to check."""

    def tensors(self) -> list[TensorSpec]:
        """Values that keep the size of what they multiply."""
        size, std = self.size, self.size**-0.5
        return [
            TensorSpec("table", (CLASSES, size), RepeatedNormal(1.0)),
            TensorSpec("w", (size, size), RepeatedNormal(std)),
            TensorSpec("out", (CLASSES, size), RepeatedNormal(std)),
        ]

    def forward(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Rows [1, size, size], multiplied; as logits a few of the last."""
        x = ops.embed(p["table"], batch["tokens"])
        for _ in range(self.products):
            x = ops.linear(x, p["w"])
        return ops.linear(x, p["out"])


# -- alone in a process ---------------------------------------------------------------------------------------------


def measure_alone(entry: Entry, environment: Mapping[str, str] | None = None) -> dict[str, float | None]:
    """Seconds and bytes of an entry in a new process; RunFailed when it does not get through.

    By FIGURES: those until its first step, from the process's start; the most that it took of its device's memory, None
    where that is not counted; the most that the process held, with those that compute beside it, None where the system
    does not tell that; and those of its own that came after all was imported.
    """
    command = [sys.executable, "-m", "toyexp.cli.bench_stepper", json.dumps(asdict(entry)), str(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        why = re.sub(r"^toyexp\.base\.errors\.\w+: ", "", last)
        raise RunFailed(f"{entry.name}: in a process of its own: {why}; --no-memory leaves this out")
    figures: dict[str, float | None] = json.loads(done.stdout)
    return figures


def main(words: Sequence[str]) -> None:
    """Open the entry in `words`, take a few steps, and write the seconds since the time in `words`, and its memory."""
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
    whole = max(peak, before) + sum(most for _, most in filter(None, others)) if all(others) else None
    found = seconds, stepper.device_bytes(), whole, peak - imported
    json.dump(dict(zip(FIGURES, found, strict=True)), sys.stdout)
    stepper.close()


def memory_bytes() -> tuple[int, int]:
    """What this process holds, and the most it held; where the system tells only the latter, that twice."""
    if found := _linux_memory("self"):  # whose getrusage starts at the peak of the process that started this one
        return found
    import resource  # deferred: Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def _linux_memory(pid: int | str) -> tuple[int, int] | None:
    """The same of any process, where Linux tells it."""
    try:
        found = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
    except OSError:
        return None
    return 1024 * int(found["VmRSS"]), 1024 * int(found["VmHWM"])


def reset_peak() -> None:
    """Lets the peak begin anew where the system can: reading data may have needed more for a moment."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux


if __name__ == "__main__":
    main(sys.argv[1:])
