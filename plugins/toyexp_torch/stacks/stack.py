"""Runs of one shape in one process, whose training steps are taken together.

Each run has a session of its own. Its vectors are rows of the stack's matrices [K, N], so that everything but the
training step and the held-out loss is what `TorchSession` does, and no run is moved when another one ends.
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
from toyexp_torch.session import Switches, TorchSession, Wanted, places_of
from toyexp_torch.stacks.step import StackedResident, StackedStep, StackedUpdate

CROWDED = 0.75  # the share of a graph's runs that still train, below which a graph of those alone takes its place
AT_ONCE, BYTES = 8, 1 << 25  # steps that a GPU is given at once, and what they may read


class TorchStack(Stack):
    """The memory and the program of K runs; a step takes those along that ask for one."""

    sessions: Sequence[StackedSession]

    def __init__(self, plans: Sequence[Plan], wanted: Wanted):
        self._plans, self._device, self._settings = plans, torch.device(wanted.device), Switches(wanted)
        self._dtype = torch.float64 if wanted.dtype == "float64" else torch.float32
        self._rounding, self._capture = wanted.dtype, wanted.capture
        places, length = places_of(plans[0])
        self.flat, self.grad = (
            torch.zeros((len(plans), length), dtype=self._dtype, device=self._device) for _ in range(2)
        )
        self.update, self._where = StackedUpdate(plans[0], self.flat, self.grad, places), places
        super().__init__([StackedSession(plan, wanted, self, row) for row, plan in enumerate(plans)])
        self._under_way: list[Callable[[], object]] = []  # what waits for the steps whose numbers a GPU still holds
        self._places: dict[int, int] = {}  # of the rows in the program
        self._step: StackedStep | None = None
        self._resident: StackedResident | None = None  # the same on a GPU

    def open(self) -> TorchStack:
        """Open all sessions; all are closed where one cannot be opened."""
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
    def uncaptured(self) -> str:
        """Why a GPU's kernels are launched one by one; empty where they are not, or nobody knows yet."""
        return self._resident.refused if self._resident else "" if self._capture else "engine.capture=false"

    @cached_property
    def depth(self) -> int:
        """On a GPU twice as many steps as are begun together: each run's host then works on several of them."""
        plan = self._plans[0]
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        room = BYTES // max(len(self._plans) * plan.accumulate * plan.rows * row, 1)
        return 2 * max(min(AT_ONCE, room), 1) if self.on_gpu else 1

    def leave(self) -> None:
        """Free the memory when the last run has ended."""
        if all(session.state is State.CLOSED for session in self.sessions):
            if self._resident is not None:
                self._resident.close()
            self._step = self._resident = None
            self._under_way.clear()
            self.flat = self.grad = self.update = None  # type: ignore[assignment]
            if self.on_gpu:
                torch.cuda.empty_cache()

    def do_step(self, asked: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        asked = dict(sorted(asked.items()))
        with self._settings.applied():
            self._prepare([*asked])
            if self._resident is None:
                return self._taken(asked)
            if len(self._under_way) == self.depth:
                self._under_way.pop(0)()  # whose numbers would be overwritten
            count, places = len(self._places), {row: self._places[row] for row in asked}
            wait = cache(self._resident.launch({places[row]: own for row, own in asked.items()}))
            self._under_way.append(wait)

        def metrics(place: int) -> StepMetrics:
            found = wait()
            return StepMetrics(found[place], found[count + place])

        return {row: partial(metrics, place) for row, place in places.items()}

    def _taken(self, asked: Mapping[int, StepInput]) -> Mapping[int, Callable[[], StepMetrics]]:
        assert self._step is not None
        micros = [self._there([own.micros[i] for own in asked.values()]) for i in range(self._plans[0].accumulate)]
        exact = torch.float64 if self._device.type == "cpu" else self._dtype
        vectors = zip(*(own.numbers for own in asked.values()), strict=True)
        numbers = [torch.from_numpy(np.stack(group)).to(self._device, exact) for group in vectors]
        found = self._step(micros, numbers).T.tolist()
        return {row: partial(StepMetrics, *each) for row, each in zip(asked, found, strict=True)}

    def losses(self, asked: Mapping[int, Iterable[Batch]]) -> Mapping[int, Callable[[], float]]:
        """See Stack; batch by batch: a run with fewer of them than others has none in the end."""
        held_out = {row: HeldOut(self._plans[row], batches) for row, batches in sorted(asked.items())}
        micros: dict[int, Sequence[Batch]] = {}
        waits: dict[int, Callable[[], float]] = {}
        for row, own in held_out.items():
            try:
                micros[row] = [*own]
            except BaseException as error:  # also a signal to this run
                waits[row] = partial(_raise, error)
        if not micros:
            return waits
        with self._settings.applied():
            sums = cache(self._losses(micros).tolist)
        places = {row: self._places[row] for row in micros}
        return waits | {row: partial(lambda row: held_out[row].mean(sums()[places[row]]), row) for row in places}

    def _losses(self, asked: Mapping[int, Sequence[Batch]]) -> Tensor:
        """The sums of losses by place."""
        self._prepare([*asked])
        total = torch.zeros(len(self._places), dtype=torch.float64 if self._device.type != "mps" else self._dtype)
        total = total.to(self._device)
        plan = self._plans[0]
        blank = {name: np.zeros((plan.rows, *spec.shape), spec.dtype) for name, spec in plan.inputs.items()}
        for i in range(max(map(len, asked.values()))):
            those = {self._places[row]: micros[i] for row, micros in asked.items() if i < len(micros)}
            if self._resident is not None:
                total += self._resident.losses(those)
                continue
            assert self._step is not None
            total += self._step.losses(self._there([those.get(place, blank) for place in range(len(asked))]))
        return total

    def _prepare(self, asking: Sequence[int]) -> None:
        """Has a program ready in which the runs that ask are, and no others.

        On a GPU, where it takes a while to capture one, it is of all that train and of some that have left.
        """
        on_gpu, rows = self.on_gpu, [*asking]
        if on_gpu:
            open_ones = [row for row, session in enumerate(self.sessions) if session.state is State.BUILT]
            rows = sorted({*open_ones, *asking})
            still = len({*rows} & self._places.keys())
            if self._step is not None and self._places.keys() >= {*asking} and still > CROWDED * len(self._places):
                return
        elif self._step is not None and rows == [*self._places]:
            return
        if self._resident is not None:
            self._resident.close()
        self._step = self._resident = None  # their memory is free before there is another
        plans, frozen = [self._plans[row] for row in rows], self._frozen(rows)
        step = StackedStep(plans, rows, self.flat, self.grad, self._where, self.update, frozen, self._rounding)
        if on_gpu:
            sizes = self.update.sizes()
            self._resident = StackedResident(step, plans[0], sizes, len(rows), self._dtype, self._capture, self.depth)
        self._step, self._places = step, {row: place for place, row in enumerate(rows)}

    def _there(self, micros: Sequence[Batch]) -> dict[str, Tensor]:
        """A micro-batch of each run as one on the device."""
        found = {}
        for name in self._plans[0].inputs:
            host = torch.from_numpy(np.stack([micro[name] for micro in micros]))
            found[name] = host.to(self._device, self._dtype if host.is_floating_point() else host.dtype)
        return found

    def _frozen(self, rows: Sequence[int]) -> dict[str, tuple[Tensor, bool]]:
        """The tensors that do not train: what all runs have alike once, of others each one's, and whether so.

        Where they differ, the sessions have theirs as rows of the program's from then on.
        """
        found = {}
        for tensor in self._plans[0].tensors:
            if not tensor.trainable:
                own = [self.sessions[row].frozen(tensor.name) for row in rows]
                alike = all(values is own[0] for values in own)
                found[tensor.name] = (own[0] if alike else torch.stack(own), not alike)
                if not alike:
                    del own
                    for row, values in zip(rows, found[tensor.name][0], strict=True):
                        self.sessions[row].hold(tensor.name, values)
        return found

    def shared(self, name: str, values: Tensor) -> Tensor:
        """Values of a frozen tensor, as another run has them already if one does."""
        for session in self.sessions:
            other = session.frozen(name)
            if other is not None and torch.equal(other, values):
                return other
        return values


def _raise(error: BaseException) -> NoReturn:
    raise error


class StackedSession(TorchSession):
    """One run of a stack; its `step` is one that no other run takes part in."""

    def __init__(self, plan: Plan, wanted: Wanted, stack: TorchStack, row: int):
        super().__init__(plan, wanted, self._own_state)  # type: ignore[arg-type]
        self.stack, self.row = stack, row
        self._halved = False  # the program rounds the weights themselves where it computes in bfloat16

    def _own_state(self, *_: object) -> SimpleNamespace:
        """What the session knows of the stack's optimiser: the state in its row."""
        state = self.stack.update.state
        return SimpleNamespace(state={name: {s: x[self.row] for s, x in own.items()} for name, own in state.items()})

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"stacked": len(self.stack.sessions)}

    def frozen(self, name: str) -> Any:
        """A tensor that does not train; None while it has no values."""
        return self._tensors.get(name)

    def hold(self, name: str, values: Tensor) -> None:
        """Has a tensor that does not train where all runs have theirs side by side."""
        self._tensors[name] = values
        if self._params is not None:
            self._params = self.plan.params(self._tensors)

    def _vectors(self, length: int) -> tuple[Tensor, Tensor]:
        return self.stack.flat[self.row], self.stack.grad[self.row]

    def _make_resident(self) -> None:
        return None

    @property
    def _uncaptured(self) -> str:
        return self.stack.uncaptured

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        """See TorchSession; what another run has as well is held once."""
        super().do_upload(tensor, array)
        if not tensor.trainable:
            values = self._tensors.pop(tensor.name)
            self._tensors[tensor.name] = self.stack.shared(tensor.name, values)  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        return self.stack.depth

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        return self.stack.do_step({self.row: StepInput(micros, numbers)})[self.row]()

    def _give_back(self) -> None:
        """The others go on with it."""

    def do_close(self) -> None:
        super().do_close()
        self.stack.leave()
