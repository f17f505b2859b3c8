"""Import optional packages, and explain in one line why one cannot be used."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from toyexp.base.errors import Absent, Broken, Unavailable, UserError, printable
from toyexp.base.signals import hidden_interrupt

# First import error of each package: a second attempt would fail with another error, on the remains of the first.
_broken_packages: dict[str, str] = {}


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Disable garbage collection inside this context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def require_package(package: str, how: str, distribution: str = "") -> Iterator[None]:
    """Convert errors from importing `package` inside this context to Absent (not installed) or Broken.

    `how` is the command that installs the package; `distribution` is its name on PyPI, if different from `package`.
    """
    title = distribution or package
    if package in _broken_packages:
        raise broken_package(title, _broken_packages[package])
    try:
        with pause_collection():  # 15 % faster
            yield
        if problem := _namespace_problem(getattr(sys.modules.get(package), "__spec__", None)):
            raise ImportError(problem)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise Absent(f"{title} is not installed: {how}") from None
        raise _record_broken(package, title, error) from None
    except (Exception, SystemExit) as error:
        raise hidden_interrupt(error) or _record_broken(package, title, error) from None


def _record_broken(package: str, title: str, error: BaseException) -> Broken:
    _broken_packages[package] = explain_import_error(error)
    return broken_package(title, _broken_packages[package])


def broken_package(distribution: str, reason: str) -> Broken:
    """Return the error for a package that is installed but cannot be loaded."""
    fact = f"{distribution} is installed but cannot be loaded ({reason})"
    return Broken(fact, f"reinstall it: pip install --force-reinstall {distribution}")


def _namespace_problem(spec: ModuleSpec | None) -> str:
    """Return a message if a package is only a directory without __init__.py, else "".

    Python imports such a directory as an empty package.
    """
    if not isinstance(spec, ModuleSpec) or spec.origin is not None:
        return ""
    return f"{next(iter(spec.submodule_search_locations or ()), spec.name)} holds no __init__.py"


@contextlib.contextmanager
def block_exit() -> Iterator[None]:
    """Make os._exit raise SystemExit in this process, so that an imported module cannot end toyexp silently."""
    real_exit, process = os._exit, os.getpid()

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() != process:
            real_exit(status)
        raise SystemExit(f"os._exit({status}) would end toyexp")

    os._exit = raise_exit
    try:
        yield
    finally:
        os._exit = real_exit


def explain_import_error(error: BaseException) -> str:
    """Return in one line what went wrong in an import."""
    while isinstance(error, ImportError) and error.__cause__ is not None:  # numpy wraps the cause in a page of advice
        error = error.__cause__
    words = " ".join(str(error).split())
    if isinstance(error, UserError):
        return words
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"there is no module {error.name}{error_location(error, of_plugins=True)}"
    owner = error.obj if isinstance(error, AttributeError) else None
    if isinstance(owner, ModuleType) and owner.__spec__ is not None:
        words += f" in {owner.__spec__.origin}"  # perhaps a local file with the package's name
    return printable(f"{type(error).__name__}: {words}", 300)


def error_location(error: BaseException, of_plugins: bool = False) -> str:
    """Return " (FILE, line N)" for the last traceback frame outside toyexp, PyTorch and the standard library.

    If there is no such frame, return "" if `of_plugins` is True, and otherwise the text for the last frame of the
    traceback. Frames of a module that sets `__tracebackhide__` do not count.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    skipped = {"toyexp", "torch", *sys.stdlib_module_names}
    shown = [at for at in frames if not at[0].f_globals.get("__tracebackhide__")]
    outside = [at for at in shown if str(at[0].f_globals.get("__name__")).partition(".")[0] not in skipped]
    locations = [f" ({Path(frame.f_code.co_filename).name}, line {line})" for frame, line in outside or frames]
    return locations[-1] if outside or (locations and not of_plugins) else ""


@contextlib.contextmanager
def prefix_unavailable(who: str) -> Iterator[None]:
    """Add `who`, the setting or file that needs a package, at the start of an Unavailable error's message."""
    try:
        yield
    except Unavailable as reason:
        if str(reason).startswith(who):  # the message names it already
            raise
        raise Unavailable(f"{who}: {reason}") from None


@functools.cache
def probe_import(package: str) -> str | None:
    """Import a package in a child process, so that a crash does no harm.

    Return None if the import succeeds, else a phrase such as "is not installed".
    """
    import subprocess  # deferred: every command imports this module, few need it

    spec = importlib.util.find_spec(package)
    if spec is None:
        return "is not installed"
    command = [sys.executable, "-P", "-c", f"import {package}"]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if run.returncode == 0 and not _namespace_problem(spec):
        return None
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    reason = _namespace_problem(spec) or (lines or [f"its import ended with {run.returncode}"])[-1]
    return f"is installed but cannot be loaded ({printable(reason, 300)})"


def broken_requirement(error: BaseException) -> Broken | None:
    """Return a Broken error that names the third-party package whose import raised `error`.

    Return None if the error was not raised while such a package was imported.
    """
    imported, trace = [], error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code.co_name == "<module>":
            imported.append(str(frame.f_globals.get("__name__")).partition(".")[0])
    distribution = None
    if imported:
        from importlib.metadata import entry_points, packages_distributions  # deferred: scanning all packages is slow

        plugins = {entry.value.partition(".")[0] for entry in entry_points(group="toyexp")} | {"toyexp"}
        owners = packages_distributions()
        distribution = next((owners[n][0] for n in reversed(imported) if n in owners and n not in plugins), None)
    if distribution is None and isinstance(error, ModuleNotFoundError) and error.name:
        return Broken(f"the Python package {error.name.partition('.')[0]} is not installed")
    return broken_package(distribution, explain_import_error(error)) if distribution else None
