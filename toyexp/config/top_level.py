"""Top-level configuration keys: settings of sweeps, their limits, and the names that other tools give to settings."""

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

PARTS = ("model", "data", "recipe", "engine", "optim", "objective")
GROUPS = (*PARTS, "callbacks", "experiment")  # config groups
LAUNCHERS = ("serial", "processes", "stacked", "submitit", "ray")
ALIASES = {"joblib": "processes"}  # other names of launchers
MAX_JOBS = 100_000  # per sweep
SEARCHES = ("random", "tpe", "cmaes", "grid")
PRUNERS = ("asha", "median")
SEARCH_KEYS = ("trials", "metric", "repeats", "prune")
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable for the cluster to use
LIMITS = {  # minimum values
    "submitit": {"timeout_min": 1, "gpus": 0, "cpus": 1, "mem_gb": 0, "requeues": 0},
    "ray": {"gpus": 0, "cpus": 1, "retries": 0},
}
TEXT_LIMITS = {  # minimum and maximum of the options of text generation
    "--tokens": (1, 10**6), "--top-k": (0, 10**6), "--seed": (0, 2**63 - 1),
    "--temperature": (0.0, 100.0), "--top-p": (1e-9, 1.0), "--min-p": (0.0, 1.0),
}  # fmt: skip
SEARCH_IDENTITY = ("sweep.search", "sweep.metric", "sweep.repeats", "sweep.prune")  # a resumed search keeps these
# The settings of Hydra that toyexp reads. A sweep sets hydra.job.num for each job.
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.searchpath", "hydra.job.num")


@dataclass
class Submitit:
    """Resources that `sweep.launcher=submitit` requests from the cluster."""

    cluster: str | None = None  # slurm | local (processes) | debug (this process); null: slurm if installed, else local
    partition: str | None = None  # Slurm partition; null: the cluster's default
    timeout_min: int = 60  # time limit of a job in minutes; at the limit it saves a checkpoint and is queued again
    gpus: int = 0  # GPUs per job; 0: the number that the engine uses
    cpus: int | None = None  # CPU cores per job; null: the cluster's default
    mem_gb: float | None = None  # memory per job in GB; null: the cluster's default
    requeues: int = 10  # maximum number of times that a job is queued again after its time limit


@dataclass
class Ray:
    """Ray cluster that `sweep.launcher=ray` uses, and resources of each job."""

    address: str | None = None  # Ray cluster: auto (the one running here) | HOST:PORT; null: $RAY_ADDRESS, or start one
    gpus: float = 0  # GPUs per job (0.5: two jobs share one); 0: the number that the engine uses
    cpus: int | None = None  # CPU cores per job; null: an equal share of the machines' cores
    retries: int = 3  # maximum number of times that a job is restarted from its checkpoint after its node failed

    def cluster(self) -> str | None:
        """Return the address of the running cluster to use; None to start a new one."""
        return self.address or os.environ.get(RAY_ADDRESS) or None


LAUNCHER_SETTINGS = {"submitit": Submitit, "ray": Ray}


