"""Compose the configuration of one run with Hydra. The module `build` later creates its parts, such as the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.errors import UserError, require_visible
from toyexp.base.formatting import format_value as plain
from toyexp.base.ranks import rank_warnings, started_ranks
from toyexp.config.build import (
    apply_types,
    build_parts,
    create_part,
    drop_hydra_keys,
    load_objective_model,
    pick_engine,
    resolve_config,
    resolve_paths,
)
from toyexp.config.compose_cache import compose_cached
from toyexp.config.keys import Keys, mapping_overrides, single_value
from toyexp.config.mistakes import check_files, check_keys, check_settings, explain, locate_errors, rephrase
from toyexp.config.paths import CONF
from toyexp.config.safe_yaml import require_plugins
from toyexp.config.schema import AUTO, Root, Source, default_callbacks
from toyexp.config.top_level import LAUNCHER_SETTINGS, Sweep
from toyexp.formats.gguf.header import source_path
from toyexp.formats.gguf.open_model import load_open_model, open_gguf
from toyexp.interfaces.callback import Callback, sets_lr
from toyexp.interfaces.command import parse_modules
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import Model, model_settings
from toyexp.interfaces.recipe import Recipe
from toyexp.plugins.compatibility import model_mismatch, suggest_command
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import Origin
from toyexp.training.resume import differences
from toyexp.training.run_config import Config


def compose(typed: Sequence[Override], registry: Registry, source: Source, modules: Sequence[str] = ()) -> Composition:
    """Compose the configuration of one run from the overrides on the command line; raise UserError if that fails.

    `modules` are the local plugins that the command line names; `source` says which configuration files to read.
    """
    keys = Keys.from_registry(registry)
    check_settings(typed, keys, source)
    try:
        words = keys.hydra_overrides(typed)
        cfg = compose_cached(words, source)
    except UserError:  # raised by safe_yaml
        raise
    except Exception as error:  # Hydra raises arbitrary exceptions for malformed files
        raise explain(error, typed, registry, source) from None
    check_files(cfg, typed, source)
    composition = Composition(cfg, typed, keys, modules, source)
    with open_dict(cfg):
        for override in typed:  # data.path=2024_01 is a text, but Hydra parses a number
            is_number = isinstance(single_value(override), bool | int | float)
            if is_number and isinstance(OmegaConf.select(cfg, override.key_or_group), str):
                OmegaConf.update(cfg, override.key_or_group, str(override.input_line).partition("=")[2].strip())
        cfg.hydra.job.num = OmegaConf.select(cfg, "hydra.job.num", default=0)
        for override in mapping_overrides(typed):  # typed keys come first: in optim.groups the first match counts
            node = OmegaConf.select(cfg, override.key_or_group)
            typed_names: Any = override.value()
            merged = {name: node[name] for name in (*typed_names, *node)}
            OmegaConf.update(cfg, override.key_or_group, merged, merge=False)
        typed_keys = {o.key_or_group for o in typed}
        if "steps" in typed_keys and cfg.get("epochs") is not None:
            if "epochs" in typed_keys:
                raise UserError(f"epochs={cfg.epochs:g}: sets the number of steps; leave steps={cfg.steps} out")
            cfg.epochs = None
        sweeps = {key: values for key, values in composition.sweeps.items() if key not in typed_keys}
        if code := parse_modules(f"{key}={values}" for key, values in sweeps.items()):
            raise UserError(f"hydra.sweeper.params: names {code[0]}; only the command line can load code")
        cfg.hydra.sweeper.params = sweeps
        for f in dataclasses.fields(Root):
            if f.name not in cfg:  # a user's file may leave keys out
                cfg[f.name] = getattr(Root(), f.name)
    HydraConfig.instance().set_config(cfg)  # read by ${hydra:...}
    return composition


@dataclass
class Composition:
    """The composed configuration of one run."""

    cfg: DictConfig  # with Hydra's settings under `hydra`
    typed: Sequence[Override]
    all_keys: Keys  # keys of all available parts
    modules: Sequence[str] = ()  # local plugins from the command line; files cannot load code
    source: Source = field(default_factory=Source.from_flags)

    @property
    def sweeps(self) -> dict[str, str]:
        """Sweeps that configuration files define (hydra.sweeper.params), as {key: values separated by commas}.

        A key that the command line sets is left out.
        """
        params = OmegaConf.select(self.cfg, "hydra.sweeper.params") or {}
        lists = {str(key): values if isinstance(values, ListConfig) else [values] for key, values in params.items()}
        return {key: ",".join("null" if v is None else str(v) for v in values) for key, values in lists.items()}

    def directory(self, key: str, below: Path = Path()) -> Path:
        """Return the absolute path of the directory that a setting such as `hydra.run.dir` gives.

        A relative path is resolved against `below`.
        """
        try:
            text = str(OmegaConf.select(self.cfg, key, throw_on_missing=True))
        except OmegaConfBaseException as error:
            raise rephrase(key, error) from None
        if not text.strip():
            raise UserError(f"{key}=: is empty; it must be a directory, such as {key}=outputs/mine")
        require_visible(key, text)
        return (below / text).absolute()

    def apply_base(self) -> Model | None:
        """Put the settings of the model in the recipe's base file into the configuration, and return that model.

        Afterwards `${model.name}` in the run's name and directories gives the name of that model. Return None if the
        recipe has no base file (recipe.base).
        """
        return self._base_and_keys[0]

    @cached_property
    def _base_and_keys(self) -> tuple[Model | None, Keys]:
        """Return the model of the recipe's base file or None, and the valid keys of the configuration.

        The first access also puts the settings of that model into the configuration.
        """
        keys = check_keys(self.cfg, self.all_keys)
        with self.locate_errors():
            base = load_base(self.cfg, self.typed, keys, self.source.origin)
        if base is None:
            return None, keys
        with open_dict(self.cfg):
            self.cfg.model = dict(base.settings)
        return base.model, self.all_keys.restrict(self.cfg)

    def diff(self, other: Composition) -> list[str]:
        """Return the settings that differ from those of `other`, as `key=value` with this configuration's values.

        Hydra's settings are left out.
        """
        old, new = (OmegaConf.to_container(drop_hydra_keys(c.cfg)) for c in (other, self))
        return [f"{key}={plain(value)}" for key, (_, value) in differences(old, new)]

    def check_parts(self) -> None:
        """Raise UserError for invalid settings of the run's parts (model, data, recipe, ...).

        The engine and the contents of the recipe's base file are not checked.
        """
        build_parts(self.cfg, check_keys(self.cfg, self.all_keys), self.source.origin)

    def build_config(self) -> Config:
        """Build all parts of the run, including the engine; raise UserError for invalid settings."""
        registry = self.all_keys.registry
        if self.sweeps:
            name = OmegaConf.select(self.cfg, "hydra.runtime.choices.experiment")
            subject, line = (f"experiment={name}", f" experiment={name}") if name else ("this configuration", " ...")
            line += registry.plugins_override
            raise UserError(f"{subject} sweeps over {', '.join(self.sweeps)}; run it with -m: toyexp -m{line}")
        base, keys = self._base_and_keys
        try:
            parts = build_parts(self.cfg, keys, self.source.origin)
        except UserError:
            with self.locate_errors():
                raise
        require_plugins(parts["settings"].plugins, self.modules, "the config")
        with self.locate_errors():
            load_objective_model(parts["objective"], registry)
        self._set_devices(parts["plain"]["engine"])
        engine, note = pick_engine(parts["plain"]["engine"], registry)
        return Config(
            **parts, engine=engine, engine_note=note, base=base, default_callbacks=default_callbacks,
            cwd=self.source.origin.cwd,
            typed=[] if self.source != Source(CONF) else [
                str(o.input_line) for o in self.typed if not str(o.key_or_group).startswith("hydra.")
            ],
            suggest_command=lambda: suggest_command(
                inputs_by_key(self.typed), parts["recipe"], parts["model"], type(parts["data"]), registry
            ),
            omissions=[
                *(f"plugin {p.plugin} ({p.package}) is left out: {p.reason}" for p in registry.problems),
                *registry.notes,
                *_repetition_warnings(self.typed),
                *_callback_warnings(self.typed, parts["callbacks"], registry),
                *_thread_warnings(parts["plain"], engine),
                *rank_warnings(),
            ],
        )  # fmt: skip

    def _set_devices(self, engine: dict[str, Any]) -> None:
        """Set `devices` in the engine's settings to the number of ranks that `torchrun` started.

        If the command line sets `devices` to a number above 1, keep this number.
        """
        typed_number = any(o.key_or_group == "engine.devices" for o in self.typed) and engine.get("devices") != "1"
        if (count := started_ranks().count) > 1 and "devices" in engine and not typed_number:
            engine["devices"] = str(count)

    def locate_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that says in the message of a UserError where the wrong value was set.

        The function `locate_errors` in mistakes.py describes the added text.
        """
        return locate_errors(self.cfg, self.typed, self.source)

    def sweep_settings(self) -> Sweep:
        """Return the checked settings of a sweep; raise UserError for invalid ones."""
        only = OmegaConf.masked_copy(self.cfg, ["sweep"])
        node = apply_types(Sweep, resolve_config(only)["sweep"], "sweep")
        settings = Sweep(**{**node, **{launcher: cls(**node[launcher]) for launcher, cls in LAUNCHER_SETTINGS.items()}})
        settings.check()
        return settings


