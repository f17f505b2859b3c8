"""Finds plugins, keeps the broken ones apart, and answers "what is there?"."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pluggy

from toyexp.base.errors import UserError, choose, nearest
from toyexp.base.files import working_directory
from toyexp.base.packages import why
from toyexp.contract.callback import Callback
from toyexp.contract.command import Command
from toyexp.contract.data import Data
from toyexp.contract.dataset import Batches, Dataset
from toyexp.contract.engine import Engine
from toyexp.contract.exporter import exporter
from toyexp.contract.format import Format
from toyexp.contract.hooks import Registration
from toyexp.contract.model import Model
from toyexp.contract.optimiser import Optimiser
from toyexp.contract.recipe import Recipe
from toyexp.contract.rules import check_class, check_hooks
from toyexp.contract.session import Session

GROUP = "toyexp"  # of entry points
OWN = "toyexp"  # the distribution whose names nobody can take over
LOCAL = "local module"  # the package of plugins=[...]
IN_A_MODULE = "one in a module of yours: add 'plugins=[my_module]'"
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


# Whose method something came out of: the parts of each kind, and what they make.
PARTS: dict[type, str] = {base: kind for kind, (base, _) in KINDS.items()}
PARTS |= {Session: "engine", Dataset: "data", Batches: "data"}


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
    notes: list[str] = field(default_factory=list)  # a sentence about each thing that a plugin did and that was undone
    modules: Sequence[str] = ()  # the local ones among them

    @property
    def loading(self) -> str:
        """What stands at the end of a command that is suggested, for it to find the same: ` 'plugins=[a,b]'`."""
        return f" 'plugins=[{','.join(self.modules)}]'" if self.modules else ""

    def engines(self) -> list[Offer]:
        """The engines in the order in which engine=auto asks them."""
        return sorted(self.offers["engine"].values(), key=lambda o: -cast("type[Engine]", o.cls).priority)

    def classes(self, kind: str) -> dict[str, Any]:
        """The classes of a kind by name, in the order in which they were registered."""
        return {name: offer.cls for name, offer in self.offers[kind].items()}

    def models(self) -> list[type[Model]]:
        """The classes of models."""
        return list(self.classes("model").values())

    def types(self) -> dict[str, tuple[type[Format], Mapping[str, Any]]]:
        """What `toyexp export --type` takes: the format of each word, and the settings that it stands for."""
        known: dict[str, tuple[type[Format], Mapping[str, Any]]] = {}
        for form in self.classes("format").values():
            known |= {form.name: (form, {}), **{word: (form, settings) for word, settings in form.types.items()}}
        return known

    def suffixes(self) -> dict[str, str]:
        """The formats by what their files' names end in."""
        return {form.suffix: name for name, form in self.classes("format").items()}

    def get(self, kind: str, name: str) -> type:
        """The class of that name; raises UserError with the nearest name, and with the broken plugin that had it."""
        offer = self.offers[kind].get(name)
        if offer is not None:
            return offer.cls
        raise UserError(self.missing(kind, name, self.offers[kind]))

    def drop(self, offer: Offer, reason: str) -> None:
        """Takes out all that the plugin of an offer has, which is broken after all; UserError for a local one."""
        if offer.package == LOCAL:
            raise UserError(f"plugins=[{offer.plugin}]: {reason}")
        origin = offer.plugin, offer.package
        gone = [o for known in self.offers.values() for o in known.values() if (o.plugin, o.package) == origin]
        for each in gone:
            del self.offers[each.kind][each.name]
        self.problems.append(Problem(*origin, reason, tuple((each.kind, each.name) for each in gone)))

    def missing(self, kind: str, name: str, known: Collection[str]) -> str:
        """Why nothing of that name is there, and what of the `known` is near, or all of them."""
        for problem in self.problems:
            if (kind, name) in problem.offered:
                why_not = f"comes from plugin {problem.plugin}, which is broken: {problem.reason}"
                return f"{kind}={name} {why_not}; {choose(name, known)}"
        broken = "; ".join(f"{p.plugin}: {p.reason}" for p in self.problems)
        note = f" (a broken plugin may have offered it: {broken})" if broken else ""
        own = "" if self.modules or nearest(name, known) else f"; {IN_A_MODULE}"
        return f"{kind}={name}: there is none of that name{note}; {choose(name, known)}{own}"


