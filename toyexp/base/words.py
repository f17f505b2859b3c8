"""Numbers and paths as people say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def count(n: float) -> str:
    """A number as people say it: 950, 12.3k, 4.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def short(path: Path) -> str:
    """Relative to here when it is below here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def typed(value: Any) -> str:
    """The value of a setting as it is typed: null, true, [a,b]."""
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def counted(threads: int) -> str:
    """`1 thread`, `2 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"
