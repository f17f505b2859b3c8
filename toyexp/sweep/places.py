"""Where the jobs of a sweep are: each in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

from toyexp.base.errors import UserError
from toyexp.base.writing import require_below
from toyexp.sweep.directory import Job


class Places:
    """Whose directory each is."""

    def __init__(self, jobs: Iterable[Job]):
        self._owners: dict[PurePath, Job] = {}
        self._within: dict[PurePath, Job] = {}  # of a directory that is none of a job's, one of those below it
        for job in jobs:
            self._take(job)

    def give(self, job: Job, root: Path, directory: Path) -> None:
        """Lets a job have a directory of a sweep; UserError where that is another's, or not the sweep's to give."""
        if not directory.is_relative_to(root) or ".." in directory.relative_to(root).parts or directory == root:
            raise UserError(f"hydra.sweep.subdir leads out of the sweep's directory, to {directory}")
        require_below(root, directory)
        name = directory.relative_to(root)
        if owner := self._owners.get(name):
            raise UserError(f"hydra.sweep.subdir gives jobs {owner.number} and {job.number} one directory, {name}")
        for other in (self._within.get(name), *map(self._owners.get, name.parents)):
            if other:
                raise UserError(f"hydra.sweep.subdir puts jobs {other.number} and {job.number} one into the other")
        job.directory = str(name)
        self._take(job)

    def _take(self, job: Job) -> None:
        if job.directory is not None:
            name = PurePath(job.directory)
            self._owners[name] = job
            self._within.update(dict.fromkeys(name.parents, job))
