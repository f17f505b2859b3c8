"""The keys at the top of a configuration: how -m runs its jobs, and a list of all of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.base.validators import MAX_INT, require_choice, require_range
from toyexp.interfaces.run_preview import is_changed
from toyexp.plugins.settings import Setting, list_settings
from toyexp.training.settings import Settings

PARTS = ("model", "data", "recipe", "engine", "optim")
GROUPS = (*PARTS, "callbacks", "experiment")  # what is chosen by name
LAUNCHERS = ("serial", "processes", "stacked", "submitit", "ray")
ALIASES = {"joblib": "processes"}  # of launchers
MAX_JOBS = 100_000  # of a sweep
SEARCHES = ("random", "tpe", "cmaes", "grid")
PRUNERS = ("asha", "median")
SEARCH_KEYS = ("trials", "metric", "repeats", "prune")
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable for the cluster to use
LIMITS = {  # the least that is taken
    "submitit": {"timeout_min": 1, "gpus": 0, "cpus": 1, "mem_gb": 0, "requeues": 0},
    "ray": {"gpus": 0, "cpus": 1, "retries": 0},
}
TEXT_LIMITS = {  # of the numbers that a text is written by: the least and the most
    "--tokens": (1, 10**6), "--top-k": (0, 10**6), "--seed": (0, 2**63 - 1),
    "--temperature": (0.0, 100.0), "--top-p": (1e-9, 1.0), "--min-p": (0.0, 1.0),
}  # fmt: skip
SEARCH_IDENTITY = ("sweep.search", "sweep.metric", "sweep.repeats", "sweep.prune")  # fixed for a search
# Of Hydra's own settings, those that toyexp goes by; a sweep gives its jobs the last one.
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.searchpath", "hydra.job.num")


@dataclass
class Submitit:
    """What `sweep.launcher=submitit` asks a cluster for; null is the cluster's own default."""

    cluster: str | None = None  # slurm, local or debug; null: slurm where it is found, else local
    partition: str | None = None  # of Slurm
    timeout_min: int = 60  # minutes a job may take before it saves, and is queued again
    gpus: int = 0  # per job; 0: as many as its engine says that it takes
    cpus: int | None = None  # cores per job; null: the cluster's default
    mem_gb: float | None = None  # memory per job; null: the cluster's default
    requeues: int = 10  # how often a job whose time is up is queued again


@dataclass
class Ray:
    """Where `sweep.launcher=ray` runs jobs, and what each takes there."""

    address: str | None = None  # of a cluster: auto (that of this machine) | HOST:PORT; null: one for the sweep, here
    gpus: float = 0  # per job, 0.5: two share one; 0: as many as its engine says that it takes
    cpus: int | None = None  # cores per job; null: its share of the machines
    retries: int = 3  # how often a job that was lost with its node is begun again, from its checkpoint

    def cluster(self) -> str | None:
        """The address of a cluster that is there; None: one is started."""
        return self.address or os.environ.get(RAY_ADDRESS) or None


LAUNCHER_SETTINGS = {"submitit": Submitit, "ray": Ray}  # the launchers with settings of their own


