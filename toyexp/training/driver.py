"""What a run asks for, and who answers it: one run from one session, or several from those of a stack.

Who takes steps ahead is another driver and no other loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from toyexp.interfaces.dataset import Batch
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import scores_of
from toyexp.interfaces.plan import Plan
from toyexp.interfaces.session import Session, StepMetrics


@dataclass(frozen=True)
class Realize:
    """Asks for an open session of a plan, which answers all that is asked for later."""

    engine: Engine
    plan: Plan

    def answer(self) -> Session:
        """Opens one of its own."""
        return self.engine.realize(self.plan).opened()


@dataclass(frozen=True)
class Step:
    """Asks for one training step to begin; the answer waits for its StepMetrics when it is called.

    Whoever can take several at once may begin the first of those `behind` it too, and answers with `Begun`.
    """

    batch: Batch
    numbers: Sequence[np.ndarray]  # of `plan.numbers`
    behind: Sequence[tuple[Batch, Sequence[np.ndarray]]] = ()

    def answer(self, session: Session) -> Callable[[], StepMetrics]:
        """Launches it."""
        return session.launch(self.batch, self.numbers)


@dataclass(frozen=True)
class Begun:
    """So many steps are under way, and what waits for all of them."""

    count: int
    wait: Callable[[], Sequence[StepMetrics]]


@dataclass(frozen=True)
class Evaluate:
    """Asks for the loss and the model's scores on the batches that `batches()` gives, without a change."""

    batches: Callable[[], Iterable[Batch]]

    def launch(self, session: Session) -> Callable[[], tuple[float, Mapping[str, float]]]:
        """Begins to compute them; what it returns waits for the loss, and computes the scores."""
        loss = session.launch_evaluation(self.batches())
        return lambda: (loss(), scores_of(session.plan.model, session.logits, self.batches()))

    def answer(self, session: Session) -> tuple[float, Mapping[str, float]]:
        """Computes them."""
        return self.launch(session)()


@dataclass(frozen=True)
class Rest:
    """Asks for nothing: what comes next may wait for the disk, and other runs may have something to give it first."""

    def answer(self, session: Session) -> None:
        """Nothing."""


T = TypeVar("T")
Asks = Generator[Realize | Step | Evaluate | Rest, Any, T]


def drive(loop: Asks[T], session: Session | None = None) -> T:
    """Answers a loop until it ends, from a session or from the one that it asks for first.

    What an answer raises, and a signal in between, is raised where the loop asked for it.
    """
    go_on: GoOn = partial(next, loop)
    while True:
        try:
            request = go_on()
            if isinstance(request, Realize):
                session = request.answer()
                go_on = partial(loop.send, session)
            else:
                assert session is not None
                go_on = _answered(loop, request, session)
        except BaseException as error:
            if getgeneratorstate(loop) != GEN_CLOSED:  # it was not the loop that raised
                go_on = partial(loop.throw, error)
            elif isinstance(error, StopIteration):
                result: T = error.value
                return result
            else:
                raise


def drive_together(
    loops: Sequence[Asks[T]], sessions: Sequence[Session], begun: Sequence[GoOn] = ()
) -> list[T | Exception]:
    """Answers several loops until the last one ends, each from its session; how each ended, or what it raised.

    `begun` has loops go on that were begun already. A round is a step of each loop that goes on: all are launched
    before the first is waited for, so that sessions of a stack take them as one; so are the evaluations that loops ask
    for in a round. Of loops that ask for several steps, each has as many taken as every other one asks for. What a loop
    raises ends no other, but for what is no Exception, such as a second signal.
    """
    ends: dict[int, T | Exception] = {}

    def asked(going: Mapping[int, GoOn]) -> dict[int, Step | Evaluate | Rest]:
        """What each loop asks for next, of those that do not end."""
        requests: dict[int, Step | Evaluate | Rest] = {}
        for i, go_on in going.items():
            try:
                request = go_on()
                assert not isinstance(request, Realize)
                requests[i] = request
            except StopIteration as end:
                ends[i] = end.value
            except Exception as error:
                ends[i] = error
        return requests

    going: dict[int, GoOn] = dict(enumerate(begun or [partial(next, loop) for loop in loops]))
    while going:
        requests = asked(going)
        while evals := {i: _launched(r, sessions[i]) for i, r in requests.items() if isinstance(r, Evaluate)}:
            requests = {i: r for i, r in requests.items() if i not in evals}
            requests |= asked({i: _sent(loops[i], wait) for i, wait in evals.items()})
        behind = min((len(request.behind) for request in requests.values() if isinstance(request, Step)), default=0)
        going = {i: _answered(loops[i], requests[i], sessions[i], behind) for i in sorted(requests)}
        for i, request in requests.items():
            if isinstance(request, Step):  # a device has work then while the loops look at the step before
                sessions[i].all_launched()
    return [ends[i] for i in range(len(loops))]


# Has a loop go on to what it asks for next; StopIteration where it ends.
GoOn = Callable[[], Realize | Step | Evaluate | Rest]


def _answered(loop: Asks[Any], request: Step | Evaluate | Rest, session: Session, behind: int = 0) -> GoOn:
    """Answers a request, a step with so many of those behind it; what it gives hands the answer to the loop."""
    if behind and isinstance(request, Step):
        steps = [(request.batch, request.numbers), *request.behind[:behind]]
        return _sent(loop, lambda: Begun(len(steps), session.launch_several(steps)))
    return _sent(loop, lambda: request.answer(session))


def _sent(loop: Asks[Any], answer: Callable[[], Any]) -> GoOn:
    """Works an answer out, or what it raises; what it gives hands that to the loop."""
    try:
        return partial(loop.send, answer())
    except BaseException as error:
        return partial(_told, loop, error, error.__traceback__)


def _told(loop: Asks[Any], error: BaseException, where: TracebackType | None) -> Any:
    """Raises it where the loop asked, as it was raised: without the ways to other loops that were told of it too."""
    return loop.throw(error.with_traceback(where))


def _launched(request: Evaluate, session: Session) -> Callable[[], Any]:
    """What waits for an evaluation that begins here, and raises what that has raised."""
    try:
        return request.launch(session)
    except BaseException as error:
        return partial(_raised, error)


def _raised(error: BaseException) -> NoReturn:
    raise error
