"""Jobs that train together: a process for each GPU or core, which makes stacks of the jobs that it is given."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

from toyexp.config.top_level import PARTS
from toyexp.sweeps.combinations import STACK
from toyexp.sweeps.directory import Ended, Job
from toyexp.sweeps.launchers.forking import Start, spawned
from toyexp.sweeps.launchers.processes import Order, Stop, run_process, side_by_side

if TYPE_CHECKING:
    from toyexp.sweeps.job_configs import Lookahead

WORTH_IT = 4  # jobs of one program
SAME = ("optim", "recipe", "callbacks", "data")  # parts whose settings, other than their names, are often numbers alone
OF_A_STEP = ("batch_size", "optim.accumulate", "recipe.rank", "recipe.targets", "experiment")
Ends = Callable[[tuple[Job, Ended]], None]  # hears how a job ended


@dataclass(eq=False)
class _Given:
    """Jobs that a process was given, and what it has said of them."""

    jobs: dict[int, Job]  # that have not ended, by their numbers
    begun: set[int] = field(default_factory=set)
    prepares: int | None = None  # the one that it looks at


@dataclass(frozen=True)
class Stacked:
    """Hands jobs to processes that train them together."""

    order: Callable[[Job], Order]  # of a job alone
    begin: Callable[[Sequence[Job]], None]  # these train from now on
    words: Sequence[str]  # what all jobs share
    limit: int  # jobs in a stack; 0: as many as pay
    shared_by: int  # stacks that a device's memory is for
    stop: Stop
    show: Callable[[Job | None, str, IO[str]], None]  # a line, and whose it is
    start: Start = spawned  # its processes

    def run(
        self, jobs: Sequence[Job], processes: int, gpus: Callable[[], AbstractContextManager[list[str]]]
    ) -> Iterator[tuple[Job, Ended]]:
        """Trains them all, or until a signal comes; each as it ends, and how. Each process has its own `gpus`."""

        def work(part: Sequence[Job], hand_on: Ends) -> None:
            with gpus() as own:
                self._until_ended(part, own, hand_on)

        parts = itertools.takewhile(lambda _: not self.stop.requested, dealt(jobs, processes))
        return side_by_side(parts, work, processes)

    def _until_ended(self, jobs: Sequence[Job], gpus: Sequence[str], hand_on: Ends) -> None:
        """Has a process train these jobs, and where that dies another one those that it had not begun."""
        given = _Given({job.number: job for job in jobs})
        while given.jobs and not self.stop.requested:
            ended = self._process(given, gpus, hand_on)
            if self.stop.requested and not given.begun:
                return
            looked_at = {number for number in given.jobs if number == given.prepares}
            for number in sorted(given.begun or looked_at or given.jobs):
                said = ended if ended.code else Ended(1, "its process ended without a word of it")
                hand_on((given.jobs.pop(number), said))
            given.begun, given.prepares = set(), None

    def _process(self, given: _Given, gpus: Sequence[str], hand_on: Ends) -> Ended:
        """One process, until it ends."""
        orders = [(job, self.order(job)) for job in given.jobs.values()]
        first = orders[0][1]
        entries = [
            {"number": job.number, "overrides": job.overrides, "directory": str(order.directory),
             "goes_on": order.goes_on, "environment": dict(order.environment)}
            for job, order in orders
        ]  # fmt: skip
        with tempfile.TemporaryFile("w+") as file, _Reports() as reports:
            json.dump({"limit": self.limit, "shared_by": self.shared_by, "jobs": entries}, file)
            file.flush()
            file.seek(0)
            log = first.log.with_name(f"stack-{min(given.jobs)}.log")
            files = (file.fileno(), reports.writing)
            order = replace(
                first, log=log, first=self.words, again=self.words, goes_on=False, several=True, gpus=gpus, files=files,
                environment={STACK: "1"},
            )  # fmt: skip

            def poll() -> None:
                for report in reports.new():
                    self._hear(report, given, hand_on)

            def show(line: str, stream: IO[str]) -> None:
                poll()
                number = re.match(r"\[(\d+)\] ", line)
                self.show(given.jobs.get(int(number[1])) if number else None, line, stream)

            ended = run_process(order, self.stop, show, poll, start=self.start)
            poll()
        return ended

    def _hear(self, report: dict[str, Any], given: _Given, hand_on: Ends) -> None:
        """What a process says became of its jobs."""
        match report:
            case {"prepares": number}:
                given.prepares = number
            case {"begins": numbers}:
                given.begun |= set(numbers)
                self.begin([given.jobs[number] for number in numbers])
            case {"ended": number, "code": code, "error": error}:
                given.begun.discard(number)
                hand_on((given.jobs.pop(number), Ended(code, error)))


class _Reports:
    """A pipe through which a process tells what becomes of its jobs, a line of JSON each."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._rest = b""

    def __enter__(self) -> _Reports:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)
        os.close(self.writing)

    def new(self) -> Iterator[dict[str, Any]]:
        """What came since the last call."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reading, 1 << 16):
                self._rest += chunk
        *whole, self._rest = self._rest.split(b"\n")
        for line in whole:
            yield json.loads(line)


def advice(jobs: Sequence[Job], ahead: Lookahead) -> str:
    """That jobs which are about to run one by one could train together, where that is worth it; else nothing."""
    kinds = [kind for kind in _kinds(jobs) if len(kind) >= WORTH_IT and ahead.could_be_stacked(kind[0])]
    if not kinds:
        return ""
    count = sum(map(len, kinds))
    which = f"these {count} jobs" if count == len(jobs) else f"{count} of these {len(jobs)} jobs"
    return f"{which} could train together: sweep.launcher=stacked"


def dealt(jobs: Sequence[Job], processes: int) -> list[list[Job]]:
    """The jobs of each process, and where there are more such parts than processes of those that come later.

    Those that are likely of one program stand together; which are, is seen once they are ready.
    """
    kinds = _kinds(jobs)
    if processes == 1:
        return [[job for kind in kinds for job in kind]]
    parts = []
    for kind in kinds:
        share = -(-len(kind) // processes)
        parts += [kind[start : start + share] for start in range(0, len(kind), share)]
    return parts


def _kinds(jobs: Sequence[Job]) -> list[list[Job]]:
    kinds: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        kinds.setdefault(tuple(filter(_shapes, job.overrides)), []).append(job)
    return [*kinds.values()]


def _shapes(word: str) -> bool:
    """Whether a setting is likely to change what a step computes, beyond its numbers."""
    key = word.partition("=")[0].lstrip("+~")
    part, _, own = key.partition(".")
    return key in OF_A_STEP or (part in (*PARTS, "callbacks") and (not own or part not in SAME))
