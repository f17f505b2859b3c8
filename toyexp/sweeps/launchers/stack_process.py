"""The process that trains stacks. It receives jobs from the sweep, and trains jobs with the same program together.

The program of a job is its training step: the operations and the shapes of the tensors, but not the numbers in them.
"""

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
from toyexp.plugins.discovery import load
from toyexp.runner.one_run import PreparedRun, prepare_run
from toyexp.sweeps.combinations import JOBS_FILE, REPORTS, STACK
from toyexp.sweeps.directory import Job, JobExit, prepare_resume
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.search.pruning import pop_pruning_callback
from toyexp.training.driver import Realize, Requests, bind_sessions, drive, forward_interrupts
from toyexp.training.experiment import run_requests
from toyexp.training.memory import stack_bytes
from toyexp.training.resume import ResumeState
from toyexp.training.run_config import Prepared
from toyexp.training.verdict import print_result

log = logging.getLogger("toyexp")

POOL = 256  # jobs that are prepared before the first stack trains; also the largest stack
MEMORY_SHARE = 0.8  # share of the free memory that stacks may use
MIN_SECONDS = 5.0  # if all jobs one after another would take fewer seconds, no stack size is timed
SIZES = (4, 16, 64)  # stack sizes to try, besides all jobs that fit
WARM_UP, STEPS, SLICE, PATIENCE = 3, 3, 0.1, 3.0  # warm-up steps; minimum steps and seconds to time; maximum seconds
# Ratios of a size's time per job to the best so far: below GAIN it is the new best, above MAX_SLOWDOWN timing ends.
GAIN, MAX_SLOWDOWN = 0.95, 1.3
FAST_ENOUGH = 0.5  # ratio to a single job's time; if the largest stack is below it, a GPU tries no smaller one

_tag: ContextVar[str] = ContextVar("tag", default="")  # prefix of the current job's output lines


@dataclass(eq=False)
class Member:
    """A job that is checked and ready to train in a stack, together with other jobs."""

    number: int
    prepared: Prepared
    directory: Path
    resumed: ResumeState | None
    context: Context

    @property
    def steps(self) -> int:
        """Steps that are left to train."""
        return self.prepared.config.settings.steps - (self.resumed.checkpoint.step if self.resumed else 0)

    def stack_conflict(self, other: Member) -> str:
        """Return why this job and another cannot train in one program, or "" if they can."""
        first, second = self.prepared, other.prepared
        if first.config.engine != second.config.engine:
            return "their engines differ"
        return program_difference([first.plan, second.plan])


def train_stack(request: Request) -> int:
    """Train the jobs that the sweep gave to this process, and report to the sweep when each starts and ends.

    The environment variable STACK holds a directory with the list of jobs (JOBS_FILE) and a pipe for the reports
    (REPORTS). Return the exit code, which is 0 even if jobs failed.
    """
    folder = Path(os.environ.pop(STACK))
    work = json.loads((folder / JOBS_FILE).read_text(encoding="utf-8"))
    request = replace(request, registry=load(work["modules"]), modules=work["modules"])
    signals = CommonSignals()
    with (
        open(folder / REPORTS, "w", encoding="utf-8", buffering=1) as pipe,
        catch_signals(signals),
        share_open_data(),
        contextlib.redirect_stdout(cast("TextIO", TaggedStream(sys.stdout))),
        contextlib.redirect_stderr(cast("TextIO", TaggedStream(sys.stderr))),
    ):
        log.setLevel(logging.INFO)  # each run resets the level at its end, while others still train

        def tell(**fields: Any) -> None:
            with contextlib.suppress(OSError):  # the sweep has exited, and will signal this process
                pipe.write(json.dumps(fields) + "\n")

        return StackProcess(request, signals, tell, work["limit"], work["shared_by"]).train(work["jobs"])


