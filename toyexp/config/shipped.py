"""Where the configurations that ship with toyexp stand."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def conf_dir() -> Path:
    """The checkout's conf/, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "conf"
    return checkout if (checkout / "config.yaml").is_file() else package / "_conf"
