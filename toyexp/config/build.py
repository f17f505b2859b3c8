"""Build the parts of a run (model, data, recipe, optimiser, callbacks) from its settings, and choose the engine."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from toyexp.formats.gguf.open_model import load_open_model, open_gguf
from toyexp.interfaces.data import Data
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import CrossEntropy, Objective
from toyexp.interfaces.optimiser import Optimiser
from toyexp.interfaces.recipe import Recipe
from toyexp.plugins.discovery import current_registry
from toyexp.plugins.registry import Registry
from toyexp.training.provenance import Origin
from toyexp.training.settings import Settings


def build_parts(cfg: DictConfig, keys: Keys, origin: Origin) -> dict[str, Any]:
    """Build and check all parts of a run except the engine; return them as keyword arguments of the class `Config`.

    The keys are settings, model, data, recipe, optim, objective, callbacks, and plain (the configuration as plain
    data). `origin` holds the directory where a resumed run was started: relative paths in its settings refer to it.
    """
    plain = _apply_all_types(cfg)
    classes = {where: candidates[0] for where, candidates in keys.classes.items() if candidates}
    for nodes, values, prefix in (cfg, plain, ""), (cfg.callbacks, plain["callbacks"], "callbacks."):
        for name in PARTS if nodes is cfg else [*values]:
            cls: Any = classes[f"{prefix}{name}"]
            is_typed = OmegaConf.get_type(nodes, name) is schema(cls, str(values[name]["name"]))
            values[name] = apply_types(cls, values[name], f"{prefix}{name}", is_typed)
    parts = {
        kind: create_part(classes[kind], resolve_paths(classes[kind], plain[kind], origin))
        for kind in PARTS
        if kind != "engine"
    }
    callbacks = {name: create_part(classes[f"callbacks.{name}"], node) for name, node in plain["callbacks"].items()}
    settings = create_part(Settings, plain)
    check_parts(settings, parts, callbacks)
    return {"settings": settings, **parts, "callbacks": callbacks, "plain": plain}


def check_parts(settings: Settings, parts: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
    """Raise UserError if a setting of the run or of a part is invalid or contradicts another setting.

    `parts` maps kinds of parts, such as model, to the parts. The engine is not checked here.
    """
    named = {f"{kind}={part.name}": part for kind, part in parts.items()}
    every = {"settings": settings, **named, **{f"callbacks.{name}": c for name, c in callbacks.items()}}
    for who, part in every.items():
        with attribute_part_errors(), prefix_unavailable(who):
            if isinstance(part, Optimiser):  # a subclass's check() may not call this one
                Optimiser.check(part)
            part.check()
    batch_size, accumulate = settings.batch_size, parts["optim"].accumulate
    if batch_size % accumulate:
        raise UserError(f"optim.accumulate={accumulate}: must divide batch_size={batch_size}")


def load_objective_model(objective: Objective, registry: Registry) -> None:
    """Load the second model that the objective runs, such as a teacher, if it names one."""
    if path := objective.model_file():
        objective.second_model = load_open_model(open_gguf(str(path)), registry)  # type: ignore[misc]  # of this object


def _apply_all_types(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration as plain data, with types and defaults applied to its top-level settings.

    The settings of the parts stay unchanged. The settings of a sweep (`sweep.*`) are checked, but left out of the
    result. The keys are in the order of the fields of `Root`.
    """
    values = resolve_config(cfg)
    groups = {kind: values[kind] for kind in (*PARTS, "callbacks") if isinstance(values.get(kind), dict)}
    if len(groups) <= len(PARTS):  # a part is missing or invalid
        return {key: value for key, value in apply_types(Root, values, "").items() if key != "sweep"}
    if "sweep" in values:  # checked, but not part of a run
        apply_types(Sweep, values["sweep"], "sweep", OmegaConf.get_type(cfg, "sweep") is Sweep)
    top_level = {key: value for key, value in values.items() if key not in (*groups, "sweep")}
    return apply_types(Settings, top_level, "") | groups


