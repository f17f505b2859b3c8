"""Where the jobs of a sweep come from: one after another, and each may depend on those that have ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from toyexp.base.errors import UserError
from toyexp.base.formatting import short_path
from toyexp.base.terminal import print_line, show_status
from toyexp.sweeps.directory import UNFINISHED, Job, Status, SweepDir
from toyexp.sweeps.job_configs import JobConfigs, first_look, require_directories


class JobSource:
    """Jobs that are known from the start: every combination of values, or those that are left of them."""

    probe: Job | None = None  # that says where the sweep is, if there is no job yet
    description: str = ""  # how jobs are chosen, if that is not every combination

    def __init__(self, jobs: list[Job]):
        self.jobs = jobs  # so far
        self.samples: Sequence[Job] = jobs  # that show every value
        self._left = OrderedDict((job.number, job) for job in jobs)

    @property
    def total(self) -> int:
        """How many jobs there may be."""
        return len(self.jobs)

    def resume(self, jobs: Sequence[Job]) -> None:
        """Run only these of the jobs that there are."""
        self._left = OrderedDict((job.number, job) for job in jobs)

    def check(self, configs: JobConfigs, is_new: bool) -> Mapping[int, UserError]:
        """Return what is wrong with jobs, by their numbers; raise UserError for what is wrong with all of them."""
        new = [job for job in self._left.values() if job.directory is None]
        if not new:
            return {}
        show_status(f"checking the settings of {len(new)} jobs")
        wrong = first_look(new, configs)
        if is_new:
            require_directories(new, configs)
        return wrong

    def open(self, folder: SweepDir, is_new: bool) -> None:
        """Begin in a sweep's directory."""
        if is_new:
            many = "s" if len(self.jobs) > 1 else "" if self.jobs[0].overrides else "; no key has several values"
            print_line(f"sweep   {short_path(folder.path)}, {len(self.jobs)} job{many}")

    def peek(self) -> Job | None:
        """Return the next job, if it is known already."""
        return next(iter(self._left.values()), None)

    def next(self) -> Job | None:
        """Return the next job to run; None if there is no other."""
        return self._left.popitem(last=False)[1] if self._left else None

    def told(self, job: Job) -> None:
        """Learn how a job ended."""
        self._left.pop(job.number, None)

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
        """Return the jobs that are yet to run."""
        return [*self._left.values()]

    def standing(self) -> tuple[str, bool]:
        """Return how much is done, in words, and whether something is left."""
        done = sum(job.status == Status.COMPLETED for job in self.jobs)
        return f"{done} of {len(self.jobs)} jobs are completed", any(job.status in UNFINISHED for job in self.jobs)

    def summarise(self, folder: SweepDir) -> None:
        """Print and keep what the table does not show."""
