"""Load the public names of a package, and large libraries, on first use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING


def lazy(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package, so that it imports its public names on first use.

    `file` is the package's __init__.py. The public names are those that this file imports under `if TYPE_CHECKING:`.
    """
    with open(file, encoding="utf-8") as source:
        imports = re.findall(r"^    from ([\w.]+) import (\([^)]*\)|.*)", source.read(), re.MULTILINE)
    modules = {name: module for module, names in imports for name in re.findall(r"\w+", names)}

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from toyexp.base.signals import protect_imports  # deferred: importing it calls `lazy` for toyexp.base

        with protect_imports():
            value = getattr(import_module(modules[name]), name)
        # Cache the value; importing a submodule with the same name may have set it already.
        return vars(sys.modules[package]).setdefault(name, value)

    return get, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)


class LazyModule:
    """A module that is imported when one of its names is first used."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> object:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import numpy as numpy
    import tokenizers as tokenizers
else:
    numpy, tokenizers = LazyModule("numpy"), LazyModule("tokenizers")
