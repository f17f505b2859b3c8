"""Driver of training loops, which are generators that yield requests for steps and evaluations.

The driver answers the requests of one or more loops with the sessions of a stack. A stack is a set of runs that are
computed together.
"""

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
    """Request to open a session for a plan on an engine. The session answers the training loop's later requests."""

    engine: Engine
    plan: Plan

    def answer(self) -> Stack:
        """Open the session and return it as a stack of one run."""
        return Stack([self.engine.realize(self.plan).require_open()])


@dataclass(frozen=True)
class Step:
    """Request of a training loop to launch training steps, one for each input.

    The driver may launch fewer steps, but at least the first. Its answer is a list with a function for each launched
    step. The function waits for the step and returns its metrics.
    """

    inputs: Sequence[StepInput]


@dataclass(frozen=True)
class Evaluate:
    """Request to evaluate the model on the batches that `batches()` returns. The answer is (loss, metrics by name)."""

    batches: Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Pause:
    """Request that needs no answer. A loop yields it before waiting for the disk, so that other loops run first."""


T = TypeVar("T")
Request = Realize | Step | Evaluate | Pause
Requests = Generator[Request, Any, T]
Resume = Callable[[], Request]  # runs a loop up to its next request; raises StopIteration when it ends
Answer = Callable[[], Any]  # returns the value to send to a loop, or raises the exception to throw into it


def drive(loops: Sequence[Requests[T]], stack: Stack, starts: Sequence[Resume] = ()) -> list[T | Exception]:
    """Run all training loops to their ends; return for each loop its result, or the exception that ended it.

    Loop i uses session i of the stack. If the loops have begun already, `starts` holds for each loop a function that
    continues it.

    The driver works in rounds: it waits until every loop has made a request, and then answers. If some loops request an
    evaluation, only these requests are answered. Otherwise all loops that requested steps take equally many: the
    smallest number that any of them requested. An Exception ends only its own loop; any other BaseException, such as a
    second Ctrl-C, ends all loops.
    """
    ends: dict[int, T | Exception] = {}
    requests: dict[int, Request] = {}
    resumes: Mapping[int, Resume] = dict(enumerate(starts or [partial(next, loop) for loop in loops]))
    while resumes:
        for row, resume in resumes.items():
            try:
                requests[row] = resume()
            except StopIteration as end:
                ends[row] = end.value
            except Exception as error:
                ends[row] = error
        evals = {row: request.batches for row, request in requests.items() if isinstance(request, Evaluate)}
        answers = _evaluate(stack, evals) if evals else _begin_steps(stack, requests)
        for row in answers:
            del requests[row]
        resumes = {row: partial(_resume, loops[row], answers[row]) for row in sorted(answers)}
    return [ends[row] for row in range(len(loops))]


def bind_sessions(loops: Sequence[Requests[Any]], opened: Stack | Exception) -> tuple[Stack, Sequence[Resume]]:
    """Return the arguments `stack` and `starts` of `drive`, for training loops that have requested their sessions.

    `opened` is the stack of these sessions, or the exception raised when it was opened. `starts` has a function for
    each loop. The function continues the loop: it sends the loop its session, or throws the exception into it. After an
    exception, the returned stack is empty.
    """
    if isinstance(opened, Exception):
        return Stack([]), [partial(loop.throw, opened) for loop in loops]
    return opened, [partial(loop.send, session) for loop, session in zip(loops, opened.sessions, strict=True)]


@contextlib.contextmanager
def forward_interrupts(loops: Iterable[Requests[Any]]) -> Iterator[None]:
    """If an interrupt, such as Ctrl-C, is raised in the `with` block, throw it into each loop that has not ended."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            for loop in loops:
                with contextlib.suppress(StopIteration, type(error)):  # an ended loop raises it again
                    loop.throw(error)
        raise


def _evaluate(stack: Stack, evals: Mapping[int, Callable[[], Iterable[Batch]]]) -> Mapping[int, Answer]:
    def wait(row: int, loss: Callable[[], float]) -> tuple[float, Mapping[str, float]]:
        session = stack.sessions[row]
        scores = compute_scores(session.plan.model, session.logits, evals[row]())
        return loss(), {**scores, **session.metrics(evals[row]())}

    try:
        losses = stack.losses({row: batches() for row, batches in evals.items()})
    except Exception as error:
        return dict.fromkeys(evals, _raiser(error))
    return {row: partial(wait, row, losses[row]) for row in evals}


def _begin_steps(stack: Stack, requests: Mapping[int, Request]) -> Mapping[int, Answer]:
    """Launch the training steps that loops have requested, and return {index of the loop: answer} for all requests.

    The answer to a loop is a function. It returns a list of functions, one for each launched step, which wait for the
    step and return its metrics. If the launch failed, the answer raises the error.
    """
    steps = {row: request.inputs for row, request in sorted(requests.items()) if isinstance(request, Step)}
    count = min(map(len, steps.values()), default=0)
    try:
        launched = [stack.step({row: inputs[i] for row, inputs in steps.items()}) for i in range(count)]
    except Exception as error:
        return dict.fromkeys(requests, lambda: None) | dict.fromkeys(steps, _raiser(error))
    return {row: partial(list, [waits[row] for waits in launched] if row in steps else ()) for row in requests}


def _resume(loop: Requests[Any], answer: Answer) -> Request:
    resume: Resume
    try:
        resume = partial(loop.send, answer())
    except BaseException as error:
        resume = partial(loop.throw, error)
    return resume()


def _raiser(error: Exception) -> Answer:
    """Return a function that raises `error` with its original traceback at each call."""
    traceback = error.__traceback__

    def answer() -> NoReturn:
        raise error.with_traceback(traceback)

    return answer
