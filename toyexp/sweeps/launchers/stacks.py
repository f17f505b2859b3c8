"""Jobs that train together: a process for each GPU or core, which makes stacks of the jobs that it is given."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from toyexp.base.threads import available_cores
from toyexp.config.top_level import PARTS
from toyexp.sweeps.combinations import ORDERS, REPORTS, STACK
from toyexp.sweeps.directory import Ended, Job, shared_words
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.gpus import visible
from toyexp.sweeps.launchers.job_process import run_process
from toyexp.sweeps.launchers.launcher import Resources, of_each_engine
from toyexp.sweeps.launchers.processes import Processes, side_by_side
from toyexp.sweeps.watch import Watch

SAME = ("optim", "recipe", "callbacks", "data")  # parts whose settings, other than their names, are often numbers alone
FULL = 32  # jobs whose steps together keep a GPU as busy as their process keeps a core, for small models
STACKS = 4  # that share a GPU at most, unless told
WORTH_IT = 4  # jobs of one program that are worth training together
OF_A_STEP = ("batch_size", "optim.accumulate", "recipe.rank", "recipe.targets", "experiment")
Ends = Callable[[tuple[Job, Ended]], None]  # hears how a job ended


@dataclass(eq=False)
class _Given:
    """Jobs that a process was given, and what it has said of them."""

    jobs: dict[int, Job]  # that have not ended, by their numbers
    begun: set[int] = field(default_factory=set)
    prepares: int | None = None  # the one that it looks at


class Stacks(Processes):
    """Hands jobs to processes that train them together."""

    name = "stacked"
    takes_all = "train"
    is_stacked = True

    def resources(self, jobs: Sequence[Job]) -> Resources:
        """Return the share of each process.

        A stack of small models waits for its process, which sees to one job after another, longer than for the GPU:
        where there are cores for it, several stacks share one.
        """
        share, cores = self.demand(jobs, len(visible())), available_cores()
        stacks = self.per_gpu(share)
        if share.gpus == 1 and not (self.settings.per_gpu or self.settings.jobs):
            there = self.gpus.at_once(1) or 1
            stacks = max(min(STACKS, self.total // there // FULL, cores // there // 2), 1)
        at_once = self.gpus.at_once(share.gpus, stacks)
        if not at_once:  # a process for each core, or one for a GPU that is not counted
            asked = [self.configs.cores(job) for job in of_each_engine(jobs)]
            stacks = at_once = max(min(cores // max(asked) if all(asked) else 1, self.total), 1)
        return share._replace(jobs=at_once, cores=max(cores // at_once, 1), stacks=stacks)

    def describe(self, at_once: int) -> str:
        return "together as far as they are one program"

    def caveat(self, at_once: int) -> str:
        return "counted one after another; what training together saves is measured when it begins"

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        """Train jobs together, those of a search a generation at a time."""
        generation = (self.settings.search and self.settings.jobs) or None  # of points that learn of none: all
        while batch := list(itertools.islice(jobs, generation)):
            yield from self._trained(batch, watch)

    def _trained(self, jobs: Sequence[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        def work(part: Sequence[Job], hand_on: Ends) -> None:
            with self.gpus.some(self.share.gpus) as own:
                self._until_ended(part, own, watch, hand_on)

        parts = itertools.takewhile(lambda _: not watch.stop.requested, dealt(jobs, self.limit()))
        return side_by_side(parts, work, self.limit())

    def _until_ended(self, jobs: Sequence[Job], gpus: Sequence[str], watch: Watch, hand_on: Ends) -> None:
        """Train jobs in a process, and if it dies those that it had not begun in another one."""
        given = _Given({job.number: job for job in jobs})
        while given.jobs and not watch.stop.requested:
            ended = self._process(given, gpus, watch, hand_on)
            if watch.stop.requested and not given.begun:
                return
            looked_at = {number for number in given.jobs if number == given.prepares}
            for number in sorted(given.begun or looked_at or given.jobs):
                said = ended if ended.code else Ended(1, "its process ended without a word of it")
                hand_on((given.jobs.pop(number), said))
            given.begun, given.prepares = set(), None

    def _process(self, given: _Given, gpus: Sequence[str], watch: Watch, hand_on: Ends) -> Ended:
        """Run one process until it ends."""
        orders = [(job, watch.order(job)) for job in given.jobs.values()]
        first = orders[0][1]
        entries = [
            {"number": job.number, "overrides": job.overrides, "directory": str(order.directory),
             "goes_on": order.goes_on, "environment": dict(order.environment)}
            for job, order in orders
        ]  # fmt: skip
        asked = {"limit": self.settings.jobs, "shared_by": self.share.stacks, "jobs": entries}
        with tempfile.TemporaryDirectory(prefix="toyexp-") as folder, _pipe(Path(folder, REPORTS)) as reports:
            Path(folder, ORDERS).write_text(json.dumps(asked))
            words = shared_words(watch.folder.asked)
            log = first.log.with_name(f"stack-{min(given.jobs)}.log")
            order = replace(
                first, log=log, first=words, again=words, goes_on=False, several=True, gpus=gpus,
                cores=self.share.cores, environment={STACK: folder},
            )  # fmt: skip
            rest = b""

            def poll() -> None:
                nonlocal rest
                *whole, rest = (rest + (reports.read() or b"")).split(b"\n")
                for report in whole:
                    self._hear(json.loads(report), given, watch, hand_on)

            def show(line: str, stream: IO[str]) -> None:
                poll()
                number = re.match(r"\[(\d+)\] ", line)
                job = given.jobs.get(int(number[1])) if number else None
                watch.hear(job, line.partition("] ")[2] if job else line, stream)

            ended = run_process(order, watch.stop, show, poll, start=self.start)
            poll()
        return ended

    def _hear(self, report: dict[str, Any], given: _Given, watch: Watch, hand_on: Ends) -> None:
        """Take note of what a process says of its jobs."""
        match report:
            case {"prepares": number}:
                given.prepares = number
            case {"begins": numbers}:
                given.begun |= set(numbers)
                watch.begin([given.jobs[number] for number in numbers])
            case {"ended": number, "code": code, "error": error}:
                given.begun.discard(number)
                hand_on((given.jobs.pop(number), Ended(code, error)))


def _pipe(place: Path) -> IO[bytes]:
    """Make a pipe of this name, whose reader waits for nobody."""
    os.mkfifo(place)
    return open(os.open(place, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)


def dealt(jobs: Sequence[Job], processes: int) -> list[list[Job]]:
    """The jobs of each process, and where there are more such parts than processes of those that come later.

    Those that are likely of one program stand together; which are, is seen once they are ready.
    """
    kinds = programs(jobs)
    if processes == 1:
        return [[job for kind in kinds for job in kind]]
    parts = []
    for kind in kinds:
        share = -(-len(kind) // processes)
        parts += [kind[start : start + share] for start in range(0, len(kind), share)]
    return parts


def programs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs that are likely to be of one program, together."""
    kinds: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        kinds.setdefault(tuple(filter(_shapes, job.overrides)), []).append(job)
    return [*kinds.values()]


def _shapes(word: str) -> bool:
    """Return whether a setting is likely to change what a step computes, beyond its numbers."""
    key = word.partition("=")[0].lstrip("+~")
    part, _, own = key.partition(".")
    return key in OF_A_STEP or (part in (*PARTS, "callbacks") and (not own or part not in SAME))


def advice(jobs: Sequence[Job], configs: JobConfigs) -> str:
    """Return that jobs could train together, or nothing."""
    kinds = [kind for kind in programs(jobs) if len(kind) >= WORTH_IT and configs.could_be_stacked(kind[0])]
    if not kinds:
        return ""
    count = sum(map(len, kinds))
    which = f"these {count} jobs" if count == len(jobs) else f"{count} of these {len(jobs)} jobs"
    return f"{which} could train together: sweep.launcher=stacked"
