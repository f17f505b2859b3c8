"""Where the files that ship with toyexp stand: configurations, templates of plugins, and pages of documentation."""

from __future__ import annotations

from pathlib import Path


def _shipped(in_checkout: str, in_package: str) -> Path:
    """The copy inside an installed package, or the folder of the checkout."""
    package = Path(__file__).resolve().parents[1]
    copy = package / in_package
    return copy if copy.is_dir() else package.parent / in_checkout


CONF = _shipped("conf", "_conf")  # presets, experiments, defaults
TEMPLATES = _shipped("templates", "_templates")  # what `toyexp new` writes: a folder a kind of plugin
PAGES = _shipped("docs/pages", "_pages")
