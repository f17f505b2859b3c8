"""An engine that computes nothing, so that everything around an engine can be tested without a framework.

Give it to a run with `plugins=[toyexp.testing.null] engine=noop`.
"""

from __future__ import annotations

from toyexp.interfaces.hooks import Register, hookimpl
from toyexp.reference.null import NullEngine, NullSession

__all__ = ["NullEngine", "NullSession"]


@hookimpl
def register_engines(register: Register) -> None:
    """Offers engine=noop to runs that name this module."""
    register(NullEngine)
