"""Parse overrides (`key=value`) with Hydra's grammar, and explain syntax errors."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.formatting import format_value
from toyexp.plugins.discovery import current_registry

CACHE_SIZE = 1000  # parsing takes 1 ms per override, and the jobs of a sweep share most of them
PART_KEYS = ("model", "data", "recipe", "engine", "optim", "callbacks")
RESERVED_WORDS = {"null", "true", "false", "nan", "inf"}  # values that are not parsed as text
# Expressions for random or multiple values, in the syntax of Hydra and of other tools.
DISTRIBUTIONS = re.compile(
    r"(suggest_\w+|\w*uniform|\w*normal|\w*randint|\w*space|arange|interval|range|choice|tag|log|int|float)\(.*\)"
)


def parse(words: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra; raise UserError for a syntax error."""
    return [copy.copy(_parse_one(text)) for text in words]


@functools.lru_cache(CACHE_SIZE)
def _parse_one(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException:
        raise _parse_error(text) from None
    except ValueError:  # Python limits integers to some thousand digits
        raise UserError(f"{printable(text)}: the number has too many digits") from None
    if not override.key_or_group:
        raise _parse_error(text)
    return override


def input_lines(parsed: Sequence[Override]) -> list[str]:
    """Return the texts of the overrides as the user typed them."""
    return [str(override.input_line) for override in parsed]


def format_override(key: str, value: object) -> str:
    """Return `key=value` in Hydra's syntax; raise UserError for an unsupported type."""
    return f"{key}={_format_value(key, value)}"


def _format_value(key: str, value: Any) -> str:
    if getattr(value, "shape", None) == ():  # a NumPy scalar
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return format_value(value)
    if isinstance(value, list | tuple | range):
        return f"[{','.join(_format_value(key, item) for item in value)}]"
    if isinstance(value, Mapping):  # Hydra wants keys unquoted, with special characters escaped
        names = (re.sub(r"([][{}():=, ])", r"\\\1", str(name)) for name in value)
        pairs = zip(names, value.values(), strict=True)
        return f"{{{','.join(f'{name}:{_format_value(key, item)}' for name, item in pairs)}}}"
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        plain = (
            re.fullmatch(r"[A-Za-z_][\w./-]*|[\w.-]*/[\w./-]*", text, re.ASCII) and text.lower() not in RESERVED_WORDS
        )
        return text if plain else QuotedString(text, Quote.double).with_quotes()
    examples = {"callbacks": f"['default', {(value if isinstance(value, type) else type(value)).__name__}()]"}
    is_part = key in PART_KEYS or getattr(value, "check", None)
    call = f"toyexp.train({key}={examples.get(key, '...')})" if key in PART_KEYS else "toyexp.train(...)"
    raise UserError(
        f"{key}={printable(repr(value))}: invalid value; use numbers, text, true or false, and lists or mappings of "
        "these" + (f"; pass objects to {call}" if is_part else "")
    )


def _parse_error(text: str) -> UserError:
    key, equals, value = text.partition("=")
    engine, *engine_settings = value.split(":")
    compact = re.sub(",[, ]*,", ",", text).rstrip(", ")
    tight, several, escaped = _strip_spaces(text), text.split(), _escape_brackets(key, value)
    single = f"{key.strip()}={value.strip(' =')}"  # for steps==3
    setting = re.fullmatch(r"\[((?:\w+,)*(\w+)),(?:\2\.)?(\w+=[^],=]+)\]", value) if key == "callbacks" else None
    for is_wrong, words in (
        (setting, setting and f"set it separately: callbacks=[{setting[1]}] callbacks.{setting[2]}.{setting[3]}"),
        (not equals, "expected key=value, such as steps=100"),
        (value[:1] == "=" and _is_readable(single), f"write one = sign: {single}"),
        (key.strip() and tight, f"no spaces are allowed around =: {tight}"),
        (
            len(several) > 1 and all(re.fullmatch(r"[+~]*[A-Za-z_][\w./]*=\S+", word) for word in several),
            f"{len(several)} settings in one pair of quotes; quote each separately: {' '.join(several)}",
        ),
        (not key.strip("+~"), "a setting needs a key before '=', such as steps=100"),
        (
            key == "engine" and engine_settings,
            key == "engine" and _separate(engine, engine_settings),
        ),
        (value[:1] == "~", f"unknown home directory {value.partition('/')[0]}; give the full path"),
        (compact != text and _is_readable(compact), f"empty value next to a comma; did you mean {compact}?"),
        (re.match(r"[a-z]+\(", value) and _is_readable(f"{text})"), f"missing closing parenthesis: {text})"),
        (value.endswith("()"), f"{value} has no value; write several values as {key}=1,2,3"),
        (
            DISTRIBUTIONS.fullmatch(value),
            "for several values use interval(0.1, 0.5), tag(log, interval(1e-4, 1e-1)), int(interval(1, 9)), "
            "range(0, 10, 2) or choice(a, b)",
        ),
        (key[:1] in ("'", '"'), 'only quote the value: key="value"'),
        (
            escaped and escaped != text,
            f"in braces, keys are not quoted, and [ and ] are escaped with a backslash: '{escaped}'",
        ),
        (value[:1] == "{" and set(value) & set("'\""), f"in braces, keys are not quoted: {key}={{name: value}}"),
        (
            any(value.count(a) != value.count(b) for a, b in ("[]", "{}")),
            f"missing closing bracket; a list is written {key}=[a,b]",
        ),
        (value.count('"') % 2 or value.count("'") % 2, "missing closing quote"),
    ):
        if is_wrong:
            return UserError(f"{text!r}: {words}")
    quoted = f"'{key.strip()}=\"{value.strip()}\"'"
    return UserError(f"{text!r}: cannot be parsed; quote values with special characters: {quoted}")


def _separate(engine: str, settings: Sequence[str]) -> str:
    """Return what is wrong with settings typed after the engine's name, and what to type instead."""
    cls = current_registry().classes("engine").get(engine)
    names = [field.name for field in fields(cls)] if cls else []
    if unknown := [key for key in (text.partition("=")[0] for text in settings) if names and key not in names]:
        return f"engine={engine} has no setting {printable(unknown[0])}; {suggest(unknown[0], names)}"
    return f"settings of the engine are written separately: {' engine.'.join([f'engine={engine}', *settings])}"


def _strip_spaces(text: str) -> str | None:
    """Return the text without spaces around its first `=` if it is then a valid override, else None."""
    key, _, value = text.partition("=")
    tight = f"{key.strip()}={value.strip()}"
    return tight if tight != text and _is_readable(tight) else None


def _escape_brackets(key: str, value: str) -> str | None:
    """Return `key={...}` with [ and ] in the mapping's keys escaped, as Hydra requires; None for any other value."""
    if value[:1] != "{" or not set(value) & set("[]"):
        return None
    bare = re.sub("[\"']", "", value)
    escaped = f"{key}=" + re.sub(r"(?<!\\)[][]", r"\\\g<0>", bare)
    return escaped if _is_readable(escaped) else None


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([text])
    except (HydraException, ValueError):
        return False
    return True
