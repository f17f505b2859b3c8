"""What is wrong with a sweep is told before its first job: each value is looked at once, and not each combination."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import format_value as plain
from toyexp.base.writing import require_plain_path
from toyexp.config.build import apply_types, drop_hydra_keys, instantiate, resolve_config
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
from toyexp.interfaces.recipe import Recipe
from toyexp.sweeps.directory import Job
from toyexp.sweeps.launchers.gpus import VISIBLE, visible
from toyexp.training.resume import differences
from toyexp.training.run_config import ASIDE_KEYS
from toyexp.training.rundir import read_settings

CHOICES = 8  # choices of names that are composed ahead: each composition takes a tenth of a second
VALUES = 1000  # jobs that are looked at ahead
COMPARED = {"model", "data", "recipe", "optim", "seed", "lr", "batch_size"}  # of a job and the run that it goes on with
SMALL = 20_000_000  # parameters of a model whose jobs are faster together on a GPU; of 6M they are three times as fast


@dataclass
class JobConfigs:
    """The configurations of a sweep's jobs: Hydra composes each choice of names once, other values are set in it."""

    request: Request  # with the settings that all jobs share
    values: Mapping[str, Any]  # of the words that vary, where they are known
    _bases: dict[tuple[str, ...], Composition | UserError] = field(default_factory=dict)  # by the names that are chosen
    _read_hydra: dict[tuple[str, ...], bool] = field(default_factory=dict)  # whether one reads Hydra's own settings
    _lists: dict[str, bool] = field(default_factory=dict)  # whether a key, which has been checked, holds a list

    @cached_property
    def _keys(self) -> Keys:
        return Keys.from_registry(self.request.registry)

    def config(self, job: Job) -> Composition:
        """A job's configuration, until the next one is asked for; UserError for what cannot be composed."""
        composed = self._with_values(*split_choices(job.overrides))
        with read_write(composed.cfg.hydra.job):
            composed.cfg.hydra.job.num = job.number
        return composed

    def directory(self, job: Job, root: Path | None) -> tuple[Path, Path]:
        """Return the sweep's directory, which is `root` if there is one, and below it the job's."""
        composed = self._settled(self._known_to_hydra(job)[0])
        root = root or composed.directory("hydra.sweep.dir")
        return root, composed.directory("hydra.sweep.subdir", below=root)

    def of_a_run(self, job: Job) -> Composition:
        """Return what a run of the job is made from, in this process."""
        composed, is_whole = self._known_to_hydra(job)
        if is_whole:
            return composed
        given = [*self.request.settings, *parse(job.overrides)]
        cfg = copy.deepcopy(composed.cfg) if self._has_base(composed) else composed.cfg  # in which a base is put
        keys = {override.key_or_group for override in given}
        with read_write(cfg.hydra.sweeper):  # an experiment's own sweep, of which the job has a value each
            cfg.hydra.sweeper.params = {key: values for key, values in composed.sweeps.items() if key not in keys}
        return replace(composed, cfg=cfg, given=given)

    def _known_to_hydra(self, job: Job) -> tuple[Composition, bool]:
        """Return a job's configuration, of which ${hydra:...} reads, and whether Hydra has composed all of it.

        Only Hydra knows more of its settings than the job's number, such as ${hydra:job.override_dirname}.
        """
        composed, names = self.config(job), split_choices(job.overrides)[0]
        if names not in self._read_hydra:
            nodes = drop_hydra_keys(composed.cfg), composed.cfg.hydra.sweep
            self._read_hydra[names] = bool(
                HYDRA_REFERENCE.search(str([OmegaConf.to_container(node) for node in nodes]))
            )
        if self._read_hydra[names] or HYDRA_REFERENCE.search(job.label):
            return self.request.compose(*job.overrides, f"hydra.job.num={job.number}"), True
        HydraConfig.instance().set_config(composed.cfg)
        return composed, False

    def other_run(self, job: Job, run: Path) -> str:
        """Return a setting, typed or COMPARED, of which a job and the run in its directory have different values."""
        with contextlib.suppress(UserError):  # what cannot be composed is told when it is the job's turn
            saved, given = read_settings(run / "config.yaml"), [*self.request.settings, *parse(job.overrides)]
            typed_keys = {o.key_or_group for o in given if "$" not in str(o.input_line)}
            keys = {key for key in typed_keys if key.split(".")[0] not in {*ASIDE_KEYS, "engine"}}
            parts = {key.split(".")[0] for key in keys} | COMPARED
            ours = self.request.compose(*job.overrides, f"hydra.job.num={job.number}") if saved else None
            for key, (there, here) in differences(saved, resolve_config(self._settled(ours).cfg)) if ours else ():
                name = key.removesuffix(".name")
                is_typed = name in parts or f"{key}.".startswith(tuple(f"{k}." for k in keys - parts))
                if is_typed and str(there) != str(here):
                    return f"{printable(f'{name} is {plain(there)}')} there and {printable(plain(here))} in this job"
        return ""

    def gpus(self, job: Job, auto: int) -> int | None:
        """How many GPUs the job takes, as far as its settings tell; None: all, and with engine=auto so many."""
        engine = self._engine(job)
        return auto if engine == AUTO else engine.gpus() if isinstance(engine, Engine) else 0

    def cores(self, job: Job) -> int:
        """How many of the machine's cores the job has use for at least; 0: it computes on a GPU, or may."""
        engine = self._engine(job)
        if engine == AUTO:
            return 0 if visible() or sys.platform == "darwin" else 1
        if isinstance(engine, Engine):
            return 0 if engine.on_gpu else max(getattr(engine, "threads", 0), engine.processes(), 1)
        return 1

    def could_be_stacked(self, job: Job) -> bool:
        """Whether the job is of a small model on a GPU engine that trains several jobs together, as far as is known."""
        engine = self._engine(job)
        cls = self._auto_gpu() if engine == AUTO else type(engine)
        with contextlib.suppress(UserError):  # which is told when it is the job's turn
            if cls and issubclass(cls, Engine) and cls.on_gpu and cls.stack_conflict is not Engine.stack_conflict:
                of_one = isinstance(engine, Engine) and engine.gpus() not in (0, 1)
                return not of_one and sum(math.prod(t.shape) for t in self.model(job).tensors()) <= SMALL
        return False

    def _auto_gpu(self) -> type | None:
        """The engine that engine=auto is likely to take where there are NVIDIA GPUs."""
        offered = self.request.registry.classes("engine").values() if visible() else ()
        engines = [cast("type[Engine]", cls) for cls in offered]
        return max(
            (cls for cls in engines if cls.device_variable == VISIBLE), key=lambda cls: cls.priority, default=None
        )

    def processes(self, job: Job) -> int:
        """How many processes the job is that compute on the CPU, as far as its settings tell."""
        engine = self._engine(job)
        return engine.processes() if isinstance(engine, Engine) else 1

    def _engine(self, job: Job) -> Engine | str:
        """The engine of a job, `auto`, or nothing for one that cannot be, which is told when it is the job's turn."""
        try:
            node = self.config(job).cfg.engine
            if node.name == AUTO:
                return AUTO
            cls = part_class("engine", node, self.request.registry)
            return cast("Engine", instantiate(cls, apply_types(cls, node, "engine")))
        except UserError:
            return ""

    def model(self, job: Job) -> Model:
        """The model of a job; UserError for one that cannot be."""
        cfg = self._settled(self.config(job)).cfg
        cls = part_class("model", cfg.model, self.request.registry)
        return cast("Model", instantiate(cls, apply_types(cls, cfg.model, "model")))

    def _settled(self, composed: Composition) -> Composition:
        """With the model of the recipe's base file, which names the job, where it has one."""
        if not self._has_base(composed):
            return composed
        settled = replace(composed, cfg=copy.deepcopy(composed.cfg))
        settled.apply_base()
        return settled

    def _has_base(self, composed: Composition) -> bool:
        recipe = cast("type[Recipe]", part_class("recipe", composed.cfg.recipe, self.request.registry))
        return recipe.base_file is not Recipe.base_file

    def check(self, job: Job, whole: bool = False) -> None:
        """Raises UserError for values of the job that cannot work; `whole`: for any of its settings.

        What lies in files and what the engine says is only known when the job runs.
        """
        names, others = split_choices(job.overrides)
        composed = self._with_values(names, others)
        if whole:
            composed.check_parts()
            return
        for owner in {word.partition("=")[0].rpartition(".")[0] for word in others} - {"engine"}:
            self._check_owner(composed.cfg, owner)

    def _with_values(self, names: tuple[str, ...], others: Sequence[str]) -> Composition:
        composed = self._base(names)
        for word in others:
            self._set(composed.cfg, word)
        return replace(composed)  # which has looked at nothing yet

    def _base(self, names: tuple[str, ...]) -> Composition:
        if names not in self._bases:
            try:
                self._bases[names] = self.request.compose(*names)
            except UserError as error:
                self._bases[names] = error
        found = self._bases[names]
        if isinstance(found, UserError):
            raise found
        return found

    def _set(self, cfg: DictConfig, word: str) -> None:
        key = word.partition("=")[0]
        if key not in self._lists:
            check_settings(parse([word]), self._keys, self.request.source)
            self._lists[key] = self._keys.is_list(key)
        value = self.values[word] if word in self.values else parse([word])[0].value()
        try:
            one = self._lists[key] and isinstance(value, str | int | float)
            OmegaConf.update(cfg, key, [value] if one else value, merge=True)
        except (ConfigKeyError, AttributeError):
            raise UserError(unknown_key(key, cfg, self.request.registry)) from None
        except OmegaConfBaseException as error:
            raise wrong_value(error, key, parse([word]), self.request.registry) from None

    def _check_owner(self, cfg: DictConfig, owner: str) -> None:
        """Have a part check its settings: model, callbacks.cosine, or "" for the top-level keys."""
        kind, _, name = owner.partition(".")
        part = OmegaConf.select(cfg, owner) if owner else cfg
        left_out = () if owner else (*GROUPS, "hydra", "sweep")
        node = {str(key): part[key] for key in part if str(key) not in left_out}
        registry = self.request.registry
        cls = registry.get(kind, name) if name else part_class(kind, node, registry) if owner else Root
        (cls(**node) if cls is Root else instantiate(cls, node)).check()


