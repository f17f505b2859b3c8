"""Typed configuration: Hydra composes names and differences, plugin dataclasses are the schema.

Nothing is ever instantiated from a config. Errors become one or two lines that name the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.bus import Callback
from toyexp.data import Data
from toyexp.engine import Engine
from toyexp.errors import Unavailable, UserError, choose, nearest
from toyexp.model import Model
from toyexp.optim import Optim
from toyexp.recipe import Recipe
from toyexp.registry import Registry

AUTO = "auto"


@dataclass
class Settings:
    """The top-level keys; what they mean stands in conf/config.yaml, which shows them all."""

    name: str = "run"
    seed: int = 0
    steps: int = 200
    batch_size: int = 8
    lr: float = 1e-3
    eval_every: int = 50
    plugins: list[str] = field(default_factory=list)
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
                raise UserError(f"{name}={value}: must be a whole number from {least}")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: must be a number, 0 or above")
        if not re.fullmatch(r"[^/\\\0]{1,100}", self.name) or self.name.startswith("."):
            raise UserError(f"name={self.name!r}: must be 1 to 100 characters, not start with a dot and hold no slash")


@dataclass
class AutoEngine:
    """The best engine that works here; it says which one and why."""


@dataclass
class Config:
    """A run's parts, each built from its own settings; no part sees another's."""

    settings: Settings
    model: Model
    data: Data
    recipe: Recipe
    engine: Engine
    optim: Optim
    callbacks: dict[str, Callback]
    plain: dict[str, Any]  # the same as resolved plain data, for the run directory
    engine_note: str  # which engine, and why that one


def conf_dir() -> Path:
    """The checkout's conf/, or the copy inside the installed package."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else package / "_conf"


# -- what Hydra can compose -----------------------------------------------------------------------------------------


