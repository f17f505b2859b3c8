"""Typed configuration: Hydra composes names and differences, plugin dataclasses are the schema.

Nothing is ever instantiated from a config. Errors become one or two lines that name the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from toyexp.bus import Callback
from toyexp.data import Data, read_text
from toyexp.engine import Engine
from toyexp.errors import Unavailable, UserError, choose, nearest
from toyexp.model import Model
from toyexp.optim import Optim
from toyexp.recipe import Recipe
from toyexp.registry import Registry

AUTO = "auto"
PARTS = ("model", "data", "recipe", "engine", "optim")
GROUPS = (*PARTS, "callbacks", "experiment")  # what is chosen by name


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
                most = f" to {2**63 - 1}" if value > least else ""
                raise UserError(f"{name}={value}: must be a whole number from {least}{most}")
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


@dataclass(frozen=True)
class Source:
    """Where the configuration comes from: toyexp's conf/, or a person's own directory with conf/ behind it."""

    directory: Path
    name: str = "config"
    extra: Path | None = None  # one more directory of presets

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
    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise _yaml_error(error, path) from None


def compose(overrides: Sequence[str], registry: Registry, source: Source, job: int = 0) -> DictConfig:
    """The configuration of one run, with Hydra's own settings under `hydra`; `job` counts the runs of a sweep."""
    parsed = parse(overrides)
    for override in parsed:
        check_override(override, registry, source)
    try:
        cfg = _compose([*source.overrides(), *overrides], source)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, parsed, registry, source) from None
    except yaml.YAMLError as error:
        raise _yaml_error(error, source.directory) from None
    with open_dict(cfg):
        cfg.hydra.job.num = job
        for key in valid_keys(None, registry, "") - {str(k) for k in cfg}:  # a person's own file may leave keys out
            cfg[key] = getattr(Settings(), key)
    HydraConfig.instance().set_config(cfg)  # what ${hydra:...} reads
    return cfg


def _compose(overrides: list[str], source: Source) -> DictConfig:
    with hydra.initialize_config_dir(str(source.directory), version_base="1.3", job_name="toyexp"):
        return hydra.compose(source.name, overrides=overrides, return_hydra_config=True)


def directory(cfg: DictConfig, key: str, below: Path = Path()) -> Path:
    """The directory that `hydra.run.dir` or another of Hydra's settings gives, relative to `below`."""
    try:
        given = str(OmegaConf.select(cfg, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{key}: {in_plain_words(error)}") from None
    if not given.strip():
        raise UserError(f"{key}=: must name a directory")
    return (below / given).absolute()


def require_node(cfg: DictConfig, key: str) -> None:
    """Raises UserError when the config has no part of that name."""
    try:
        found = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        found = None
    if found is None:
        raise UserError(f"--package {key}: the config has no such part; {choose(key, (str(k) for k in cfg))}")


# -- from a composed config to a run's parts --------------------------------------------------------------------------


def build(cfg: DictConfig, registry: Registry, allowed_plugins: Sequence[str] = ()) -> Config:
    """The parts of a run; raises UserError for anything a user could have typed wrong.

    `allowed_plugins` are the modules named on the command line: a config file that came from elsewhere must not be
    able to load code.
    """
    cfg = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])
    check_keys(cfg, registry)
    try:
        plain = typing.cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{getattr(error, 'full_key', None) or 'the config'}: {in_plain_words(error)}") from None
    plain = _typed(Settings, plain, "")
    for kind in PARTS:
        plain[kind] = _typed(_class(kind, plain[kind], registry), plain[kind], kind)
    for name, node in plain["callbacks"].items():
        plain["callbacks"][name] = _typed(registry.get("callbacks", name), node, f"callbacks.{name}")
    settings = Settings(**plain)
    settings.check()
    unknown = [p for p in settings.plugins if p not in allowed_plugins]
    if unknown:
        raise UserError(
            f"the config asks for the local plugin {unknown[0]}; code is only loaded from the command line: "
            f"add 'plugins=[{','.join(settings.plugins)}]'"
        )
    optim = typing.cast("Optim", make(Optim, plain["optim"]))
    optim.check()
    if settings.batch_size % optim.accumulate:
        raise UserError(
            f"optim.accumulate={optim.accumulate} does not divide batch_size={settings.batch_size} into micro-batches"
        )
    parts = {kind: make(_class(kind, plain[kind], registry), plain[kind]) for kind in ("model", "data", "recipe")}
    for part in parts.values():
        part.check()
    callbacks = {name: _callback(name, node, registry) for name, node in plain["callbacks"].items()}
    engine, note = pick_engine(plain["engine"], registry)
    return Config(settings, parts["model"], parts["data"], parts["recipe"], engine, optim, callbacks, plain, note)


