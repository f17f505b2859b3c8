"""`toyexp.train(...)`: train from Python objects, without a Hydra configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from toyexp.api.calls import check_path, isolated_call, note_remains
from toyexp.api.result import Result
from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.lazy import numpy as np
from toyexp.base.memory import convert_memory_errors
from toyexp.base.signals import protect_imports
from toyexp.base.terminal import show_status
from toyexp.config.build import apply_types, check_engine, check_parts, load_objective_model, pick_engine
from toyexp.config.paths import CONF
from toyexp.config.schema import AUTO, default_callbacks, load_yaml
from toyexp.formats.gguf.open_model import load_open_model, open_gguf
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.data import Data
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.hooks import RunHooks
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import Objective
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
    "model": Model, "data": Data, "recipe": Recipe, "engine": Engine, "optim": Optimiser, "objective": Objective,
    "callbacks": Callback,
}  # fmt: skip
SIZES = ("d_model", "n_layers", "n_heads", "context")  # settings that an error shows for a preset without any


@protect_imports()
def train(
    model: Model | str | Any | None = None,
    data: Data | str | Any = "stdlib",
    recipe: Recipe | str = "scratch",
    engine: Engine | str = "auto",
    optim: Optimiser | str = "adamw",
    objective: Objective | str = "cross_entropy",
    callbacks: Sequence[Callback | str] = ("default",),
    *,
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Train a model from part objects and return the result.

    Each part is an object of a plugin's class or of your own class. It may also be the name of a plugin's class, which
    is then created with its default settings. A model may also be a torch.nn.Module, and data may be arrays (x, y) of
    vectors or a torch Dataset of such pairs. `settings` are top-level settings: steps, batch_size, lr, seed,
    eval_every, name and others. The default model is that of the recipe's base file, or `llama` if the recipe has no
    base file. Callbacks hold state, so create new ones for each run; other parts can be reused.

        result = toyexp.train(model=Llama(d_model=64), engine="cpu", steps=100, lr=1e-3)

    The run is written to `directory`, which must be empty, or by default to a new directory below outputs/. To resume a
    run, pass its directory as `resume`, and the same parts and settings as before. Errors and Ctrl-C have the same
    effect as in `toyexp.run`.
    """
    if resume is not None and directory is not None:
        where = f"the run continues in resume={printable(str(resume))}"
        raise UserError(f"train directory={printable(str(directory))}: {where}; leave directory out")
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise UserError("train callbacks: must be a list, such as ['default', 'plots']")
    with isolated_call("toyexp.train", quiet):
        show_status("starting the engine")
        choices = {
            "model": model, "data": data, "recipe": recipe, "engine": engine, "optim": optim, "objective": objective
        }  # fmt: skip
        with convert_memory_errors():
            choices |= {"model": _wrap_module(model), "data": _wrap_arrays(data)}
            registry = _extend_registry([*choices.values(), *callbacks])
            built = _build_config(choices, callbacks, settings, registry)
            if resume is not None:
                run_directory = check_path("toyexp.train resume", resume).absolute()
                require_run(run_directory, "resume")
            else:
                now = f"{datetime.now():%Y-%m-%d_%H%M%S_%f}"
                default = Path("outputs", built.settings.name, now)
                chosen = default if directory is None else check_path("toyexp.train directory", directory)
                run_directory = chosen.absolute()
            ready = prepare_parts(built, run_directory, resume is not None, "directory")
        with note_remains(run_directory, "toyexp.train(..., "), update_summary(run_directory, resume is not None):
            ready.run()
    return Result(run_directory, registry)


def _wrap_module(model: Any) -> Any:
    """Return a model for a torch.nn.Module; return anything else unchanged."""
    torch: Any = sys.modules.get("torch")  # without it, no object is a module
    if torch is None or not isinstance(model, torch.nn.Module):
        return model
    cls: Any = load().get("model", "torch_module")
    return cls.wrap(model)