def store_schemas(registry: Registry) -> None:
    """Makes every plugin's dataclass known to Hydra under its group and name."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Settings)
    store.store(group="optim", name="adamw", node=schema(Optim, "adamw"))
    store.store(group="engine", name=AUTO, node=schema(AutoEngine, AUTO))
    for kind, offers in registry.offers.items():
        for name, offer in offers.items():
            package = f"callbacks.{name}" if kind == "callbacks" else None
            try:
                store.store(group=kind, name=name, node=schema(offer.cls, name), package=package)
            except OmegaConfBaseException as error:
                raise UserError(f"{kind}={name} ({offer.plugin}): its fields cannot be settings: {error}") from None


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


# -- from a composed config to a run's parts --------------------------------------------------------------------------


def build(cfg: DictConfig, registry: Registry, allowed_plugins: Sequence[str] = ()) -> Config:
    """The parts of a run; raises UserError for anything a user could have typed wrong.

    `allowed_plugins` are the modules named on the command line: a config file that came from elsewhere must not be
    able to load code.
    """
    check_keys(cfg, registry)
    try:
        plain = typing.cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(first_line(error)) from None
    settings = Settings(**{f.name: plain[f.name] for f in dataclasses.fields(Settings)})
    settings.check()
    unknown = [p for p in settings.plugins if p not in allowed_plugins]
    if unknown:
        raise UserError(
            f"the config asks for the local plugin {unknown[0]}; code is only loaded from the command line: "
            f"add 'plugins=[{','.join(settings.plugins)}]'"
        )
    optim = typing.cast("Optim", make(Optim, plain["optim"], "optim"))
    optim.check()
    if settings.batch_size % optim.accumulate:
        raise UserError(
            f"optim.accumulate={optim.accumulate} does not divide batch_size={settings.batch_size} into micro-batches"
        )
    parts = {kind: _part(kind, plain[kind], registry) for kind in ("model", "data", "recipe")}
    for part in parts.values():
        part.check()
    callbacks = {name: _callback(name, node, registry) for name, node in plain["callbacks"].items()}
    engine, note = pick_engine(plain["engine"], registry)
    return Config(settings, parts["model"], parts["data"], parts["recipe"], engine, optim, callbacks, plain, note)


def make(cls: type, node: Mapping[str, Any], where: str) -> Any:
    """An instance of a plugin class from its settings."""
    names = {f.name for f in dataclasses.fields(cls)}
    for key, value in node.items():
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{where}.{key}=nan: must be a number")
    return cls(**{k: v for k, v in node.items() if k in names})


def _part(kind: str, node: Mapping[str, Any], registry: Registry) -> Any:
    return make(registry.get(kind, str(node["name"])), node, kind)


def _callback(name: str, node: Mapping[str, Any], registry: Registry) -> Callback:
    callback = make(registry.get("callbacks", name), node, f"callbacks.{name}")
    callback.check()
    return typing.cast("Callback", callback)


def pick_engine(node: Mapping[str, Any], registry: Registry) -> tuple[Engine, str]:
    """The engine that was asked for, or with `auto` the best that works here, and a line that says which and why."""
    if node["name"] != AUTO:
        engine = _part("engine", node, registry)
        return engine, f"{engine.name}: {engine.check()}"
    passed_over: list[str] = []
    offers = sorted(registry.offers["engine"].values(), key=lambda o: -getattr(o.cls, "priority", 0))
    for offer in offers:
        try:
            facts = offer.cls().check()
        except Unavailable:
            passed_over.append(offer.name)
            continue
        why = f"auto; not here: {', '.join(passed_over)}" if passed_over else "auto"
        return offer.cls(), f"{offer.name}: {facts} ({why})"
    raise UserError("engine=auto: no engine works here; `toyexp doctor` says why and what to install")


# -- errors, in a person's words ------------------------------------------------------------------------------------


def check_keys(cfg: DictConfig, registry: Registry) -> None:
    """Raises UserError for keys nobody reads, whatever prefix they were typed with, and for config that names code."""
    for key in cfg:
        if str(key) not in valid_keys(cfg, registry, ""):
            raise unknown_key(str(key), cfg, registry)
    for kind in ("model", "data", "recipe", "engine", "optim"):
        if not isinstance(cfg[kind], DictConfig) or "name" not in cfg[kind]:
            raise UserError(f"{kind}={cfg[kind]}: not a {kind} by name; {choose('', valid_choices(kind, registry))}")
        for key in cfg[kind]:
            if str(key) not in valid_keys(cfg, registry, kind):
                raise unknown_key(f"{kind}.{key}", cfg, registry)
    for name, node in cfg.callbacks.items():
        registry.get("callbacks", str(name))
        for key in node or ():
            if str(key) not in valid_keys(cfg, registry, f"callbacks.{name}"):
                raise unknown_key(f"callbacks.{name}.{key}", cfg, registry)


def valid_keys(cfg: DictConfig | None, registry: Registry, where: str) -> set[str]:
    """The keys that may stand under `where` ("" is the top level)."""
    if where == "":
        return {f.name for f in dataclasses.fields(Settings)}
    if where == "callbacks":
        return set(registry.offers["callbacks"])
    if where == "optim":
        return {"name"} | {f.name for f in dataclasses.fields(Optim)}
    kind, _, name = where.partition(".")
    if not name and cfg is not None and isinstance(cfg.get(kind), DictConfig):
        name = str(cfg[kind].get("name"))
    offer = registry.offers.get(kind, {}).get(name)
    return {"name"} | ({f.name for f in dataclasses.fields(offer.cls)} if offer else set())


def valid_choices(kind: str, registry: Registry) -> set[str]:
    """What `kind=` may be: plugins by name, and the presets of conf/."""
    presets = {p.stem for p in (conf_dir() / kind).glob("*.yaml")}
    extra = {"engine": {AUTO}, "optim": {"adamw"}}.get(kind, set())
    return set(registry.offers.get(kind, ())) | presets | extra


def unknown_key(key: str, cfg: DictConfig | None, registry: Registry) -> UserError:
    """An error about a key nobody reads, with the nearest one that somebody does."""
    where, _, last = key.rpartition(".")
    if where.split(".")[0] == "engine" and cfg is not None and cfg.engine.get("name") == AUTO:
        return UserError(f"{key}: engine=auto has no settings; name the engine too, such as engine=cpu {key}=...")
    valid = valid_keys(cfg, registry, where) - {"name"} if where else valid_keys(cfg, registry, where)
    best = nearest(last, valid)
    if best:
        return UserError(f"unknown key {key}; did you mean {where + '.' if where else ''}{best}?")
    listed = ", ".join(sorted(valid)) or "no settings"
    return UserError(f"unknown key {key}; {where or 'the top level'} has: {listed}")


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of the command line; UserError for what it cannot read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException:
            raise UserError(_syntax(text)) from None
    return parsed


def _syntax(text: str) -> str:
    key, equals, value = text.partition("=")
    if equals and not key:
        return f"{text!r}: a setting needs a key before '=', such as steps=100"
    if not equals:
        return f"{text!r}: neither a command nor a setting (key=value)"
    return f"{text!r}: cannot be read as key=value; quote special characters: '{key}=\"{value}\"'"


def explain(error: Exception, overrides: Sequence[str], registry: Registry) -> UserError:
    """Hydra's and OmegaConf's complaint about the command line, as one of ours."""
    if isinstance(error, UserError):
        return error
    parsed = parse(overrides)
    for o in parsed:
        kind = o.key_or_group
        wanted = o.value() if not o.is_sweep_override() else None
        if kind in ("model", "data", "recipe", "engine", "optim", "callbacks", "experiment"):
            for name in wanted if isinstance(wanted, list | ListConfig) else [wanted]:
                choices = valid_choices(kind, registry)
                if isinstance(name, str) and name not in choices and not o.is_delete():
                    return UserError(f"{registry.missing(kind, name)}; {choose(name, choices)}")
            if isinstance(wanted, list) and kind != "callbacks":
                return UserError(
                    f"{kind}={wanted}: takes one name; to run several, sweep: -m {kind}={','.join(wanted)}"
                )
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    named = next((o for o in parsed if o.key_or_group == key), None)
    for o in parsed:
        if f"'{o.key_or_group}'" in str(error) and "Could not override" in str(error):
            return unknown_key(o.key_or_group, _composed_quietly(parsed, o), registry)
        if "Ambiguous value" in str(error) and str(error).find(str(o.input_line)) >= 0:
            return UserError(f"{o.input_line}: several values; add -m to sweep over them")
        if "Could not delete" in str(error) and o.is_delete():
            return UserError(f"{o.input_line}: there is nothing of that name to drop")
    if named is not None:
        return UserError(f"{named.input_line}: {first_line(cause)}")
    return UserError(first_line(error))


def _composed_quietly(parsed: Iterable[Override], without: Override) -> DictConfig | None:
    """The config without the override that failed, to know which model's keys to suggest."""
    from hydra import compose

    rest = [str(o.input_line) for o in parsed if o is not without]
    try:
        return compose("config", overrides=rest)
    except (HydraException, OmegaConfBaseException):
        return None


def first_line(error: BaseException) -> str:
    """The first line of a message, with OmegaConf's type names in plain words."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    match = re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    if match:
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return f"must be {kinds.get(match[2], match[2])}"
    if re.match(r"field '\w+' is not Optional", text):
        return "cannot be null"
    return text


COMPOSITION_ERRORS = (
    ConfigCompositionException,
    MissingConfigException,
    OverrideParseException,
    HydraException,
    OmegaConfBaseException,
    ValueError,
)
