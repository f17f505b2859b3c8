"""The parts of a run from its settings, each from its own class, and which engine computes."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toyexp.base.attribution import attribute_part_errors
from toyexp.base.errors import Absent, Broken, Unavailable, UserError, printable, suggest
from toyexp.base.packages import explain_import_error, prefix_unavailable
from toyexp.base.ranks import started_ranks
from toyexp.base.signals import hidden_interrupt
from toyexp.base.user_paths import expand_path
from toyexp.config.keys import Keys
from toyexp.config.mistakes import rephrase
from toyexp.config.schema import AUTO, Root, part_class, schema
from toyexp.config.top_level import PARTS, Sweep
from toyexp.interfaces.data import Data
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import Model
from toyexp.interfaces.optimiser import Optimiser
from toyexp.interfaces.recipe import Recipe
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import Origin
from toyexp.training.settings import Settings


def build_parts(cfg: DictConfig, keys: Keys, begun: Origin) -> dict[str, Any]:
    """Return the parts of a run by their names in Config, each checked, but for the engine.

    Of a run that is resumed, relative paths are those of the directory where it was `begun`.
    """
    plain = _apply_all_types(resolve_config(cfg))
    classes = {where: found[0] for where, found in keys.classes.items() if found}
    for kind in PARTS:
        plain[kind] = _apply_types_cached(classes[kind], plain[kind], kind)
    for name, node in plain["callbacks"].items():
        plain["callbacks"][name] = _apply_types_cached(classes[f"callbacks.{name}"], node, f"callbacks.{name}")
    parts = {
        kind: instantiate(classes[kind], resolve_paths(classes[kind], plain[kind], begun))
        for kind in PARTS
        if kind != "engine"
    }
    callbacks = {name: instantiate(classes[f"callbacks.{name}"], node) for name, node in plain["callbacks"].items()}
    settings = instantiate(Settings, plain)
    check_parts(settings, parts, callbacks)
    return {"settings": settings, **parts, "callbacks": callbacks, "plain": plain}


def check_parts(settings: Settings, parts: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
    """Has all parts of a run but its engine look at their settings, and looks at what two of them say together."""
    named = {f"{kind}={part.name}": part for kind, part in parts.items()}
    every = {"settings": settings, **named, **{f"callbacks.{name}": c for name, c in callbacks.items()}}
    for who, part in every.items():
        with attribute_part_errors(), prefix_unavailable(who):
            if isinstance(part, Optimiser):  # whose own check may leave out that of all optimisers
                Optimiser.check(part)
            part.check()
    batch_size, accumulate = settings.batch_size, parts["optim"].accumulate
    if batch_size % accumulate:
        raise UserError(f"optim.accumulate={accumulate} does not divide batch_size={batch_size} into micro-batches")


def _apply_all_types(found: dict[str, Any]) -> dict[str, Any]:
    """A run's own settings with their types, and those of its parts as they are found, in the order of Root."""
    groups = {kind: found[kind] for kind in (*PARTS, "callbacks") if isinstance(found.get(kind), dict)}
    if len(groups) <= len(PARTS):  # one is missing, or no settings
        return {key: value for key, value in apply_types(Root, found, "").items() if key != "sweep"}
    if "sweep" in found:  # is about many runs, and no part of any
        _apply_types_cached(Sweep, found["sweep"], "sweep")
    own = {key: value for key, value in found.items() if key not in (*groups, "sweep")}
    return _apply_types_cached(Settings, own, "") | groups


def build_saved_parts(plain: Mapping[str, Any], registry: Registry, begun: Origin) -> tuple[Model, Data, Recipe]:
    """Return the model, data and recipe of a run's saved configuration, checked; UserError for a missing file."""
    parts = []
    for kind in ("model", "data", "recipe"):
        node = plain.get(kind)
        if not isinstance(node, Mapping) or "name" not in node:
            raise UserError(f"its configuration holds no {kind}")
        cls = part_class(kind, node, registry)
        parts.append(instantiate(cls, resolve_paths(cls, apply_types(cls, node, kind), begun)))
        parts[-1].check()
    return parts[0], parts[1], parts[2]


# -- settings with the types and defaults of the classes whose fields they are -----------------------------------------


def drop_hydra_keys(cfg: DictConfig) -> DictConfig:
    """A copy with our keys alone."""
    return OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])


def resolve_config(cfg: DictConfig) -> dict[str, Any]:
    """Our keys as plain data, with every ${key} in place; UserError for what cannot be."""
    try:
        return {str(key): _value(cfg[key]) for key in cfg if key != "hydra"}
    except OmegaConfBaseException as error:
        raise rephrase(getattr(error, "full_key", None) or "the config", error) from None


def _value(node: Any) -> Any:
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return node


_typed_cache: dict[tuple[type, str], tuple[str, dict[str, Any]]] = {}  # of the previous job: raw, typed