@dataclass
class Sweep:
    """Settings of a sweep (-m). They do not affect the results of a run. conf/config.yaml repeats these comments."""

    launcher: str = "serial"  # how jobs run: serial | processes | stacked (as one program) | submitit (Slurm) | ray
    jobs: int = 0  # maximum number of parallel jobs; 0: the launcher chooses
    per_gpu: int = 0  # jobs (or with launcher=stacked: stacks) that share a GPU; 0: automatic (1 job, 1 to 4 stacks)
    isolate: bool = True  # run each job in its own process; false: all jobs in this process (faster for tiny jobs)
    fail_fast: bool = False  # stop the sweep at the first failed job
    resume: str | None = None  # directory of a sweep to resume: runs its waiting, interrupted and killed jobs
    retry: bool = False  # with sweep.resume: also rerun failed and rejected jobs
    verbose: bool = False  # print everything that jobs print; false: two lines per job, the rest is in logs/
    report: bool = True  # write report.html (as toyexp compare --html does) into the sweep's directory
    search: str | None = None  # method that chooses trials: random | tpe | cmaes | grid; null: run all combinations
    trials: int | None = None  # number of trials of a search; null: all, which only sweep.search=grid allows
    metric: str = "loss"  # held-out metric that a search optimises: minimises loss, ppl and kl, maximises any other
    repeats: int = 1  # runs per trial, with the seeds seed, seed+1, ...; a search compares means of the metric
    prune: str | None = None  # method that stops poor trials early: asha | median; null: trials are never stopped
    submitit: Submitit = field(default_factory=Submitit)  # resources of a job on a cluster
    ray: Ray = field(default_factory=Ray)  # Ray cluster, and resources of a job

    def __post_init__(self) -> None:
        self.launcher = ALIASES.get(self.launcher, self.launcher)

    def check(self) -> None:
        """Raise UserError for invalid or contradictory settings. Each launcher also checks its own requirements."""
        require_choice("sweep", self, launcher=LAUNCHERS)
        require_range("sweep", self, jobs="[0,inf)", per_gpu="[0,inf)")
        if self.retry and self.resume is None:
            raise UserError("sweep.retry=true: only has an effect with sweep.resume=DIR")
        self._check_search()
        for launcher in LAUNCHER_SETTINGS:
            resources = getattr(self, launcher)
            changed = [f.name for f in dataclasses.fields(resources) if is_changed(resources, f.name)]
            if changed and self.launcher != launcher:
                setting = f"sweep.{launcher}.{changed[0]}={getattr(resources, changed[0])}"
                raise UserError(f"{setting}: only has an effect with sweep.launcher={launcher}")
            limits = {name: f"[{low},{MAX_INT}]" for name, low in LIMITS[launcher].items()}
            require_range(f"sweep.{launcher}", resources, **limits)
        if self.ray.gpus > 1 and self.ray.gpus % 1:
            raise UserError(f"sweep.ray.gpus={self.ray.gpus}: must be a whole number, or a fraction such as 0.5")

    def _check_search(self) -> None:
        words = {"search": SEARCHES, "prune": PRUNERS}
        require_choice("sweep", self, **{k: allowed for k, allowed in words.items() if getattr(self, k) is not None})
        require_range("sweep", self, trials=f"[1,{MAX_JOBS}]", repeats=f"[1,{MAX_JOBS}]")
        if self.search is None:
            for name in (name for name in SEARCH_KEYS if is_changed(self, name)):
                setting = f"sweep.{name}={getattr(self, name)}"
                raise UserError(f"{setting}: only has an effect with a search: sweep.search=tpe sweep.trials=20")
            return
        if self.trials is None and self.search != "grid":
            raise UserError(f"sweep.search={self.search}: needs a number of trials: sweep.trials=20")


@cache
def other_tools(kind: str) -> dict[str, str]:
    """Return the table `kind` of other_tools.yaml.

    The table `settings` maps each setting of toyexp to its names in other tools. The tables `commands` and `generate`
    map commands of other tools, and options of llama-cli, to the words to type for toyexp.
    """
    import yaml  # deferred: only error messages need it

    tables: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("other_tools.yaml").read_text())
    return tables[kind]


def translate_setting(key: str, value: str) -> str | None:
    """Return the override that does the same as a key of another tool; None if unknown.

    For example, trainer.max_epochs=3 becomes epochs=3.
    """
    last = key.rpartition(".")[2].lower()
    if last in ("direction", "directions", "mode") and not key.startswith(PARTS):
        return "sweep.metric=... (loss, ppl and kl are minimised, any other metric is maximised)"
    table = {name: hint for hint, names in other_tools("settings").items() for name in names.split()}
    lowered = value.strip("[]'\"").lower()
    hint = table.get(f"{last}={'false' if lowered in ('no', 'none', 'null', 'off', '0') else lowered}", table.get(last))
    return hint if hint is None or "=" in hint else f"{hint}={value}"


def top_level_settings() -> Iterator[tuple[str, Setting]]:
    """Yield (full key, setting) for every key that does not belong to a part, such as sweep.jobs."""
    launchers = ((f"sweep.{launcher}.", cls) for launcher, cls in LAUNCHER_SETTINGS.items())
    for prefix, cls in (("", Settings), ("sweep.", Sweep), *launchers):
        yield from ((prefix + s.name, s) for s in list_settings(cls) if s.name not in LAUNCHER_SETTINGS)
