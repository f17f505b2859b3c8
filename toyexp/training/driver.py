"""What runs ask for, and the driver that answers them from a stack: one run or many, round by round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import compute_scores
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import StepInput
from toyexp.interfaces.stack import Stack


@dataclass(frozen=True)
class Realize:
    """A request for an open session of a plan, from which all later requests are answered."""

    engine: Engine
    plan: Plan

    def answer(self) -> Stack:
        """Open a session of its own."""
        return Stack([self.engine.realize(self.plan).require_open()])


@dataclass(frozen=True)
class Step:
    """A request for steps; the answer has, for each that began, at least one, a function that waits for its metrics."""

    inputs: Sequence[StepInput]


@dataclass(frozen=True)
class Evaluate:
    """A request for the loss and the model's scores on the batches that `batches()` gives."""

    batches: Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Pause:
    """A request for nothing, made before a loop waits for the disk: the other runs take their steps first."""


T = TypeVar("T")
Request = Realize | Step | Evaluate | Pause
Requests = Generator[Request, Any, T]
Resume = Callable[[], Request]  # resumes a loop up to its next request; StopIteration where it ends
Answer = Callable[[], Any]  # gives what a loop is sent, or raises what is raised in it


def drive(loops: Sequence[Requests[T]], stack: Stack, starts: Sequence[Resume] = ()) -> list[T | Exception]:
    """Answer loops until the last one ends, each from its row of the stack; return how each ended, or what it raised.

    `starts` resume loops that have begun already. A round has a request of each loop. Loops that evaluate do so first;
    then the steps of all loops begin together, as many as every loop asks for, before a loop looks at one of them.
    An exception ends its own loop alone, unless it is no Exception, such as a second signal.
    """
    ends: dict[int, T | Exception] = {}
    requests: dict[int, Request] = {}
    going: Mapping[int, Resume] = dict(enumerate(starts or [partial(next, loop) for loop in loops]))
    while going:
        for row, go_on in going.items():
            try:
                requests[row] = go_on()
            except StopIteration as end:
                ends[row] = end.value
            except Exception as error:
                ends[row] = error
        evals = {row: request.batches for row, request in requests.items() if isinstance(request, Evaluate)}
        answers = _evaluate(stack, evals) if evals else _begin_steps(stack, requests)
        for row in answers:
            del requests[row]
        going = {row: partial(_resume, loops[row], answers[row]) for row in sorted(answers)}
    return [ends[row] for row in range(len(loops))]


def bind_sessions(loops: Sequence[Requests[Any]], found: Stack | Exception) -> tuple[Stack, Sequence[Resume]]:
    """Return the stack of loops that asked for a session, and what resumes them: with that, or why there is none."""
    if isinstance(found, Exception):
        return Stack([]), [partial(loop.throw, found) for loop in loops]
    return found, [partial(loop.send, session) for loop, session in zip(loops, found.sessions, strict=True)]


@contextlib.contextmanager
def forward_interrupts(loops: Iterable[Requests[Any]]) -> Iterator[None]:
    """Raise a signal that comes in here, and in no loop, in each loop that has not ended."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            for loop in loops:
                with contextlib.suppress(StopIteration, type(error)):  # one that has ended raises it again
                    loop.throw(error)
        raise


def _evaluate(stack: Stack, evals: Mapping[int, Callable[[], Iterable[Batch]]]) -> Mapping[int, Answer]:
    def wait(row: int, loss: Callable[[], float]) -> tuple[float, Mapping[str, float]]:
        session = stack.sessions[row]
        return loss(), compute_scores(session.plan.model, session.logits, evals[row]())

    try:
        losses = stack.losses({row: batches() for row, batches in evals.items()})
    except Exception as error:
        return dict.fromkeys(evals, _raiser(error))
    return {row: partial(wait, row, losses[row]) for row in evals}


def _begin_steps(stack: Stack, requests: Mapping[int, Request]) -> Mapping[int, Answer]:
    """Begin the steps of a round; return for each loop what gives the functions that wait for its own."""
    steps = {row: request.inputs for row, request in sorted(requests.items()) if isinstance(request, Step)}
    count = min(map(len, steps.values()), default=0)
    try:
        begun = [stack.step({row: inputs[i] for row, inputs in steps.items()}) for i in range(count)]
    except Exception as error:
        return dict.fromkeys(requests, lambda: None) | dict.fromkeys(steps, _raiser(error))
    return {row: partial(list, [waits[row] for waits in begun] if row in steps else ()) for row in requests}


def _resume(loop: Requests[Any], answer: Answer) -> Request:
    go_on: Resume
    try:
        go_on = partial(loop.send, answer())
    except BaseException as error:
        go_on = partial(loop.throw, error)
    return go_on()


def _raiser(error: Exception) -> Answer:
    """Return what raises an error in several loops, in each without the traceback of the others."""
    where = error.__traceback__

    def answer() -> NoReturn:
        raise error.with_traceback(where)

    return answer
