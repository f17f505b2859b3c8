"""What a plugin and its classes have to be before a registry takes them: rules by which an author's slips are told."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections import defaultdict
from collections.abc import Callable
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
from toyexp.interfaces.optimiser import MODES, Optimiser
from toyexp.interfaces.recipe import Recipe

# Keys by which Hydra and its kin are told what to call.
NAMES_CODE = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_", "target")


KINDS: dict[str, tuple[type, str]] = {
    "engine": (Engine, "register_engines"),
    "recipe": (Recipe, "register_recipes"),
    "optim": (Optimiser, "register_optimisers"),
    "model": (Model, "register_models"),
    "data": (Data, "register_data"),
    "callbacks": (Callback, "register_callbacks"),
    "format": (Format, "register_formats"),
    "command": (Command, "register_commands"),
}


@dataclass
class Candidate:
    """A plugin on its way into a registry."""

    plugin: str
    package: str
    importer: Callable[[], ModuleType]
    reason: str | None = None  # why it is broken
    module: ModuleType | None = None
    classes: dict[str, list[type]] = field(default_factory=partial(defaultdict, list))  # by kind
    exporters: list[type[Callback]] = field(default_factory=list)  # with which a run writes its formats


def check_classes(candidate: Candidate) -> None:
    """Raises UserError when a class of a plugin breaks a rule of its kind, and when it has none."""
    if not any(candidate.classes.values()):
        raise UserError(f"{candidate.plugin} offers nothing; a plugin calls register(...) in @hookimpl functions")
    for kind, classes in candidate.classes.items():
        for cls in classes:
            check_class(cls, KINDS[kind][0])


def check_class(cls: type, base: type) -> None:
    """Raises UserError when a class that stands for a plugin's part of the kind `base` breaks one of its rules."""
    label = getattr(cls, "__qualname__", repr(cls))
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"{label} is no subclass of toyexp.{base.__name__}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{label}.name is {name!r}; it must be lower-case letters, digits and underscores")
    if "__dataclass_fields__" not in vars(cls):
        raise UserError(f"{label} is not decorated with @dataclass")
    told = (cls.__doc__ or "").strip() and not str(cls.__doc__).startswith(f"{cls.__name__}(")
    if not told and sys.flags.optimize < 2:  # with python -OO nothing has one
        raise UserError(f"{label} has no docstring; its first line is the help people see")
    if inspect.isabstract(cls):
        raise UserError(f"{label} does not implement {', '.join(sorted(getattr(cls, '__abstractmethods__', ())))}")
    _check_settings(cls, base, label)
    for kind, check in _OF_A_KIND.items():
        if issubclass(cls, kind):
            check(cls, label)


def check_hooks(owner: type | ModuleType, group: type, label: str) -> None:
    """Raises UserError for functions that were meant to be hooks of `group` and are none."""
    hooks = {n for n in vars(group) if not n.startswith("_")}
    for name, member in inspect.getmembers(owner, inspect.isfunction):
        marked = getattr(member, "toyexp_impl", None) is not None
        if marked and name not in hooks:
            raise UserError(f"{label}.{name} is marked @hookimpl but is no hook; {suggest(name, hooks)}")
        if not marked and name in hooks:
            raise UserError(f"{label}.{name} has a hook's name but is not marked @hookimpl; put @hookimpl above it")
        if not marked and group is RunHooks and name.startswith("on_"):
            raise UserError(f"{label}.{name} is no hook, and nothing would call it; {suggest(name, hooks)}")
        if marked:
            known = _arguments(getattr(group, name))
            for argument in _arguments(member) - known:
                hint = suggest(argument, known - {"self"})
                raise UserError(f"{label}.{name}: {argument!r} is no argument of that hook; {hint}")


@functools.cache
def _arguments(function: Callable[..., object]) -> frozenset[str]:
    """The names of a function's arguments."""
    return frozenset(inspect.signature(function).parameters)


types_of = functools.cache(typing.get_type_hints)  # of a class by name: to read its annotations takes a while