@dataclass
class StackProcess:
    """Process of a sweep that trains the jobs given to it. It trains several jobs together, as a stack."""

    request: Request
    signals: CommonSignals
    tell: Callable[..., None]  # report an event to the sweep
    limit: int  # jobs in a stack; 0: automatic
    shared_by: int  # number of stacks that share the device's memory
    _sizes: list[tuple[Member, int]] = field(default_factory=list)  # chosen size, with one member of each program
    _printed_lines: set[str] = field(default_factory=set)

    def train(self, jobs: Sequence[Mapping[str, Any]]) -> int:
        """Train all jobs, but stop early at a signal. Return the exit code."""
        configs, remaining, pool = JobConfigs(self.request), deque(jobs), list[Member]()
        try:
            while (remaining or pool) and not self.signals.is_ending():
                while remaining and len(pool) < (self.limit or POOL) and not self.signals.is_ending():
                    pool += self._prepare(remaining.popleft(), configs)
                if pool and not self.signals.is_ending():
                    stack = self._next_stack(pool)
                    pool = [member for member in pool if member not in stack]
                    with restore_process_state():
                        self._train(stack)
        except Interrupted as second:
            return second.exit_code
        return 0

    # -- which jobs --

    def _prepare(self, request: Mapping[str, Any], configs: JobConfigs) -> Iterator[Member]:
        """Prepare a job for training and yield it. If that fails, report the error to the sweep and yield nothing."""
        job = Job(request["number"], request["overrides"])
        context, directory = copy_context(), Path(request["directory"])
        context.run(_tag.set, f"[{job.number}] ")
        self.tell(prepares=job.number)

        def make() -> PreparedRun:
            os.environ.update(request["environment"])
            can_resume = request["goes_on"] and prepare_resume(directory)
            return prepare_run(
                configs.run_config(job), directory, directory if can_resume else None, pop_pruning_callback()
            )

        try:
            with restore_process_state(), attribute_part_errors():
                yield Member(job.number, *context.run(make), context)
        except (Exception, SystemExit) as error:
            self._report_end(job.number, JobExit.from_error(error))

    def _next_stack(self, pool: Sequence[Member]) -> list[Member]:
        """Return the jobs of the next stack: the first job of the pool, and other jobs that have the same program."""
        first = pool[0]
        same_program = [member for member in pool if member is first or not first.stack_conflict(member)]
        if len(same_program) == 1:
            if len(pool) > 1:
                why = first.stack_conflict(pool[1])
                self._say_once(f"job {first.number} trains alone; the next job has a different program: {why}")
            return same_program
        size = next((size for member, size in self._sizes if not first.stack_conflict(member)), 0)
        if not size:
            size, reason = self._size(same_program)
            self._say_once(reason)
            self._sizes.append((first, size))
        parts = -(-len(same_program) // size)
        return same_program[: -(-len(same_program) // parts)]

    def _size(self, members: Sequence[Member]) -> tuple[int, str]:
        """Return how many of these jobs train together, and a line for the user that says why.

        All jobs have the same program.
        """
        prepared = [member.prepared for member in members]
        if why := prepared[0].config.engine.stack_conflict([run.plan for run in prepared]):
            return 1, f"jobs train one after another: {why}"
        try:
            return choose_size(prepared, sum(member.steps for member in members), self.limit, self.shared_by)
        except Exception as error:  # training will show which part caused it
            return 1, f"jobs train one after another: timing their steps failed ({error})"

    def _say_once(self, line: str) -> None:
        if line not in self._printed_lines:
            print_line(f"stack   {line}")
        self._printed_lines.add(line)

    # -- one stack --

    def _train(self, stack: Sequence[Member]) -> None:
        self.tell(begins=[member.number for member in stack])
        if len(stack) > 1:
            numbers = ", ".join(str(member.number) for member in stack)
            print_line(f"stack   {pluralise(len(stack), 'job')} train together: {numbers}")
        lives = [ContextLoop(self._run_member(member), member.context) for member in stack]
        requests = {}
        with forward_interrupts(lives):
            for life in lives:
                with contextlib.suppress(StopIteration):  # the run has ended already
                    requests[life] = cast("Realize", next(life))
            self._drive(requests)

    def _drive(self, requests: Mapping[ContextLoop, Realize]) -> None:
        """Train runs together as one stack. If the memory runs out, train one half of the runs and then the other half.

        Each run is a generator that has requested a session (its model on the device). `requests` maps each generator
        to its request.
        """
        lives = [*requests]
        if not lives:
            return
        stack_or_error: Stack | Exception
        try:
            if len(lives) == 1:
                stack_or_error = requests[lives[0]].answer()
            else:
                with convert_memory_errors():
                    plans = [request.plan for request in requests.values()]
                    stack_or_error = requests[lives[0]].engine.realize_stack(plans)
        except Exception as error:
            stack_or_error = error
        if len(lives) > 1 and isinstance(stack_or_error, RunFailed):
            half = (len(lives) + 1) // 2
            print_line(f"stack   {stack_or_error}: training in two stacks of {half} and {len(lives) - half} jobs")
            del stack_or_error  # its traceback keeps the device memory alive
            for part in (lives[:half], lives[half:]):
                self._drive({life: requests[life] for life in part})
            return
        drive(lives, *bind_sessions(lives, stack_or_error))

    def _run_member(self, member: Member) -> Requests[None]:
        """Run one job of a stack, and report to the sweep how it ended.

        Errors of the job are caught here, so that the other jobs of the stack continue.
        """
        try:
            with attribute_part_errors():
                signals = self.signals.add_run()
                result = yield from run_requests(member.prepared, member.directory, signals, print_line, member.resumed)
                print_result(result)
        except KeyboardInterrupt as error:
            self._report_end(member.number, JobExit.from_error(error))
            if self.signals.count() > 1:  # a second signal stops all runs, not only this one
                raise
        except (Exception, SystemExit) as error:
            log.debug("job failed", exc_info=error)
            self._report_end(member.number, JobExit.from_error(error))
        else:
            self._report_end(member.number, JobExit(0))

    def _report_end(self, number: int, ended: JobExit) -> None:
        sys.stdout.flush()
        self.tell(ended=number, code=ended.code, error=ended.error)


class ContextLoop(Generator[Any, Any, None]):
    """Wrapper of the generator that executes a run.

    It executes the generator's code in a contextvars.Context that belongs to this run.
    """

    def __init__(self, loop: Requests[None], context: Context):
        self._loop, self._context = loop, context

    def send(self, answer: Any) -> Any:
        """Send a value to the run's generator and return the request that it yields next."""
        return self._context.run(self._loop.send, answer)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the generator and return the value that it yields next.

        An `Interrupted` error is copied first, so that each run can add its own text to its copy.
        """
        errors = [Interrupted(e.exit_code - 128) if isinstance(e, Interrupted) else e for e in error]
        return self._context.run(partial(self._loop.throw, *errors))


class TaggedStream:
    """A stream that prefixes each line with the number of its job."""

    def __init__(self, stream: TextIO):
        self._stream, self._begins = stream, True

    def write(self, text: str) -> int:
        """Write lines, each with its prefix."""
        tag = _tag.get()
        for line in text.splitlines(keepends=True):
            self._stream.write(tag + line if self._begins else line)
            self._begins = line.endswith("\n")
        return len(text)

    def isatty(self) -> bool:
        """Return False: no progress bar is drawn."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- how many train together ------------------------------------------------------------------------------------------


def choose_size(prepared_runs: Sequence[Prepared], steps: int, limit: int, shared_by: int = 1) -> tuple[int, str]:
    """Return how many of these jobs train together, and a line for the user that says why.

    All jobs have the same program. `steps` is the number of steps that they have left to train, added over all jobs.
    `limit` is the maximum number of jobs that train together, or 0 for no maximum. Without a maximum, this function
    times several numbers of jobs and returns the fastest. It times nothing if there is a maximum, or if several stacks
    (`shared_by`) share a GPU and would disturb each other's measurements. Then it only checks the memory.
    """
    plan, engine = prepared_runs[0].plan, prepared_runs[0].config.engine
    job_bytes, free = engine.stack_bytes(plan) or stack_bytes(plan), engine.free_bytes()
    most = min(limit or len(prepared_runs), len(prepared_runs))
    trained = sum(t.size for t in plan.trainable)
    jobs = f"{pluralise(len(prepared_runs), 'job')} of one program"
    reason = f"{jobs}, {trained:,} trainable parameters, about {format_bytes(job_bytes)} each"
    if free is not None:
        frozen = 4 * sum(tensor.size for tensor in plan.tensors if not tensor.trainable)  # stored once for each stack
        free = max(free // shared_by - frozen, 0)
        reason += f" of {format_bytes(free)} free"
        if job_bytes * most > MEMORY_SHARE * free:
            most = max(int(MEMORY_SHARE * free / job_bytes), 1)
            reason += f": at most {most} at once"
    if limit or most == 1 or (shared_by > 1 and engine.on_gpu):
        return most, reason
    return _fastest_size(prepared_runs, steps, most, reason)


def _fastest_size(alike: Sequence[Prepared], steps: int, most: int, words: str) -> tuple[int, str]:
    """Time stacks of several sizes. Return the number of jobs with the shortest time per job, and a line for the user.

    `alike` are the jobs, which all have the same program. The result is at most `most`. `steps` is the number of steps
    that the jobs have left to train, added over all jobs. The line begins with `words` and says why this size was
    chosen. On a GPU the largest size is timed first, and chosen at once if it takes less than half the time per job of
    a single job.
    """
    blank, on_gpu = [_zero_weights(prepared) for prepared in alike[:most]], alike[0].config.engine.on_gpu
    alone = _time_step(blank[:1])
    if alone * steps < MIN_SECONDS:
        return most, words
    best, share = 1, alone
    sizes = [*(size for size in SIZES if size < most), most]
    for size in sizes[::-1] if on_gpu else sizes:
        try:
            with convert_memory_errors():
                now = _time_step(blank[:size]) / size
        except RunFailed:  # out of memory
            if on_gpu:
                continue
            break
        if now < GAIN * share:
            best, share = size, now
        elif now > MAX_SLOWDOWN * share and (on_gpu or size > SIZES[0]):
            break
        if on_gpu and best == most and share < FAST_ENOUGH * alone:
            break
    if best == 1:
        return 1, f"{words}; a stack is no faster here: they train one after another"
    took = f"a step of {best} takes {best * share * 1e3:,.4g} ms, of one {alone * 1e3:,.4g} ms"
    return best, f"{words}; {took}: {alone / share:.1f} times as fast"


def _zero_weights(prepared: Prepared) -> Prepared:
    """Return a copy of the run in which all weights start at 0, to time a few steps.

    Drawing or reading the real weights would take longer than these steps.
    """
    plan = prepared.plan
    return replace(prepared, plan=replace(plan, tensors=tuple(replace(t, values=Constant(0)) for t in plan.tensors)))


def _time_step(prepared_runs: Sequence[Prepared]) -> float:
    """Return the median duration, in seconds, of a step in which all these jobs train together.

    The steps train temporary copies of the models, which are dropped afterwards.
    """
    engine, plans = prepared_runs[0].config.engine, [prepared.plan for prepared in prepared_runs]
    stack = Stack([])
    try:
        stack = engine.realize_stack(plans) if len(plans) > 1 else Stack([engine.realize(plans[0]).require_open()])
        for session in stack.sessions:
            session.build()
        batches = [prepared.batches.batch(0) for prepared in prepared_runs]
        rates = [prepared.config.settings.lr for prepared in prepared_runs]
        numbers = [plan.numbers(0, lr, {}) for plan, lr in zip(plans, rates, strict=True)]
        durations: list[float] = []
        began = time.perf_counter()
        while len(durations) < WARM_UP + STEPS or math.fsum(durations[WARM_UP:]) < SLICE:
            before = time.perf_counter()
            inputs = [s.step_input(b, n) for s, b, n in zip(stack.sessions, batches, numbers, strict=True)]
            for wait in stack.step(dict(enumerate(inputs))).values():
                wait()
            durations.append(time.perf_counter() - before)
            if len(durations) > WARM_UP and time.perf_counter() - began > PATIENCE:
                break
        return statistics.median(durations[WARM_UP:])
    finally:
        for session in stack.sessions:
            session.close()
