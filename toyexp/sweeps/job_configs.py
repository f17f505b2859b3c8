"""Compose and check the configurations of jobs.

Before the first job starts, each value of each swept key (a key with several values) is checked, but not each
combination of values.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import format_value as plain
from toyexp.base.writing import require_plain_path
from toyexp.config.build import apply_types, create_part, drop_hydra_keys, resolve_config
from toyexp.config.compose import Composition
from toyexp.config.compose_cache import HYDRA_REFERENCE, split_choices
from toyexp.config.keys import Keys
from toyexp.config.mistakes import check_settings, unknown_key, wrong_value
from toyexp.config.request import Request
from toyexp.config.schema import AUTO, Root, part_class
from toyexp.config.top_level import GROUPS
from toyexp.config.words import parse
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import Objective
from toyexp.interfaces.recipe import Recipe
from toyexp.sweeps.directory import Job
from toyexp.sweeps.launchers.gpus import VISIBLE_DEVICES, visible_gpus
from toyexp.training.resume import differences
from toyexp.training.run_config import ASIDE_KEYS
from toyexp.training.rundir import read_settings

CHOICES = 8  # combinations of presets that are composed for the check; each takes 0.1 s
VALUES = 1000  # maximum number of jobs that are checked before the first one starts
# These must agree when a job resumes a run.
COMPARED = {"model", "data", "recipe", "optim", "objective", "seed", "lr", "batch_size"}
SMALL = 20_000_000  # parameters; models up to this size train faster in a stack on a GPU (at 6M three times as fast)


@dataclass
class JobConfigs:
    """Composer of the configurations of a sweep's jobs.

    Hydra composes each combination of presets (such as model=nano) once, since that is slow. The other overrides of a
    job are then set in that configuration.
    """

    request: Request  # holds the settings that all jobs share
    _bases: dict[tuple[str, ...], Composition | UserError] = field(default_factory=dict)  # by the chosen presets
    _read_hydra: dict[tuple[str, ...], bool] = field(default_factory=dict)  # by presets: contains ${hydra:...}
    _lists: dict[str, bool] = field(default_factory=dict)  # keys that were checked, and whether each takes a list

    @cached_property
    def _keys(self) -> Keys:
        return Keys.from_registry(self.request.registry)

    def config(self, job: Job) -> Composition:
        """Return a job's configuration. Raise UserError if it cannot be composed.

        The next call may change the returned configuration.
        """
        names, other_words = split_choices(job.overrides)
        composed = self._base(names)
        for word in other_words:
            self._set(composed.cfg, word)
        with read_write(composed.cfg.hydra.job):
            composed.cfg.hydra.job.num = job.number
        return replace(composed)  # a copy without cached checks

    def directory(self, job: Job, root: Path | None) -> tuple[Path, Path]:
        """Return two paths: the sweep's directory and the job's run directory in it.

        The sweep's directory is `root` if that is given, otherwise the value of hydra.sweep.dir.
        """
        composed = self._load_base_model(self._set_hydra_config(job)[0])
        root = root or composed.directory("hydra.sweep.dir")
        return root, composed.directory("hydra.sweep.subdir", below=root)

    def run_config(self, job: Job) -> Composition:
        """Return a job's configuration, for a run that is executed in this process."""
        composed, is_whole = self._set_hydra_config(job)
        if is_whole:
            return composed
        overrides = [*self.request.settings, *parse(job.overrides)]
        cfg = copy.deepcopy(composed.cfg) if self._has_base(composed) else composed.cfg  # apply_base() changes it
        keys = {override.key_or_group for override in overrides}
        with read_write(cfg.hydra.sweeper):  # leave out the experiment's own sweep: the job has one value of each key
            cfg.hydra.sweeper.params = {key: values for key, values in composed.sweeps.items() if key not in keys}
        return replace(composed, cfg=cfg, typed=overrides)

    def _set_hydra_config(self, job: Job) -> tuple[Composition, bool]:
        """Compose a job's configuration, and make ${hydra:...} interpolations refer to this configuration.

        Return the configuration, and True if Hydra composed it anew for this job. That is slow, but needed for values
        that only Hydra can set, such as ${hydra:job.override_dirname}.
        """
        composed, names = self.config(job), split_choices(job.overrides)[0]
        if names not in self._read_hydra:
            nodes = drop_hydra_keys(composed.cfg), composed.cfg.hydra.sweep
            text = str([OmegaConf.to_container(node) for node in nodes])
            self._read_hydra[names] = bool(HYDRA_REFERENCE.search(text))
        if self._read_hydra[names] or HYDRA_REFERENCE.search(job.label):
            return self.request.compose(*job.overrides, f"hydra.job.num={job.number}"), True
        HydraConfig.instance().set_config(composed.cfg)
        return composed, False

    def other_run(self, job: Job, run: Path) -> str:
        """Compare a job's settings with those of the run in the directory `run`. Return a text about one that differs.

        Return "" if no setting differs, or if the settings of the job or of the run cannot be read. Only keys on the
        command line, swept keys, and the keys in COMPARED are compared.
        """
        with contextlib.suppress(UserError):  # a configuration error is reported when the job starts
            saved, overrides = read_settings(run / "config.yaml"), [*self.request.settings, *parse(job.overrides)]
            typed_keys = {o.key_or_group for o in overrides if "$" not in str(o.input_line)}
            keys = {key for key in typed_keys if key.split(".")[0] not in {*ASIDE_KEYS, "engine"}}
            parts = {key.split(".")[0] for key in keys} | COMPARED
            composed = self.request.compose(*job.overrides, f"hydra.job.num={job.number}") if saved else None
            config = resolve_config(self._load_base_model(composed).cfg) if composed else {}
            for key, (run_value, job_value) in differences(saved, config) if composed else ():
                name = key.removesuffix(".name")
                is_typed = name in parts or f"{key}.".startswith(tuple(f"{k}." for k in keys - parts))
                if is_typed and str(run_value) != str(job_value):
                    run_text = printable(f"{name} is {plain(run_value)}")
                    return f"{run_text} in that run and {printable(plain(job_value))} in this job"
        return ""

    def gpus(self, job: Job, machine_gpus: int) -> int:
        """Return how many GPUs a job uses on a machine with `machine_gpus` GPUs."""
        engine = self._engine(job)
        if engine == AUTO:
            return min(machine_gpus, 1)
        count = engine.gpus() if isinstance(engine, Engine) else 0
        return machine_gpus if count is None else count  # None: all

    def cores(self, job: Job) -> int:
        """Return the minimum number of CPU cores that a job uses.

        Return 0 if the job computes on a GPU, or may do so.
        """
        engine = self._engine(job)
        if engine == AUTO:
            return 0 if visible_gpus() or sys.platform == "darwin" else 1
        if isinstance(engine, Engine):
            return 0 if engine.on_gpu else max(getattr(engine, "threads", 0), engine.processes(), 1)
        return 1

    def can_stack(self, job: Job) -> bool:
        """Return True if a job can probably train in a stack (several jobs as one program) on a GPU.

        That needs an engine that supports stacks, and a small model. This method looks only at the settings. Before
        training, the engine may still find that the job cannot be stacked.
        """
        engine = self._engine(job)
        cls = self._auto_gpu() if engine == AUTO else type(engine)
        with contextlib.suppress(UserError):  # the error is reported when the job starts
            if cls and issubclass(cls, Engine) and cls.on_gpu and cls.stack_conflict is not Engine.stack_conflict:
                of_one = isinstance(engine, Engine) and engine.gpus() not in (0, 1)
                return not of_one and sum(math.prod(t.shape) for t in self.model(job).tensors()) <= SMALL
        return False

    def _auto_gpu(self) -> type | None:
        """Return the engine class that engine=auto probably chooses on this machine's NVIDIA GPUs.

        Return None if there is no such GPU or no engine for it.
        """
        offers = self.request.registry.engines() if visible_gpus() else ()
        engines = [cast("type[Engine]", offer.cls) for offer in offers]
        return next((cls for cls in engines if cls.device_variable == VISIBLE_DEVICES), None)

    def processes(self, job: Job) -> int:
        """Return how many processes the job starts that compute on the CPU, as its engine declares; 1 if unknown."""
        engine = self._engine(job)
        return engine.processes() if isinstance(engine, Engine) else 1

    def _engine(self, job: Job) -> Engine | str:
        """Create a job's engine from its settings. Return "auto" if the setting is engine=auto.

        Return "" if the settings are invalid; that error is reported when the job starts.
        """
        try:
            node = self.config(job).cfg.engine
            if node.name == AUTO:
                return AUTO
            cls = part_class("engine", node, self.request.registry)
            return cast("Engine", create_part(cls, apply_types(cls, node, "engine")))
        except UserError:
            return ""

    def model(self, job: Job) -> Model:
        """Return the model of a job. Raise UserError for invalid settings."""
        cfg = self._load_base_model(self.config(job)).cfg
        cls = part_class("model", cfg.model, self.request.registry)
        return cast("Model", create_part(cls, apply_types(cls, cfg.model, "model")))

    def objective(self, job: Job) -> type[Objective]:
        """Return the class of a job's objective. Raise UserError for an unknown name."""
        return cast("type[Objective]", part_class("objective", self.config(job).cfg.objective, self.request.registry))

    def _load_base_model(self, composed: Composition) -> Composition:
        """Return a copy of the configuration, with the model settings replaced by those of the recipe's base model.

        If the recipe has no base model, return the configuration unchanged.
        """
        if not self._has_base(composed):
            return composed
        copied = replace(composed, cfg=copy.deepcopy(composed.cfg))
        copied.apply_base()
        return copied

    def _has_base(self, composed: Composition) -> bool:
        recipe = cast("type[Recipe]", part_class("recipe", composed.cfg.recipe, self.request.registry))
        return recipe.base_file is not Recipe.base_file

    def check(self, job: Job, all_settings: bool = False) -> None:
        """Raise UserError if the value of a swept key is invalid in this job. With `all_settings`, check all settings.

        Errors in the contents of files and in the engine are found only when the job runs.
        """
        composed = self.config(job)
        if all_settings:
            composed.check_parts()
            return
        words = split_choices(job.overrides)[1]
        for owner in {word.partition("=")[0].rpartition(".")[0] for word in words} - {"engine"}:
            self._check_owner(composed.cfg, owner)

    def _base(self, names: tuple[str, ...]) -> Composition:
        if names not in self._bases:
            try:
                self._bases[names] = self.request.compose(*names)
            except UserError as error:
                self._bases[names] = error
        base = self._bases[names]
        if isinstance(base, UserError):
            raise base
        return base

    def _set(self, cfg: DictConfig, word: str) -> None:
        key = word.partition("=")[0]
        if key not in self._lists:
            check_settings(parse([word]), self._keys, self.request.source)
            self._lists[key] = self._keys.is_list(key)
        value = parse([word])[0].value()
        try:
            is_single = self._lists[key] and isinstance(value, str | int | float)
            OmegaConf.update(cfg, key, [value] if is_single else value, merge=True)
        except (ConfigKeyError, AttributeError):
            raise UserError(unknown_key(key, cfg, self.request.registry)) from None
        except OmegaConfBaseException as error:
            raise wrong_value(error, key, parse([word]), self.request.registry) from None

    def _check_owner(self, cfg: DictConfig, owner: str) -> None:
        """Raise UserError if the settings of one part (a component of a run, such as the model) are invalid.

        `owner` is the key of the part, such as "model" or "callbacks.cosine", or "" for the top-level settings.
        """
        kind, _, name = owner.partition(".")
        part = OmegaConf.select(cfg, owner) if owner else cfg
        left_out = () if owner else (*GROUPS, "hydra", "sweep")
        node = {str(key): part[key] for key in part if str(key) not in left_out}
        registry = self.request.registry
        cls = registry.get(kind, name) if name else part_class(kind, node, registry) if owner else Root
        (cls(**node) if cls is Root else create_part(cls, node)).check()


