"""`toyexp.train(...)`: train from Python objects, without a Hydra configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from toyexp.api.calls import check_path, isolated_call, note_remains
from toyexp.api.result import Result
from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.memory import convert_memory_errors
from toyexp.base.signals import protect_imports
from toyexp.base.terminal import show_status
from toyexp.config.build import apply_types, check_engine, check_parts, pick_engine
from toyexp.config.paths import CONF
from toyexp.config.schema import AUTO, default_callbacks
from toyexp.formats.gguf.open_model import load_open_model, open_gguf
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.data import Data
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.hooks import RunHooks
from toyexp.interfaces.model import Model
from toyexp.interfaces.optimiser import Optimiser
from toyexp.interfaces.recipe import Recipe
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import LOCAL, Offer, Registry
from toyexp.plugins.rules import check_hooks
from toyexp.runner.one_run import prepare_parts
from toyexp.sweeps.directory import update_summary
from toyexp.training.resume import require_run
from toyexp.training.run_config import Config
from toyexp.training.settings import Settings

KINDS: Mapping[str, type] = {
    "model": Model, "data": Data, "recipe": Recipe, "engine": Engine, "optim": Optimiser, "callbacks": Callback,
}  # fmt: skip


@protect_imports()
def train(
    model: Model | str | None = None,
    data: Data | str = "stdlib",
    recipe: Recipe | str = "scratch",
    engine: Engine | str = "auto",
    optim: Optimiser | str = "adamw",
    callbacks: Sequence[Callback | str] = ("default",),
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Train a model from part objects and return the result.

    Each part is an object, of a registered class or your own, or the name of a registered class, for its defaults.
    `settings` are top-level settings: steps, batch_size, lr, seed, eval_every, name, ... The default model is that of
    the recipe's base file, else llama. Callbacks hold state: create new ones for each run. Other parts can be reused.

        result = toyexp.train(model=Llama(d_model=64), engine="cpu", steps=100, lr=1e-3)

    The run is written to `directory`, which must be empty, or by default below outputs/. `resume` is the directory of a
    run to resume; pass the same objects again. Errors and interrupts are as in `toyexp.run`.
    """
    if resume is not None and directory is not None:
        raise UserError(f"train directory: resume={printable(str(resume))} uses that directory; leave directory out")
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise UserError("train callbacks: must be a list, such as ['default', 'plots']")
    with isolated_call("toyexp.train", quiet):
        show_status("starting the engine")
        given = {"model": model, "data": data, "recipe": recipe, "engine": engine, "optim": optim}
        with convert_memory_errors():
            registry = _extend_registry([*given.values(), *callbacks])
            built = _build_config(given, callbacks, settings, registry)
            if resume is not None:
                where = check_path("toyexp.train resume", resume).absolute()
                require_run(where, "resume")
            else:
                now = f"{datetime.now():%Y-%m-%d_%H%M%S_%f}"
                below = Path("outputs", built.settings.name, now)
                where = (below if directory is None else check_path("toyexp.train directory", directory)).absolute()
            ready = prepare_parts(built, where, resume is not None, "directory")
        with note_remains(where, "toyexp.train(..., "), update_summary(where, resume is not None):
            ready.run()
    return Result(where, registry)


def _extend_registry(parts: Sequence[Any]) -> Registry:
    """Return the installed plugins and the classes of these parts, so that the run can be read."""
    known = load()
    grown = Registry({kind: dict(offers) for kind, offers in known.offers.items()}, known.problems, known.notes)
    for part in parts:
        kind = next((kind for kind, base in KINDS.items() if isinstance(part, base)), None)
        if kind:
            cls = type(part)
            if not isinstance(getattr(cls, "name", None), str):
                raise UserError(f"train {kind}: {cls.__name__} has no name; add one to the class: name = 'mine'")
            if kind == "callbacks":
                check_hooks(cls, RunHooks, f"train callbacks: {cls.__name__}")
            there = grown.offers[kind].get(cls.name)
            if there and there.cls is not cls:
                raise UserError(f"train {kind}={cls.__name__}: the name {cls.name} is taken by {there.cls.__name__}")
            grown.offers[kind].setdefault(cls.name, Offer(kind, cls.name, cls, cls.__module__, LOCAL))
    return grown


