"""Runs of one shape in one process, whose training steps are taken together.

Each run has a session of its own. Its vectors are rows of the stack's matrices [K, N], so that everything but the
training step and the held-out loss is what `TorchSession` does, and no run is moved when another one ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Plan, PlanTensor, State, StepMetrics
from toyexp_torch.session import Switches, TorchSession, Wanted, places_of
from toyexp_torch.stack_step import How, StackedResident, StackedStep, StackedUpdate

CROWDED = 0.75  # the share of a graph's runs that still train, below which a graph of those alone takes its place
AT_ONCE, BYTES = 8, 1 << 25  # steps that a GPU is given at once, and what they may read

OneStep = tuple[Sequence[Batch], Sequence[np.ndarray]]  # a step's micro-batches, and each group's numbers


class _Answers:
    """What comes of something that was begun for several runs: waited for once, by whoever asks first."""

    def __init__(self, wait: Callable[[], Sequence[Any]]):
        self._wait = wait
        self._found: Sequence[Any] | BaseException | None = None
        self._where: TracebackType | None = None  # that was raised

    def all(self) -> Sequence[Any]:
        """One for each run; where it has failed, it has for each that asks."""
        if self._found is None:
            try:
                self._found = self._wait()
            except BaseException as error:  # a signal too: each that waits is told of it
                self._found, self._where = error, error.__traceback__
        if isinstance(self._found, BaseException):
            raise self._found.with_traceback(self._where)  # without the way to whoever has asked before
        return self._found

    def settle(self) -> None:
        """Waits; of a failure those are told who ask."""
        with contextlib.suppress(Exception):
            self.all()


@dataclass(eq=False)
class _Asked:
    """What a run has asked for: steps, or losses on micro-batches."""

    row: int
    steps: Sequence[OneStep] = ()
    micros: Sequence[Batch] = ()
    answer: Callable[[], Any] | None = None  # None until it is begun

    def answered(self, begin: Callable[[], None]) -> Any:
        """What came of it, which is begun now where it was not, with what other runs have asked for."""
        if self.answer is None:
            begin()
        assert self.answer is not None
        return self.answer()


class Stack:
    """The memory and the program of K runs; a step takes those along that have asked for one."""

    def __init__(self, plans: Sequence[Plan], wanted: Wanted):
        self._plans, self._device, self._settings = plans, torch.device(wanted.device), Switches(wanted)
        self._dtype = torch.float64 if wanted.dtype == "float64" else torch.float32
        self._how, self._capture = How(wanted.dtype, wanted.compile), wanted.capture
        places, length = places_of(plans[0])
        self.flat, self.grad = (
            torch.zeros((len(plans), length), dtype=self._dtype, device=self._device) for _ in range(2)
        )
        self.update, self._where = StackedUpdate(plans[0], self.flat, self.grad, places), places
        self.sessions = [StackedSession(plan, wanted, self, row) for row, plan in enumerate(plans)]
        self._asked: dict[int, _Asked] = {}  # steps, by row
        self._held_out: dict[int, _Asked] = {}  # losses
        self._begun: list[tuple[int, _Answers]] = []  # steps whose numbers are on their way from a GPU, and how many
        self._places: dict[int, int] = {}  # of the rows in the program
        self._step: StackedStep | None = None
        self._resident: StackedResident | None = None  # the same on a GPU

    def open(self) -> Sequence[StackedSession]:
        """The sessions, open; all are closed where one cannot be."""
        try:
            return [session.open() for session in self.sessions]
        except BaseException:
            for session in self.sessions:
                session.close()
            raise

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are taken beside the host's work."""
        return self._device.type == "cuda"

    @property
    def uncaptured(self) -> str:
        """Why a GPU's kernels are launched one by one; empty where they are not, or nobody knows yet."""
        return self._resident.refused if self._resident else "" if self._capture else "engine.capture=false"

    @cached_property
    def steps_at_once(self) -> int:
        """How many steps are best begun together, since each run's host then works on several of them."""
        plan = self._plans[0]
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        room = BYTES // max(len(self._plans) * plan.accumulate * plan.rows * row, 1)
        return max(min(AT_ONCE, room), 1) if self.runs_ahead else 1

    def ask(self, row: int, steps: Sequence[OneStep]) -> Callable[[], Sequence[StepMetrics]]:
        """Notes that a run wants steps, and gives what waits for them; those before are begun first."""
        self.settle(row)
        asked = self._asked[row] = _Asked(row, steps)
        return partial(asked.answered, self.take)

    def ask_losses(self, row: int, micros: Sequence[Batch]) -> Callable[[], float]:
        """The same for the sum of its losses on micro-batches, without training."""
        self.settle(row)
        if row in self._held_out:
            self._evaluate()
        asked = self._held_out[row] = _Asked(row, micros=micros)
        return partial(asked.answered, self._evaluate)

    def settle(self, row: int) -> None:
        """Begins the steps that a run has asked for, if it has."""
        if row in self._asked:
            self.take()

    def leave(self, row: int) -> None:
        """A run has ended; what it asked for is not computed any more. The last one frees the memory."""
        self._asked.pop(row, None)
        self._held_out.pop(row, None)
        if all(session.state is State.CLOSED for session in self.sessions):
            if self._resident is not None:
                self._resident.close()
            self._step = self._resident = None
            self.flat = self.grad = self.update = None  # type: ignore[assignment]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def take(self) -> None:
        """Begins the steps that runs have asked for; where one fails, it fails for each of them."""
        if not self._asked:
            return
        together, self._asked = self._asked, {}
        self._begin(together, self._taken)

    def _evaluate(self) -> None:
        together, self._held_out = self._held_out, {}
        self._begin(together, self._losses)

    def _begin(self, asked: Mapping[int, _Asked], compute: Callable[[Sequence[_Asked]], _Answers]) -> None:
        together = [asked[row] for row in sorted(asked)]
        try:
            with self._settings.applied():
                answers = compute(together)
        except BaseException as error:
            answers = _Answers(_raising(error))
        for place, one in enumerate(together):
            one.answer = _one_of(answers, place)

    def _taken(self, asked: Sequence[_Asked]) -> _Answers:
        """The metrics of each run's steps, one after another: a run that wants fewer rests in the end."""
        count = max(len(one.steps) for one in asked)
        while self._begun and count + sum(n for n, _ in self._begun) > 2 * self.steps_at_once:
            self._begun.pop(0)[1].settle()  # whose numbers would be overwritten
        waits: list[Callable[[], Mapping[int, StepMetrics]]] = []

        def wait() -> Sequence[Sequence[StepMetrics]]:
            found = [each() for each in waits]
            return [[metrics[one.row] for metrics in found[: len(one.steps)]] for one in asked]

        answers = _Answers(wait)
        try:
            for i in range(count):
                waits.append(self._one_taken({one.row: one.steps[i] for one in asked if i < len(one.steps)}))
        finally:  # those before one that cannot be begun are under way, too
            self._begun.append((len(waits), answers))
        return answers

    def _one_taken(self, steps: Mapping[int, OneStep]) -> Callable[[], Mapping[int, StepMetrics]]:
        """Begins a step of the runs in these rows."""
        self._prepare([*steps])
        if self._resident is None:
            assert self._step is not None
            micros = [self._there([own[i] for own, _ in steps.values()]) for i in range(self._plans[0].accumulate)]
            exact = torch.float64 if self._device.type == "cpu" else self._dtype
            vectors = zip(*(numbers for _, numbers in steps.values()), strict=True)
            numbers = [torch.from_numpy(np.stack(group)).to(self._device, exact) for group in vectors]
            found = self._step(micros, numbers).T.tolist()
            metrics = {row: StepMetrics(*each) for row, each in zip(steps, found, strict=True)}
            return lambda: metrics
        places, count = {row: self._places[row] for row in steps}, len(self._places)
        fetched = self._resident.launch({places[row]: own for row, own in steps.items()})

        def wait() -> Mapping[int, StepMetrics]:
            found = fetched()
            return {row: StepMetrics(found[place], found[count + place]) for row, place in places.items()}

        return wait

    def _losses(self, asked: Sequence[_Asked]) -> _Answers:
        """The sums of losses, batch by batch: a run with fewer of them than others has none in the end."""
        self._prepare([one.row for one in asked])
        total = torch.zeros(len(self._places), dtype=torch.float64 if self._device.type != "mps" else self._dtype)
        total = total.to(self._device)
        places, plan = [self._places[one.row] for one in asked], self._plans[0]
        blank = {name: np.zeros((plan.rows, *spec.shape), spec.dtype) for name, spec in plan.inputs.items()}
        for i in range(max(len(one.micros) for one in asked)):
            those = {place: one.micros[i] for place, one in zip(places, asked, strict=True) if i < len(one.micros)}
            if self._resident is not None:
                total += self._resident.losses(those)
                continue
            assert self._step is not None
            total += self._step.losses(self._there([those.get(place, blank) for place in range(len(asked))]))
        return _Answers(lambda: [sums[place] for sums in [total.tolist()] for place in places])

    def _prepare(self, asking: Sequence[int]) -> None:
        """Has a program ready in which the runs that ask are, and no others.

        On a GPU, where it takes a while to capture one, it is of all that train and of some that have left.
        """
        on_gpu, rows = self.runs_ahead, [*asking]
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
        step = StackedStep(plans, rows, self.flat, self.grad, self._where, self.update, frozen, self._how)
        if on_gpu:
            sizes = self.update.sizes()
            self._resident = StackedResident(
                step, plans[0], sizes, len(rows), self._dtype, self._capture, 2 * self.steps_at_once
            )
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


