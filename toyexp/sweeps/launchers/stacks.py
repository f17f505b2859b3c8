"""Launcher that trains jobs in stacks: each process trains several jobs as one program."""

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
from toyexp.sweeps.combinations import JOBS_FILE, REPORTS, STACK
from toyexp.sweeps.directory import Job, JobExit, shared_args
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


@dataclass(eq=False)
class _ProcessJobs:
    """Jobs that the sweep gave to one process, and which of them have started."""

    jobs: dict[int, Job]  # jobs that have not ended, by number
    started: set[int] = field(default_factory=set)
    prepares: int | None = None  # number of the job that the process is preparing


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
            yield from self._train_all(batch, watch)

    def _train_all(self, jobs: Sequence[Job], watch: Watch) -> Iterator[tuple[Job, JobExit]]:
        def work(part: Sequence[Job], hand_on: Ends) -> None:
            with self.gpus.reserve(self.share.gpus) as gpus:
                self._train_part(part, gpus, watch, hand_on)

        parts = itertools.takewhile(lambda _: not watch.stop.is_requested, deal_jobs(jobs, self.limit()))
        return run_in_threads(parts, work, self.limit())

    def _train_part(self, jobs: Sequence[Job], gpus: Sequence[str], watch: Watch, hand_on: Ends) -> None:
        """Train jobs in one process, and call `hand_on` with each job and its exit when the job has ended.

        If the process dies, the jobs that were training are recorded as ended with the error of the process. The jobs
        that had not started run in a new process.
        """
        process_jobs = _ProcessJobs({job.number: job for job in jobs})
        while process_jobs.jobs and not watch.stop.is_requested:
            ended = self._run_process(process_jobs, gpus, watch, hand_on)
            if watch.stop.is_requested and not process_jobs.started:
                return
            prepared_numbers = {number for number in process_jobs.jobs if number == process_jobs.prepares}
            for number in sorted(process_jobs.started or prepared_numbers or process_jobs.jobs):
                job_exit = ended if ended.code else JobExit(1, "its process ended without reporting how the job ended")
                hand_on((process_jobs.jobs.pop(number), job_exit))
            process_jobs.started, process_jobs.prepares = set(), None

    def _run_process(self, process_jobs: _ProcessJobs, gpus: Sequence[str], watch: Watch, hand_on: Ends) -> JobExit:
        specs = [(job, watch.launch_spec(job)) for job in process_jobs.jobs.values()]
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
        with tempfile.TemporaryDirectory(prefix="toyexp-") as folder, _pipe(Path(folder, REPORTS)) as reports:
            Path(folder, JOBS_FILE).write_text(json.dumps(request))
            args = shared_args(watch.folder.spec)
            log = first.log.with_name(f"stack-{min(process_jobs.jobs)}.log")
            spec = replace(
                first, log=log, start_args=args, resume_args=args, resumes=False, is_stack=True, gpus=gpus,
                cores=self.share.cores, environment={STACK: folder},
            )  # fmt: skip
            rest, jobs = b"", dict(process_jobs.jobs)  # a job may be reported as ended before its last lines are read

            def poll() -> None:
                nonlocal rest
                *complete_lines, rest = (rest + (reports.read() or b"")).split(b"\n")
                for report in complete_lines:
                    self._hear(json.loads(report), process_jobs, watch, hand_on)

            def show(line: str, stream: IO[str]) -> None:
                poll()
                number = re.match(r"\[(\d+)\] ", line)
                job = jobs.get(int(number[1])) if number else None
                watch.hear(job, line.partition("] ")[2] if job else line, stream)

            ended = run_process(spec, watch.stop, show, poll, start=self.start)
            poll()
        return ended

    def _hear(self, report: dict[str, Any], process_jobs: _ProcessJobs, watch: Watch, hand_on: Ends) -> None:
        match report:
            case {"prepares": number}:
                process_jobs.prepares = number
            case {"begins": numbers}:
                process_jobs.started |= set(numbers)
                watch.begin([process_jobs.jobs[number] for number in numbers])
            case {"ended": number, "code": code, "error": error}:
                process_jobs.started.discard(number)
                hand_on((process_jobs.jobs.pop(number), JobExit(code, error)))


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
