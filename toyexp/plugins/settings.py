"""Settings of a part, such as a model, for help texts: the fields of its dataclass, with their comments."""

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
    """A setting of a part: name, type and default of a dataclass field, and the comment that explains it."""

    name: str
    type: str
    default: object
    comment: str


def list_settings(cls: type) -> list[Setting]:
    """Return the settings of the dataclass `cls`.

    The help text of a setting is the entry `help` in the field's metadata or, if there is none, the comment on the
    field's line.
    """
    comments = _comments(cls) | (_comments(cls.form) if issubclass(cls, Exporter) else {})
    values = default_settings(cls)
    settings = []
    for f in dataclasses.fields(cls):
        kind = f.type if isinstance(f.type, str) else inspect.formatannotation(f.type)
        settings.append(Setting(f.name, kind, values[f.name], f.metadata.get("help") or comments.get(f.name, "")))
    return settings


def _comments(cls: type) -> dict[str, str]:
    """Return the comment on the line of each field of a dataclass, keyed by field name."""
    comments: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        with contextlib.suppress(OSError):  # classes without a source file, such as exporters
            for line in inspect.getsource(part).splitlines() if dataclasses.is_dataclass(part) else ():
                match = re.fullmatch(r" {4}(\w+): .*?# (.+)", line)
                if match:
                    comments[match[1]] = match[2]
    return comments
