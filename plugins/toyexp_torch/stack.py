"""Runs of one shape in one process, whose training steps are taken together.

Each run has a session of its own. Its vectors are rows of the stack's matrices [K, N], so that everything but the
training step is what `TorchSession` does, and no run is moved when another one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp import Batch, Plan, PlanTensor, State, StepMetrics
from toyexp_torch.host_copy import put_on_host, wait_for_copies
from toyexp_torch.session import Switches, TorchSession, Wanted, places_of
from toyexp_torch.stack_step import StackedStep, StackedUpdate


@dataclass(eq=False)
class _Asked:
    """A step that a run has asked for."""

    row: int
    micros: Sequence[Batch]
    numbers: Sequence[np.ndarray]
    answer: StepMetrics | BaseException | None = None  # None until it is taken


class Stack:
    """The memory and the program of K runs; a step takes those along that have asked for one."""

    def __init__(self, plans: Sequence[Plan], wanted: Wanted):
        self._plans, self._device, self._settings = plans, torch.device(wanted.device), Switches(wanted)
        self._dtype = torch.float64 if wanted.dtype == "float64" else torch.float32
        places, length = places_of(plans[0])
        self.flat, self.grad = (
            torch.zeros((len(plans), length), dtype=self._dtype, device=self._device) for _ in range(2)
        )
        self.update, self._places = StackedUpdate(plans[0], self.flat, self.grad, places), places
        self.sessions = [StackedSession(plan, wanted, self, row) for row, plan in enumerate(plans)]
        self._asked: list[_Asked] = []
        self._step: StackedStep | None = None
        self._rows: list[int] = []  # whose step that is

    def open(self) -> Sequence[StackedSession]:
        """The sessions, open; all are closed where one cannot be."""
        try:
            return [session.open() for session in self.sessions]
        except BaseException:
            for session in self.sessions:
                session.close()
            raise

    def ask(self, row: int, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> _Asked:
        """Notes what a run wants computed; its step before this one is taken first."""
        self.settle(row)
        self._asked.append(_Asked(row, micros, numbers))
        return self._asked[-1]

    def settle(self, row: int) -> None:
        """Takes the step that a run has asked for, if it has."""
        if any(asked.row == row for asked in self._asked):
            self.take()

    def leave(self, row: int) -> None:
        """A run has ended; what it asked for is not computed any more. The last one frees the memory."""
        self._asked = [asked for asked in self._asked if asked.row != row]
        if all(session.state is State.CLOSED for session in self.sessions):
            self._step = self.flat = self.grad = self.update = None  # type: ignore[assignment]

    def take(self) -> None:
        """One step of all runs that have asked for one; where it fails, it fails for each of them."""
        asked = sorted(self._asked, key=lambda a: a.row)
        self._asked = []
        try:
            with self._settings.applied():
                metrics = self._taken(asked).T.tolist()
        except BaseException as error:  # a signal too: each that waits for its step is told of it
            for one in asked:
                one.answer = error
        else:
            for one, (loss, norm) in zip(asked, metrics, strict=True):
                one.answer = StepMetrics(loss, norm)

    def _taken(self, asked: Sequence[_Asked]) -> Tensor:
        rows = [one.row for one in asked]
        if self._step is None or rows != self._rows:
            plans = [self._plans[row] for row in rows]
            self._step = StackedStep(plans, rows, self.flat, self.grad, self._places, self.update, self._frozen(rows))
            self._rows = rows
        micros = [
            {name: self._there([one.micros[i][name] for one in asked]) for name in self._plans[0].inputs}
            for i in range(self._plans[0].accumulate)
        ]
        exact = torch.float64 if self._device.type == "cpu" else self._dtype
        vectors = zip(*(one.numbers for one in asked), strict=True)
        numbers = [torch.from_numpy(np.stack(group)).to(self._device, exact) for group in vectors]
        return self._step(micros, numbers)

    def _there(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """An array of each run as one on the device."""
        host = torch.from_numpy(np.stack(arrays))
        return host.to(self._device, self._dtype if host.is_floating_point() else host.dtype)

    def _frozen(self, rows: Sequence[int]) -> dict[str, tuple[Tensor, bool]]:
        """The tensors that do not train: what all runs have alike once, of others each one's, and whether so."""
        found = {}
        for tensor in self._plans[0].tensors:
            if not tensor.trainable:
                own = [self.sessions[row].frozen(tensor.name) for row in rows]
                alike = all(values is own[0] for values in own)
                found[tensor.name] = (own[0] if alike else torch.stack(own), not alike)
        return found

    def shared(self, name: str, values: Tensor) -> Tensor:
        """Values of a frozen tensor, as another run has them already if one does."""
        for session in self.sessions:
            other = session.frozen(name)
            if other is not None and torch.equal(other, values):
                return other
        return values


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

    def describe(self) -> dict[str, Any]:
        """With how many runs its steps are computed."""
        return super().describe() | {"stacked": len(self.stack.sessions)}

    def frozen(self, name: str) -> Any:
        """A tensor that does not train; None while it has no values."""
        return self._tensors.get(name)

    def _vectors(self, length: int) -> tuple[Tensor, Tensor]:
        return self.stack.flat[self.row], self.stack.grad[self.row]

    def _make_resident(self) -> None:
        return None

    @property
    def _uncaptured(self) -> str:
        return "a stack's steps are not"

    def do_upload(self, tensor: PlanTensor, array: np.ndarray) -> None:
        """See TorchSession; what another run has as well is held once."""
        super().do_upload(tensor, array)
        if not tensor.trainable:
            values = self._tensors.pop(tensor.name)
            self._tensors[tensor.name] = self.stack.shared(tensor.name, values)  # type: ignore[arg-type]

    def do_launch(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> Callable[[], StepMetrics]:
        """See Session."""
        asked = self.stack.ask(self.row, micros, numbers)

        def wait() -> StepMetrics:
            if asked.answer is None:
                self.stack.take()
            if isinstance(asked.answer, BaseException):
                raise asked.answer
            assert asked.answer is not None
            return asked.answer

        return wait

    def do_step(self, micros: Sequence[Batch], numbers: Sequence[np.ndarray]) -> StepMetrics:
        """See Session."""
        return self.do_launch(micros, numbers)()

    @_once_settled
    def do_snapshot(self, into: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """See Session."""
        copy = dict(into)
        for name, values in self.named(
            {t.name: self._weights(t) for t in self.plan.trainable}, self._update.state
        ).items():
            put_on_host(copy, name, values)
        wait_for_copies(self._device)
        return copy

    do_loss = _once_settled(TorchSession.do_loss)
    do_logits = _once_settled(TorchSession.do_logits)
    do_gradients = _once_settled(TorchSession.do_gradients)
    do_download = _once_settled(TorchSession.do_download)
    do_restore = _once_settled(TorchSession.do_restore)
    do_decoder = _once_settled(TorchSession.do_decoder)

    def do_close(self) -> None:
        """See Session; the others go on."""
        super().do_close()
        self.stack.leave(self.row)
