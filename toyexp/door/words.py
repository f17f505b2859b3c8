"""Keywords of a call as the settings that would be typed for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.words import typed

SPECIAL = {"null", "true", "false", "nan", "inf"}  # words that are no texts
WITHIN = ("callbacks", "hydra", "sweep")  # whose mappings hold mappings of settings, too


def texts(call: str, words: Sequence[Any]) -> list[str]:
    """The words themselves; UserError for what is none, such as a mapping of settings."""
    for word in words:
        if not isinstance(word, str):
            raise UserError(
                f"{call} {printable(repr(word))}: is no word of a command line; settings are words or keywords: "
                f"{call}('recipe=warm', steps=100)"
            )
    return list(words)


def place(what: str, given: Any) -> Path:
    """A directory that is given; UserError for what is no path."""
    if not isinstance(given, str | os.PathLike) or isinstance(os.fspath(given), bytes):
        raise UserError(f"{what}: takes a directory, and is {printable(repr(given))}")
    return Path(given)


def worded(settings: Mapping[str, Any], swept: bool = False) -> list[str]:
    """`key=value` for each keyword; a mapping holds the settings of a part, and `name` in it which part that is.

    With `swept` a list or a tuple holds the values of a sweep, but for `callbacks` and `plugins`, which are lists.
    Raises UserError for what is no setting's value.
    """
    return [word for key, value in settings.items() for word in _words(key, value, swept)]


def _words(key: str, value: Any, swept: bool) -> Iterator[str]:
    parts = key.split(".")
    if isinstance(value, Mapping) and (len(parts) == 1 or (parts[0] in WITHIN and len(parts) == 2)):
        if parts == ["callbacks"]:
            yield f"callbacks={_list(key, list(value))}"
        for name, inner in value.items():
            yield from _words(key if name == "name" and parts[0] != "callbacks" else f"{key}.{name}", inner, swept)
    elif swept and isinstance(value, list | tuple | range) and key not in ("callbacks", "plugins"):
        yield f"{key}={','.join(_text(key, one) for one in value)}"
    else:
        yield f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if getattr(value, "shape", None) == ():  # a number of numpy's
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return typed(value)
    if isinstance(value, str | os.PathLike):
        return _quoted(os.fspath(value))
    if isinstance(value, list | tuple | range):
        return _list(key, value)
    if isinstance(value, Mapping):  # names in braces stand without quotes, what has a meaning to Hydra escaped
        pairs = (f"{_escaped(str(name))}:{_text(key, one)}" for name, one in value.items())
        return f"{{{','.join(pairs)}}}"
    what = printable(repr(value))
    raise UserError(
        f"{key}={what}: is no setting's value; it takes numbers, texts, true or false, lists and mappings of these"
        + ("; finished objects go to toyexp.train(...)" if getattr(value, "check", None) else "")
    )


def _list(key: str, values: Any) -> str:
    return f"[{','.join(_text(key, one) for one in values)}]"


def _quoted(text: str) -> str:
    from toyexp.config.words import setting

    plain = re.fullmatch(r"[A-Za-z_./][\w./-]*", text, re.ASCII) and text.lower() not in SPECIAL
    return text if plain else setting("", text).removeprefix("=")


def _escaped(name: str) -> str:
    return re.sub(r"([][{}():=, ])", r"\\\1", name)
