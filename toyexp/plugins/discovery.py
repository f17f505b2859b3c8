"""Discovery and loading of plugins; a broken plugin is recorded and contributes nothing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.files import working_directory
from toyexp.base.packages import block_exit, explain_import_error
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.hooks import Registration
from toyexp.plugins.exporter import exporter
from toyexp.plugins.registry import DISTRIBUTION, LOCAL, Problem, Registry
from toyexp.plugins.rules import KINDS, Candidate, check_class, check_classes, check_hooks

GROUP = "toyexp"  # group of entry points
OWN_COMMANDS = EntryPoint("commands", "toyexp.cli.commands", GROUP)  # found even if toyexp is not installed

_cached: Registry | None = None
_latest: Registry | None = None


def load(modules: Sequence[str] = (), installed: Iterable[tuple[EntryPoint, str]] | None = None) -> Registry:
    """Load all installed plugins, and then the local plugins `modules`.

    A broken installed plugin is recorded as a Problem. A broken local plugin raises UserError, because the user named
    it. If `installed` is given, its pairs of entry point and package are loaded instead of the installed plugins.
    """
    global _latest
    if installed is None and _cached is not None and _cached.modules == tuple(modules):
        _latest = _cached
        return _cached
    registry = Registry(modules=tuple(modules))
    for entry, package in _installed_plugins() if installed is None else installed:
        candidate = Candidate(entry.name, package, entry.load, _unmet_requirement(entry, package))
        _add_plugin(registry, candidate)
        if candidate.reason is not None:
            parts = ((kind, cls) for kind, classes in candidate.classes.items() for cls in classes)
            offered = tuple((kind, getattr(cls, "name", "?")) for kind, cls in parts)
            registry.problems.append(Problem(candidate.plugin, candidate.package, candidate.reason, offered))
    if modules:
        directory = str(working_directory())
        sys.path.insert(0, directory)  # the working directory is not on sys.path otherwise
        try:
            for name in modules:
                if name.endswith(".py"):
                    raise UserError(f"plugins=[{name}]: expected a module name: plugins=[{name.removesuffix('.py')}]")
                local = Candidate(name, LOCAL, functools.partial(importlib.import_module, name))
                _add_plugin(registry, local)
                if local.reason is not None:
                    raise UserError(f"plugins=[{name}]: {local.reason}{_directory_hint(name, local.reason)}")
        finally:
            sys.path.remove(directory)
        if directory not in sys.path:  # last, so that a local file torch.py does not shadow PyTorch in later imports
            sys.path.append(directory)
    _latest = registry
    return registry


def current_registry() -> Registry:
    """Return the registry that was loaded last, for code that has no registry argument, such as recipes."""
    return _latest or load()


def import_local(path: str, key: str) -> Any:
    """Return the object that `path`, the value of the setting `key`, names as MODULE:NAME.

    Raise UserError unless the user named the module on the command line. A configuration file must not load code.
    """
    shown, (module, colon, name) = f"{key}={printable(path)}", path.partition(":")
    if not (module and colon and name.isidentifier()):
        raise UserError(f"{shown}: must be a module and a name in it, such as {key}=my_module:Net")
    if module not in current_registry().modules:
        raise UserError(f"{shown}: names code, which only the command line can load; type {shown}")
    names = vars(sys.modules[module])
    if name not in names:
        public = [other for other in names if not other.startswith("_")]
        raise UserError(f"{shown}: {module} has no {name}; {suggest(name, public)}")
    return names[name]


def _directory_hint(module: str, reason: str) -> str:
    """Return a hint with the command to type if a subdirectory contains the local plugin that was not found.

    In all other cases return an empty string.
    """
    if reason != f"there is no module {module}" or not module.isidentifier():
        return ""
    directory = working_directory()
    files = sorted([*directory.glob(f"*/{module}.py"), *directory.glob(f"*/{module}/__init__.py")])
    if not files:
        return ""
    path = files[0].relative_to(directory)
    return f" here, but {path} exists; type: cd {path.parts[0]}, or pip install -e {path.parts[0]}"


def load_package(entries: Sequence[EntryPoint], package: str) -> Registry:
    """Return a registry of all installed plugins and of `entries`, which are loaded as plugins of `package`.

    An installed plugin is left out if one of the entries has the same module.
    """
    modules = {entry.module for entry in entries}
    others = [(entry, origin) for entry, origin in _installed_plugins() if entry.module not in modules]
    return load(installed=[*others, *((entry, package) for entry in entries)])


def cache_registry(registry: Registry) -> None:
    """Make `load` return `registry` when it is called again with the same local plugins.

    This holds in this process and in processes forked from it.
    """
    global _cached
    _cached = registry


def _installed_plugins() -> list[tuple[EntryPoint, str]]:
    """Return the entry point and the package (name and version) of each installed plugin.

    The result is cached until sys.path or a directory on it changes.
    """
    return _read_entry_points(tuple((path, _modification_time(path)) for path in sys.path))


def _modification_time(path: str) -> int:
    """Return when a directory was last modified, in ns; 0 if it does not exist."""
    try:
        return Path(path or ".").stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=1)
def _read_entry_points(_: tuple[tuple[str, int], ...]) -> list[tuple[EntryPoint, str]]:
    """Return entry points and their packages without duplicates: toyexp's own first, the others sorted by name.

    The argument is only the key of the cache.
    """
    entries: dict[tuple[str, str], tuple[EntryPoint, str]] = {}
    packages: dict[int, str] = {}  # distributions do not cache their metadata
    for entry in entry_points(group=GROUP):
        if entry.dist is not None and id(entry.dist) not in packages:
            metadata = entry.dist.metadata
            packages[id(entry.dist)] = f"{metadata['Name']} {metadata['Version']}"
        entries.setdefault((entry.name, entry.value), (entry, packages.get(id(entry.dist), "?")))
    plugins = sorted(entries.values(), key=lambda e: (not e[1].startswith(f"{DISTRIBUTION} "), e[0].name))
    from toyexp import __version__

    return [(OWN_COMMANDS, f"{DISTRIBUTION} {__version__}"), *plugins]


def _unmet_requirement(entry: EntryPoint, package: str) -> str | None:
    """Return a sentence if the plugin's package requires another version of toyexp than this one, else None."""
    # pip checks this at installation, but toyexp may have been replaced since.
    if entry.dist is None or package.startswith(f"{DISTRIBUTION} "):
        return None
    lines = [line for line in (entry.dist.requires or ()) if DISTRIBUTION in line.lower()]
    if not lines:
        return None
    from packaging.requirements import InvalidRequirement, Requirement  # deferred: few runs need it

    from toyexp import __version__

    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        applies = requirement.name.lower() == DISTRIBUTION and (marker is None or marker.evaluate({"extra": ""}))
        if applies and not requirement.specifier.contains(__version__, prereleases=True):
            return f"needs toyexp {requirement.specifier}; this is {__version__}"
    return None