# -- warnings about settings without effect ----------------------------------------------------------------


def _repetition_warnings(typed: Sequence[Override]) -> list[str]:
    """Return a warning for each setting that the user typed twice with different values. The last value counts."""
    last = {o.key_or_group: o.input_line for o in typed}
    braced = mapping_overrides(typed) if len(last) < len(typed) else []
    pairs = [(o.input_line, last[o.key_or_group]) for o in typed if o not in braced]
    return [f"{line}: overridden by the later {later}" for line, later in pairs if line != later]


def _thread_warnings(plain: Mapping[str, Any], engine: Engine) -> list[str]:
    threads = plain["engine"].get("threads") if plain["engine"]["name"] == AUTO else None
    if not threads or any(f.name == "threads" for f in dataclasses.fields(engine)):
        return []
    return [f"engine.threads={threads}: has no effect: engine=auto chose {engine.name}, which has no such setting"]


def _callback_warnings(typed: Sequence[Override], callbacks: Mapping[str, Callback], registry: Registry) -> list[str]:
    """Return a warning if `callbacks=[...]` on the command line leaves out default callbacks.

    An empty list and a preset give no warning, and neither does dropping the default learning-rate schedule if another
    schedule is chosen. Raise UserError if a callback is named twice.
    """
    lists = [o for o in typed if o.key_or_group == "callbacks"]
    value = lists[-1].value() if lists else []
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"{lists[-1].input_line}: contains {twice} twice; name it once (for a second linear schedule, add linear_2)"
        )
    if not names or not all(name in registry.offers["callbacks"] for name in names):
        return []
    scheduled = any(sets_lr(c) for c in callbacks.values())
    usual = {name: sets_lr(registry.get("callbacks", name)()) for name in default_callbacks()}
    missing = [name for name, schedule in usual.items() if name not in callbacks and not (schedule and scheduled)]
    if not missing:
        return []
    overrides = [f"callbacks=[default,{','.join(name for name in names if name not in usual)}]".replace(",]", "]")]
    overrides += [
        f"'~callbacks.{name}'" for name, schedule in usual.items() if schedule and name not in callbacks and scheduled
    ]
    return [f"callbacks=[{','.join(names)}]: leaves out {', '.join(missing)}, which are on by default; to keep them: "
            f"{' '.join(overrides)}"]  # fmt: skip


