"""In the process of a stack: jobs that a sweep hands over, trained together as far as they are one program."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from toyexp.base.attribution import attribute_part_errors
from toyexp.base.errors import RunFailed
from toyexp.base.formatting import format_bytes, pluralise
from toyexp.base.memory import convert_memory_errors
from toyexp.base.process_state import restore_process_state
from toyexp.base.signals import CommonSignals, Interrupted, catch_signals
from toyexp.base.terminal import print_line
from toyexp.config.request import Request
from toyexp.interfaces.data import share_open_data
from toyexp.interfaces.stack import Stack, program_difference
from toyexp.interfaces.values import Constant
from toyexp.runner.one_run import PreparedRun, prepare_run
from toyexp.sweeps.combinations import ORDERS, REPORTS, STACK
from toyexp.sweeps.directory import Ended, Job, is_begun
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.search.pruning import taken
from toyexp.training.driver import Realize, Requests, bind_sessions, drive, forward_interrupts
from toyexp.training.experiment import run_requests
from toyexp.training.memory import stack_bytes
from toyexp.training.resume import Resumed
from toyexp.training.run_config import Prepared
from toyexp.training.verdict import print_result

log = logging.getLogger("toyexp")

POOL = 256  # jobs that are made ready before the first of them trains, and so the most in a stack
SHARE = 0.8  # of the memory that is free
SHORT = 5.0  # seconds of all steps one after another, for which nothing is tried
SIZES = (4, 16, 64)  # that are tried, and the most that fit
WARM_UP, STEPS, SLICE, PATIENCE = 3, 3, 0.1, 3.0  # steps not measured; steps and seconds that are at least; at most
GAIN, LOSS = 0.95, 1.3  # of a job's share of a step beside the best one's: what is better; what ends the trying
MUCH = 0.5  # of the share alone: a GPU on which the most have less is seldom faster with fewer, and they are not tried

_tag: ContextVar[str] = ContextVar("tag", default="")  # what a line begins with of the job that is at work


@dataclass(eq=False)
class Member:
    """A job that is ready to begin, and what is its own in this process."""

    number: int
    prepared: Prepared
    directory: Path
    resumed: Resumed | None
    context: Context

    @property
    def steps(self) -> int:
        """Those that are left."""
        return self.prepared.config.settings.steps - (self.resumed.checkpoint.step if self.resumed else 0)

    def joins(self, other: Member) -> str:
        """Why its steps and another's are not of one program, or nothing."""
        ours, theirs = self.prepared, other.prepared
        if ours.config.engine != theirs.config.engine:
            return "their engines differ"
        return program_difference([ours.plan, theirs.plan])


def train_stack(request: Request) -> int:
    """Train the jobs that ORDERS of this process's folder lists, and write what becomes of each into REPORTS there.

    Returns the exit code, which is 0 also where jobs failed.
    """
    folder = Path(os.environ.pop(STACK))
    asked = json.loads((folder / ORDERS).read_text(encoding="utf-8"))
    signals = CommonSignals()
    with (
        open(folder / REPORTS, "w", encoding="utf-8", buffering=1) as pipe,
        catch_signals(signals),
        share_open_data(),
        contextlib.redirect_stdout(cast("TextIO", Tagged(sys.stdout))),
        contextlib.redirect_stderr(cast("TextIO", Tagged(sys.stderr))),
    ):
        log.setLevel(logging.INFO)  # each run would put it back as it was when it began, and others go on

        def tell(**fields: Any) -> None:
            with contextlib.suppress(OSError):  # the sweep is gone, and a signal on its way
                pipe.write(json.dumps(fields) + "\n")

        return StackProcess(request, signals, tell, asked["limit"], asked["shared_by"]).train(asked["jobs"])


