"""Stack: runs with the same shapes in one process, whose training steps are computed together.

Each of the K runs has its own session. A session's N weights are one row of a matrix [K, N] of the stack, and its
gradients are one row of another matrix. The stack computes training steps and held-out losses; `TorchSession` does
everything else. When a run ends, the others keep their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, HeldOut, Plan, PlanTensor, Stack, State, StepInput, StepMetrics
from toyexp_torch.session import SessionSettings, Switches, TorchSession, flat_layout
from toyexp_torch.stacks.step import StackedResident, StackedStep, StackedUpdate

CROWDED = 0.75  # recapture a graph when this share of its runs, or less, still trains
AT_ONCE, BYTES = 8, 1 << 25  # most steps that are launched together, and most bytes of input they read


class TorchStack(Stack):
    """Stack of K runs on one torch device: their memory, and the program that computes their steps together.

    A step trains only the runs that request one.
    """

    sessions: Sequence[StackedSession]

    def __init__(self, plans: Sequence[Plan], settings: SessionSettings):
        self._plans, self._device, self._switches = plans, torch.device(settings.device), Switches(settings)
        self._dtype = torch.float64 if settings.dtype == "float64" else torch.float32
        self._dtypes, self._capture = (settings.dtype, settings.attention_dtype), settings.capture
        slices, length = flat_layout(plans[0])
        self.flat, self.grad = (
            torch.zeros((len(plans), length), dtype=self._dtype, device=self._device) for _ in range(2)
        )
        self.update, self._slices = StackedUpdate(plans[0], self.flat, self.grad, slices), slices
        super().__init__([StackedSession(plan, settings, self, row) for row, plan in enumerate(plans)])
        self._under_way: list[Callable[[], object]] = []  # functions that wait for the steps under way on a GPU
        self._indices: dict[int, int] = {}  # the index of each run in the program, keyed by the run's row
        self._step: StackedStep | None = None
        self._resident: StackedResident | None = None  # launches the step on a GPU

    def open(self) -> TorchStack:
        """Open all sessions and return the stack. If one fails, close all of them."""
        try:
            for session in self.sessions:
                session.open()
        except BaseException:
            for session in self.sessions:
                session.close()
            raise
        return self

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def uncaptured_reason(self) -> str:
        """Reason why steps are not captured as CUDA graphs; empty if they are, or if no step was taken yet."""
        return self._resident.uncaptured_reason if self._resident else "" if self._capture else "engine.capture=false"

    @cached_property
    def depth(self) -> int:
        """Maximum number of launched steps whose metrics are unread, for each run.

        On a GPU, it is twice the number of steps that are launched together, so that the GPU is always busy.
        """
        plan = self._plans[0]
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        room = BYTES // max(len(self._plans) * plan.accumulate * plan.rows * row, 1)
        return 2 * max(min(AT_ONCE, room), 1) if self.on_gpu else 1

    def free_if_closed(self) -> None:
        """Free the memory if all sessions are closed."""
        if all(session.state is State.CLOSED for session in self.sessions):
            if self._resident is not None:
                self._resident.close()
            self._step = self._resident = None
            self._under_way.clear()
            self.flat = self.grad = self.update = None  # type: ignore[assignment]
            if self.on_gpu:
                torch.cuda.empty_cache()

    def do_step(self, requests: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        requests = dict(sorted(requests.items()))
        with self._switches.apply():
            self._prepare([*requests])
            if self._resident is None:
                return self._step_eagerly(requests)
            if len(self._under_way) == self.depth:
                self._under_way.pop(0)()  # wait: the next launch overwrites its results
            count, indices = len(self._indices), {row: self._indices[row] for row in requests}
            wait = cache(self._resident.launch({indices[row]: request for row, request in requests.items()}))
            self._under_way.append(wait)

        def metrics(index: int) -> StepMetrics:
            numbers = wait()
            return StepMetrics(numbers[index], numbers[count + index])

        return {row: partial(metrics, index) for row, index in indices.items()}

    def _step_eagerly(self, requests: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        assert self._step is not None
        micros = [self._upload([x.micros[i] for x in requests.values()]) for i in range(self._plans[0].accumulate)]
        dtype = torch.float64 if self._device.type == "cpu" else self._dtype
        vectors = zip(*(request.numbers for request in requests.values()), strict=True)
        numbers = [torch.from_numpy(np.stack(group)).to(self._device, dtype) for group in vectors]
        metrics = self._step(micros, numbers).T.tolist()
        return {row: partial(StepMetrics, *pair) for row, pair in zip(requests, metrics, strict=True)}

    def losses(self, requests: Mapping[int, Iterable[Batch]]) -> Mapping[int, Callable[[], float]]:
        """Compute the held-out losses of several runs; see Stack.

        `requests` maps each run's row to its batches. Return, for each row, a function that returns the run's mean
        loss. A run with fewer batches than the others is idle while the others compute their remaining batches.
        """
        for row in requests:
            self.sessions[row].use_average(True)
        held_out = {row: HeldOut(self._plans[row], batches) for row, batches in sorted(requests.items())}
        micros: dict[int, Sequence[Batch]] = {}
        waits: dict[int, Callable[[], float]] = {}
        for row, run_batches in held_out.items():
            try:
                micros[row] = [*run_batches]
            except BaseException as error:  # including an exception that asks this run to end
                waits[row] = partial(_raise, error)
        if not micros:
            return waits
        with self._switches.apply():
            sums = cache(self._losses(micros).tolist)
        indices = {row: self._indices[row] for row in micros}
        return waits | {row: partial(lambda row: held_out[row].mean(sums()[indices[row]]), row) for row in indices}

    def _losses(self, requests: Mapping[int, Sequence[Batch]]) -> Tensor:
        """Return a vector with one element per run in the current StackedStep: the sum of its micro-batches' losses.

        `requests` has the micro-batches of each run, keyed by the run's row in the stack.
        """
        self._prepare([*requests])
        total = torch.zeros(len(self._indices), dtype=torch.float64 if self._device.type != "mps" else self._dtype)
        total = total.to(self._device)
        plan = self._plans[0]
        blank = {name: np.zeros((plan.rows, *spec.shape), spec.dtype) for name, spec in plan.inputs.items()}
        for i in range(max(map(len, requests.values()))):
            current = {self._indices[row]: micros[i] for row, micros in requests.items() if i < len(micros)}
            if self._resident is not None:
                total += self._resident.losses(current)
                continue
            assert self._step is not None
            total += self._step.losses(self._upload([current.get(index, blank) for index in range(len(requests))]))
        return total

    def _prepare(self, requested: Sequence[int]) -> None:
        """Make a program (a StackedStep) for the runs in the rows `requested`, unless the current program can be kept.

        On the CPU, the program contains exactly these runs. On a GPU, where capturing a new program is slow, it
        contains all runs that still train. There it is kept as long as it contains the requested runs, even if a few
        of its other runs have ended.
        """
        on_gpu, rows = self.on_gpu, [*requested]
        if on_gpu:
            training = [row for row, session in enumerate(self.sessions) if session.state is State.BUILT]
            rows = sorted({*training, *requested})
            remaining, contained = len({*rows} & self._indices.keys()), self._indices.keys()
            if self._step is not None and contained >= {*requested} and remaining > CROWDED * len(contained):
                return
        elif self._step is not None and rows == [*self._indices]:
            return
        if self._resident is not None:
            self._resident.close()
        self._step = self._resident = None  # frees their memory before the next program is made
        plans, frozen_values = [self._plans[row] for row in rows], self._collect_frozen(rows)
        step = StackedStep(plans, rows, self.flat, self.grad, self._slices, self.update, frozen_values, *self._dtypes)
        if on_gpu:
            sizes = self.update.sizes()
            self._resident = StackedResident(step, plans[0], sizes, len(rows), self._dtype, self._capture, self.depth)
        self._step, self._indices = step, {row: index for index, row in enumerate(rows)}

    def _upload(self, micros: Sequence[Batch]) -> dict[str, Tensor]:
        """Stack the micro-batches of k runs, and return the tensors [k, rows, ...] on the device, keyed by name."""
        tensors = {}
        for name in self._plans[0].inputs:
            host = torch.from_numpy(np.stack([micro[name] for micro in micros]))
            tensors[name] = host.to(self._device, self._dtype if host.is_floating_point() else host.dtype)
        return tensors

    def _collect_frozen(self, rows: Sequence[int]) -> dict[str, tuple[Tensor, bool]]:
        """Return (tensor, is stacked) for each frozen tensor, keyed by name.

        If all runs in `rows` share the tensor, return it unstacked. Otherwise return the k runs' tensors stacked,
        [k, ...]. Each run's session then uses its slice of this stack, so that its own copy is freed.
        """
        frozen_values = {}
        for tensor in self._plans[0].tensors:
            if not tensor.trainable:
                by_run = [self.sessions[row].frozen_values(tensor.name) for row in rows]
                is_shared = all(values is by_run[0] for values in by_run)
                frozen_values[tensor.name] = (by_run[0] if is_shared else torch.stack(by_run), not is_shared)
                if not is_shared:
                    del by_run  # frees each run's copy as soon as its session uses its row of the stack
                    for row, values in zip(rows, frozen_values[tensor.name][0], strict=True):
                        self.sessions[row].set_frozen(tensor.name, values)
        return frozen_values

    def find_equal(self, name: str, values: Tensor) -> Tensor:
        """Return another run's tensor `name` if it equals `values`, so that both runs share it.

        If no run has such a tensor, return `values`.
        """
        for session in self.sessions:
            other = session.frozen_values(name)
            if other is not None and torch.equal(other, values):
                return other
        return values


def _raise(error: BaseException) -> NoReturn:
    raise error


class StackedSession(TorchSession):
    """Session of one run in a stack. Its `step` trains only this run; the stack's `step` trains several together."""

    def __init__(self, plan: Plan, settings: SessionSettings, stack: TorchStack, row: int):
        super().__init__(plan, settings, self._view_state)  # type: ignore[arg-type]
        self.stack, self.row = stack, row
        self._keeps_bfloat16 = False  # in bfloat16 the stack's program rounds the weights itself

    def _view_state(self, *_: object) -> SimpleNamespace:
        """Return a substitute for an Update: an object whose only attribute, `state`, is this run's optimiser state."""
        state = self.stack.update.state
        return SimpleNamespace(state={n: {s: x[self.row] for s, x in slots.items()} for n, slots in state.items()})

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"stacked": len(self.stack.sessions)}

    def frozen_values(self, name: str) -> Any:
        """Return the frozen tensor `name` on the device; None if it has no values yet."""
        return self._tensors.get(name)

    def set_frozen(self, name: str, values: Tensor) -> None:
        """Replace the frozen tensor `name` by a tensor with the same values."""
        self._tensors[name] = values
        if self._params is not None:
            self._params = self.plan.params(self._tensors)

    def _allocate_vectors(self, length: int) -> tuple[Tensor, Tensor]:
        return self.stack.flat[self.row], self.stack.grad[self.row]

    def _make_resident(self) -> None:
        return None

    @property
    def _uncaptured_reason(self) -> str:
        return self.stack.uncaptured_reason

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        """Upload a tensor; see TorchSession. Runs share the memory of frozen tensors with equal values."""
        super().do_upload(tensor, array)
        if not tensor.trainable:
            values = self._tensors.pop(tensor.name)
            self._tensors[tensor.name] = self.stack.find_equal(tensor.name, values)  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        return self.stack.depth

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        return self.stack.do_step({self.row: StepInput(micros, numbers)})[self.row]()

    def _release_memory(self) -> None:
        """Do nothing, so that the memory stays cached for the stack's other runs."""

    def do_close(self) -> None:
        super().do_close()
        self.stack.free_if_closed()
