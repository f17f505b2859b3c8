"""What runs the jobs of a sweep: the interface of a launcher, and the share of a machine that each job has."""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from toyexp.base.errors import UserError
from toyexp.base.formatting import pluralise
from toyexp.base.packages import prefix_unavailable, require_package
from toyexp.base.threads import available_cores, core_variables
from toyexp.config.top_level import Sweep
from toyexp.sweeps.directory import Ended, Job
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.forking import PLATFORMS, Forks, Start, spawned
from toyexp.sweeps.launchers.gpus import Gpus, visible
from toyexp.sweeps.launchers.job_process import Stop
from toyexp.sweeps.watch import Watch

AUTO = -1  # GPUs of a job whose engine is chosen when it begins


class Resources(NamedTuple):
    """How many run at once, jobs or processes that train several, and what each of them has."""

    jobs: int
    cores: int  # 0: all there are
    gpus: int  # of the one that takes the most
    processes: int = 1  # of the one that is the most of them
    stacks: int = 1  # that share the memory of a device
    counts: Sequence[int | None] = ()  # GPUs of a job of each engine; None: all there are

    def gpus_of(self, there: int) -> int:
        """Return the GPUs of the job that takes the most, of so many; 0: as many as one asks for."""
        auto = min(there, 1)
        return max((there if n is None else auto if n == AUTO else n for n in self.counts), default=0)


class Launcher(ABC):
    """Runs jobs. Each class is one value of sweep.launcher."""

    name: ClassVar[str]
    package: ClassVar[str] = ""  # that has to be installed
    has_several: ClassVar[bool] = True  # sweep.jobs applies
    takes_all: ClassVar[str] = ""  # without sweep.jobs all jobs run at once: what they do then
    shares_gpus: ClassVar[bool] = False  # sweep.per_gpu applies
    shares_gpus_by: ClassVar[str] = ""  # what to type in place of it
    is_forked: ClassVar[bool] = False  # jobs start from the fork server, where there is one
    is_stacked: ClassVar[bool] = False  # one process trains several jobs together
    _forks: Forks | None = None

    def __init__(self, settings: Sweep, jobs: Sequence[Job], total: int, configs: JobConfigs):
        """Divide the machine among `total` jobs, of which `jobs` show every setting."""
        self.settings, self.total, self.configs = settings, total, configs
        self.gpus = Gpus(visible())
        self.share = self.resources(jobs)

    @classmethod
    def check(cls, settings: Sweep) -> None:
        """Raise UserError for settings that cannot work with this launcher, Unavailable without its package."""
        if settings.jobs > 1 and not cls.has_several:
            raise UserError(f"sweep.jobs={settings.jobs}: runs jobs side by side with sweep.launcher=processes")
        if settings.per_gpu and not cls.shares_gpus:
            goes = f"goes with sweep.launcher=processes or stacked{cls.shares_gpus_by}"
            raise UserError(f"sweep.per_gpu={settings.per_gpu}: {goes}")
        if cls.takes_all and not settings.jobs and settings.search in ("tpe", "cmaes"):
            how = f"learns from the runs before; say how many {cls.takes_all} at once: sweep.jobs=4"
            raise UserError(f"sweep.search={settings.search}: {how}")
        cls.require()

    @classmethod
    def require(cls) -> None:
        """Raise Unavailable when the package that the launcher needs is missing or broken."""
        if cls.package:
            with (
                prefix_unavailable(f"sweep.launcher={cls.name}"),
                require_package(cls.package, f"pip install 'toyexp[{cls.package}]'"),
            ):
                importlib.import_module(cls.package)

    @abstractmethod
    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, Ended]]:
        """Run jobs; yield each as it ends. The next one may depend on how those before ended."""

    def resources(self, jobs: Sequence[Job]) -> Resources:
        """Return how many jobs run at once, and the share of the machine that each has; UserError if none fits."""
        return Resources(1, 0, 0)

    def limit(self) -> int:
        """Return how many jobs run at once."""
        return self.share.jobs

    @property
    def alone(self) -> bool:
        """Whether jobs print as if there were no other."""
        return self.limit() == 1 and not self.is_stacked

    @property
    def start(self) -> Start:
        """Return the function that starts the process of a job."""
        return self._forks.start if self._forks else spawned

    def preload(self, words: Sequence[str], stop: Stop) -> None:
        """Start the fork server, which imports what jobs of these words need."""
        if self.is_forked and sys.platform in PLATFORMS:
            environment = {**os.environ, **core_variables(self.share.cores)}
            self._forks = Forks(environment, words, lambda: stop.requested, self.is_stacked)

    def wait(self) -> None:
        """Wait until the fork server has loaded what jobs need."""
        if self._forks:
            self._forks.wait()

    def connect(self) -> None:  # noqa: B027 - most have no cluster
        """Join the cluster that jobs are handed to; UserError without one."""

    def close(self) -> None:
        """Release what the launcher holds."""
        if self._forks:
            self._forks.close()

    def describe(self, at_once: int) -> str:
        """Return how so many jobs run at once, for a dry run."""
        return "one after another" if at_once == 1 else f"{at_once} at once"

    def caveat(self, at_once: int) -> str:
        """Return what a dry run's estimate of the time leaves out."""
        if at_once > 1 and not self.share.cores:
            return "where the cluster starts so many at once, on machines like this one"
        cores = pluralise(self.share.cores, "core")
        return f"{cores} each; tried one at a time, they may be slower side by side" if at_once > 1 else ""

    # -- shares of a machine -------------------------------------------------------------------------------------------

    def demand(self, jobs: Sequence[Job], gpus: int) -> Resources:
        """Return what the largest job takes of so many `gpus`, for all jobs at once."""
        kinds = list(of_each_engine(jobs))
        processes = max((self.configs.processes(job) for job in kinds), default=1)
        counts = [self.configs.gpus(job, AUTO) for job in kinds]
        share = Resources(self.settings.jobs or self.total, 0, 0, processes, counts=counts)
        return share._replace(gpus=share.gpus_of(gpus))

    def on_this_machine(self, share: Resources) -> Resources:
        """Return the share of each job here: jobs of several GPUs have them for themselves, others unless told."""
        settings, cores = self.settings, available_cores()
        at_once = self.gpus.at_once(share.gpus, self.per_gpu(share))
        limit = settings.jobs or max(cores // share.processes, 1)
        if settings.jobs:
            limit = min(limit, max(self.total, 1))
        if at_once and (share.gpus > 1 or settings.per_gpu or not settings.jobs):
            limit = min(limit, at_once)
        return share._replace(jobs=limit, cores=max(cores // limit, min(share.processes, cores)))

    def per_gpu(self, share: Resources) -> int:
        """Return how many share a GPU if told; UserError for jobs of several GPUs."""
        if self.settings.per_gpu > 1 and share.gpus > 1:
            raise UserError(
                f"sweep.per_gpu={self.settings.per_gpu}: jobs of {share.gpus} GPUs have them for themselves"
            )
        return max(self.settings.per_gpu, 1)


def of_each_engine(jobs: Sequence[Job]) -> Iterable[Job]:
    """Return a job of each engine, and of each setting of one."""
    kinds: dict[tuple[str, ...], Job] = {}
    for job in jobs:
        kinds.setdefault(tuple(w for w in job.overrides if w.startswith(("engine", "experiment"))), job)
    return kinds.values()