def build_saved_objective(plain: Mapping[str, Any], registry: Registry, origin: Origin) -> Objective:
    """Return the objective in the saved configuration `plain`, to evaluate the run with its held-out loss.

    If this loss is a cross-entropy of the data's targets, or if `plain` has no objective, return plain cross-entropy.
    """
    node = plain.get("objective")
    if not isinstance(node, Mapping) or "name" not in node:
        return CrossEntropy()
    cls = part_class("objective", node, registry)
    objective: Objective = create_part(cls, resolve_paths(cls, apply_types(cls, node, "objective"), origin))
    return CrossEntropy() if objective.in_nats else objective


def build_saved_parts(plain: Mapping[str, Any], registry: Registry, origin: Origin) -> tuple[Model, Data, Recipe]:
    """Build and check the model, data and recipe of the saved configuration `plain`, and return them in this order.

    Raise UserError if one is missing or invalid, for example because of a missing file.
    """
    parts = []
    for kind in ("model", "data", "recipe"):
        node = plain.get(kind)
        if not isinstance(node, Mapping) or "name" not in node:
            raise UserError(f"the configuration of the run has no {kind}")
        cls = part_class(kind, node, registry)
        parts.append(create_part(cls, resolve_paths(cls, apply_types(cls, node, kind), origin)))
        parts[-1].check()
    return parts[0], parts[1], parts[2]


# -- types and defaults of settings -----------------------------------------


def drop_hydra_keys(cfg: DictConfig) -> DictConfig:
    """Return a copy without the key `hydra`."""
    return OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])


