"""The schema that Hydra composes against: the top-level keys, every plugin's dataclass, and where presets lie."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shutil
import tempfile
import typing
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigResult
from omegaconf import MISSING, DictConfig
from omegaconf.errors import OmegaConfBaseException

from toyexp.checkpoint import Interval
from toyexp.data import read_text
from toyexp.errors import UserError, choose, printable
from toyexp.foreign import SIZE_LIMIT, check_file
from toyexp.optim import Optim
from toyexp.registry import Registry

AUTO = "auto"
PARTS = ("model", "data", "recipe", "engine", "optim")
NONFINITE = ("stop", "skip")  # what a step whose loss or gradient is no finite number does
LAUNCHERS = ("serial", "joblib", "submitit")
GROUPS = (*PARTS, "callbacks", "experiment")  # what is chosen by name


@dataclass
class Submitit:
    """What `sweep.launcher=submitit` asks a cluster for; null is the cluster's own default."""

    cluster: str | None = None  # slurm, local or debug; null: slurm where it is found, else local
    partition: str | None = None  # of Slurm
    timeout_min: int = 60  # minutes a job may take before it saves, and is queued again
    gpus: int = 0  # per job
    cpus: int | None = None  # cores per job
    mem_gb: float | None = None  # memory per job


@dataclass
class Sweep:
    """How -m runs its jobs. No number of a run depends on it."""

    launcher: str = "serial"  # one job after another; joblib: several at once here; submitit: on a cluster
    jobs: int = 0  # at once; 0: 1 with serial, as many as there are cores with joblib, all with submitit
    isolate: bool = True  # each job in a process of its own; false: in this one, for many tiny jobs
    fail_fast: bool = False  # the first failure ends the sweep
    resume: str | None = None  # a sweep's directory: its interrupted and killed jobs go on
    retry: bool = False  # with resume: jobs that failed, too
    submitit: Submitit = field(default_factory=Submitit)

    def check(self) -> None:
        """Raises UserError for what cannot work together."""
        if self.launcher not in LAUNCHERS:
            raise UserError(f"sweep.launcher={self.launcher}: {choose(self.launcher, LAUNCHERS)}")
        if self.jobs < 0:
            raise UserError(f"sweep.jobs={self.jobs}: must be 0 or above")
        if self.jobs > 1 and self.launcher == "serial":
            raise UserError(f"sweep.jobs={self.jobs}: runs jobs side by side with sweep.launcher=joblib")
        if not self.isolate and self.launcher != "serial":
            raise UserError(f"sweep.isolate=false: runs one job after another in this process, without {self.launcher}")
        if self.retry and self.resume is None:
            raise UserError("sweep.retry=true: goes with sweep.resume=DIR")
        given, limits = self.submitit, {"timeout_min": 1, "gpus": 0, "cpus": 1, "mem_gb": 0}
        for name, least in limits.items():
            value = getattr(given, name)
            if value is not None and not least <= value < 2**31:
                raise UserError(f"sweep.submitit.{name}={value}: must be a number from {least}")