def _wrap_arrays(data: Any) -> Any:
    """Convert arrays x or (x, y), or a torch Dataset of such pairs, to a data object of vectors.

    Return names, data objects and anything else unchanged.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.utils.data.Dataset):
        data = tuple(zip(*(data[i] for i in range(len(data))), strict=True))
    elif isinstance(data, np.ndarray) or (torch is not None and isinstance(data, torch.Tensor)):
        data = (data,)
    if not isinstance(data, tuple):
        return data
    if len(data) not in (1, 2):
        raise UserError(f"train data: has {len(data)} arrays; pass (x, y), or only x if it is its own target")
    cls: Any = load().get("data", "vectors")
    return cls.from_arrays(*map(_convert_array, data))


def _convert_array(values: Any) -> np.ndarray:
    """Convert a NumPy array, a torch tensor on any device, or a sequence of either to one NumPy array."""
    torch: Any = sys.modules.get("torch")
    if isinstance(values, tuple | list):
        return np.stack([_convert_array(value) for value in values])
    is_tensor = torch is not None and isinstance(values, torch.Tensor)
    return np.asarray(values.detach().cpu() if is_tensor else values)


def _extend_registry(parts: Sequence[Any]) -> Registry:
    """Return a registry of the installed plugins and the classes of `parts`. The Result needs it to open the run.

    Raise UserError for a class without a name, or with a name that another class has.
    """
    loaded = load()
    extended = Registry({kind: dict(offers) for kind, offers in loaded.offers.items()}, loaded.problems, loaded.notes)
    for part in parts:
        kind = next((kind for kind, base in KINDS.items() if isinstance(part, base)), None)
        if kind:
            cls = type(part)
            if not isinstance(getattr(cls, "name", None), str):
                raise UserError(f"train {kind}: {cls.__name__} has no name; add one to the class: name = 'mine'")
            if kind == "callbacks":
                check_hooks(cls, RunHooks, f"train callbacks: {cls.__name__}")
            other = extended.offers[kind].get(cls.name)
            if other and other.cls is not cls:
                raise UserError(f"train {kind}={cls.__name__}: the name {cls.name} is taken by {other.cls.__name__}")
            extended.offers[kind].setdefault(cls.name, Offer(kind, cls.name, cls, cls.__module__, LOCAL))
    return extended


def _build_config(
    choices: Mapping[str, Any], callbacks: Sequence[Callback | str], settings: Mapping[str, Any], registry: Registry
) -> Config:
    parts = {
        kind: copy(_resolve_part(kind, choices[kind], registry)) for kind in ("data", "recipe", "optim", "objective")
    }
    watchers = _resolve_callbacks(callbacks, registry)
    base = _load_base(parts["recipe"], choices["model"], registry)
    parts["model"] = base or _resolve_part("model", choices["model"] or "llama", registry)
    if choices["engine"] == AUTO:
        engine, note = pick_engine({"name": AUTO}, registry)
    else:
        engine = _resolve_part("engine", choices["engine"], registry)
        note = f"{engine.name}: {check_engine(engine)}"
    name = f"{parts['recipe'].name}-{parts['model'].name}"
    top_level = _build_settings({"name": name, **settings})
    plain: dict[str, Any] = {f.name: getattr(top_level, f.name) for f in fields(top_level)}
    plain |= {kind: _plain_settings(kind, part) for kind, part in {**parts, "engine": engine}.items()}
    plain["callbacks"] = {name: _plain_settings(f"callbacks.{name}", callback) for name, callback in watchers.items()}
    check_parts(top_level, parts, watchers)
    load_objective_model(parts["objective"], registry)
    return Config(
        settings=top_level, **parts, engine=engine, callbacks=watchers, plain=plain, engine_note=note, base=base,
        default_callbacks=default_callbacks,
    )  # fmt: skip


def _resolve_part(kind: str, value: Any, registry: Registry) -> Any:
    names = {*registry.offers[kind], *(["default"] if kind == "callbacks" else [])}
    if isinstance(value, str):
        if value in registry.offers[kind]:
            return registry.get(kind, value)()
        shown, hint = printable(value), ""
        if preset := _describe_preset(kind, shown, registry):
            raise UserError(f"train {kind}={shown}: is a preset; use {preset}, or toyexp.run('{kind}={shown}')")
        if kind == "data" and (text := registry.offers[kind].get("text")):
            hint = f"; for your own text: {text.cls.__module__}.{text.cls.__name__}(path='book.txt')"
        raise UserError(f"train {registry.explain_missing(kind, shown, names)}{hint}")
    if not isinstance(value, KINDS[kind]):
        expected = f"train {kind}: must be a name or a toyexp.{KINDS[kind].__name__}"
        if isinstance(value, type) and issubclass(value, KINDS[kind]):
            raise UserError(f"{expected}, got the class {value.__name__}; use {value.__name__}()")
        shown = f"the class {value.__name__}" if isinstance(value, type) else printable(repr(value))
        raise UserError(f"{expected}, got {shown}; {suggest('', names)}")
    return value


def _describe_preset(kind: str, name: str, registry: Registry) -> str:
    """Return the Python expression that creates the same object as the preset `conf/<kind>/<name>.yaml`.

    Return "" if there is no such file. If the preset changes no setting, the expression shows the default sizes of the
    object's class, such as d_model.
    """
    path = CONF / kind / f"{name}.yaml"
    if not path.is_file():
        return ""
    settings = load_yaml(path)
    cls = registry.get(kind, settings.pop("defaults")[0])
    shown = settings or {f.name: f.default for f in fields(cls) if f.name in SIZES}
    return f"{cls.__module__}.{cls.__name__}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


def _resolve_callbacks(values: Sequence[Callback | str], registry: Registry) -> dict[str, Callback]:
    """Return callback objects, keyed by name. Raise UserError if two objects have the same name.

    `values` are callback objects and names. The name `default` stands for all default callbacks.
    """
    expanded = [item for value in values for item in (default_callbacks() if value == "default" else [value])]
    by_name: dict[str, Callback] = {}
    objects: dict[str, Callback] = {}
    for value in expanded:
        callback = _resolve_part("callbacks", value, registry)
        if callback.name in by_name and isinstance(value, str):
            continue
        if not isinstance(value, str) and objects.setdefault(callback.name, callback) is not callback:
            raise UserError(f"train callbacks: two callbacks are named {callback.name}; names must be unique")
        by_name[callback.name] = callback
    return by_name


def _load_base(recipe: Recipe, model: Any, registry: Registry) -> Model | None:
    recipe.check()
    path = recipe.base_file()
    if path is None:
        return None
    if model is not None:
        raise UserError(f"train model: recipe={recipe.name} takes the model from {path}; leave model out")
    return load_open_model(open_gguf(str(path)), registry, recipe.reads)


def _build_settings(values: Mapping[str, Any]) -> Settings:
    if {"steps", "epochs"} <= values.keys():
        raise UserError(f"train epochs={values['epochs']}: sets the number of steps; leave steps={values['steps']} out")
    names = {f.name for f in fields(Settings)} - {"resume", "plugins"}
    for key in values.keys() - names:
        raise UserError(f"train {key}: unknown setting; {suggest(key, names)}")
    return Settings(**apply_types(Settings, dict(values), ""))


def _plain_settings(where: str, part: Any) -> dict[str, Any]:
    node = {"name": part.name, **{f.name: getattr(part, f.name) for f in fields(part) if f.init}}
    return apply_types(type(part), node, where)