@dataclass
class StackProcess:
    """The jobs of this process, stack by stack."""

    request: Request
    signals: CommonSignals
    tell: Callable[..., None]  # the sweep
    limit: int  # jobs in a stack; 0: as many as fit, and as pay
    shared_by: int  # stacks that the device's memory is for
    _sizes: list[tuple[Member, int]] = field(default_factory=list)  # what was found, by a member of each program
    _told: set[str] = field(default_factory=set)  # reasons

    def train(self, jobs: Sequence[Mapping[str, Any]]) -> int:
        """Trains them all, or until a signal comes; returns the exit code."""
        ahead, left, pool = JobConfigs(self.request, {}), deque(jobs), list[Member]()
        try:
            while (left or pool) and not self.signals.is_ending():
                while left and len(pool) < (self.limit or POOL) and not self.signals.is_ending():
                    pool += self._made_ready(left.popleft(), ahead)
                if pool and not self.signals.is_ending():
                    stack = self._next_stack(pool)
                    pool = [member for member in pool if member not in stack]
                    with restore_process_state():
                        self._train(stack)
        except Interrupted as second:
            return second.exit_code
        return 0

    # -- which jobs --

    def _made_ready(self, order: Mapping[str, Any], ahead: JobConfigs) -> Iterator[Member]:
        """The job's run, checked, with nothing written yet; none where it cannot be, which is told."""
        job = Job(order["number"], order["overrides"])
        context, directory = copy_context(), Path(order["directory"])
        context.run(_tag.set, f"[{job.number}] ")
        self.tell(prepares=job.number)

        def make() -> PreparedRun:
            os.environ.update(order["environment"])
            begun = order["goes_on"] and is_begun(directory)
            return prepare_run(ahead.of_a_run(job), directory, directory if begun else None, taken())

        try:
            with restore_process_state(), attribute_part_errors():
                yield Member(job.number, *context.run(make), context)
        except (Exception, SystemExit) as error:
            self._ended(job.number, Ended.of(error))

    def _next_stack(self, pool: Sequence[Member]) -> list[Member]:
        """The first job, and those that train with it."""
        first = pool[0]
        alike = [member for member in pool if member is first or not first.joins(member)]
        if len(alike) == 1:
            if len(pool) > 1:
                self._once(f"job {first.number} trains alone, the next one is another program: {first.joins(pool[1])}")
            return alike
        size = next((size for known, size in self._sizes if not first.joins(known)), 0)
        if not size:
            size, words = self._size(alike)
            self._once(words)
            self._sizes.append((first, size))
        parts = -(-len(alike) // size)
        return alike[: -(-len(alike) // parts)]

    def _size(self, alike: Sequence[Member]) -> tuple[int, str]:
        """Return how many of these jobs of one program train together, and why, in words."""
        prepared = [member.prepared for member in alike]
        if why := prepared[0].config.engine.stack_conflict([one.plan for one in prepared]):
            return 1, f"jobs train one after another: {why}"
        try:
            return size_of(prepared, sum(member.steps for member in alike), self.limit, self.shared_by)
        except Exception as error:  # whose fault that is shows when they train
            return 1, f"jobs train one after another: their steps could not be tried ({error})"

    def _once(self, line: str) -> None:
        if line not in self._told:
            print_line(f"stack   {line}")
        self._told.add(line)

    # -- one stack --

    def _train(self, stack: Sequence[Member]) -> None:
        self.tell(begins=[member.number for member in stack])
        if len(stack) > 1:
            print_line(
                f"stack   {pluralise(len(stack), 'job')} train together: {', '.join(str(m.number) for m in stack)}"
            )
        lives = [Life(self._life(member), member.context) for member in stack]
        begun = {}
        with forward_interrupts(lives):
            for life in lives:
                with contextlib.suppress(StopIteration):  # it has ended already
                    begun[life] = cast("Realize", next(life))
            self._drive(begun)

    def _drive(self, begun: Mapping[Life, Realize]) -> None:
        """Answer runs that stand at their beginning; where memory is too short for all, by halves."""
        lives = [*begun]
        if not lives:
            return
        found: Stack | Exception
        try:
            if len(lives) == 1:
                found = begun[lives[0]].answer()
            else:
                with convert_memory_errors():
                    found = begun[lives[0]].engine.realize_stack([request.plan for request in begun.values()])
        except Exception as error:
            found = error
        if len(lives) > 1 and isinstance(found, RunFailed):
            half = (len(lives) + 1) // 2
            print_line(f"stack   {found}: {half} and {len(lives) - half} jobs train together")
            del found  # its traceback holds the memory that was taken
            for part in (lives[:half], lives[half:]):
                self._drive({life: begun[life] for life in part})
            return
        drive(lives, *bind_sessions(lives, found))

    def _life(self, member: Member) -> Requests[None]:
        """A job's run; whatever becomes of it is told, and touches no other."""
        try:
            with attribute_part_errors():
                signals = self.signals.add_run()
                result = yield from run_requests(member.prepared, member.directory, signals, print_line, member.resumed)
                print_result(result)
        except KeyboardInterrupt as error:
            self._ended(member.number, Ended(getattr(error, "exit_code", 130), str(error)))
            if self.signals.count() > 1:  # in the midst of this run; it is meant for all
                raise
        except (Exception, SystemExit) as error:
            log.debug("job failed", exc_info=error)
            self._ended(member.number, Ended.of(error))
        else:
            self._ended(member.number, Ended(0))

    def _ended(self, number: int, ended: Ended) -> None:
        sys.stdout.flush()
        self.tell(ended=number, code=ended.code, error=ended.error)


class Life(Generator[Any, Any, None]):
    """A run that goes on in a context of its own, wherever it is driven from."""

    def __init__(self, loop: Requests[None], context: Context):
        self._loop, self._context = loop, context

    def send(self, answer: Any) -> Any:
        """See Generator."""
        return self._context.run(self._loop.send, answer)

    def throw(self, *error: Any) -> Any:
        """See Generator; of a signal each run has its own exception, to which it adds words."""
        own = [Interrupted(e.exit_code - 128) if isinstance(e, Interrupted) else e for e in error]
        return self._context.run(partial(self._loop.throw, *own))


class Tagged:
    """A stream whose lines begin with which job they are of."""

    def __init__(self, stream: TextIO):
        self._stream, self._begins = stream, True

    def write(self, text: str) -> int:
        """Writes lines, each with its tag."""
        tag = _tag.get()
        for line in text.splitlines(keepends=True):
            self._stream.write(tag + line if self._begins else line)
            self._begins = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        """Return False: no bar is drawn."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- how many train together ------------------------------------------------------------------------------------------


def size_of(alike: Sequence[Prepared], steps: int, limit: int, shared_by: int = 1) -> tuple[int, str]:
    """Return how many jobs of one program, with so many steps in all, train together, and why, in words.

    With a `limit` nothing is tried but whether it fits.

    Several stacks share the memory; on one GPU they would measure one another: there nothing is tried either.
    """
    plan, engine = alike[0].plan, alike[0].config.engine
    each, free = engine.stack_bytes(plan) or stack_bytes(plan), engine.free_bytes()
    most = min(limit or len(alike), len(alike))
    trained = sum(t.size for t in plan.trainable)
    jobs = f"{pluralise(len(alike), 'job')} of one program"
    words = f"{jobs}, {trained:,} parameters that train, about {format_bytes(each)} each"
    if free is not None:
        frozen = 4 * sum(tensor.size for tensor in plan.tensors if not tensor.trainable)  # held once in each stack
        free = max(free // shared_by - frozen, 0)
        words += f" of {format_bytes(free)} that are free"
        if each * most > SHARE * free:
            most = max(int(SHARE * free / each), 1)
            words += f": at most {most} at once"
    if limit or most == 1 or (shared_by > 1 and engine.on_gpu):
        return most, words
    return _paying(alike, steps, most, words)


def _paying(alike: Sequence[Prepared], steps: int, most: int, words: str) -> tuple[int, str]:
    """Return the size whose jobs have the least share of a step each.

    On a GPU the largest comes first, and is taken at once if its jobs have less than `MUCH` of the share of one alone.
    """
    blank, on_gpu = [_blank(prepared) for prepared in alike[:most]], alike[0].config.engine.on_gpu
    alone = _seconds(blank[:1])
    if alone * steps < SHORT:
        return most, words
    best, share = 1, alone
    sizes = [*(size for size in SIZES if size < most), most]
    for size in sizes[::-1] if on_gpu else sizes:
        try:
            with convert_memory_errors():
                now = _seconds(blank[:size]) / size
        except RunFailed:  # that many do not fit
            if on_gpu:
                continue
            break
        if now < GAIN * share:
            best, share = size, now
        elif now > LOSS * share and (on_gpu or size > SIZES[0]):
            break
        if on_gpu and best == most and share < MUCH * alone:
            break
    if best == 1:
        return 1, f"{words}; together they are no faster here than alone: they train one after another"
    took = f"a step of {best} takes {best * share * 1e3:,.4g} ms, of one {alone * 1e3:,.4g} ms"
    return best, f"{words}; {took}: {alone / share:.1f} times as fast"


def _blank(prepared: Prepared) -> Prepared:
    """The same run with zeros in place of its weights: to draw or read those takes longer than a few steps."""
    plan = prepared.plan
    return replace(prepared, plan=replace(plan, tensors=tuple(replace(t, values=Constant(0)) for t in plan.tensors)))


def _seconds(some: Sequence[Prepared]) -> float:
    """Seconds of a step of these jobs, on weights that are dropped afterwards."""
    engine, plans = some[0].config.engine, [prepared.plan for prepared in some]
    stack = Stack([])
    try:
        stack = engine.realize_stack(plans) if len(plans) > 1 else Stack([engine.realize(plans[0]).require_open()])
        for session in stack.sessions:
            session.build()
        batches = [prepared.batches.batch(0) for prepared in some]
        numbers = [plan.numbers(0, prepared.config.settings.lr, {}) for plan, prepared in zip(plans, some, strict=True)]
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < WARM_UP + STEPS or math.fsum(taken[WARM_UP:]) < SLICE:
            before = time.perf_counter()
            given = [s.step_input(b, n) for s, b, n in zip(stack.sessions, batches, numbers, strict=True)]
            for wait in stack.step(dict(enumerate(given))).values():
                wait()
            taken.append(time.perf_counter() - before)
            if len(taken) > WARM_UP and time.perf_counter() - began > PATIENCE:
                break
        return statistics.median(taken[WARM_UP:])
    finally:
        for session in stack.sessions:
            session.close()