def _build_config(
    given: Mapping[str, Any], callbacks: Sequence[Callback | str], settings: Mapping[str, Any], registry: Registry
) -> Config:
    parts = {kind: copy(_resolve_part(kind, given[kind], registry)) for kind in ("data", "recipe", "optim")}
    watching = _resolve_callbacks(callbacks, registry)
    base = _load_base(parts["recipe"], given["model"], registry)
    parts["model"] = base or _resolve_part("model", given["model"] or "llama", registry)
    if given["engine"] == AUTO:
        engine, note = pick_engine({"name": AUTO}, registry)
    else:
        engine = _resolve_part("engine", given["engine"], registry)
        note = f"{engine.name}: {check_engine(engine)}"
    name = f"{parts['recipe'].name}-{parts['model'].name}"
    of_run = _build_settings({"name": name, **settings})
    plain: dict[str, Any] = {f.name: getattr(of_run, f.name) for f in fields(of_run)}
    plain |= {kind: _plain_settings(kind, part) for kind, part in {**parts, "engine": engine}.items()}
    plain["callbacks"] = {name: _plain_settings(f"callbacks.{name}", callback) for name, callback in watching.items()}
    check_parts(of_run, parts, watching)
    return Config(
        settings=of_run, **parts, engine=engine, callbacks=watching, plain=plain, engine_note=note, base=base,
        default_callbacks=default_callbacks,
    )  # fmt: skip


def _resolve_part(kind: str, value: Any, registry: Registry) -> Any:
    if isinstance(value, str):
        if value in registry.offers[kind]:
            return registry.get(kind, value)()
        shown, hint = printable(value), ""
        if (CONF / kind / f"{shown}.yaml").is_file():
            hint = f"; that is a preset; use toyexp.run('{kind}={shown}'), or an object with its sizes"
        elif kind == "data" and (text := registry.offers[kind].get("text")):
            hint = f"; for your own text: {text.cls.__module__}.{text.cls.__name__}(path='book.txt')"
        raise UserError(f"train {registry.explain_missing(kind, shown, registry.offers[kind])}{hint}")
    if not isinstance(value, KINDS[kind]):
        wanted = f"train {kind}: must be a name or a toyexp.{KINDS[kind].__name__}"
        if isinstance(value, type):
            raise UserError(f"{wanted}, got the class {value.__name__}; use {value.__name__}()")
        raise UserError(f"{wanted}, got {printable(repr(value))}; {suggest('', registry.offers[kind])}")
    return value


def _resolve_callbacks(given: Sequence[Callback | str], registry: Registry) -> dict[str, Callback]:
    """Return callbacks by name; `default` stands for the default callbacks."""
    each = [one for value in given for one in (default_callbacks() if value == "default" else [value])]
    found: dict[str, Callback] = {}
    objects: dict[str, Callback] = {}
    for value in each:
        callback = _resolve_part("callbacks", value, registry)
        if callback.name in found and isinstance(value, str):
            continue
        if not isinstance(value, str) and objects.setdefault(callback.name, callback) is not callback:
            raise UserError(f"train callbacks: two are named {callback.name}; names must be unique")
        found[callback.name] = callback
    return found


def _load_base(recipe: Recipe, model: Any, registry: Registry) -> Model | None:
    recipe.check()
    path = recipe.base_file()
    if path is None:
        return None
    if model is not None:
        raise UserError(f"train model: recipe={recipe.name} takes the model from {path}; leave model out")
    return load_open_model(open_gguf(str(path)), registry, recipe.reads)


def _build_settings(given: Mapping[str, Any]) -> Settings:
    if {"steps", "epochs"} <= given.keys():
        raise UserError(f"train epochs={given['epochs']}: sets the number of steps; leave steps={given['steps']} out")
    known = {f.name for f in fields(Settings)} - {"resume", "plugins"}
    for key in given.keys() - known:
        raise UserError(f"train {key}: unknown setting; {suggest(key, known)}")
    return Settings(**apply_types(Settings, dict(given), ""))


def _plain_settings(where: str, part: Any) -> dict[str, Any]:
    node = {"name": part.name, **{f.name: getattr(part, f.name) for f in fields(part) if f.init}}
    return apply_types(type(part), node, where)
