"""Words of a command line as Hydra reads them."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import format_value

CACHE_SIZE = 1000  # that are known again: reading one takes a millisecond, and the jobs of a sweep share most
RESERVED_WORDS = {"null", "true", "false", "nan", "inf"}  # words that are no texts
# What draws a number, here or in another tool, as far as it is called.
DISTRIBUTIONS = re.compile(
    r"(suggest_\w+|\w*uniform|\w*normal|\w*randint|\w*space|arange|interval|range|choice|tag|log|int|float)\(.*\)"
)


def parse(words: Sequence[str]) -> list[Override]:
    """Hydra's reading of the settings; UserError for what it cannot read."""
    return [copy.copy(_parse_one(text)) for text in words]


@functools.lru_cache(CACHE_SIZE)
def _parse_one(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException:
        raise _parse_error(text) from None
    except ValueError:  # Python makes no number of more than some thousand digits
        raise UserError(f"{printable(text)}: holds a number of more digits than can be read") from None
    if not override.key_or_group:
        raise _parse_error(text)
    return override


def input_lines(parsed: Sequence[Override]) -> list[str]:
    """The same as they were typed."""
    return [str(override.input_line) for override in parsed]


def format_override(key: str, value: object) -> str:
    """Return `key=value` as it is read back; UserError for a value that is no text, number, list, mapping or null."""
    return f"{key}={_format_value(key, value)}"


def _format_value(key: str, value: Any) -> str:
    if getattr(value, "shape", None) == ():  # a number of numpy's
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return format_value(value)
    if isinstance(value, list | tuple | range):
        return f"[{','.join(_format_value(key, item) for item in value)}]"
    if isinstance(value, Mapping):  # names in braces stand without quotes, what has a meaning to Hydra escaped
        names = (re.sub(r"([][{}():=, ])", r"\\\1", str(name)) for name in value)
        pairs = zip(names, value.values(), strict=True)
        return f"{{{','.join(f'{name}:{_format_value(key, item)}' for name, item in pairs)}}}"
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        plain = (
            re.fullmatch(r"[A-Za-z_][\w./-]*|[\w.-]*/[\w./-]*", text, re.ASCII) and text.lower() not in RESERVED_WORDS
        )
        return text if plain else QuotedString(text, Quote.double).with_quotes()
    raise UserError(
        f"{key}={printable(repr(value))}: is no setting's value; it takes numbers, texts, true or false, lists and "
        "mappings of these" + ("; finished objects go to toyexp.train(...)" if getattr(value, "check", None) else "")
    )


def _parse_error(text: str) -> UserError:
    key, equals, value = text.partition("=")
    engine, *own = value.split(":")
    one = re.sub(",[, ]*,", ",", text).rstrip(", ")
    tight, several, escaped = _strip_spaces(text), text.split(), _escape_brackets(key, value)
    for wrong, words in (
        (not equals, "cannot be read; a setting is key=value, such as steps=100"),
        (key.strip() and tight, f"there is no space around =: {tight}"),
        (
            len(several) > 1 and all(re.fullmatch(r"[+~]*[A-Za-z_][\w./]*=\S+", word) for word in several),
            f"{len(several)} settings in one pair of quotes; each stands by itself: {' '.join(several)}",
        ),
        (not key.strip("+~"), "a setting needs a key before '=', such as steps=100"),
        (
            key == "engine" and own,
            f"a run has one engine, whose settings stand beside it: {' engine.'.join([f'engine={engine}', *own])}",
        ),
        (value[:1] == "~", f"there is no home directory {value.partition('/')[0]}; name the folder itself"),
        (one != text and _is_readable(one), f"a value beside a comma is empty: {one}"),
        (re.match(r"[a-z]+\(", value) and _is_readable(f"{text})"), f"a parenthesis is not closed: {text})"),
        (value.endswith("()"), f"{value} holds no value; several are {key}=1,2,3"),
        (
            DISTRIBUTIONS.fullmatch(value),
            "several values are interval(0.1, 0.5), tag(log, interval(1e-4, 1e-1)), int(interval(1, 9)), "
            "range(0, 10, 2) or choice(a, b)",
        ),
        (key[:1] in ("'", '"'), 'the quotes belong around the value alone: key="value"'),
        (
            escaped and escaped != text,
            f"in braces names stand without quotes, and [ and ] each behind a backslash: '{escaped}'",
        ),
        (value[:1] == "{" and set(value) & set("'\""), f"in braces names stand without quotes: {key}={{name: value}}"),
        (
            any(value.count(a) != value.count(b) for a, b in ("[]", "{}")),
            f"a bracket is not closed; a list is {key}=[a,b]",
        ),
        (value.count('"') % 2 or value.count("'") % 2, "a quote is not closed"),
    ):
        if wrong:
            return UserError(f"{text!r}: {words}")
    quoted = f"'{key.strip()}=\"{value.strip()}\"'"
    return UserError(f"{text!r}: cannot be read; put quotes around a value with special characters: {quoted}")


def _strip_spaces(text: str) -> str | None:
    """The same without spaces around its first `=`, where it has some and they are all that is wrong."""
    key, _, value = text.partition("=")
    tight = f"{key.strip()}={value.strip()}"
    return tight if tight != text and _is_readable(tight) else None


def _escape_brackets(key: str, value: str) -> str | None:
    """A mapping whose names hold [ or ], as patterns do, as it is read; None for any other value."""
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
