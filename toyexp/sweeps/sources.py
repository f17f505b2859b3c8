"""Sources of a sweep's jobs. A source yields jobs one by one. A search chooses a job by the results of earlier jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from toyexp.base.errors import UserError
from toyexp.base.formatting import pluralise, short_path
from toyexp.base.terminal import print_line, show_status
from toyexp.sweeps.directory import UNFINISHED, Job, Status, SweepDir
from toyexp.sweeps.job_configs import JobConfigs, check_values, require_distinct_directories


class JobSource:
    """Source of the jobs of a grid sweep: a job for each combination of the swept values, all known from the start."""

    probe: Job | None = None  # example whose configuration gives the sweep's directory before there are jobs
    description: str = ""  # how jobs are chosen; "": all combinations

    def __init__(self, jobs: list[Job]):
        self.jobs = jobs  # all jobs so far
        self.samples: Sequence[Job] = jobs  # jobs that together have every value of every swept key
        self._remaining = OrderedDict((job.number, job) for job in jobs)

    @property
    def total(self) -> int:
        """Maximum number of jobs."""
        return len(self.jobs)

    def resume(self, jobs: Sequence[Job]) -> None:
        """Set the jobs that are left to run."""
        self._remaining = OrderedDict((job.number, job) for job in jobs)

    def check(self, configs: JobConfigs, is_new: bool) -> Mapping[int, UserError]:
        """Check every value of every swept key. Return a dict that maps the number of an invalid job to its error.

        Raise UserError for an error that all jobs have.
        """
        new = [job for job in self._remaining.values() if job.directory is None]
        if not new:
            return {}
        show_status(f"checking the settings of {pluralise(len(new), 'job')}")
        errors = check_values(new, configs)
        if is_new:
            require_distinct_directories(new, configs)
        return errors

    def open(self, folder: SweepDir, is_new: bool) -> None:
        """Print the sweep's directory and number of jobs if the sweep is new."""
        if is_new:
            many = "s" if len(self.jobs) > 1 else "" if self.jobs[0].overrides else "; no key has several values"
            print_line(f"sweep   {short_path(folder.path)}, {len(self.jobs)} job{many}")

    def next(self) -> Job | None:
        """Return the next job to run; None if there is none."""
        return self._remaining.popitem(last=False)[1] if self._remaining else None

    def record_end(self, job: Job) -> None:
        """Record that a job has ended."""
        self._remaining.pop(job.number, None)

    def environment(self, job: Job) -> Mapping[str, str]:
        """Return extra environment variables for a job's process."""
        return {}

    def may_retry(self, job: Job) -> bool:
        """Return True if sweep.retry=true runs the job again."""
        return job.status in (Status.FAILED, Status.REFUSED)

    def all_jobs(self) -> list[Job]:
        """Return all jobs of the sweep; a search adds a placeholder for each job that it has not chosen yet."""
        return self.jobs

    def remaining_jobs(self) -> list[Job]:
        """Return the jobs that are left to run."""
        return [*self._remaining.values()]

    def progress(self) -> tuple[str, bool]:
        """Return a text such as "3 of 10 jobs are completed", and True if any job is left to run."""
        count = sum(job.status == Status.COMPLETED for job in self.jobs)
        return f"{count} of {len(self.jobs)} jobs are completed", any(job.status in UNFINISHED for job in self.jobs)

    def summarise(self, folder: SweepDir) -> None:
        """Print and save the results of a search. For other sweeps do nothing, because the table of jobs is enough."""