def load(modules: Sequence[str] = (), installed: Iterable[tuple[EntryPoint, str]] | None = None) -> Registry:
    """All installed plugins, and then the local `modules`.

    A broken installed plugin becomes a Problem; a broken module of `modules` was asked for, so it raises UserError.
    `installed` replaces the installed plugins, as (entry point, package) pairs.
    """
    registry = Registry(modules=tuple(modules))
    for entry, package in _installed() if installed is None else installed:
        unmet = unmet_requirement(entry) if not package.startswith(f"{OWN} ") else None
        problem = Problem(entry.name, package, unmet) if unmet else _add(registry, entry.name, package, entry.load)
        if problem:
            registry.problems.append(problem)
    if modules:
        here = str(working_directory())
        sys.path.insert(0, here)  # toyexp does not look beside the user's files otherwise
        try:
            for name in modules:
                if name.endswith(".py"):
                    raise UserError(f"plugins=[{name}]: takes the module's name: plugins=[{name.removesuffix('.py')}]")
                problem = _add(registry, name, LOCAL, partial(importlib.import_module, name))
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
    stated = [line for line in (entry.dist.requires or ()) if OWN in line.lower()] if entry.dist else []
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
    given: dict[str, list[type]] = {kind: [] for kind in KINDS}
    exporters: list[type] = []  # the callbacks with which a run writes the formats
    try:
        manager = pluggy.PluginManager("toyexp")
        manager.add_hookspecs(Registration)
        with _staying(registry, plugin):
            module = importer()
        check_hooks(module, Registration, plugin)
        manager.register(module, plugin)
        for kind, (_, hook) in KINDS.items():
            for impl in getattr(manager.hook, hook).get_hookimpls():
                impl.function(given[kind].append)
        if not any(given.values()):
            raise UserError(f"{plugin} offers nothing; a plugin calls register(...) in @hookimpl functions")
        for kind, classes in given.items():
            for cls in classes:
                check_class(cls, KINDS[kind][0])
        for form in given["format"]:
            exporters.append(exporter(form))
            check_class(exporters[-1], Callback)
        registry.offers = _joined(registry, plugin, package, [*given.items(), ("callbacks", exporters)])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit(); none of them ends toyexp
        offered = [(kind, getattr(cls, "name", "?")) for kind, found in given.items() for cls in found]
        return Problem(plugin, package, why(error), tuple(offered))
    return None


@contextlib.contextmanager
def _staying(registry: Registry, plugin: str) -> Iterator[None]:
    """Goes back where the working directory was: relative paths are the user's, whatever a plugin does."""
    try:
        before = Path.cwd()
    except OSError:  # it is gone
        yield
        return
    try:
        yield
    finally:
        if not before.samefile("."):
            os.chdir(before)
            registry.notes.append(f"plugin {plugin} changed the working directory; it is {before} again")


def _joined(
    registry: Registry, plugin: str, package: str, given: Iterable[tuple[str, Iterable[Any]]]
) -> dict[str, dict[str, Offer]]:
    """What the registry has, and the classes of a plugin by their kinds.

    Raises UserError for a name, a format's suffix or a word of `--type` that is taken.
    """
    grown = Registry({kind: dict(known) for kind, known in registry.offers.items()})
    for offer in [Offer(kind, cls.name, cls, plugin, package) for kind, classes in given for cls in classes]:
        taken = grown.offers[offer.kind].get(offer.name)
        if taken is not None:
            same = (taken.plugin, taken.package) == (offer.plugin, offer.package)
            how = "registered twice" if same else f"already offered by {taken.plugin} ({taken.package})"
            raise UserError(f"{offer.kind}={offer.name} is {how}")
        if offer.kind == "format":
            form, label = cast("type[Format]", offer.cls), offer.cls.__qualname__
            if form.suffix in (suffixes := grown.suffixes()):
                raise UserError(f"{label}.suffix is {form.suffix!r}, which is that of format={suffixes[form.suffix]}")
            for word in {form.name, *form.types} & grown.types().keys():
                raise UserError(f"{label}: --type {word} is already a word of format={grown.types()[word][0].name}")
        grown.offers[offer.kind][offer.name] = offer
    return grown.offers