@dataclass
class Sweep:
    """How -m runs its jobs. No number of a run depends on it, and conf/config.yaml shows it as it stands here."""

    launcher: str = "serial"  # serial | processes (several at once) | stacked (one program) | submitit | ray (clusters)
    jobs: int = 0  # at once; 0: 1 with serial, all with submitit, as many as pay with stacked, else as many as fit
    per_gpu: int = 0  # jobs, or stacks, that share a GPU; 0: one, of stacks up to four where there are many jobs
    isolate: bool = True  # each job in a process of its own; false: in this one, for many tiny jobs
    fail_fast: bool = False  # the first failure ends the sweep
    resume: str | None = None  # a sweep's directory: its interrupted and killed jobs go on
    retry: bool = False  # with resume: jobs that failed, too
    report: bool = True  # report.html in the sweep's directory: its runs side by side, as toyexp compare --html has it
    search: str | None = None  # random | tpe | cmaes | grid choose the points; null: every combination is run
    trials: int | None = None  # with search: how many points; null: all of a grid
    metric: str = "loss"  # with search: loss or ppl, which should fall; or a score of the model's that should rise
    repeats: int = 1  # with search: runs of each point, with seeds seed, seed+1, ...; their mean is its score
    prune: str | None = None  # with search: asha | median stop a run at an eval that is bad beside other points'
    submitit: Submitit = field(default_factory=Submitit)  # what a job asks the cluster for
    ray: Ray = field(default_factory=Ray)  # where the jobs run, and what each takes there

    def __post_init__(self) -> None:
        self.launcher = ALIASES.get(self.launcher, self.launcher)

    def check(self) -> None:
        """Raise UserError for settings that cannot work together; a launcher checks what is its own."""
        require_choice("sweep", self, launcher=LAUNCHERS)
        require_range("sweep", self, jobs="[0,inf)", per_gpu="[0,inf)")
        if self.retry and self.resume is None:
            raise UserError("sweep.retry=true: goes with sweep.resume=DIR")
        self._check_search()
        for launcher in LAUNCHER_SETTINGS:
            own = getattr(self, launcher)
            asked = [f.name for f in dataclasses.fields(own) if is_changed(own, f.name)]
            if asked and self.launcher != launcher:
                given = f"sweep.{launcher}.{asked[0]}={getattr(own, asked[0])}"
                raise UserError(f"{given}: goes with sweep.launcher={launcher}")
            limits = {name: f"[{low},{MAX_INT}]" for name, low in LIMITS[launcher].items()}
            require_range(f"sweep.{launcher}", own, **limits)
        if self.ray.gpus > 1 and self.ray.gpus % 1:
            raise UserError(f"sweep.ray.gpus={self.ray.gpus}: takes a whole number, or a share of one GPU: 0.5")

    def _check_search(self) -> None:
        words = {"search": SEARCHES, "prune": PRUNERS}
        require_choice("sweep", self, **{k: known for k, known in words.items() if getattr(self, k) is not None})
        require_range("sweep", self, trials=f"[1,{MAX_JOBS}]", repeats=f"[1,{MAX_JOBS}]")
        if self.search is None:
            for name in (name for name in SEARCH_KEYS if is_changed(self, name)):
                given = f"sweep.{name}={getattr(self, name)}"
                raise UserError(f"{given}: goes with a search, such as sweep.search=tpe sweep.trials=20")
            return
        if self.trials is None and self.search != "grid":
            raise UserError(f"sweep.search={self.search}: takes as many points as it is told to: sweep.trials=20")


@cache
def other_tools(kind: str) -> dict[str, str]:
    """Return the table of other tools' settings, commands, or options of generate."""
    import yaml  # deferred: only an error asks for it

    found: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("other_tools.yaml").read_text())
    return found[kind]


def translate_setting(key: str, value: str) -> str | None:
    """The setting that a key of another tool's stands for, wherever that has it: trainer.max_epochs=3."""
    last = key.rpartition(".")[2].lower()
    if last in ("direction", "directions", "mode") and not key.startswith(PARTS):
        return "sweep.metric=... (loss and ppl should fall, any other score should rise)"
    table = {theirs: ours for ours, names in other_tools("settings").items() for theirs in names.split()}
    said = value.strip("[]'\"").lower()
    ours = table.get(f"{last}={'false' if said in ('no', 'none', 'null', 'off', '0') else said}", table.get(last))
    return ours if ours is None or "=" in ours else f"{ours}={value}"


def top_level_settings() -> Iterator[tuple[str, Setting]]:
    """Every key that is no part's, by its whole name."""
    own = ((f"sweep.{launcher}.", cls) for launcher, cls in LAUNCHER_SETTINGS.items())
    for prefix, cls in (("", Settings), ("sweep.", Sweep), *own):
        yield from ((prefix + s.name, s) for s in list_settings(cls) if s.name not in LAUNCHER_SETTINGS)
