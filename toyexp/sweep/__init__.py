"""Many runs. The package is called as `toyexp.sweep(...)`, too: by its name people look for that function."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Python puts a package's module in place of whatever else has its name."""

    def __call__(self, *words: str, **settings: Any) -> Any:
        """See `toyexp.door.running.sweep`."""
        return import_module("toyexp.door.running").sweep(*words, **settings)


sys.modules[__name__].__class__ = _Callable