def _raising(error: BaseException) -> Callable[[], Sequence[Any]]:
    def wait() -> Sequence[Any]:
        raise error

    return wait


def _one_of(answers: _Answers, place: int) -> Callable[[], Any]:
    return lambda: answers.all()[place]


def _once_settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same, once the step is taken that the session has asked for."""

    def settled(self: StackedSession, *arguments: Any) -> Any:
        self.stack.settle(self.row)
        return method(self, *arguments)

    return settled


class _Own:
    """What a run's session knows of the stack's optimiser: the state in its row."""

    def __init__(self, update: StackedUpdate, row: int):
        self.state = {n: {slot: x[row] for slot, x in state.items()} for n, state in update.state.items()}


class StackedSession(TorchSession):
    """One run of a stack. A step that it launches is taken once one of the runs waits for its own."""

    def __init__(self, plan: Plan, wanted: Wanted, stack: Stack, row: int):
        super().__init__(plan, wanted, lambda *_: _Own(stack.update, row))  # type: ignore[arg-type]
        self.stack, self.row = stack, row
        self._halved = False  # the program rounds the weights themselves where it computes in bfloat16

    def describe(self) -> dict[str, Any]:
        """With how many runs its steps are computed."""
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
    def runs_ahead(self) -> bool:
        """See Session."""
        return self.stack.runs_ahead

    def all_launched(self) -> None:
        """See Session."""
        self.stack.take()

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        """See Session."""
        wait = self.stack.ask(self.row, [(micros, numbers)])
        return lambda: wait()[0]

    @property
    def steps_at_once(self) -> int:
        """See Session."""
        return self.stack.steps_at_once

    def do_launch_several(self, steps: Sequence[OneStep]) -> Callable[[], Sequence[StepMetrics]]:
        """See Session."""
        return self.stack.ask(self.row, steps)

    def do_launch_losses(self, micros: Iterable[Batch]) -> Callable[[], float]:
        """See Session."""
        return self.stack.ask_losses(self.row, [*micros])

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        """See Session."""
        return self.do_launch(micros, numbers)()

    do_snapshot = _once_settled(TorchSession.do_snapshot)
    do_loss = _once_settled(TorchSession.do_loss)
    do_logits = _once_settled(TorchSession.do_logits)
    do_gradients = _once_settled(TorchSession.do_gradients)
    do_download = _once_settled(TorchSession.do_download)
    do_restore = _once_settled(TorchSession.do_restore)
    do_decoder = _once_settled(TorchSession.do_decoder)

    def _give_back(self) -> None:
        """The others go on with it."""

    def do_close(self) -> None:
        """See Session."""
        super().do_close()
        self.stack.leave(self.row)
