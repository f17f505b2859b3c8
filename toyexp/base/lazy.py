"""Packages whose public names are loaded when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """A package's `__getattr__`, `__dir__` and `__all__`; `homes`: by module, its public names, blanks between."""
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # the next time it is simply there
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home_of}), sorted(home_of)
