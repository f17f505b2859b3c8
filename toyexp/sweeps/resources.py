"""What each job of a sweep has of this machine: how many run at once, and with how many cores and GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from toyexp.base.errors import UserError
from toyexp.base.threads import available_cores
from toyexp.sweeps.directory import Job
from toyexp.sweeps.launchers.gpus import Gpus, stacks_of, visible

if TYPE_CHECKING:
    from toyexp.config.top_level import Sweep
    from toyexp.sweeps.job_configs import Lookahead


AUTO = -1  # GPUs of a job whose engine is chosen when it begins


class Share(NamedTuple):
    """How many run at once, jobs or processes that train several, and what each of them has."""

    jobs: int
    cores: int  # 0: all there are
    gpus: int  # of the one that takes the most
    processes: int = 1  # of the one that is the most of them
    stacks: int = 1  # that share the memory of a device
    counts: Sequence[int | None] = ()  # GPUs of a job of each engine; None: all there are

    def gpus_of(self, there: int) -> int:
        """How many GPUs the job takes that takes the most, where there are so many; 0: as many as one asks for."""
        auto = min(there, 1)
        return max((there if n is None else auto if n == AUTO else n for n in self.counts), default=0)


def share_of(settings: Sweep, jobs: Sequence[Job], ahead: Lookahead, gpus: Gpus) -> Share:
    """Jobs that take GPUs do not share them, unless `sweep.per_gpu` or, of those of one GPU, `sweep.jobs` says so.

    A stack of small models waits for its process, which sees to one job after another, longer than for the GPU: where
    there are cores for it, several stacks share one.
    """
    launcher, cluster = settings.launcher, settings.submitit.cluster
    if launcher == "serial":
        return Share(1, 0, 0)
    here = launcher in ("joblib", "stacked") or (launcher == "ray" and not settings.ray.cluster())
    share = Share(settings.jobs or len(jobs), 0, 0, counts=[ahead.gpus(job, AUTO) for job in _of_each_engine(jobs)])
    most_gpus = share.gpus_of(len(visible()) if here else 0)
    most = max((ahead.processes(job) for job in _of_each_engine(jobs)), default=1)
    share = share._replace(gpus=most_gpus, processes=most)
    if launcher == "submitit" and (cluster == "slurm" or (cluster is None and shutil.which("srun"))):
        return share
    if launcher == "ray" and not here:
        return share
    if settings.per_gpu > 1 and most_gpus > 1:
        raise UserError(f"sweep.per_gpu={settings.per_gpu}: jobs of {most_gpus} GPUs have them for themselves")
    stacks = max(settings.per_gpu, 1)
    if launcher == "stacked" and most_gpus == 1 and not (settings.per_gpu or settings.jobs):
        stacks = stacks_of(len(jobs), gpus.at_once(1), available_cores())
    at_once = gpus.at_once(most_gpus, stacks)
    if launcher == "stacked":  # processes, each of which has stacks of its own
        if not at_once:  # a process for each core, or one for a GPU that is not counted
            asked = [ahead.cores(job) for job in _of_each_engine(jobs)]
            stacks = at_once = max(min(available_cores() // max(asked) if all(asked) else 1, len(jobs)), 1)
        return share._replace(jobs=at_once, cores=max(available_cores() // at_once, 1), stacks=stacks)
    limit = settings.jobs or max(available_cores() // most, 1)
    if settings.jobs and not settings.search:  # of a search these are not all
        limit = min(limit, max(len(jobs), 1))
    if at_once and (most_gpus > 1 or settings.per_gpu or not settings.jobs):
        limit = min(limit, at_once)
    cores = max(available_cores() // limit, min(most, available_cores()))  # where more were asked for at once
    return share._replace(jobs=limit, cores=cores)


def _of_each_engine(jobs: Sequence[Job]) -> Iterable[Job]:
    """A job of each engine, and of each setting of one."""
    kinds: dict[tuple[str, ...], Job] = {}
    for job in jobs:
        kinds.setdefault(tuple(w for w in job.overrides if w.startswith(("engine", "experiment"))), job)
    return kinds.values()
