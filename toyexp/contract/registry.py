"""Finds plugins, keeps the broken ones apart, and answers "what is there?"."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pluggy

from toyexp.base.errors import UserError, choose
from toyexp.base.packages import why
from toyexp.contract.callback import Callback
from toyexp.contract.command import Command
from toyexp.contract.data import Data
from toyexp.contract.engine import Engine
from toyexp.contract.exporter import Exporter, exporter
from toyexp.contract.format import Format
from toyexp.contract.hooks import Registration, RunHooks
from toyexp.contract.kind import Kind
from toyexp.contract.model import Model
from toyexp.contract.optimiser import Optimiser
from toyexp.contract.planned import defaults
from toyexp.contract.recipe import Recipe

# Keys by which Hydra and its kin are told what to call.
NAMES_CODE = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_", "target")

GROUP = "toyexp"  # of entry points
OWN = "toyexp"  # the distribution whose names nobody can take over
OWN_COMMANDS = EntryPoint("commands", "toyexp.commands.table", GROUP)  # without an entry point of the distribution

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


@functools.cache
def conf_dir() -> Path:
    """The checkout's conf/, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else package / "_conf"


@dataclass(frozen=True)
class Offer:
    """One thing a plugin offers."""

    kind: str
    name: str
    cls: type
    plugin: str
    package: str

    @property
    def help(self) -> str:
        """The first line of its docstring."""
        return (self.cls.__doc__ or "").strip().splitlines()[0]

    @property
    def origin(self) -> str:
        """What stands behind that in a list: where it comes from, if that is not toyexp itself."""
        return "" if self.package.startswith(f"{OWN} ") else f"  [{self.plugin}, {self.package}]"


@dataclass(frozen=True)
class Problem:
    """A plugin that could not be used, and what it would have offered as far as it came."""

    plugin: str
    package: str
    reason: str
    offered: tuple[tuple[str, str], ...] = ()


