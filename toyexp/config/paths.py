"""Paths of files that ship with toyexp: configurations, plugin templates and documentation pages."""

from __future__ import annotations

from pathlib import Path


def _bundled_directory(in_checkout: str, in_package: str) -> Path:
    """Return a directory that ships with toyexp.

    It is `in_checkout` if toyexp runs from a checkout, and `in_package` if toyexp is installed.
    """
    package = Path(__file__).resolve().parents[1]
    copy = package / in_package
    return copy if copy.is_dir() else package.parent / in_checkout


CONF = _bundled_directory("conf", "_conf")  # presets, experiments, defaults
TEMPLATES = _bundled_directory("templates", "_templates")  # for `toyexp new`: one directory per kind of plugin
PAGES = _bundled_directory("docs/pages", "_pages")