@dataclass
class Settings:
    """The top-level keys; what they mean stands in conf/config.yaml, which shows them all."""

    name: str = "run"
    seed: int = 0
    steps: int = 200
    batch_size: int = 8
    lr: float = 1e-3
    eval_every: int = 50
    checkpoint_every: str = "10min"
    checkpoint_keep: int = 2
    checkpoint_best: str | None = None
    nonfinite: str = "stop"
    resume: str | None = None
    plugins: list[str] = field(default_factory=list)
    sweep: Sweep = field(default_factory=Sweep)
    model: Any = MISSING
    data: Any = MISSING
    recipe: Any = MISSING
    engine: Any = MISSING
    optim: Any = MISSING
    callbacks: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises UserError for numbers that cannot work."""
        for name, least in (("steps", 1), ("batch_size", 1), ("seed", 0), ("eval_every", 0)):
            value = getattr(self, name)
            if not least <= value < 2**63:
                most = f" to {2**63 - 1}" if value > least else ""
                raise UserError(f"{name}={value}: must be a whole number from {least}{most}")
        Interval.parse(self.checkpoint_every, "checkpoint_every")
        if self.checkpoint_keep < 1:
            raise UserError(
                f"checkpoint_keep={self.checkpoint_keep}: must be at least 1; checkpoint_every=0 writes none"
            )
        if self.checkpoint_best is not None and not self.eval_every:
            raise UserError(f"checkpoint_best={self.checkpoint_best}: needs looks at the held-out data: eval_every=50")
        if self.nonfinite not in NONFINITE:
            raise UserError(f"nonfinite={self.nonfinite}: {choose(self.nonfinite, NONFINITE)}")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: must be a number, 0 or above")
        if not re.fullmatch(r"[^/\\\0]{1,100}", self.name) or self.name.startswith("."):
            raise UserError(f"name={self.name!r}: must be 1 to 100 characters, not start with a dot and hold no slash")


@dataclass
class AutoEngine:
    """The best engine that works here; it says which one and why."""

    threads: int = 0  # cores to use, if it computes on them; 0: all that this process may use


def conf_dir() -> Path:
    """The checkout's conf/, or the copy inside the installed package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else package / "_conf"


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's reader of files, which takes only what `foreign` lets through; known to Hydra by the name of its own."""

    def load_config(self, config_path: str) -> ConfigResult:
        """A file's contents; UserError for one that says more than settings."""
        path = Path(self.path, self._normalize_file_name(config_path))
        ours = path.is_relative_to(conf_dir())
        if not ours and (".." in path.parts or config_path.startswith("hydra/")):
            raise UserError(f"{config_path}: is not taken from {self.path}")
        if path.is_file():
            check_file(path, read_config(path), ours)
        return super().load_config(config_path)


def read_config(path: Path) -> str:
    """The text of a configuration file, as far as one may be long; UserError when it cannot be read."""
    if path.stat().st_size > SIZE_LIMIT:
        raise UserError(f"{path}: has more than {SIZE_LIMIT >> 10} KiB, which is no configuration")
    return read_text(path)


def store_schemas(registry: Registry) -> None:
    """Makes every plugin's dataclass known to Hydra under its group and name, and files pass through `foreign`."""
    SourcesRegistry.instance().types["file"] = FileConfigSource
    store = ConfigStore.instance()
    store.store(name="schema", node=Settings)
    store.store(group="optim", name="adamw", node=schema(Optim, "adamw"))
    store.store(group="engine", name=AUTO, node=schema(AutoEngine, AUTO))
    for kind, offers in registry.offers.items():
        for name, offer in offers.items():
            if _stored.get((kind, name)) is offer.cls:
                continue
            package = f"callbacks.{name}" if kind == "callbacks" else None
            try:
                store.store(group=kind, name=name, node=schema(offer.cls, name), package=package)
            except OmegaConfBaseException as error:
                raise UserError(f"{kind}={name} ({offer.plugin}): its fields cannot be settings: {error}") from None
            _stored[kind, name] = offer.cls


_stored: dict[tuple[str, str], type] = {}  # by kind and name: Hydra's store is the process's, and takes a while


@functools.cache
def schema(cls: type, name: str) -> type:
    """A plain dataclass with the fields of `cls`, led by its name, so that a saved config says what it is of."""
    hints = typing.get_type_hints(cls)
    parts: list[tuple[str, Any, Any]] = [("name", str, field(default=name))]
    for f in dataclasses.fields(cls):
        copy = (
            field(default=f.default)
            if f.default is not dataclasses.MISSING
            else field(default_factory=typing.cast("typing.Callable[[], Any]", f.default_factory))
        )
        parts.append((f.name, hints[f.name], copy))
    return dataclasses.make_dataclass(cls.__name__, parts)


def class_of(kind: str, node: Mapping[str, Any], registry: Registry) -> type:
    """The class whose settings `node` holds; UserError when nobody offers one of that name."""
    if kind == "optim":
        return Optim
    return AutoEngine if (kind, node["name"]) == ("engine", AUTO) else registry.get(kind, str(node["name"]))