def _check_settings(cls: type, base: type, label: str) -> None:
    """Each field has a default, and a name that stands for nothing else."""
    prepare_base = [vars(b) for b in base.__mro__] + [inspect.get_annotations(b) for b in base.__mro__]
    settings_of_base = {f.name for f in dataclasses.fields(base)}
    try:
        if base is not Command:  # whose fields nothing reads
            types_of(cls)
    except Exception as error:  # an annotation may be any expression
        raise UserError(f"{label}: its annotations cannot be read: {type(error).__name__}: {error}") from error
    for f in dataclasses.fields(cls):
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{label}.{f.name} has no default")
        refused = f"{label}.{f.name} cannot be a setting"
        if f.name in NAMES_CODE:
            raise UserError(f"{refused}: elsewhere a key of that name says what to call")
        meant = next((names[f.name] for names in prepare_base if f.name in names), None)
        if meant is not None and f.name not in settings_of_base and not isinstance(meant, property):
            raise UserError(f"{refused}: toyexp.{base.__name__} has something else of that name; is it a ClassVar?")


def _check_callback(cls: type[Callback], label: str) -> None:
    if cls.__eq__ is not object.__eq__:
        raise UserError(f"{label} must be a @dataclass(eq=False): two callbacks with equal settings are two callbacks")
    check_hooks(cls, RunHooks, label)


def _check_data(cls: type[Data], label: str) -> None:
    _check_kinds(cls, "gives", label)
    for setting in _names(cls, "fills", label):
        _check_setting(cls, "fills", setting, label)


def _check_model(cls: type[Model], label: str) -> None:
    _check_kinds(cls, "reads", label)
    _names(cls, "score_names", label)
    _check_mode(cls, label)
    if not cls.reads.sequence and cls.inputs is Model.inputs:
        raise UserError(f"{label} does not implement inputs, as a model that reads {cls.reads} has to")


def _check_recipe(cls: type[Recipe], label: str) -> None:
    _check_kinds(cls, "reads", label)
    _names(cls, "needs_tensors", label)
    _check_mode(cls, label)
    _check_setting(cls, "starts_from", cls.starts_from, label)


def _check_format(cls: type[Format], label: str) -> None:
    if not re.fullmatch(r"[.-][A-Za-z0-9._-]+", cls.suffix):
        raise UserError(f"{label}.suffix is {cls.suffix!r}; it must be what a file's name ends in, such as .onnx")
    if cls.writes_adapters and cls.write_adapter is Format.write_adapter:
        raise UserError(f"{label} does not implement write_adapter, as a format with adapters has to")
    _check_setting(cls, "dtype_setting", cls.dtype_setting, label)


def _check_optimiser(cls: type[Optimiser], label: str) -> None:
    for name in ("slots", "numbers", "update"):
        own, wanted = (list(inspect.signature(getattr(c, name)).parameters) for c in (cls, Optimiser))
        try:
            inspect.signature(getattr(cls, name)).bind(*wanted)
        except TypeError:
            raise UserError(f"{label}.{name} takes ({', '.join(own)}); it must take ({', '.join(wanted)})") from None


_OF_A_KIND: dict[type, Callable[[Any, str], None]] = {
    Callback: _check_callback,
    Data: _check_data,
    Model: _check_model,
    Optimiser: _check_optimiser,
    Recipe: _check_recipe,
    Format: _check_format,
}


def _check_kinds(cls: type[Data] | type[Model] | type[Recipe], attribute: str, label: str) -> None:
    """The class says which kind of data it gives, or which ones it reads."""
    said, several = getattr(cls, attribute, None), issubclass(cls, Recipe)
    kinds = said if several and isinstance(said, tuple) and said else (said,)
    if not all(isinstance(kind, Kind) for kind in kinds):
        what = "a tuple of kinds" if several else "a kind"
        raise UserError(f"{label}.{attribute} is {said!r}; it is {what} of data: TOKENS, IMAGES or a Kind of your own")


def _check_mode(cls: type[Model] | type[Recipe], label: str) -> None:
    """AdamW has the mode that the class wants; a model may want none."""
    if cls.optim_mode is not None and cls.optim_mode not in MODES:
        raise UserError(f"{label}.optim_mode is {cls.optim_mode!r}; {suggest(str(cls.optim_mode), MODES)}")


def _check_setting(cls: type, attribute: str, name: str, label: str) -> None:
    """What a class variable names, if anything, is a setting of the class."""
    if name and name not in {f.name for f in dataclasses.fields(cls)}:
        raise UserError(f"{label}.{attribute} is {name!r}, which is no setting of it")


def _names(cls: type, attribute: str, label: str) -> tuple[str, ...]:
    """The names that a class variable holds: a tuple, where a forgotten comma makes a text."""
    names = getattr(cls, attribute)
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        hint = f": ({names!r},)" if isinstance(names, str) else ""
        raise UserError(f"{label}.{attribute} is {names!r}; it is a tuple of names{hint}")
    return names
