"""Where the jobs of a sweep come from: one after another, and each may depend on those that have ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from toyexp.base.errors import UserError
from toyexp.base.formatting import short
from toyexp.base.terminal import say, status
from toyexp.sweeps.directory import UNFINISHED, Job, Status, SweepDir
from toyexp.sweeps.job_configs import JobConfigs, first_look, require_directories

MANY = 100  # jobs that it takes a moment to check


class JobSource(ABC):
    """Gives a sweep its jobs."""

    jobs: list[Job]  # so far
    samples: Sequence[Job]  # that show every value
    probe: Job | None = None  # that says where the sweep is, before there is a job
    description: str = ""  # how jobs are chosen, where that is not every combination

    @property
    @abstractmethod
    def total(self) -> int:
        """How many jobs there may be."""

    @abstractmethod
    def check(self, configs: JobConfigs, is_new: bool, quiet: bool) -> Mapping[int, UserError]:
        """Return what is wrong with jobs, by their numbers; raise UserError for what is wrong with all of them."""

    @abstractmethod
    def open(self, folder: SweepDir, is_new: bool) -> None:
        """Begin in a sweep's directory."""

    @abstractmethod
    def peek(self) -> Job | None:
        """Return the next job, if it is known already."""

    @abstractmethod
    def next(self) -> Job | None:
        """Return the next job to run; None if there is no other."""

    def told(self, job: Job) -> None:  # noqa: B027 - most learn nothing
        """Learn how a job ended."""

    def resume(self, jobs: Sequence[Job]) -> None:  # noqa: B027
        """Run these jobs of a sweep again before any other."""

    def environment(self, job: Job) -> Mapping[str, str]:
        """Return variables for the process of a job alone."""
        return {}

    def may_retry(self, job: Job) -> bool:
        """Return whether sweep.retry=true runs a job again."""
        return job.status in (Status.FAILED, Status.REFUSED)

    def in_sight(self) -> list[Job]:
        """Return the jobs that there are and will be."""
        return self.jobs

    def foreseen(self) -> list[Job]:
        """Return the jobs that a dry run counts."""
        return self.in_sight()

    def standing(self) -> tuple[str, bool]:
        """Return how much is done, in words, and whether something is left."""
        done = sum(job.status == Status.COMPLETED for job in self.jobs)
        return f"{done} of {len(self.jobs)} jobs are completed", any(job.status in UNFINISHED for job in self.jobs)

    def summarise(self, folder: SweepDir) -> None:  # noqa: B027 - most have no more to say than the table
        """Print and keep what came out."""


class Combinations(JobSource):
    """Jobs that are known from the start: every combination of values, or what is left of them."""

    def __init__(self, jobs: list[Job]):
        self.jobs = self.samples = jobs
        self._left = OrderedDict((job.number, job) for job in jobs)

    @property
    def total(self) -> int:
        """See JobSource."""
        return len(self.jobs)

    def resume(self, jobs: Sequence[Job]) -> None:
        """See JobSource."""
        self._left = OrderedDict((job.number, job) for job in jobs)

    def check(self, configs: JobConfigs, is_new: bool, quiet: bool) -> Mapping[int, UserError]:
        """See JobSource."""
        new = [job for job in self._left.values() if job.directory is None]
        if not new:
            return {}
        if len(new) > MANY and not quiet:
            say(f"sweep   {len(new)} jobs; their settings are checked, each value once")
        status("checking the settings of the jobs")
        wrong = first_look(new, configs)
        if is_new:
            require_directories(new, configs)
        return wrong

    def open(self, folder: SweepDir, is_new: bool) -> None:
        """See JobSource."""
        if is_new:
            many = "s" if len(self.jobs) > 1 else "" if self.jobs[0].overrides else "; no key has several values"
            say(f"sweep   {short(folder.path)}, {len(self.jobs)} job{many}")

    def peek(self) -> Job | None:
        """See JobSource."""
        return next(iter(self._left.values()), None)

    def next(self) -> Job | None:
        """See JobSource."""
        return self._left.popitem(last=False)[1] if self._left else None

    def told(self, job: Job) -> None:
        """See JobSource."""
        self._left.pop(job.number, None)

    def foreseen(self) -> list[Job]:
        """See JobSource."""
        return [*self._left.values()]