def _add_plugin(registry: Registry, candidate: Candidate) -> None:
    """Import a plugin and add all its classes to the registry.

    If that raises an exception, add nothing and set `candidate.reason` to an explanation.
    """
    if candidate.reason is not None:
        return
    try:
        with block_exit(), _restore_directory(registry, candidate.plugin):
            candidate.module = candidate.importer()
            check_hooks(candidate.module, Registration, candidate.plugin)
            for kind, (_, hook) in KINDS.items():
                if register := vars(candidate.module).get(hook):
                    register(candidate.classes[kind].append)
            is_builtin = candidate.package.startswith(f"{DISTRIBUTION} ")  # the test suite checks its classes
            if not is_builtin and (any(candidate.classes.values()) or not _uses_torch(candidate.module)):
                check_classes(candidate)
            candidate.exporters += [exporter(cls) for cls in candidate.classes["format"]]
            for cls in [] if is_builtin else candidate.exporters:
                check_class(cls, Callback)
            registry.add(candidate)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit()
        candidate.reason = explain_import_error(error)


def _uses_torch(module: ModuleType) -> bool:
    """Return True if a module imports torch.

    Such a module need not register parts, because it may define networks for the setting `model.path`.
    """
    sources = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values())
    return any(str(source).partition(".")[0] == "torch" for source in sources)


@contextlib.contextmanager
def _restore_directory(registry: Registry, plugin: str) -> Iterator[None]:
    """If the plugin changes the working directory inside the context, change it back and add a note.

    Relative paths that the user typed refer to the original directory.
    """
    try:
        directory = Path.cwd()
    except OSError:  # the directory was deleted
        yield
        return
    try:
        yield
    finally:
        if not directory.samefile("."):
            os.chdir(directory)
            registry.notes.append(f"plugin {plugin} changed the working directory; it was changed back to {directory}")