def _class(kind: str, node: Mapping[str, Any], registry: Registry) -> type:
    if kind == "optim":
        return Optim
    return AutoEngine if (kind, node["name"]) == ("engine", AUTO) else registry.get(kind, str(node["name"]))


def _typed(cls: type, node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`node` with the types and defaults of `cls`: a person's own config file may have come without its schema."""
    dot = f"{where}." if where else ""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls if where == "" else schema(cls, str(node["name"]))), node)
        values = typing.cast("dict[str, Any]", OmegaConf.to_container(merged, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or getattr(error, "key", None)
        raise UserError(f"{dot}{key}={node.get(str(key))}: {in_plain_words(error)}") from None
    for key, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{dot}{key}=nan: must be a number")
    return values


def make(cls: type, node: Mapping[str, Any]) -> Any:
    """An instance of a plugin class from its settings."""
    return cls(**{f.name: node[f.name] for f in dataclasses.fields(cls)})


def _callback(name: str, node: Mapping[str, Any], registry: Registry) -> Callback:
    callback = make(registry.get("callbacks", name), node)
    callback.check()
    return typing.cast("Callback", callback)


def pick_engine(node: Mapping[str, Any], registry: Registry) -> tuple[Engine, str]:
    """The engine that was asked for, or with `auto` the best that works here, and a line that says which and why."""
    if node["name"] != AUTO:
        engine = make(_class("engine", node, registry), node)
        try:
            return engine, f"{engine.name}: {engine.check()}"
        except Unavailable as reason:
            raise Unavailable(f"engine={engine.name}: {reason}") from None
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


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's reading of the command line; UserError for what it cannot read."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_overrides([text])[0]
        except HydraException:
            raise UserError(_syntax(text)) from None
        if not override.key_or_group:
            raise UserError(_syntax(text))
        parsed.append(override)
    return parsed


def _syntax(text: str) -> str:
    key, equals, value = text.partition("=")
    if not equals:
        return f"{text!r}: cannot be read; a setting is key=value, such as steps=100"
    if not key.strip("+~"):
        return f"{text!r}: a setting needs a key before '=', such as steps=100"
    if key[0] in "\"'":
        return f'{text!r}: the quotes belong around the value alone: key="value"'
    if value.count("[") != value.count("]") or value.count("{") != value.count("}"):
        return f"{text!r}: a bracket is not closed; a list is {key}=[a,b]"
    if value.count('"') % 2 or value.count("'") % 2:
        return f"{text!r}: a quote is not closed"
    return f"{text!r}: cannot be read; put quotes around a value with special characters: '{key}=\"{value}\"'"


def check_override(override: Override, registry: Registry, source: Source) -> None:
    """Raises UserError for what Hydra would accept without effect, or refuse in words of its own."""
    key, line = override.key_or_group, str(override.input_line)
    kind, *rest = key.split(".")
    if key.replace("/", ".").startswith(("hydra.launcher", "hydra.sweeper")):
        raise UserError(f"{line}: toyexp runs the jobs of a sweep itself, one after another: -m key=a,b")
    if override.package is not None:
        raise UserError(f"{line}: '@' has no meaning here; write {key}={override.get_value_element_as_str()}")
    if override.is_sweep_override():
        raise UserError(f"{line}: several values; add -m to sweep over them")
    if kind.split("/")[0] == "hydra":
        return
    if "/" in key:
        raise UserError(f"unknown key {key}; did you mean {key.replace('/', '.')}?")
    if override.is_delete():
        if kind != "callbacks" or len(rest) != 1:
            raise UserError(f"{line}: only callbacks can be dropped, such as '~callbacks.progress'")
    elif key in GROUPS:
        _check_choice(override, line, registry, source)
    elif kind in GROUPS and rest:
        depth = 2 if kind == "callbacks" else 1
        if len(rest) < depth and rest[0] not in registry.offers[kind]:
            raise unknown_key(key, None, registry)
        if len(rest) < depth:
            raise UserError(f"{line}: give a callback's settings one by one ({key}.<setting>=...); add callbacks by "
                            f"name: callbacks=[default,{rest[0]}]")  # fmt: skip
        if len(rest) > depth:
            raise UserError(f"{line}: {'.'.join([kind, *rest[:depth]])} holds one value, not keys of its own")
        if rest[-1] == "name":
            named = "callbacks=[...]" if kind == "callbacks" else f"{kind}={override.get_value_element_as_str()}"
            raise UserError(f"{line}: cannot be set; choose by name: {named}")
    elif rest and kind in valid_keys(None, registry, ""):
        raise UserError(f"{line}: {kind} holds one value: {kind}=...")


def _check_choice(override: Override, line: str, registry: Registry, source: Source) -> None:
    kind, wanted = override.key_or_group, override.value()
    choices = valid_choices(kind, registry, source)
    if line.startswith("+"):
        raise UserError(f"{line}: leave out the '+': {line.lstrip('+')}")
    if isinstance(wanted, list) and kind != "callbacks":
        several = f"; to run several, sweep: -m {kind}={','.join(map(str, wanted))}" if len(wanted) > 1 else ""
        raise UserError(f"{line}: takes one name, without brackets{several}")
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if not isinstance(name, str) or not name:
            raise UserError(f"{line}: takes a name; {choose('', choices)}")
        if name not in choices:
            raise UserError(f"{registry.missing(kind, name)}; {choose(name, choices)}")


def check_keys(cfg: DictConfig, registry: Registry) -> None:
    """Raises UserError for keys nobody reads, whatever prefix they were typed with, and for config that names code."""
    for key in cfg:
        if str(key) not in valid_keys(cfg, registry, ""):
            raise unknown_key(str(key), cfg, registry)
    for kind in PARTS:
        node = None if OmegaConf.is_missing(cfg, kind) else cfg.get(kind)
        if not isinstance(node, DictConfig) or "name" not in node:
            raise UserError(
                f"the config chooses no {kind}; add {kind}=..., {choose('', valid_choices(kind, registry))}"
            )
        _class(kind, node, registry)
        for key in node:
            if str(key) not in valid_keys(cfg, registry, kind):
                raise unknown_key(f"{kind}.{key!s}", cfg, registry)
    for name, node in cfg.get("callbacks", {}).items():
        registry.get("callbacks", str(name))
        if not isinstance(node, DictConfig) or node.get("name") != name:
            raise _not_chosen(f"callbacks.{name}")
        for key in node:
            if str(key) not in valid_keys(cfg, registry, f"callbacks.{name}"):
                raise unknown_key(f"callbacks.{name!s}.{key!s}", cfg, registry)


def valid_keys(cfg: DictConfig | None, registry: Registry, where: str) -> set[str]:
    """The keys that may stand under `where` ("" is the top level)."""
    if where == "":
        return {f.name for f in dataclasses.fields(Settings)}
    if where == "optim":
        return {"name"} | {f.name for f in dataclasses.fields(Optim)}
    kind, _, name = where.partition(".")
    name = name or _chosen(cfg, kind) or ""
    offers = registry.offers.get(kind, {})
    possible = offers.values() if cfg is None and not name else [offers[name]] if name in offers else []
    return {"name"}.union(*({f.name for f in dataclasses.fields(offer.cls)} for offer in possible))


def _chosen(cfg: DictConfig | None, kind: str) -> str | None:
    """The name of the run's `kind`."""
    node = None if cfg is None or OmegaConf.is_missing(cfg, kind) else cfg.get(kind)
    return str(node.get("name")) if isinstance(node, DictConfig) else None


def valid_choices(kind: str, registry: Registry, source: Source | None = None) -> set[str]:
    """What `kind=` may be: plugins by name, and the presets of the config directories."""
    roots = [d / kind for d in (source.directories if source else [conf_dir()])]
    presets = {p.relative_to(root).with_suffix("").as_posix() for root in roots for p in root.rglob("*.yaml")}
    extra = {"engine": {AUTO}, "optim": {"adamw"}}.get(kind, set())
    return set(registry.offers.get(kind, ())) | presets | extra


def unknown_key(key: str, cfg: DictConfig | None, registry: Registry) -> UserError:
    """An error about a key nobody reads, with the nearest one that somebody does."""
    kind, *rest = key.split(".")
    top = valid_keys(cfg, registry, "")
    if kind == "hydra":
        return UserError(f"unknown key {key}; of Hydra's settings you may want hydra.run.dir or hydra.sweep.dir")
    if kind not in top:
        homes = [w for w in _places(cfg) if not rest and kind in valid_keys(cfg, registry, w)]
        best = nearest(kind, top)
        if homes or best:
            return UserError(
                f"unknown key {key}; did you mean {'.'.join([homes[0], key] if homes else [str(best), *rest])}?"
            )
        return UserError(f"unknown key {key}; the keys are: {', '.join(sorted(top))}")
    if kind == "callbacks":
        if rest[0] not in registry.offers["callbacks"]:
            best = nearest(rest[0], registry.offers["callbacks"])
            hint = f"did you mean {'.'.join([kind, best, *rest[1:]])}?" if best else choose("", registry.offers[kind])
            return UserError(f"unknown key {key}; {hint}")
        if cfg is not None and rest[0] not in cfg.callbacks:
            return _not_chosen(key)
    where, last = ".".join([kind, *rest[:-1]]), rest[-1]
    chosen = f"{kind}={_chosen(cfg, kind)}" if kind != "callbacks" and _chosen(cfg, kind) else where
    owners = [
        n for n, o in registry.offers.get(kind, {}).items() if last in {f.name for f in dataclasses.fields(o.cls)}
    ]
    if owners and kind != "callbacks":
        belongs = " or ".join(f"{kind}={name}" for name in owners)
        return UserError(f"unknown key {key} with {chosen}; it belongs to {belongs}: add that too")
    valid = valid_keys(cfg, registry, where) - {"name"}
    best = nearest(last, valid)
    if best:
        return UserError(f"unknown key {key}; did you mean {where}.{best}?")
    return UserError(f"unknown key {key}; {chosen} has " + (", ".join(sorted(valid)) or "no settings"))


def _places(cfg: DictConfig | None) -> list[str]:
    """Where this run's settings stand."""
    return [*PARTS, *(f"callbacks.{name}" for name in (cfg.callbacks if cfg is not None else ()))]


def _not_chosen(key: str) -> UserError:
    name = key.split(".")[1]
    return UserError(f"{key}: {name} is not among this run's callbacks; add it, such as callbacks=[default,{name}]")


def explain(error: Exception, parsed: Sequence[Override], registry: Registry, source: Source) -> UserError:
    """Hydra's and OmegaConf's complaint about a configuration, as one of ours."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'|Key '[^']+' not in .*\n\s*full_key: (\S+)", text):
        return unknown_key(match[1] or match[2], _groups_only(parsed, source), registry)
    if match := re.search(r"An item is already at '([^']+)'", text):
        return UserError(f"+{match[1]}: that key is there already; leave out the '+'")
    if match := re.search(r"Could not (?:find|load) '(?:([^']+)/)?([^'/]+)'", text):
        kind, name = match[1] or "config", match[2]
        hint = f"; {choose(name, valid_choices(kind, registry, source))}" if kind in GROUPS else ""
        return UserError(f"{kind}={name}: there is none of that name{hint}")
    dropped = next((o for o in parsed if o.is_delete() and "Could not delete" in text), None)
    if dropped is not None:
        cfg, name = _groups_only(parsed, source), dropped.key_or_group.partition(".")[2]
        there = [str(n) for n in cfg.callbacks] if cfg is not None else []
        return UserError(f"{dropped.input_line}: this run has no such callback; {choose(name, there)}")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None) or next(iter(re.findall(r"full_key: (\S+)", text)), None)
    typed = [o for o in parsed if o.key_or_group == key]  # the same key may be there twice
    guilty = [o for o in typed if f"'{o.value()}'" in str(cause)] or typed
    label = guilty[-1].input_line if guilty else key or "the config"
    return UserError(f"{label}: {in_plain_words(cause)}")


def _groups_only(parsed: Sequence[Override], source: Source) -> DictConfig | None:
    """The config with the choices of the command line alone, to know which model's keys to suggest."""
    chosen = [str(o.input_line) for o in parsed if o.key_or_group in GROUPS]
    try:
        return _compose([*source.overrides(), *chosen], source)
    except (HydraException, OmegaConfBaseException):
        return None


_PLAIN_WORDS = {
    r"could not be converted to Integer": "must be a whole number",
    r"could not be converted to Float": "must be a number",
    r"could not be converted to Boolean|is not a valid bool": "must be true or false",
    r"Cannot convert '\w+' to string": "must be one text",
    r"is not Optional": "cannot be null",
    r"Interpolation key '(.+)' not found": "refers to ${{{0}}}, a key that is not there",
    r"Unsupported interpolation type (\S+)": "refers to ${{{0}:...}}, which is not known here",
    r"[Rr]ecursi": "refers to itself",
    r"[Mm]issing ?[Mm]andatory": "has no value",
    r"expected one of \[(.*)\]": "must be one of {0}",
}


def in_plain_words(error: BaseException) -> str:
    """What is wrong with a value, without OmegaConf's names for types."""
    text = str(error)
    for pattern, words in _PLAIN_WORDS.items():
        if match := re.search(pattern, text):
            return words.format(*match.groups())
    return text.strip().splitlines()[0] if text.strip() else "cannot be used"


def _yaml_error(error: yaml.YAMLError, where: Path) -> UserError:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = (
        f"{where / mark.name if mark.name.endswith('.yaml') else where}, line {mark.line + 1}" if mark else str(where)
    )
    return UserError(f"{place}: not valid YAML: {problem or 'it cannot be read'}")