@dataclass
class Registry:
    """Everything that can be asked for by name."""

    offers: dict[str, dict[str, Offer]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    problems: list[Problem] = field(default_factory=list)

    def engines(self) -> list[Offer]:
        """The engines in the order in which engine=auto asks them."""
        return sorted(self.offers["engine"].values(), key=lambda o: -getattr(o.cls, "priority", 0))

    def models(self) -> list[type[Model]]:
        """The classes of models."""
        return [cast("type[Model]", offer.cls) for offer in self.offers["model"].values()]

    def types(self) -> dict[str, tuple[type[Format], Mapping[str, Any]]]:
        """What `toyexp export --type` takes: the format of each word, and the settings that it stands for."""
        known: dict[str, tuple[type[Format], Mapping[str, Any]]] = {}
        for form in (cast("type[Format]", offer.cls) for offer in self.offers["format"].values()):
            known |= {form.name: (form, {}), **{word: (form, settings) for word, settings in form.types.items()}}
        return known

    def suffixes(self) -> dict[str, str]:
        """The formats by what their files' names end in."""
        return {cast("type[Format]", offer.cls).suffix: name for name, offer in self.offers["format"].items()}

    def get(self, kind: str, name: str) -> type:
        """The class of that name; raises UserError with the nearest name, and with the broken plugin that had it."""
        offer = self.offers[kind].get(name)
        if offer is not None:
            return offer.cls
        raise UserError(f"{self.missing(kind, name)}; {choose(name, self.offers[kind])}")

    def missing(self, kind: str, name: str) -> str:
        """Why nothing of that name is there."""
        for problem in self.problems:
            if (kind, name) in problem.offered:
                return f"{kind}={name} comes from plugin {problem.plugin}, which is broken: {problem.reason}"
        broken = "; ".join(f"{p.plugin}: {p.reason}" for p in self.problems)
        note = f" (a broken plugin may have offered it: {broken})" if broken else ""
        return f"{kind}={name}: there is none of that name{note}"


def load(modules: Sequence[str] = (), installed: Iterable[tuple[EntryPoint, str]] | None = None) -> Registry:
    """All installed plugins, and then the local `modules`.

    A broken installed plugin becomes a Problem; a broken module of `modules` was asked for, so it raises UserError.
    `installed` replaces the installed plugins, as (entry point, package) pairs.
    """
    registry = Registry()
    for entry, package in _installed() if installed is None else installed:
        unmet = unmet_requirement(entry)
        problem = Problem(entry.name, package, unmet) if unmet else _add(registry, entry.name, package, entry.load)
        if problem:
            registry.problems.append(problem)
    if modules:
        here = str(Path.cwd())
        sys.path.insert(0, here)  # toyexp does not look beside the user's files otherwise
        try:
            for name in modules:
                if name.endswith(".py"):
                    raise UserError(f"plugins=[{name}]: takes the module's name: plugins=[{name.removesuffix('.py')}]")
                problem = _add(registry, name, "local module", partial(importlib.import_module, name))
                if problem:
                    raise UserError(f"plugins=[{name}]: {problem.reason}")
        finally:
            sys.path.remove(here)
        if here not in sys.path:  # last, for what they import later: a file named torch.py is still not PyTorch
            sys.path.append(here)
    return registry


def _installed() -> list[tuple[EntryPoint, str]]:
    """The entry points, toyexp's own first, then by name; the same one found twice on the path counts once."""
    found: dict[tuple[str, str], tuple[EntryPoint, str]] = {}
    packages: dict[int, str] = {}  # a distribution reads its metadata anew whenever it is asked
    for entry in entry_points(group=GROUP):
        if entry.dist is not None and id(entry.dist) not in packages:
            metadata = entry.dist.metadata
            packages[id(entry.dist)] = f"{metadata['Name']} {metadata['Version']}"
        found.setdefault((entry.name, entry.value), (entry, packages.get(id(entry.dist), "?")))
    shipped = sorted(found.values(), key=lambda e: (not e[1].startswith(f"{OWN} "), e[0].name))
    from toyexp import __version__

    return [(OWN_COMMANDS, f"{OWN} {__version__}"), *shipped]


def unmet_requirement(entry: EntryPoint) -> str | None:
    """Why a plugin's package, by what it says it depends on, is for another toyexp; None where it is for this one.

    pip holds it to that when it is installed; toyexp may have been replaced since.
    """
    name = entry.dist.name if entry.dist else OWN
    stated = [line for line in (entry.dist.requires or ()) if OWN in line.lower()] if entry.dist and name != OWN else []
    if not stated:
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # deferred: few runs need it

    from toyexp import __version__

    for line in stated:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        meant = wanted.name.lower() == OWN and (wanted.marker is None or wanted.marker.evaluate({"extra": ""}))
        if meant and not wanted.specifier.contains(__version__, prereleases=True):
            return f"needs toyexp {wanted.specifier}; this is {__version__}"
    return None


def _add(registry: Registry, plugin: str, package: str, importer: Callable[[], ModuleType]) -> Problem | None:
    """Takes a plugin in whole, or not at all."""
    staged: list[Offer] = []
    try:
        manager = pluggy.PluginManager("toyexp")
        manager.add_hookspecs(Registration)
        module = importer()
        _check_hooks(module, plugin, Registration)
        manager.register(module, plugin)
        for kind, (base, hook) in KINDS.items():
            for impl in getattr(manager.hook, hook).get_hookimpls():
                impl.function(_registrar(registry, staged, kind, base, plugin, package))
        take = _registrar(registry, staged, "callbacks", Callback, plugin, package)
        for cls in [exporter(offer.cls) for offer in staged if offer.kind == "format"]:
            take(cls)  # a run writes each format with a callback that has its settings
        if not staged:
            raise UserError(f"{plugin} offers nothing; a plugin calls register(...) in @hookimpl functions")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit(); none of them ends toyexp
        offered = tuple((o.kind, o.name) for o in staged)
        return Problem(plugin, package, why(error), offered)
    for offer in staged:
        registry.offers[offer.kind][offer.name] = offer
    return None


def _registrar(
    registry: Registry, staged: list[Offer], kind: str, base: type, plugin: str, package: str
) -> Callable[[type], None]:
    def register(cls: type) -> None:
        offer = Offer(kind, getattr(cls, "name", "?"), cls, plugin, package)
        staged.append(offer)
        check_class(cls, kind, base)
        taken = registry.offers[kind].get(offer.name)
        if taken is not None:
            raise UserError(f"{kind}={offer.name} is already offered by {taken.plugin} ({taken.package})")
        if sum((o.kind, o.name) == (kind, offer.name) for o in staged) > 1:
            raise UserError(f"{kind}={offer.name} is registered twice")
        if issubclass(cls, Format):
            _check_format(cls, registry)

    return register


def check_class(cls: type, kind: str, base: type) -> None:
    """Raises UserError when a registered class breaks a rule of its kind, with the rule in the text."""
    label = getattr(cls, "__qualname__", repr(cls))
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(f"{label} is no subclass of toyexp.{base.__name__}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{label}.name is {name!r}; it must be lower-case letters, digits and underscores")
    if "__dataclass_fields__" not in vars(cls):
        raise UserError(f"{label} is not decorated with @dataclass")
    if not (cls.__doc__ or "").strip() or str(cls.__doc__).startswith(f"{cls.__name__}("):
        raise UserError(f"{label} has no docstring; its first line is the help people see")
    if inspect.isabstract(cls):
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        raise UserError(f"{label} does not implement {', '.join(missing)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise UserError(f"{label}.{f.name} has no default")
        if f.name in NAMES_CODE:
            raise UserError(f"{label}.{f.name} cannot be a setting: elsewhere a key of that name says what to call")
    if issubclass(cls, Callback):
        _check_callback(cls, label)
    if issubclass(cls, Recipe) and cls.starts_from and cls.starts_from not in cls.__dataclass_fields__:
        raise UserError(f"{label}.starts_from is {cls.starts_from!r}, which is no setting of it")
    if issubclass(cls, Command):
        for field_name, kind_of in (("switches", (tuple, list)), ("values", dict)):
            options = getattr(cls, field_name)
            if not isinstance(options, kind_of) or not all(str(o).startswith("-") for o in options):
                what = "options with an example each" if kind_of is dict else "a tuple of options"
                raise UserError(f"{label}.{field_name} is {options!r}; it is {what}, such as --json")
    if issubclass(cls, (Data, Model, Recipe)):
        _check_data_kinds(cls, label)


def _check_data_kinds(cls: type[Data] | type[Model] | type[Recipe], label: str) -> None:
    """Raises UserError unless the class says which kind of data it gives, or which ones it reads."""
    attribute = "gives" if issubclass(cls, Data) else "reads"
    said = getattr(cls, attribute, None)
    kinds = said if issubclass(cls, Recipe) and isinstance(said, tuple) and said else (said,)
    if not all(isinstance(kind, Kind) for kind in kinds):
        several = "a tuple of kinds" if issubclass(cls, Recipe) else "a kind"
        raise UserError(
            f"{label}.{attribute} is {said!r}; it is {several} of data: TOKENS, IMAGES or a Kind of your own"
        )


def _check_format(cls: type[Format], registry: Registry) -> None:
    label = cls.__qualname__
    if not re.fullmatch(r"[.-][A-Za-z0-9._-]+", cls.suffix):
        raise UserError(f"{label}.suffix is {cls.suffix!r}; it must be what a file's name ends in, such as .onnx")
    if cls.suffix in (taken := registry.suffixes()):
        raise UserError(f"{label}.suffix is {cls.suffix!r}, which is that of format={taken[cls.suffix]}")
    for word in {cls.name, *cls.types} & registry.types().keys():
        raise UserError(f"{label}: --type {word} is already a word of format={registry.types()[word][0].name}")


def _check_callback(cls: type[Callback], label: str) -> None:
    if cls.__eq__ is not object.__eq__:
        raise UserError(f"{label} must be a @dataclass(eq=False): two callbacks with equal settings are two callbacks")
    _check_hooks(cls, label, RunHooks)


def _check_hooks(owner: type | ModuleType, label: str, group: type) -> None:
    """Raises UserError for functions that were meant to be hooks of `group` and are none."""
    hooks = {n for n in vars(group) if not n.startswith("_")}
    for name, member in inspect.getmembers(owner, inspect.isfunction):
        marked = getattr(member, "toyexp_impl", None) is not None
        if marked and name not in hooks:
            raise UserError(f"{label}.{name} is marked @hookimpl but is no hook; {choose(name, hooks)}")
        if not marked and name in hooks:
            raise UserError(f"{label}.{name} has a hook's name but is not marked @hookimpl")
        if marked:
            known = set(inspect.signature(getattr(group, name)).parameters)
            for argument in set(inspect.signature(member).parameters) - known:
                hint = choose(argument, known - {"self"})
                raise UserError(f"{label}.{name}: {argument!r} is no argument of that hook; {hint}")


@dataclass(frozen=True)
class Setting:
    """One field of a plugin's dataclass, as help shows it."""

    name: str
    type: str
    default: object
    comment: str


def _comments(cls: type) -> dict[str, str]:
    """What stands behind the fields of a dataclass in its source."""
    comments: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        with contextlib.suppress(OSError):  # a class that no file holds, as those of exporters
            for line in inspect.getsource(part).splitlines() if dataclasses.is_dataclass(part) else ():
                match = re.fullmatch(r" {4}(\w+): .*?# (.+)", line)
                if match:
                    comments[match[1]] = match[2]
    return comments


def settings_of(cls: type) -> list[Setting]:
    """The settings of a dataclass, each with its help: that of the field, or the comment behind it in the source."""
    comments = _comments(cls) | (_comments(cls.form) if issubclass(cls, Exporter) else {})
    shown = []
    for f in dataclasses.fields(cls):
        kind = f.type if isinstance(f.type, str) else inspect.formatannotation(f.type)
        help_text = f.metadata.get("help") or comments.get(f.name, "")
        shown.append(Setting(f.name, kind, defaults(cls)[f.name], help_text))
    return shown
