"""Where the files that ship with toyexp stand: configurations, templates of plugins, and pages of documentation."""

from __future__ import annotations

from pathlib import Path


def _bundled_directory(in_checkout: str, in_package: str) -> Path:
    """The copy inside an installed package, or the folder of the checkout."""
    package = Path(__file__).resolve().parents[1]
    copy = package / in_package
    return copy if copy.is_dir() else package.parent / in_checkout


CONF = _bundled_directory("conf", "_conf")  # presets, experiments, defaults
TEMPLATES = _bundled_directory("templates", "_templates")  # what `toyexp new` writes: a folder a kind of plugin
PAGES = _bundled_directory("docs/pages", "_pages")
