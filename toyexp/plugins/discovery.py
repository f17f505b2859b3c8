"""Finds plugins, takes each in whole or not at all, and keeps the broken ones apart."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.base.files import working_directory
from toyexp.base.packages import block_exit, explain_import_error
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.hooks import Registration
from toyexp.plugins.exporter import exporter
from toyexp.plugins.registry import DISTRIBUTION, LOCAL, Problem, Registry
from toyexp.plugins.rules import KINDS, Candidate, check_class, check_classes, check_hooks

GROUP = "toyexp"  # of entry points
OWN_COMMANDS = EntryPoint("commands", "toyexp.cli.commands", GROUP)  # without an entry point of the distribution

_kept: Registry | None = None
_latest: Registry | None = None


def load(modules: Sequence[str] = (), installed: Iterable[tuple[EntryPoint, str]] | None = None) -> Registry:
    """All installed plugins, and then the local `modules`.

    A broken installed plugin becomes a Problem; a broken module of `modules` was asked for, so it raises UserError.
    `installed` replaces the installed plugins, as (entry point, package) pairs.
    """
    global _latest
    if installed is None and _kept is not None and _kept.modules == tuple(modules):
        _latest = _kept
        return _kept
    registry = Registry(modules=tuple(modules))
    there = _installed() if installed is None else installed
    found = [Candidate(entry.name, package, entry.load, _unmet_requirement(entry, package)) for entry, package in there]
    for candidate in found:
        _take_in(registry, candidate)
        if candidate.reason is not None:
            offered = tuple((kind, getattr(c, "name", "?")) for kind, found in candidate.classes.items() for c in found)
            registry.problems.append(Problem(candidate.plugin, candidate.package, candidate.reason, offered))
    if modules:
        here = str(working_directory())
        sys.path.insert(0, here)  # toyexp does not look beside the user's files otherwise
        try:
            for name in modules:
                if name.endswith(".py"):
                    raise UserError(f"plugins=[{name}]: takes the module's name: plugins=[{name.removesuffix('.py')}]")
                local = Candidate(name, LOCAL, functools.partial(importlib.import_module, name))
                _take_in(registry, local)
                if local.reason is not None:
                    raise UserError(f"plugins=[{name}]: {local.reason}{_elsewhere(name, local.reason)}")
        finally:
            sys.path.remove(here)
        if here not in sys.path:  # last, for what they import later: a file named torch.py is still not PyTorch
            sys.path.append(here)
    _latest = registry
    return registry


def current_registry() -> Registry:
    """Return what was loaded last, with its local modules; for code that is handed no registry, such as a recipe's."""
    return _latest or load()


def _elsewhere(module: str, reason: str) -> str:
    """What to do about a module that stands in a folder of this one, such as that of its package; else nothing."""
    if reason != f"there is no module {module}" or not module.isidentifier():
        return ""
    here = working_directory()
    there = next(iter(sorted([*here.glob(f"*/{module}.py"), *here.glob(f"*/{module}/__init__.py")])), None)
    if there is None:
        return ""
    folder = there.relative_to(here).parts[0]
    return f" here; {there.relative_to(here)} is: go there with cd {folder}, or pip install -e {folder}"


def load_package(entries: Sequence[EntryPoint], package: str) -> Registry:
    """All installed plugins but those of the same modules, and then these `entries`, told as those of a `package`."""
    modules = {entry.module for entry in entries}
    others = [(entry, origin) for entry, origin in _installed() if entry.module not in modules]
    return load(installed=[*others, *((entry, package) for entry in entries)])


def cache_registry(registry: Registry) -> None:
    """What `load` returns from now on, in this process and those forked from it, where the same modules are named."""
    global _kept
    _kept = registry


def _installed() -> list[tuple[EntryPoint, str]]:
    """The entry points, looked up once until the path or a directory on it changes: files of every package are read."""
    return _looked_up(tuple((place, _changed(place)) for place in sys.path))


def _changed(place: str) -> int:
    """When something was last put into a directory or taken out, in ns; 0 where there is none."""
    try:
        return Path(place or ".").stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _looked_up(_: tuple[tuple[str, int], ...]) -> list[tuple[EntryPoint, str]]:
    """toyexp's own first, then by name; the same one found twice on the path counts once."""
    found: dict[tuple[str, str], tuple[EntryPoint, str]] = {}
    packages: dict[int, str] = {}  # a distribution reads its metadata anew whenever it is asked
    for entry in entry_points(group=GROUP):
        if entry.dist is not None and id(entry.dist) not in packages:
            metadata = entry.dist.metadata
            packages[id(entry.dist)] = f"{metadata['Name']} {metadata['Version']}"
        found.setdefault((entry.name, entry.value), (entry, packages.get(id(entry.dist), "?")))
    shipped = sorted(found.values(), key=lambda e: (not e[1].startswith(f"{DISTRIBUTION} "), e[0].name))
    from toyexp import __version__

    return [(OWN_COMMANDS, f"{DISTRIBUTION} {__version__}"), *shipped]


def _unmet_requirement(entry: EntryPoint, package: str) -> str | None:
    """Why a plugin's package, by what it says it depends on, is for another toyexp; None where it is for this one.

    pip holds it to that when it is installed; toyexp may have been replaced since.
    """
    if entry.dist is None or package.startswith(f"{DISTRIBUTION} "):
        return None
    stated = [line for line in (entry.dist.requires or ()) if DISTRIBUTION in line.lower()]
    if not stated:
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # deferred: few runs need it

    from toyexp import __version__

    for line in stated:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        meant = wanted.name.lower() == DISTRIBUTION and (wanted.marker is None or wanted.marker.evaluate({"extra": ""}))
        if meant and not wanted.specifier.contains(__version__, prereleases=True):
            return f"needs toyexp {wanted.specifier}; this is {__version__}"
    return None


def _take_in(registry: Registry, candidate: Candidate) -> None:
    """Take a plugin in, whole or not at all: what it raises says why it is broken."""
    if candidate.reason is not None:
        return
    try:
        with block_exit(), _staying(registry, candidate.plugin):
            candidate.module = candidate.importer()
            check_hooks(candidate.module, Registration, candidate.plugin)
            for kind, (_, hook) in KINDS.items():
                if register := vars(candidate.module).get(hook):
                    register(candidate.classes[kind].append)
            check_classes(candidate)
            candidate.exporters += [exporter(cls) for cls in candidate.classes["format"]]
            for cls in candidate.exporters:  # a format of which no callback can be made
                check_class(cls, Callback)
            registry.add(candidate)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit(); none of them ends toyexp
        candidate.reason = explain_import_error(error)


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
