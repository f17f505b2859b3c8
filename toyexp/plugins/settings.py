"""What help shows of the settings of a part, which are the fields of its dataclass."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from dataclasses import dataclass

from toyexp.interfaces.run_preview import default_settings
from toyexp.plugins.exporter import Exporter


@dataclass(frozen=True)
class Setting:
    """One field of a plugin's dataclass, as help shows it."""

    name: str
    type: str
    default: object
    comment: str


def list_settings(cls: type) -> list[Setting]:
    """The settings of a dataclass, each with its help: that of the field, or the comment behind it in the source."""
    comments = _comments(cls) | (_comments(cls.form) if issubclass(cls, Exporter) else {})
    values = default_settings(cls)
    shown = []
    for f in dataclasses.fields(cls):
        kind = f.type if isinstance(f.type, str) else inspect.formatannotation(f.type)
        shown.append(Setting(f.name, kind, values[f.name], f.metadata.get("help") or comments.get(f.name, "")))
    return shown


def _comments(cls: type) -> dict[str, str]:
    """What stands behind the fields of a dataclass in its source, by their names."""
    comments: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        with contextlib.suppress(OSError):  # a class that no file holds, as those of exporters
            for line in inspect.getsource(part).splitlines() if dataclasses.is_dataclass(part) else ():
                match = re.fullmatch(r" {4}(\w+): .*?# (.+)", line)
                if match:
                    comments[match[1]] = match[2]
    return comments
