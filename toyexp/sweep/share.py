"""What each job of a sweep has of this machine: how many run at once, and with how many cores and GPUs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from toyexp.base.threads import available_cores
from toyexp.sweep.directory import Job
from toyexp.sweep.gpus import Gpus, visible

if TYPE_CHECKING:
    from toyexp.config.top_level import Sweep
    from toyexp.sweep.lookahead import Lookahead


class Share(NamedTuple):
    """How many run at once, jobs or processes that train several, and what each of them has."""

    jobs: int
    cores: int  # 0: all there are
    gpus: int  # of the one that takes the most


def share_of(settings: Sweep, jobs: Sequence[Job], ahead: Lookahead, gpus: Gpus) -> Share:
    """Jobs that take GPUs do not share them; those of one GPU do where `sweep.jobs` says that more are at once."""
    launcher, cluster = settings.launcher, settings.submitit.cluster
    if launcher == "serial":
        return Share(1, 0, 0)
    most_gpus = _takes_gpus(settings, jobs, ahead)
    if launcher == "submitit" and (cluster == "slurm" or (cluster is None and shutil.which("srun"))):
        return Share(settings.jobs or len(jobs), 0, most_gpus)
    at_once = gpus.at_once(most_gpus)
    if launcher == "stacked":  # which has a process for each device
        return Share(max(at_once, 1), max(available_cores() // max(at_once, 1), 1), most_gpus)
    most = max((ahead.processes(job) for job in _of_each_engine(jobs)), default=1)
    limit = settings.jobs or max(available_cores() // most, 1)
    if at_once and (most_gpus > 1 or not settings.jobs):
        limit = min(limit, at_once)
    cores = max(available_cores() // limit, min(most, available_cores()))  # where more were asked for at once
    return Share(limit, cores, most_gpus)


def _takes_gpus(settings: Sweep, jobs: Sequence[Job], ahead: Lookahead) -> int:
    """How many GPUs the job takes that takes the most, as far as that is known before one runs."""
    here = settings.launcher in ("joblib", "stacked")
    counts = [ahead.gpus(job, auto=1 if here else 0) for job in _of_each_engine(jobs)]
    everything = len(visible()) if here else 0  # a cluster has as many as it is asked for
    return max((everything if count is None else count for count in counts), default=0)


def _of_each_engine(jobs: Sequence[Job]) -> Iterable[Job]:
    """A job of each engine, and of each setting of one."""
    kinds: dict[tuple[str, ...], Job] = {}
    for job in jobs:
        kinds.setdefault(tuple(w for w in job.overrides if w.startswith(("engine", "experiment"))), job)
    return kinds.values()