# -- the model of the recipe's base file ---------------------


@dataclass(frozen=True)
class Base:
    """A base model, and the settings under `model` of a run that fine-tunes it."""

    model: Model
    settings: Mapping[str, Any]  # as in the file, except `context`, the run's row length


def load_base(cfg: DictConfig, typed: Sequence[Override], keys: Keys, origin: Origin) -> Base | None:
    """Load the model file that the recipe fine-tunes (recipe.base); return None if the recipe has no such file.

    Raise UserError if no model class can represent the file, or if model.context exceeds the context in the file. Also
    raise UserError if another setting of `model` on the command line differs from the file.
    """
    cls, described, data = (keys.classes[kind][0] for kind in ("recipe", "model", "data"))
    if cls.base_file is Recipe.base_file:
        return None
    node = apply_types(cls, resolve_config(cfg)["recipe"], "recipe")
    recipe: Recipe = create_part(cls, resolve_paths(cls, node, origin))
    if unfit := model_mismatch(recipe, described()):
        raise UserError(f"{unfit}{suggest_command(inputs_by_key(typed), recipe, described(), data, keys.registry)}")
    recipe.check()
    path = recipe.base_file()
    if path is None:
        return None
    model = recipe.prepare_base(load_open_model(open_gguf(str(path)), keys.registry, recipe.reads))
    settings = {"name": model.name, **model_settings(model)}
    for override in typed:
        _check_model(
            override, cfg, f"recipe={recipe.name} takes the model from {source_path(path)}, a {model.name}", model
        )
    if model.context:
        settings["context"] = context = cfg.model.get("context", model.context)
        if isinstance(context, int) and context > model.context:
            limit = f"has a context of {model.context} tokens; use model.context={model.context} or less"
            raise UserError(f"model.context={context}: {source_path(path)} {limit}")
    return Base(model, settings)


def _check_model(override: Override, cfg: DictConfig, origin: str, model: Model) -> None:
    """Raise UserError if the override sets a setting of the model to another value than the model file has.

    `origin` is a part of the message: it says from which file the model is taken.
    """
    kind, _, key = override.key_or_group.partition(".")
    if kind != "model" or key == "context":
        return
    file_settings = model_settings(model)
    typed_value, file_value = (cfg.model[key], file_settings.get(key)) if key else (override.value(), model.name)
    if typed_value != file_value:
        but = f" with {key}={file_value}" if key in file_settings else ""
        raise UserError(f"{override.input_line}: {origin}{but}; leave {override.key_or_group} out")


def inputs_by_key(typed: Sequence[Override]) -> dict[str, str]:
    """Return the overrides on the command line as {key: text as the user typed it}."""
    return {o.key_or_group: str(o.input_line) for o in typed}