def resolve_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration, without `hydra`, as plain data with all ${key} resolved; raise UserError on failure."""
    try:
        return {str(key): _value(cfg[key]) for key in cfg if key != "hydra"}
    except OmegaConfBaseException as error:
        raise rephrase(getattr(error, "full_key", None) or "the config", error) from None


def _value(node: Any) -> Any:
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return node


def apply_types(cls: type, node: Mapping[str, Any], where: str, is_typed: bool = False) -> dict[str, Any]:
    """Return the settings `node` with the types and defaults of the dataclass `cls`.

    If `is_typed` is True, Hydra has applied them. It has not if a user's configuration file does not include the
    schema. `where` is the key that contains these settings, such as model, for error messages.
    """
    dot, values = f"{where}." if where else "", dict(node)
    try:
        if not is_typed:  # slow
            merged = OmegaConf.structured(cls if where in ("", "sweep") else schema(cls, str(node["name"])))
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


def resolve_paths(cls: type, node: Mapping[str, Any], origin: Origin) -> Mapping[str, Any]:
    """Return the settings of a part, with relative paths resolved against the directory where the run was started.

    A text is treated as a path if a file of that name exists in the directory. There is one exception: if a setting has
    a non-empty default, a text that contains neither . nor / is a name, as in data.tokenizer=byte. If the class has a
    mapping `setting_names` from the setting to its names, other texts are paths.
    """
    names: dict[str, Sequence[str]] = {f.name: () for f in dataclasses.fields(cls) if f.default not in ("", None)}
    names |= getattr(cls, "setting_names", {})
    texts = {key: value for key, value in node.items() if isinstance(value, str) and key != "name"}
    paths = [k for k, v in texts.items() if k not in names or "." in v or "/" in v or (names[k] and v not in names[k])]
    return {**node, **{key: origin.resolve(texts[key]) for key in paths}}


def create_part(cls: type, node: Mapping[str, Any]) -> Any:
    """Create an instance of a dataclass from its settings."""
    return cls(**{f.name: node[f.name] for f in dataclasses.fields(cls)})


def create_data(settings: Mapping[str, Any], where: str) -> Data:
    """Return a checked data plugin with these settings, for plugins that combine several data sets.

    The setting `data` names the plugin; without it, it is the plugin that recognises the setting `path`. `where` is the
    key that contains these settings, for error messages. Raise UserError if they are invalid.
    """
    registry, name = current_registry(), settings.get("data")
    if name is None:
        path, classes = Path(str(settings.get("path", ""))), registry.classes("data").values()
        name = max(classes, key=lambda cls: cls.recognises(path)).name
    cls = registry.get("data", str(name))
    names = [f.name for f in dataclasses.fields(cls)]
    for key in settings.keys() - {"data", *names}:
        raise UserError(f"{where}.{key}: {suggest(key, ['data', *names])}")
    node = {"name": name, **{key: value for key, value in settings.items() if key != "data"}}
    data: Data = create_part(cls, apply_types(cls, node, where))
    data.check()
    return data


# -- choice of the engine ---------------------------------------------------------------------------------------------


def parse_label(label: str, prefix: str) -> tuple[str, dict[str, str]]:
    """Parse an engine label `name:key=value:...` into the engine's name and its settings.

    The message of a UserError begins with `prefix`.
    """
    name, *settings = label.split(":")
    if settings and not name:
        raise UserError(f"{prefix}: missing engine name before ':'; expected for example ggml:threads=1")
    if len(settings) == 1 and settings[0].isdecimal():
        return label, {}  # cuda:0: the registry raises a specific error for this name
    if not all("=" in setting and "," not in setting for setting in settings):
        raise UserError(f"{prefix}: expected {name}:key=value, such as {name}:threads=1")
    return name, dict(setting.split("=", 1) for setting in settings)


def build_engine(label: str, registry: Registry) -> Engine:
    """Return the engine that a label such as ggml:threads=1 describes.

    Raise UserError for an invalid label, Unavailable if the engine does not work on this machine.
    """
    return pick_labelled_engine(label, registry, f"engine={label}")[0]


def pick_labelled_engine(label: str, registry: Registry, prefix: str) -> tuple[Engine, str]:
    """Return the engine that a label such as ggml:threads=1 describes, and a line about the engine's device.

    The message of a UserError about the label begins with `prefix`.
    """
    name, settings = parse_label(label, prefix)
    cls = part_class("engine", {"name": name}, registry)
    names = [f.name for f in dataclasses.fields(cls)]
    for key in settings.keys() - set(names):
        raise UserError(f"{prefix}: unknown setting {printable(key)} of {name}; {suggest(key, names)}")
    return pick_engine(apply_types(cls, {"name": name, **settings}, "engine"), registry)


def pick_engine(node: Mapping[str, Any], registry: Registry) -> tuple[Engine, str]:
    """Return the engine that the settings `node` choose, and a line that describes it and its device.

    engine=auto chooses the best engine that works on this machine; the line then names the engines that do not work.
    """
    if node["name"] != AUTO:
        engine = create_part(part_class("engine", node, registry), node)
        try:
            return engine, f"{engine.name}: {check_engine(engine)}"
        except Unavailable:
            with prefix_unavailable(f"engine={engine.name}"):
                raise
    passed_over: list[str] = []
    absent: dict[str, None] = {}  # missing packages with installation hints, in order
    broken: dict[str, list[str]] = {}  # reason -> engines
    threads = {"threads": node["threads"]} if node.get("threads") else {}
    offers = registry.engines()
    for i, offer in enumerate(offers):
        takes_threads = any(f.name == "threads" for f in dataclasses.fields(offer.cls))
        engine = offer.cls(**(threads if takes_threads else {}))
        if started_ranks().count > 1 and getattr(offer.cls, "follow", None) is Engine.follow:  # does not support ranks
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
    reasons = "".join(f"; {fact}" for fact in (*broken, *absent))
    command = f"`toyexp doctor{registry.plugins_override}`"
    rest = "the reasons" if absent else "the reasons and what to install"
    raise UserError(f"engine=auto: no engine works here{reasons}; {command} shows {rest}")


def check_engine(engine: Engine) -> str:
    """Return the engine's description of its device; raise Broken if its check fails with an unexpected error."""
    try:
        return engine.check()
    except UserError:
        raise
    except Exception as error:  # raised by a library while it loads, or by a plugin
        raise hidden_interrupt(error) or Broken(f"its check failed ({explain_import_error(error)})") from None


def _auto_note(passed_over: Sequence[str], broken: Mapping[str, Sequence[str]], shown: Sequence[str]) -> str:
    clauses = [", ".join(passed_over)] if passed_over else []
    clauses += [f"{', '.join(names)}: {fact}" for fact, names in broken.items()]
    later = f"; not tried: {', '.join(shown)}" if shown else ""
    return "auto" + (f"; unavailable: {'; '.join(clauses)}" if clauses else "") + later