def _apply_types_cached(cls: type, node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what `typed` gives; settings that equal those of the job before are not merged again (1 to 5 ms each)."""
    given = repr(node)
    if (cls, where) not in _typed_cache or _typed_cache[cls, where][0] != given:
        _typed_cache[cls, where] = given, apply_types(cls, node, where)
    return copy.deepcopy(_typed_cache[cls, where][1])


def apply_types(cls: type, node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`node` with the types and defaults of `cls`: a person's own config file may have come without its schema."""
    dot = f"{where}." if where else ""
    shape = cls if where in ("", "sweep") else schema(cls, str(node["name"]))
    try:
        merged = OmegaConf.structured(shape)
        merged.merge_with(node)
        values = cast("dict[str, Any]", OmegaConf.to_container(merged, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or getattr(error, "key", None)
        raise rephrase(f"{dot}{key}={node.get(str(key))}", error) from None
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{dot}{key}={value}: must be a finite number")
    texts = [key for key, value in values.items() if isinstance(value, str) and value.startswith("~/")]
    return values | {key: expand_path(values[key]) for key in texts if where in PARTS}


def resolve_paths(cls: type, node: Mapping[str, Any], begun: Origin) -> Mapping[str, Any]:
    """Return the settings of a part with relative paths as from where its run was begun.

    A text is a path if something lies there, and it is no word such as data.tokenizer=byte in place of a default.
    """
    words = {f.name for f in dataclasses.fields(cls) if f.default not in ("", None)}
    texts = {key: value for key, value in node.items() if isinstance(value, str) and key != "name"}
    paths = [key for key, value in texts.items() if key not in words or "." in value or "/" in value]
    return {**node, **{key: begun.resolve(texts[key]) for key in paths}}


def instantiate(cls: type, node: Mapping[str, Any]) -> Any:
    """An instance of a dataclass from its settings."""
    return cls(**{f.name: node[f.name] for f in dataclasses.fields(cls)})


# -- which engine computes ---------------------------------------------------------------------------------------------


def parse_label(label: str, asked: str) -> tuple[str, dict[str, str]]:
    """The engine of `name:key=value:...` and its own settings; the UserError tells what was `asked`."""
    name, *own = label.split(":")
    if own and not name:
        raise UserError(f"{asked}: the engine's name is missing before the ':', such as ggml:threads=1")
    if len(own) == 1 and own[0].isdecimal():
        return label, {}  # cuda:0, which the registry knows no engine of, and has words for
    if not all("=" in setting and "," not in setting for setting in own):
        raise UserError(f"{asked}: an engine's own settings are written {name}:key=value, such as {name}:threads=1")
    return name, dict(setting.split("=", 1) for setting in own)


def build_engine(label: str, registry: Registry) -> Engine:
    """Return the engine that a label means, which works here; raise UserError, or Unavailable."""
    return pick_labelled_engine(label, registry, f"engine={label}")[0]


def pick_labelled_engine(label: str, registry: Registry, asked: str) -> tuple[Engine, str]:
    """Return the engine of a label, and a line that says which; errors in the label begin with what was `asked`."""
    name, own = parse_label(label, asked)
    cls = part_class("engine", {"name": name}, registry)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in own.keys() - set(known):
        raise UserError(f"{asked}: {name} has no setting {printable(key)}; {suggest(key, known)}")
    return pick_engine(apply_types(cls, {"name": name, **own}, "engine"), registry)


def pick_engine(node: Mapping[str, Any], registry: Registry) -> tuple[Engine, str]:
    """The engine that was asked for, or with `auto` the best that works here, and a line that says which and why."""
    if node["name"] != AUTO:
        engine = instantiate(part_class("engine", node, registry), node)
        try:
            return engine, f"{engine.name}: {check_engine(engine)}"
        except Unavailable:
            with prefix_unavailable(f"engine={engine.name}"):
                raise
    passed_over: list[str] = []
    absent: dict[str, None] = {}  # packages, with how each is installed
    broken: dict[str, list[str]] = {}  # the engines by what is wrong with their package
    threads = {"threads": node["threads"]} if node.get("threads") else {}
    offers = registry.engines()
    for i, offer in enumerate(offers):
        takes_threads = any(f.name == "threads" for f in dataclasses.fields(offer.cls))
        engine = offer.cls(**(threads if takes_threads else {}))
        if started_ranks().count > 1 and getattr(offer.cls, "follow", None) is Engine.follow:  # which refuses them
            passed_over.append(offer.name)
            continue
        try:
            facts = check_engine(engine)
        except Broken as reason:
            broken.setdefault(reason.fact, []).append(offer.name)
        except Unavailable as reason:
            passed_over.append(offer.name)
            if isinstance(reason, Absent):
                absent[str(reason)] = None
        else:
            later = [cast("type[Engine]", o.cls) for o in ([] if engine.on_gpu else offers[i:])]
            shown = [
                e.name for e in later if e.on_gpu and os.environ.get(e.device_variable or "-", "-1") not in ("", "-1")
            ]
            return engine, f"{offer.name}: {facts} ({_auto_note(passed_over, broken, shown)})"
    found = "".join(f"; {fact}" for fact in (*broken, *absent))
    command = f"`toyexp doctor{registry.loading}`"
    rest = "why" if absent else "why and what to install"
    raise UserError(f"engine=auto: no engine works here{found}; {command} says {rest}")


def check_engine(engine: Engine) -> str:
    """What an engine says about its device; Broken when its check fails in another way than saying why not."""
    try:
        return engine.check()
    except UserError:
        raise
    except Exception as error:  # whatever a library raises while it loads, or a plugin
        raise hidden_interrupt(error) or Broken(f"its check failed ({explain_import_error(error)})") from None


def _auto_note(passed_over: Sequence[str], broken: Mapping[str, Sequence[str]], shown: Sequence[str]) -> str:
    told = [", ".join(passed_over)] if passed_over else []
    told += [f"{', '.join(names)}: {fact}" for fact, names in broken.items()]
    later = f"; not tried: {', '.join(shown)}" if shown else ""
    return "auto" + (f"; not here: {'; '.join(told)}" if told else "") + later
