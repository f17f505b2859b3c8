"""`~` in paths: shells expand it at the beginning of a word, and not behind `key=` or in a file."""

from __future__ import annotations

import os
import re
from typing import Any

_TEXTS = ("--prompt",)  # flags whose value is a text, where ~ is a character like any other


def with_home(word: str) -> str:
    """A word of the command line with the home directory for each `~` that begins a value: `key=~/a,~/b`, `--to=~/c`.

    What stands in quotation marks of its own is left alone.
    """
    key, equals, value = word.partition("=")
    if not equals or key in _TEXTS:
        return word
    return key + equals + re.sub(r"(^|[\[,])(~[\w.-]*)(?=[/,\]]|$)", lambda m: m[1] + _home(m[2]), value)


def expanded(value: Any) -> Any:
    """A setting from a file, which is a path below a home directory if it begins with `~/`."""
    return _home(value) if isinstance(value, str) and value.startswith("~/") else value


def _home(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser() raises for a user there is none of