def first_look(jobs: Sequence[Job], configs: JobConfigs) -> dict[int, UserError]:
    """What is wrong with each of the jobs that show every value once, by their numbers.

    Raises UserError for what is wrong in every job.
    """
    wrong: dict[int, UserError] = {}
    seen: set[tuple[str, ...]] = set()
    for job in _one_changed(jobs[:VALUES]):
        names = split_choices(job.overrides)[0]
        if names not in seen and len(seen) == CHOICES:
            continue
        try:
            configs.check(job, whole=names not in seen)
        except UserError as error:
            wrong[job.number] = error
        seen.add(names)
    if len(jobs) > 1 and (first := wrong.get(jobs[0].number)):
        try:
            configs.check(jobs[-1], whole=True)  # which has no value like the first job's
        except UserError as other:
            if str(other) == str(first) and not str(first).startswith(tuple(jobs[-1].overrides)):
                raise first from None
    return wrong


def require_directories(jobs: Sequence[Job], configs: JobConfigs) -> None:
    """Raises UserError when a value that varies does not tell the jobs' directories apart."""
    first = jobs[0]
    changed = {_differing(first, job): job for job in reversed(list(_one_changed(jobs[:VALUES]))) if job is not first}
    for job in changed.values():
        try:
            places = [configs.directory(one, None)[1] for one in (first, job)]
        except UserError:  # which is told of the job
            continue
        if places[0] == places[1]:
            raise UserError(
                f"hydra.sweep.subdir gives jobs {first.number} and {job.number} one directory, {places[0].name}; "
                "put ${hydra.job.num} into it, or leave it out"
            )


def _one_changed(jobs: Sequence[Job]) -> Iterator[Job]:
    """The first job, and those that differ from it in one value."""
    return (job for job in jobs if sum(_differing(jobs[0], job)) <= 1)


def _differing(first: Job, job: Job) -> tuple[bool, ...]:
    return tuple(map(operator.ne, first.overrides, job.overrides))


class Places:
    """The job that each directory of a sweep belongs to."""

    def __init__(self, jobs: Iterable[Job]):
        self._owners = {job.directory: job for job in jobs if job.directory is not None}

    def give(self, job: Job, root: Path, directory: Path) -> None:
        """Lets a job have a directory of a sweep; UserError where that is another's, or not the sweep's to give."""
        if not directory.is_relative_to(root) or ".." in directory.relative_to(root).parts or directory == root:
            raise UserError(f"hydra.sweep.subdir leads out of the sweep's directory, to {directory}")
        require_plain_path(root, directory)
        name = str(directory.relative_to(root))
        if owner := self._owners.get(name):
            raise UserError(f"hydra.sweep.subdir gives jobs {owner.number} and {job.number} one directory, {name}")
        job.directory = name
        self._owners[name] = job
