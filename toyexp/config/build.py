"""Typed configuration: from a command line to the checked parts of a run.

Hydra composes names and differences; nothing is ever instantiated from a config.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.blame import blamed
from toyexp.base.errors import Broken, Unavailable, UserError, choose, printable
from toyexp.base.home import expanded
from toyexp.base.packages import told_by, why
from toyexp.base.signals import hidden_interrupt
from toyexp.config.chosen import check_files, includes_itself
from toyexp.config.mistakes import (
    check_keys,
    check_override,
    explain,
    in_lists,
    in_plain_words,
    parse,
    replaced,
    valid_keys,
)
from toyexp.config.schema import (
    AUTO,
    PARTS,
    Root,
    Source,
    class_of,
    compose_raw,
    default_callbacks,
    schema,
    yaml_error,
)
from toyexp.config.top_level import Submitit, Sweep
from toyexp.config.trust import require_plugins
from toyexp.contract.callback import Callback, answers_lr
from toyexp.contract.compatibility import misfit, suited
from toyexp.contract.data import Data
from toyexp.contract.engine import Engine
from toyexp.contract.model import Model
from toyexp.contract.recipe import Recipe
from toyexp.contract.registry import Registry
from toyexp.formats.gguf.open_model import model_in
from toyexp.formats.gguf.source import opened
from toyexp.training.parts import Config
from toyexp.training.settings import Settings


def compose(overrides: Sequence[str], registry: Registry, source: Source, job: int = 0) -> DictConfig:
    """The configuration of one run, with Hydra's own settings under `hydra`; `job` counts the runs of a sweep."""
    parsed = parse(overrides)
    for override in parsed:
        check_override(override, registry, source)
    try:
        cfg = compose_raw([*source.overrides(), *in_lists(parsed, registry)], source)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, parsed, registry, source) from None
    except yaml.YAMLError as error:
        raise yaml_error(error, source.directory) from None
    except UserError:  # of `foreign`, in its own words
        raise
    except RecursionError:
        raise includes_itself(parsed, source) from None
    except Exception as error:  # Hydra raises anything for a file with the wrong kind of thing in it
        path = source.directory / f"{source.name}.yaml"
        raise UserError(f"{path}: cannot be composed ({type(error).__name__}: {printable(str(error), 200)})") from None
    check_files(cfg, parsed, source)
    with open_dict(cfg):
        cfg.hydra.job.num = OmegaConf.select(cfg, "hydra.job.num", default=job)
        given = {o.key_or_group for o in parsed}
        cfg.hydra.sweeper.params = {key: values for key, values in sweep_of(cfg).items() if key not in given}
        for key in valid_keys(None, registry, "") - {str(k) for k in cfg}:  # a person's own file may leave keys out
            cfg[key] = getattr(Root(), key)
    HydraConfig.instance().set_config(cfg)  # what ${hydra:...} reads
    return cfg


def sweep_of(cfg: DictConfig) -> dict[str, str]:
    """What the config itself sweeps over and was given no value for, as `key: values` of a command line."""
    params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
    lists = {str(key): values if isinstance(values, ListConfig) else [values] for key, values in params.items()}
    return {key: ",".join("null" if v is None else str(v) for v in values) for key, values in lists.items()}


