"""Where the files that ship with toyexp stand: configurations, templates of plugins, and pages of documentation."""

from __future__ import annotations

import functools
from pathlib import Path


def conf_dir() -> Path:
    """The configurations: presets, experiments, defaults."""
    return _shipped("conf", "_conf")


def templates_dir() -> Path:
    """What `toyexp new` writes: a folder a kind of plugin."""
    return _shipped("templates", "_templates")


def pages_dir() -> Path:
    """The documentation's pages."""
    return _shipped("docs/pages", "_pages")


@functools.cache
def _shipped(in_checkout: str, in_package: str) -> Path:
    """The copy inside an installed package, or the folder of the checkout."""
    package = Path(__file__).resolve().parents[1]
    copy = package / in_package
    return copy if copy.is_dir() else package.parent / in_checkout
