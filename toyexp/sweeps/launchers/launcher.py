"""The interface of launchers, which run the jobs of a sweep. It also divides the cores and GPUs among the jobs."""

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
from toyexp.sweeps.directory import Job, JobExit
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.forking import PLATFORMS, ForkServer, Start, spawn
from toyexp.sweeps.launchers.gpus import Gpus, visible_gpus
from toyexp.sweeps.launchers.job_process import Stop
from toyexp.sweeps.watch import Watch


class Resources(NamedTuple):
    """Number of jobs that run in parallel, and the cores, GPUs and processes that each of them uses.

    With sweep.launcher=stacked, a process trains several jobs. Then this is the number of parallel processes, and the
    cores and GPUs that each of them uses.
    """

    jobs: int
    cores: int  # 0: all
    gpus: int  # number of GPUs of the job that uses the most
    processes: int = 1  # number of processes of the job that uses the most
    stacks: int = 1  # number of stacks that share a device's memory


class Launcher(ABC):
    """Base class of launchers, which run the jobs of a sweep. The setting sweep.launcher selects a subclass by name."""

    name: ClassVar[str]
    takes_all: ClassVar[str] = ""  # verb for messages if all jobs run at once by default: "train"
    shares_gpus: ClassVar[bool] = False  # whether sweep.per_gpu applies
    shares_gpus_by: ClassVar[str] = ""  # text for messages: what to type instead of sweep.per_gpu
    is_local: ClassVar[bool] = True  # whether jobs run on this machine
    trains_stacks: ClassVar[bool] = False  # whether one process trains several jobs together
    _forks: ForkServer | None = None

    def __init__(self, settings: Sweep, jobs: Sequence[Job], total: int, configs: JobConfigs):
        """Divide the cores and GPUs of the machine among the jobs of a sweep.

        `total` is the number of jobs. `jobs` are some of them, chosen so that every value of every swept key occurs.
        """
        self.settings, self.samples, self.total, self.configs = settings, jobs, total, configs
        self.gpus = Gpus(visible_gpus())
        self.share = self.resources(jobs)

    @classmethod
    def check(cls, settings: Sweep) -> None:
        """Raise UserError if this launcher does not support the settings, and Unavailable if its package is missing."""
        if settings.jobs > 1 and cls.name == "serial":
            raise UserError(f"sweep.jobs={settings.jobs}: parallel jobs need sweep.launcher=processes")
        if settings.per_gpu and not cls.shares_gpus:
            launchers = f"sweep.launcher=processes or stacked{cls.shares_gpus_by}"
            raise UserError(f"sweep.per_gpu={settings.per_gpu}: applies to {launchers}")
        if cls.takes_all and not settings.jobs and settings.search in ("tpe", "cmaes"):
            advice = f"learns from earlier runs; set how many {cls.takes_all} at once: sweep.jobs=4"
            raise UserError(f"sweep.search={settings.search}: {advice}")
        cls.require()

    @classmethod
    def require(cls) -> None:
        """Raise Unavailable if the Python package of a cluster, which has the launcher's name, is missing or broken."""
        if not cls.is_local:
            install = f"pip install 'toyexp[{cls.name}]'"
            with prefix_unavailable(f"sweep.launcher={cls.name}"), require_package(cls.name, install):
                importlib.import_module(cls.name)

    @abstractmethod
    def run(self, jobs: Iterator[Job], watch: Watch) -> Iterator[tuple[Job, JobExit]]:
        """Run jobs, and yield each with its exit when it has ended.

        Take a job from the iterator `jobs` only when it can start, since a search chooses it by the results of earlier
        jobs.
        """

    def resources(self, jobs: Sequence[Job]) -> Resources:
        """Return how many jobs run at once, and the cores, GPUs and processes of each.

        Raise UserError if the machine cannot run any job.
        """
        return Resources(1, 0, 0)

    def limit(self) -> int:
        """Return how many jobs run at once."""
        return self.share.jobs

    @property
    def runs_singly(self) -> bool:
        """Whether jobs run one at a time, so that their output needs no job number."""
        return self.limit() == 1 and not self.trains_stacks

    @property
    def start(self) -> Start:
        """Function that starts a job's process, by forking if the fork server runs and otherwise by spawning."""
        return self._forks.start if self._forks else spawn

    def preload(self, words: Sequence[str], stop: Stop) -> None:
        """Start the fork server, if jobs run in their own processes here and this platform can fork them.

        The server imports the modules that jobs with the arguments `words` need. If the user stops the sweep (`stop`),
        the sweep no longer waits for these imports.
        """
        if self.is_local and self.settings.isolate and sys.platform in PLATFORMS:
            environment = {**os.environ, **core_variables(self.share.cores)}
            self._forks = ForkServer(environment, words, lambda: stop.is_requested, self.trains_stacks)

    def wait(self) -> None:
        """Wait until the fork server has imported what jobs need."""
        if self._forks:
            self._forks.wait()

    def connect(self) -> None:  # noqa: B027 - most launchers use no cluster
        """Join the cluster. Raise UserError if there is none."""

    def close(self) -> None:
        """Release resources of the launcher."""
        if self._forks:
            self._forks.close()

    def describe(self, at_once: int) -> str:
        """Return a phrase for a dry run that says how jobs run, such as "4 at once"."""
        return "one after another" if at_once == 1 else f"{at_once} at once"

    def caveat(self, at_once: int) -> str:
        """Return a phrase for a dry run that says why its time estimate may be wrong for `at_once` parallel jobs.

        Return "" if there is no reason.
        """
        if at_once > 1 and not self.share.cores:
            return "if the cluster starts that many at once, on machines like this one"
        cores = pluralise(self.share.cores, "core")
        return f"{cores} each; timed one at a time, they may be slower in parallel" if at_once > 1 else ""

    # -- shares of a machine -------------------------------------------------------------------------------------------

    def requested_resources(self, jobs: Sequence[Job], gpus: int) -> Resources:
        """Return the resources of sweep.jobs parallel jobs, or of all jobs at once if sweep.jobs is 0.

        The result assumes that each job uses as many processes and GPUs as the largest of `jobs`. `gpus` is the number
        of GPUs of the machine. It matters for jobs that use all GPUs and for engine=auto.
        """
        kinds = list(one_job_per_engine(jobs))
        processes = max((self.configs.processes(job) for job in kinds), default=1)
        most_gpus = max((self.configs.gpus(job, gpus) for job in kinds), default=0)
        return Resources(self.settings.jobs or self.total, 0, most_gpus, processes)

    def limit_to_machine(self, share: Resources) -> Resources:
        """Return a copy of `share`, with the number of parallel jobs and the cores of each job set to fit this machine.

        Jobs that need several GPUs never share a GPU. Jobs that need one GPU share it only if sweep.per_gpu or a large
        sweep.jobs asks for that.
        """
        settings, cores = self.settings, available_cores()
        at_once = self.gpus.capacity(share.gpus, self.per_gpu(share))
        limit = min(settings.jobs, max(self.total, 1)) or max(cores // share.processes, 1)
        if at_once and (share.gpus > 1 or settings.per_gpu or not settings.jobs):
            limit = min(limit, at_once)
        return share._replace(jobs=limit, cores=max(cores // limit, min(share.processes, cores)))

    def per_gpu(self, share: Resources) -> int:
        """Return how many jobs share a GPU. Raise UserError if sweep.per_gpu is set for jobs that need several GPUs."""
        if self.settings.per_gpu > 1 and share.gpus > 1:
            raise UserError(f"sweep.per_gpu={self.settings.per_gpu}: jobs with {share.gpus} GPUs each cannot share one")
        return max(self.settings.per_gpu, 1)


def one_job_per_engine(jobs: Sequence[Job]) -> Iterable[Job]:
    """Return one job for each engine in the sweep.

    Jobs with different experiment presets count as having different engines, because a preset may choose the engine.
    """
    kinds: dict[tuple[str, ...], Job] = {}
    for job in jobs:
        kinds.setdefault(tuple(w for w in job.overrides if w.startswith(("engine", "experiment"))), job)
    return kinds.values()
