"""Check plugins and their classes before registration, with messages for common mistakes of authors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from toyexp.base.errors import UserError, suggest
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.command import Command
from toyexp.interfaces.data import Data
from toyexp.interfaces.engine import Engine
from toyexp.interfaces.format import Format
from toyexp.interfaces.hooks import RunHooks
from toyexp.interfaces.kind import Kind
from toyexp.interfaces.model import Model
from toyexp.interfaces.objective import Objective
from toyexp.interfaces.optimiser import MODES, Optimiser
from toyexp.interfaces.recipe import Recipe

# Keys with which Hydra and similar tools name the code to call.
RESERVED_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_", "target")


KINDS: dict[str, tuple[type, str]] = {
    "engine": (Engine, "register_engines"),
    "recipe": (Recipe, "register_recipes"),
    "optim": (Optimiser, "register_optimisers"),
    "objective": (Objective, "register_objectives"),
    "model": (Model, "register_models"),
    "data": (Data, "register_data"),
    "callbacks": (Callback, "register_callbacks"),
    "format": (Format, "register_formats"),
    "command": (Command, "register_commands"),
}


@dataclass
class Candidate:
    """A plugin that is being loaded."""

    plugin: str
    package: str
    importer: Callable[[], ModuleType]
    reason: str | None = None  # why it is broken; None if it is not
    module: ModuleType | None = None
    classes: dict[str, list[type]] = field(default_factory=partial(defaultdict, list))  # registered classes by kind
    exporters: list[type[Callback]] = field(default_factory=list)  # callbacks of its formats


def check_classes(candidate: Candidate) -> None:
    """Raise UserError if a plugin registers no class, or a class that breaks a rule for its kind of part."""
    if not any(candidate.classes.values()):
        raise UserError(
            f"{candidate.plugin} registers nothing; a plugin must call register(...) in @hookimpl functions"
        )
    for kind, classes in candidate.classes.items():
        for cls in classes:
            check_class(cls, KINDS[kind][0])


def check_class(cls: type, base: type) -> None:
    """Raise UserError if a class breaks a rule for its kind of part, such as model.

    `base` is the base class of this kind.
    """
    label = getattr(cls, "__qualname__", repr(cls))
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"{label} is not a subclass of toyexp.{base.__name__}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{label}.name is {name!r}; it must consist of lower-case letters, digits and underscores")
    if "__dataclass_fields__" not in vars(cls):
        raise UserError(f"{label} is not decorated with @dataclass")
    has_doc = (cls.__doc__ or "").strip() and not str(cls.__doc__).startswith(f"{cls.__name__}(")
    if not has_doc and sys.flags.optimize < 2:  # python -OO removes docstrings
        raise UserError(f"{label} has no docstring; toyexp shows the first line of the docstring as help")
    if inspect.isabstract(cls):
        raise UserError(f"{label} does not implement {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}")
    _check_settings(cls, base, label)
    for kind, check in _CHECKS.items():
        if issubclass(cls, kind):
            check(cls, label)


def check_hooks(owner: type | ModuleType, group: type, label: str) -> None:
    """Raise UserError for a function of `owner` that looks like a hook of the class `group` but is not one.

    `label` is the name of `owner` for the message.
    """
    hooks = {n for n in vars(group) if not n.startswith("_")}
    for name, member in inspect.getmembers(owner, inspect.isfunction):
        is_marked = getattr(member, "toyexp_impl", None) is not None
        if is_marked and name not in hooks:
            raise UserError(f"{label}.{name} is marked @hookimpl but is not a hook; {suggest(name, hooks)}")
        if not is_marked and name in hooks:
            raise UserError(f"{label}.{name} has a hook's name but is not marked @hookimpl; put @hookimpl above it")
        if not is_marked and group is RunHooks and name.startswith("on_"):
            raise UserError(f"{label}.{name} is not a hook and would never be called; {suggest(name, hooks)}")
        if is_marked:
            allowed = _arguments(getattr(group, name))
            for argument in _arguments(member) - allowed:
                hint = suggest(argument, allowed - {"self"})
                raise UserError(f"{label}.{name}: {argument!r} is not an argument of that hook; {hint}")


@functools.cache
def _arguments(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


type_hints = functools.cache(typing.get_type_hints)  # cached, because it is slow


def _check_settings(cls: type, base: type, label: str) -> None:
    """Raise UserError for a field without a default, or with a name that Hydra or the base class uses."""
    base_namespaces = [vars(b) for b in base.__mro__] + [inspect.get_annotations(b) for b in base.__mro__]
    base_settings = {f.name for f in dataclasses.fields(base)}
    try:
        if base is not Command:  # its fields are not settings
            type_hints(cls)
    except Exception as error:  # an annotation may be any expression
        raise UserError(f"{label}: type annotations cannot be evaluated: {type(error).__name__}: {error}") from error
    for f in dataclasses.fields(cls):
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{label}.{f.name} has no default")
        problem = f"{label}.{f.name} cannot be a setting"
        if f.name in RESERVED_KEYS:
            raise UserError(f"{problem}: Hydra reserves that key")
        attribute = next((names[f.name] for names in base_namespaces if f.name in names), None)
        if attribute is not None and f.name not in base_settings and not isinstance(attribute, property):
            raise UserError(
                f"{problem}: toyexp.{base.__name__} has an attribute of that name; rename it, or make it a ClassVar"
            )


def _check_callback(cls: type[Callback], label: str) -> None:
    if cls.__eq__ is not object.__eq__:
        raise UserError(f"{label} must be a @dataclass(eq=False): two callbacks with equal settings are not the same")
    check_hooks(cls, RunHooks, label)


def _check_data(cls: type[Data], label: str) -> None:
    _check_kinds(cls, "gives", label)
    for setting in _check_names(cls, "fills", label):
        _check_setting(cls, "fills", setting, label)


def _check_model(cls: type[Model], label: str) -> None:
    _check_kinds(cls, "reads", label)
    _check_names(cls, "score_names", label)
    _check_mode(cls, label)
    if not cls.reads.sequence and cls.inputs is Model.inputs:
        raise UserError(f"{label} does not implement inputs, which a model that reads {cls.reads} needs")


def _check_recipe(cls: type[Recipe], label: str) -> None:
    _check_kinds(cls, "reads", label)
    _check_names(cls, "needs_tensors", label)
    _check_mode(cls, label)
    _check_setting(cls, "starts_from", cls.starts_from, label)


def _check_format(cls: type[Format], label: str) -> None:
    if not re.fullmatch(r"[.-][A-Za-z0-9._-]+", cls.suffix):
        raise UserError(f"{label}.suffix is {cls.suffix!r}; it must be the end of a file name, such as .onnx")
    if cls.writes_adapters and cls.write_adapter is Format.write_adapter:
        raise UserError(f"{label} does not implement write_adapter, which writes_adapters = True requires")
    _check_setting(cls, "dtype_setting", cls.dtype_setting, label)


def _check_optimiser(cls: type[Optimiser], label: str) -> None:
    _check_parameters(cls, Optimiser, ("slots", "numbers", "update"), label)


def _check_objective(cls: type[Objective], label: str) -> None:
    _check_parameters(cls, Objective, ("loss", "held_out_loss", "metrics"), label)


def _check_parameters(cls: type, base: type, names: Sequence[str], label: str) -> None:
    """Raise UserError if a method in `names` cannot be called with the arguments of the one in `base`."""
    for name in names:
        actual, expected = (list(inspect.signature(getattr(c, name)).parameters) for c in (cls, base))
        try:
            inspect.signature(getattr(cls, name)).bind(*expected)
        except TypeError:
            problem = f"{label}.{name} takes ({', '.join(actual)}); it must take ({', '.join(expected)})"
            raise UserError(problem) from None


_CHECKS: dict[type, Callable[[Any, str], None]] = {
    Callback: _check_callback,
    Data: _check_data,
    Model: _check_model,
    Objective: _check_objective,
    Optimiser: _check_optimiser,
    Recipe: _check_recipe,
    Format: _check_format,
}


def _check_kinds(cls: type[Data] | type[Model] | type[Recipe], attribute: str, label: str) -> None:
    """Raise UserError unless the class variable `attribute` is a kind of data or, for a recipe, a tuple of kinds."""
    value, is_recipe = getattr(cls, attribute, None), issubclass(cls, Recipe)
    kinds = value if is_recipe and isinstance(value, tuple) and value else (value,)
    if not all(isinstance(kind, Kind) for kind in kinds):
        expected = f"{'a tuple of kinds' if is_recipe else 'a kind'} of data: TOKENS, IMAGES or your own Kind"
        raise UserError(f"{label}.{attribute} is {value!r}; it must be {expected}")


def _check_mode(cls: type[Model] | type[Recipe], label: str) -> None:
    """Raise UserError unless the class variable `optim_mode` is one of AdamW's modes or None."""
    if cls.optim_mode is not None and cls.optim_mode not in MODES:
        raise UserError(f"{label}.optim_mode is {cls.optim_mode!r}; {suggest(str(cls.optim_mode), MODES)}")


def _check_setting(cls: type, attribute: str, name: str, label: str) -> None:
    """Raise UserError unless `name`, the value of the class variable `attribute`, is empty or one of the settings."""
    if name and name not in {f.name for f in dataclasses.fields(cls)}:
        raise UserError(f"{label}.{attribute} is {name!r}, which is not one of its settings")


def _check_names(cls: type, attribute: str, label: str) -> tuple[str, ...]:
    """Return the value of the class variable `attribute`. Raise UserError unless it is a tuple of strings."""
    names = getattr(cls, attribute)
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        hint = f": ({names!r},)" if isinstance(names, str) else ""
        raise UserError(f"{label}.{attribute} is {names!r}; it must be a tuple of names{hint}")
    return names
