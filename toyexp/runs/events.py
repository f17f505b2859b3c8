"""The events of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.files import open_file

LINE = 1 << 20  # bytes of a line that is read


def start_of(run: Path) -> dict[str, Any]:
    """The first event: machine, engine, model, data; nothing where it cannot be read."""
    try:
        with open_file(run / "events.jsonl") as file:
            found = json.loads(file.readline(LINE))
    except (UserError, OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value if isinstance(value, dict) else {} for key, value in found.items() if key != "kind"}
