"""Launcher that trains jobs in stacks: each process trains several jobs as one program."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from toyexp.base.threads import available_cores
from toyexp.config.top_level import PARTS
from toyexp.sweeps.combinations import JOBS_FILE, REPORTS, STACK
from toyexp.sweeps.directory import Job, JobExit
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.gpus import visible_gpus
from toyexp.sweeps.launchers.job_process import run_process
from toyexp.sweeps.launchers.launcher import Resources, one_job_per_engine
from toyexp.sweeps.launchers.processes import Processes, run_in_threads
from toyexp.sweeps.watch import Watch

# Parts whose settings rarely change the program (the operations and shapes of a step). Another name does change it.
NUMERIC_PARTS = ("optim", "recipe", "callbacks", "data")
FULL_STACK = 32  # number of jobs with small models at which a stack keeps its GPU as busy as its process's CPU core
MAX_STACKS_PER_GPU = 4  # default limit of stacks that share a GPU
MIN_STACK = 4  # minimum number of jobs with one program for which stacking is suggested
STEP_KEYS = ("batch_size", "optim.accumulate", "recipe.rank", "recipe.targets", "experiment")
Ends = Callable[[tuple[Job, JobExit]], None]  # receives how a job ended


class Stacks(Processes):
    """Launcher that gives several jobs to each process, which trains them together."""

    name = "stacked"
    takes_all = "train"
    trains_stacks = True

    def resources(self, jobs: Sequence[Job]) -> Resources:
        """Return how many processes train stacks at once, and the cores and GPUs of each.

        The process of a stack handles its jobs one after another, so with small models the GPU often waits. If there
        are enough cores, several processes therefore share a GPU.
        """
        share, cores = self.requested_resources(jobs, len(visible_gpus())), available_cores()
        stacks = self.per_gpu(share)
        if share.gpus == 1 and not (self.settings.per_gpu or self.settings.jobs):
            gpu_count = self.gpus.capacity(1) or 1
            stacks = max(min(MAX_STACKS_PER_GPU, self.total // gpu_count // FULL_STACK, cores // gpu_count // 2), 1)
        at_once = self.gpus.capacity(share.gpus, stacks)
        if not at_once:  # CPU: a process for each core, or one process for a GPU that CUDA does not list
            core_counts = [self.configs.cores(job) for job in one_job_per_engine(jobs)]
            stacks = at_once = max(min(cores // max(core_counts) if all(core_counts) else 1, self.total), 1)
        return share._replace(jobs=at_once, cores=max(cores // at_once, 1), stacks=stacks)

    def describe(self, at_once: int) -> str:
        return "in stacks of jobs with the same program"

    def caveat(self, at_once: int) -> str:
        return "timed one after another; the gain of stacks is measured when training starts"

    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, JobExit]]:
        """Train all jobs in stacks, and yield each with its exit when it has ended.

        A search with sweep.jobs=N trains N jobs, then chooses the next N by their results.
        """
        generation = (self.settings.search and self.settings.jobs) or None  # None: all jobs at once
        while batch := list(itertools.islice(jobs, generation)):
            parts = itertools.takewhile(lambda _: not watch.stop.is_requested, deal_jobs(batch, self.limit()))
            yield from run_in_threads(parts, partial(self._train_part, watch), self.limit())

    def _train_part(self, watch: Watch, part: Sequence[Job], hand_on: Ends) -> None:
        jobs = {job.number: job for job in part}
        while jobs and not watch.stop.is_requested:
            self._run_process(watch, jobs, hand_on)

    def _run_process(self, watch: Watch, jobs: dict[int, Job], hand_on: Ends) -> None:
        """Train jobs in one process. Remove each job from `jobs` when it ends, and call `hand_on` with it and its exit.

        If the process dies, the jobs that were training end with the error of the process. If no job was training, the
        job that the process prepared last ends with this error, or all jobs if it prepared none. Other jobs remain.
        """
        specs = [(job, watch.launch_spec(job)) for job in jobs.values()]
        first = specs[0][1]
        entries = [
            {"number": job.number, "overrides": job.overrides, "directory": str(spec.directory),
             "goes_on": spec.resumes, "environment": dict(spec.environment)}
            for job, spec in specs
        ]  # fmt: skip
        modules = self.configs.request.modules  # also those that only swept values of model.path name
        request = {
            "limit": self.settings.jobs, "shared_by": self.share.stacks, "modules": modules, "jobs": entries
        }  # fmt: skip
        all_jobs = {**jobs}  # a job may be reported as ended before its last lines are read
        started: set[int] = set()  # numbers of the jobs that train
        prepared: set[int] = set()  # number of the job that the process prepared last
        rest = b""
        with (
            self.gpus.reserve(self.share.gpus) as gpus,
            tempfile.TemporaryDirectory(prefix="toyexp-") as folder,
            _pipe(Path(folder, REPORTS)) as reports,
        ):
            Path(folder, JOBS_FILE).write_text(json.dumps(request))
            spec = replace(
                first, log=first.log.with_name(f"stack-{min(jobs)}.log"), start_args=watch.folder.spec.shared_args,
                is_stack=True, gpus=gpus, cores=self.share.cores, environment={STACK: folder},
            )  # fmt: skip

            def poll() -> None:
                nonlocal rest, prepared
                *complete_lines, rest = (rest + (reports.read() or b"")).split(b"\n")
                for report in complete_lines:
                    match json.loads(report):
                        case {"prepares": number}:
                            prepared = {number}
                        case {"begins": numbers}:
                            started.update(numbers)
                            watch.begin([jobs[number] for number in numbers])
                        case {"ended": number, "code": code, "error": error}:
                            started.discard(number)
                            hand_on((jobs.pop(number), JobExit(code, error)))

            def show(line: str, stream: IO[str]) -> None:
                poll()
                number = re.match(r"\[(\d+)\] ", line)
                job = all_jobs.get(int(number[1])) if number else None
                watch.hear(job, line.partition("] ")[2] if job else line, stream)

            ended = run_process(spec, watch.stop, show, poll, start=self.start)
            poll()
        if watch.stop.is_requested and not started:
            return
        ended = ended if ended.code else JobExit(1, "its process ended without reporting how the job ended")
        for number in sorted(started or prepared & jobs.keys() or jobs):
            hand_on((jobs.pop(number), ended))


def _pipe(path: Path) -> IO[bytes]:
    """Create a named pipe and open it for reading without waiting for a writer."""
    os.mkfifo(path)
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)


def deal_jobs(jobs: Sequence[Job], processes: int) -> list[list[Job]]:
    """Split jobs into parts. Each part is trained by its own process, and at most `processes` of these run at once.

    Jobs that probably have the same program are put into one part. The process decides which jobs of its part form a
    stack.
    """
    kinds = group_by_program(jobs)
    if processes == 1:
        return [[job for kind in kinds for job in kind]]
    parts = []
    for kind in kinds:
        share = -(-len(kind) // processes)
        parts += [kind[start : start + share] for start in range(0, len(kind), share)]
    return parts


def group_by_program(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs that probably have the same program, that is, a training step with the same operations and shapes.

    Only the overrides of the jobs are compared.
    """
    kinds: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        kinds.setdefault(tuple(filter(_changes_program, job.overrides)), []).append(job)
    return [*kinds.values()]


def _changes_program(word: str) -> bool:
    """Return True if an override probably changes the operations or shapes of a training step, not only its numbers."""
    key = word.partition("=")[0].lstrip("+~")
    part, _, setting = key.partition(".")
    return key in STEP_KEYS or (part in (*PARTS, "callbacks") and (not setting or part not in NUMERIC_PARTS))


def advice(jobs: Sequence[Job], configs: JobConfigs) -> str:
    """Return a hint that jobs could train together with sweep.launcher=stacked, or "" if they could not."""
    kinds = [kind for kind in group_by_program(jobs) if len(kind) >= MIN_STACK and configs.can_stack(kind[0])]
    if not kinds:
        return ""
    count = sum(map(len, kinds))
    which = f"these {count} jobs" if count == len(jobs) else f"{count} of these {len(jobs)} jobs"
    return f"{which} could train together: sweep.launcher=stacked"