def directory(cfg: DictConfig, key: str, below: Path = Path()) -> Path:
    """The directory that `hydra.run.dir` or another of Hydra's settings gives, relative to `below`."""
    try:
        given = str(OmegaConf.select(cfg, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{key}: {in_plain_words(error)}") from None
    if not given.strip():
        raise UserError(f"{key}=: must name a directory")
    return (below / given).absolute()


def setting(key: str, value: object) -> str:
    """`key=value` as it is read back: any text, a number, true or false, null, or a list of these."""
    if isinstance(value, list):
        return f"{key}=[{','.join(setting('', item).removeprefix('=') for item in value)}]"
    if value is None or isinstance(value, bool | int | float):
        return f"{key}={'null' if value is None else str(value).lower()}"
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z0-9_./-]+", text) and "/" in text  # which is neither a number nor null
    return f"{key}={text if plain else QuotedString(text, Quote.double).with_quotes()}"


def sweep_settings(cfg: DictConfig) -> Sweep:
    """How the jobs of a sweep are run; UserError for what cannot be."""
    node = _typed(Sweep, _resolved(OmegaConf.masked_copy(cfg, ["sweep"]))["sweep"], "sweep")
    settings = Sweep(**{**node, "submitit": Submitit(**node["submitit"])})
    settings.check()
    return settings


def require_node(cfg: DictConfig, key: str) -> None:
    """Raises UserError when the config has no part of that name."""
    try:
        found = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        found = None
    if found is None:
        raise UserError(f"--package {key}: the config has no such part; {choose(key, (str(k) for k in cfg))}")


def build(cfg: DictConfig, registry: Registry, allowed_plugins: Sequence[str] = ()) -> Config:
    """The parts of a run; raises UserError for anything a user could have typed wrong.

    `allowed_plugins` are the modules named on the command line: a config file that came from elsewhere must not be
    able to load code.
    """
    if sweep_of(cfg):
        name = OmegaConf.select(cfg, "hydra.runtime.choices.experiment")
        what, line = (f"experiment={name}", f" experiment={name}") if name else ("this configuration", " ...")
        raise UserError(f"{what} is a sweep over {', '.join(sweep_of(cfg))}; run it with -m: toyexp -m{line}")
    base, typed = settle(cfg, registry), _given(cfg)
    parts = _parts(without_hydra(cfg), registry)
    callbacks, plain = parts["callbacks"], parts["plain"]
    require_plugins(parts["settings"].plugins, allowed_plugins, "the config")
    engine, note = pick_engine(plain["engine"], registry)
    left_out = [
        *_broken(registry),
        *replaced(typed),
        *_without_default(typed, callbacks, registry),
        *_unused_threads(plain, engine),
    ]
    return Config(
        **parts, engine=engine, engine_note=note, base=base, by_default=default_callbacks(),
        suited=suited(_lines(typed), parts["recipe"], parts["model"], type(parts["data"]), registry), left_out=left_out,
    )  # fmt: skip


def look_over(cfg: DictConfig, registry: Registry) -> None:
    """Raises UserError for settings that cannot work, but for what a base's file and the engine have to say."""
    cfg = without_hydra(cfg)
    check_keys(cfg, registry)
    _parts(cfg, registry)


def _parts(cfg: DictConfig, registry: Registry) -> dict[str, Any]:
    """The parts of a run by their names in Config, each checked, but for the engine."""
    plain = _typed(Root, _resolved(cfg), "")
    del plain["sweep"]  # is about many runs, and no part of any
    for kind in PARTS:
        plain[kind] = _typed(class_of(kind, plain[kind], registry), plain[kind], kind)
    for name, node in plain["callbacks"].items():
        plain["callbacks"][name] = _typed(registry.get("callbacks", name), node, f"callbacks.{name}")
    parts = {"settings": Settings(**{f.name: plain[f.name] for f in dataclasses.fields(Settings)})}
    parts |= {kind: make(class_of(kind, plain[kind], registry), plain[kind]) for kind in PARTS if kind != "engine"}
    for kind, part in parts.items():
        title = getattr(part, "name", kind)
        with blamed(f"{kind}.{title}", "while its settings were checked"), told_by(f"{kind}={title}"):
            part.check()
    batch_size, accumulate = plain["batch_size"], plain["optim"]["accumulate"]
    if batch_size % accumulate:
        raise UserError(f"optim.accumulate={accumulate} does not divide batch_size={batch_size} into micro-batches")
    callbacks = {name: _callback(name, node, registry) for name, node in plain["callbacks"].items()}
    return {**parts, "callbacks": callbacks, "plain": plain}


def _broken(registry: Registry) -> list[str]:
    """A warning of each plugin that cannot be used; one that the run asked for has ended it."""
    return [f"plugin {p.plugin} ({p.package}) is left out: {p.reason}" for p in registry.problems]


def _unused_threads(plain: Mapping[str, Any], engine: Engine) -> list[str]:
    threads = plain["engine"].get("threads") if plain["engine"]["name"] == AUTO else None
    if not threads or any(f.name == "threads" for f in dataclasses.fields(engine)):
        return []
    return [f"engine.threads={threads}: engine=auto took {engine.name}, which has no such setting"]


def _without_default(typed: Sequence[Override], callbacks: Mapping[str, Callback], registry: Registry) -> list[str]:
    """A warning when `callbacks=[plots]` was typed, of what a run has by default and this one lacks.

    Nothing is lacking in a list that is empty, one of presets, and of schedules where it has one of its own.
    """
    lists = [o for o in typed if o.key_or_group == "callbacks"]
    value = lists[-1].value() if lists else []
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if not names or not all(name in registry.offers["callbacks"] for name in names):
        return []
    scheduled = any(answers_lr(c) for c in callbacks.values())
    usual = {name: answers_lr(registry.get("callbacks", name)()) for name in default_callbacks()}
    missing = [name for name, schedule in usual.items() if name not in callbacks and not (schedule and scheduled)]
    if not missing:
        return []
    kept = [f"callbacks=[default,{','.join(name for name in names if name not in usual)}]".replace(",]", "]")]
    kept += [
        f"'~callbacks.{name}'" for name, schedule in usual.items() if schedule and name not in callbacks and scheduled
    ]
    return [f"callbacks=[{','.join(names)}]: without {', '.join(missing)}, which a run has by default; keep them: "
            f"{' '.join(kept)}"]  # fmt: skip


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A copy with our keys alone."""
    return OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])


def settle(cfg: DictConfig, registry: Registry) -> Model | None:
    """Checks the keys of `cfg`, and puts the model of the recipe's base file, if it has one, in place of its `model`.

    Names and directories that are made of the model's name are then of the one that is trained. Returns that model.
    """
    check_keys(without_hydra(cfg), registry)
    return take_base(cfg, _given(cfg), registry)


def _given(cfg: DictConfig) -> list[Override]:
    """What was typed, as Hydra keeps it."""
    return parse(typing.cast("list[str]", OmegaConf.to_container(cfg.hydra.overrides.task)))


def _lines(typed: Sequence[Override]) -> dict[str, str]:
    return {o.key_or_group: str(o.input_line) for o in typed}


def take_base(cfg: DictConfig, typed: Sequence[Override], registry: Registry) -> Model | None:
    """The model of the recipe's base file, if it has one; its settings then stand in `cfg.model`.

    Of those only `context` stays the run's own, the length of a training window. UserError for anything else of
    `model` that was `typed` and is not so, and for a file that no model here can represent.
    """
    node = _resolved(without_hydra(cfg))["recipe"]
    cls = typing.cast("type[Recipe]", class_of("recipe", node, registry))
    if cls.base_file is Recipe.base_file:
        return None
    recipe: Recipe = make(cls, _typed(cls, node, "recipe"))
    model = class_of("model", cfg.model, registry)()
    if unfit := misfit(recipe, model):
        data = typing.cast("type[Data]", class_of("data", cfg.data, registry))
        raise UserError(f"{unfit}{suited(_lines(typed), recipe, model, data, registry)}")
    recipe.check()
    path = recipe.base_file()
    if path is None:
        return None
    base = model_in(opened(str(path)), registry, recipe.reads)
    held = base.settings()
    for override in typed:
        kind, _, key = override.key_or_group.partition(".")
        if kind == "model" and key != "context":
            wanted, there = (cfg.model[key], held.get(key)) if key else (override.value(), base.name)
            if wanted != there:
                raise UserError(
                    f"{override.input_line}: recipe={recipe.name} takes the model from {path}, a {base.name}"
                    + (f" with {key}={there}" if key in held else "")
                    + f"; leave {override.key_or_group} out"
                )
    if base.context:
        held["context"] = cfg.model.get("context", base.context)
        if isinstance(held["context"], int) and held["context"] > base.context:
            raise UserError(
                f"model.context={held['context']}: {path} holds a model for up to {base.context} positions; "
                f"use model.context={base.context} or less"
            )
    with open_dict(cfg):
        cfg.model = {"name": base.name, **held}
    return base


def _resolved(cfg: DictConfig) -> dict[str, Any]:
    try:
        return typing.cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(f"{getattr(error, 'full_key', None) or 'the config'}: {in_plain_words(error)}") from None


def _typed(cls: type, node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`node` with the types and defaults of `cls`: a person's own config file may have come without its schema."""
    dot = f"{where}." if where else ""
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(cls if where in ("", "sweep") else schema(cls, str(node["name"]))), node
        )
        values = typing.cast("dict[str, Any]", OmegaConf.to_container(merged, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or getattr(error, "key", None)
        raise UserError(f"{dot}{key}={node.get(str(key))}: {in_plain_words(error)}") from None
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{dot}{key}={value}: must be a finite number")
    return {key: expanded(value) for key, value in values.items()} if where in PARTS else values


def saved_parts(plain: Mapping[str, Any], registry: Registry) -> tuple[Model, Data, Recipe]:
    """The model, data and recipe of a run's saved configuration, checked; UserError for what is not here any more."""
    parts = []
    for kind in ("model", "data", "recipe"):
        node = plain.get(kind)
        if not isinstance(node, Mapping) or "name" not in node:
            raise UserError(f"its configuration holds no {kind}")
        cls = class_of(kind, node, registry)
        parts.append(make(cls, _typed(cls, node, kind)))
        parts[-1].check()
    return parts[0], parts[1], parts[2]


def make(cls: type, node: Mapping[str, Any]) -> Any:
    """An instance of a plugin class from its settings."""
    return cls(**{f.name: node[f.name] for f in dataclasses.fields(cls)})


def _callback(name: str, node: Mapping[str, Any], registry: Registry) -> Callback:
    callback = make(registry.get("callbacks", name), node)
    with blamed(f"callbacks.{name}", "while its settings were checked"), told_by(f"callbacks.{name}"):
        callback.check()
    return typing.cast("Callback", callback)


def engine_of(label: str, registry: Registry) -> Engine:
    """The engine that `name` or `name:key=value:...` means, which works here; UserError, or Unavailable."""
    name, *own = label.split(":")
    cls = registry.get("engine", name)
    known = [f.name for f in dataclasses.fields(cls)]
    pairs = [setting.partition("=") for setting in own]
    for key, equals, _ in pairs:
        if not equals:
            raise UserError(f"engine={label}: an engine's own settings are written {name}:key=value")
        if key not in known:
            raise UserError(f"engine={label}: {name} has no setting {printable(key)}; {choose(key, known)}")
    node = {"name": name, **{key: value for key, _, value in pairs}}
    return pick_engine(_typed(cls, node, "engine"), registry)[0]


def pick_engine(node: Mapping[str, Any], registry: Registry) -> tuple[Engine, str]:
    """The engine that was asked for, or with `auto` the best that works here, and a line that says which and why."""
    if node["name"] != AUTO:
        engine = make(class_of("engine", node, registry), node)
        with told_by(f"engine={engine.name}"):
            return engine, f"{engine.name}: {facts_of(engine)}"
    passed_over: list[str] = []
    broken: dict[str, list[str]] = {}  # the engines by what is wrong with their package
    threads = {"threads": node["threads"]} if node.get("threads") else {}
    offers = registry.engines()
    for offer in offers:
        takes_threads = any(f.name == "threads" for f in dataclasses.fields(offer.cls))
        engine = offer.cls(**(threads if takes_threads else {}))
        try:
            facts = facts_of(engine)
        except Broken as reason:
            broken.setdefault(reason.fact, []).append(offer.name)
        except Unavailable:
            passed_over.append(offer.name)
        else:
            return engine, f"{offer.name}: {facts} ({_auto(passed_over, broken)})"
    found = "".join(f"; {fact}" for fact in broken)
    raise UserError(f"engine=auto: no engine works here{found}; `toyexp doctor` says why and what to install")


def facts_of(engine: Engine) -> str:
    """What an engine says about its device; Broken when its check fails in another way than saying why not."""
    try:
        return engine.check()
    except UserError:
        raise
    except Exception as error:  # whatever a library raises while it loads, or a plugin
        raise hidden_interrupt(error) or Broken(f"its check failed ({why(error)})") from None


def _auto(passed_over: Sequence[str], broken: Mapping[str, Sequence[str]]) -> str:
    told = [", ".join(passed_over)] if passed_over else []
    told += [f"{', '.join(names)}: {fact}" for fact, names in broken.items()]
    return "auto" + (f"; not here: {'; '.join(told)}" if told else "")