def check_values(jobs: Sequence[Job], configs: JobConfigs) -> dict[int, UserError]:
    """Check each value of each swept key once, in a job that differs from the first job only in that value.

    Return a dict that maps the number of an invalid job to its error. Raise UserError for an error that all jobs have.
    """
    errors: dict[int, UserError] = {}
    checked_names: set[tuple[str, ...]] = set()
    for job in _single_changes(jobs[:VALUES]):
        names = split_choices(job.overrides)[0]
        if names not in checked_names and len(checked_names) == CHOICES:
            continue
        try:
            configs.check(job, all_settings=names not in checked_names)
        except UserError as error:
            errors[job.number] = error
        checked_names.add(names)
    if len(jobs) > 1 and (first := errors.get(jobs[0].number)):
        try:
            configs.check(jobs[-1], all_settings=True)  # of all combinations, the last shares no value with the first
        except UserError as other:
            if str(other) == str(first) and not str(first).startswith(tuple(jobs[-1].overrides)):
                raise first from None
    return errors


def require_distinct_directories(jobs: Sequence[Job], configs: JobConfigs) -> None:
    """Raise UserError if two jobs would have the same run directory.

    That happens if hydra.sweep.subdir is set and does not contain every swept key.
    """
    first = jobs[0]
    changed = {
        _differing(first, job): job for job in reversed(list(_single_changes(jobs[:VALUES]))) if job is not first
    }
    for job in changed.values():
        try:
            directories = [configs.directory(candidate, None)[1] for candidate in (first, job)]
        except UserError:  # reported when the job starts
            continue
        if directories[0] == directories[1]:
            raise UserError(
                f"hydra.sweep.subdir gives jobs {first.number} and {job.number} the same directory, "
                f"{directories[0].name}; "
                "add ${hydra.job.num} to this setting, or leave the setting out"
            )


def _single_changes(jobs: Sequence[Job]) -> Iterator[Job]:
    """Yield the first job and every job that differs from the first one in a single value."""
    return (job for job in jobs if sum(_differing(jobs[0], job)) <= 1)


def _differing(first: Job, job: Job) -> tuple[bool, ...]:
    return tuple(map(operator.ne, first.overrides, job.overrides))


class JobDirectories:
    """Record of the run directories of a sweep's jobs. No two jobs may have the same directory."""

    def __init__(self, jobs: Iterable[Job]):
        self._owners = {job.directory: job for job in jobs if job.directory is not None}

    def assign(self, job: Job, root: Path, directory: Path) -> None:
        """Assign a directory to a job. Raise UserError if another job has it or it lies outside the sweep."""
        if not directory.is_relative_to(root) or ".." in directory.relative_to(root).parts or directory == root:
            raise UserError(f"hydra.sweep.subdir points outside of the sweep's directory, to {directory}")
        require_plain_path(root, directory)
        name = str(directory.relative_to(root))
        if owner := self._owners.get(name):
            raise UserError(f"hydra.sweep.subdir gives jobs {owner.number} and {job.number} the same directory, {name}")
        job.directory = name
        self._owners[name] = job