@dataclass(frozen=True)
class Source:
    """Where the configuration comes from: toyexp's conf/, or a person's own directory with conf/ behind it."""

    directory: Path
    name: str = "config"
    extra: Path | None = None  # one more directory of presets

    @classmethod
    def of_run(cls, directory: Path, asked: Mapping[str, str], registry: Registry) -> Source:
        """The saved configuration of a run, without its settings of engine and callbacks where others are `asked` for.

        Raises UserError where another model, data set or recipe is.
        """
        saved = _load_yaml(directory / "config.yaml")
        if not isinstance(saved, dict):
            raise UserError(f"{directory / 'config.yaml'}: holds no keys with values")
        for kind in ("model", "data", "recipe"):
            then, now = saved.get(kind), asked.get(kind)
            if isinstance(then, dict) and now in registry.offers[kind] and now != then.get("name"):
                was = printable(str(then.get("name")))
                raise UserError(f"resume={directory}: that run is another experiment: {kind} was {was} and is {now}")
        chosen = {"engine", "callbacks"} & asked.keys()
        if not chosen:
            return cls(directory.absolute())
        source = cls(Path(tempfile.mkdtemp(prefix="toyexp-")))
        weakref.finalize(source, shutil.rmtree, source.directory, ignore_errors=True)
        kept = {key: value for key, value in saved.items() if key not in chosen}
        (source.directory / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        return source

    @classmethod
    def of(cls, path: str | None = None, name: str | None = None, extra: str | None = None) -> Source:
        """What --config-path, --config-name and --config-dir say; UserError for what is not there."""
        for flag, given in (("--config-path", path), ("--config-dir", extra)):
            if given is not None and not Path(given).is_dir():
                raise UserError(f"{flag} {given}: there is no such directory (looked in {Path.cwd()})")
        directory = Path(path).absolute() if path else conf_dir()
        source = cls(directory, (name or "config").removesuffix(".yaml"), Path(extra).absolute() if extra else None)
        if not (directory / f"{source.name}.yaml").is_file():
            there = [p.stem for p in directory.glob("*.yaml")]
            raise UserError(f"--config-name {source.name}: {directory} has no {source.name}.yaml; "
                            f"{choose(source.name, there)}")  # fmt: skip
        return source

    @property
    def directories(self) -> list[Path]:
        """Every directory that may hold presets."""
        return list(dict.fromkeys(d for d in (self.directory, self.extra, conf_dir()) if d))

    def overrides(self) -> list[str]:
        """What makes Hydra look in all directories, and gives a foreign config our run directory and quiet."""
        if len(self.directories) == 1:
            return []
        quoted = [f'"file://{d}"'.replace("\\", "\\\\") for d in self.directories[1:]]
        added = [f"hydra.searchpath=[{','.join(quoted)}]"]
        if self.directory == conf_dir():
            return added
        path = self.directory / f"{self.name}.yaml"
        theirs = _load_yaml(path) or {}
        if not isinstance(theirs, dict):
            raise UserError(f"{path}: holds no keys with values, such as steps: 100")
        if "hydra" in theirs:
            return added
        ours = _load_yaml(conf_dir() / "config.yaml")["hydra"]
        added += ["hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null"]
        added += [f"hydra.{k}.{n}='{v}'" for k in ("run", "sweep") for n, v in ours[k].items()]
        return added


def _load_yaml(path: Path) -> Any:
    text = read_config(path)
    check_file(path, text, path.is_relative_to(conf_dir()))
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise yaml_error(error, path) from None


def compose_raw(overrides: list[str], source: Source) -> DictConfig:
    """What Hydra composes, with its own settings under `hydra`; its own errors go through."""
    with hydra.initialize_config_dir(str(source.directory), version_base="1.3", job_name="toyexp"):
        return hydra.compose(source.name, overrides=overrides, return_hydra_config=True)


def yaml_error(error: yaml.YAMLError, where: Path) -> UserError:
    """What is wrong with a YAML file, and on which line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = (
        f"{where / mark.name if mark.name.endswith('.yaml') else where}, line {mark.line + 1}" if mark else str(where)
    )
    return UserError(f"{place}: not valid YAML: {problem or 'it cannot be read'}")
