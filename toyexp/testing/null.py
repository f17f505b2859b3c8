"""An engine that computes nothing, to test everything around an engine without a framework.

Use it with `plugins=[toyexp.testing.null] engine=noop`.
"""

from __future__ import annotations

from toyexp.interfaces.hooks import Register, hookimpl
from toyexp.reference.null import NullEngine, NullSession

__all__ = ["NullEngine", "NullSession"]


@hookimpl
def register_engines(register: Register) -> None:
    """Register engine=noop."""
    register(NullEngine)
