"""Error classes, suggestions for misspelled names, and escaping of untrusted text."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable


class ToyexpError(Exception):
    """Base of all errors that toyexp raises on purpose; `exit_code` is the command line's exit code."""

    exit_code = 1


class UserError(ToyexpError):
    """Error: invalid input, found before anything is built. The message names problem, allowed values and remedy."""

    exit_code = 2


class Unavailable(UserError):
    """Error: a requested engine or optional package cannot be used. The message says how to install it."""


class Absent(Unavailable):
    """Error: an optional package is not installed."""


class Broken(Unavailable):
    """Error: an installed package or engine does not work. `fact` is the message without the remedy."""

    def __init__(self, fact: str, remedy: str = ""):
        self.fact = fact
        super().__init__(f"{fact}; {remedy}" if remedy else fact)


class UnknownCharacter(UserError):
    """Error: a text contains a character for which the tokenizer has no token."""

    def __init__(self, character: str, kind: str):
        self.character = character
        super().__init__(f"the character {character!r} is not in this {kind}")


class SessionError(ToyexpError):
    """Error: a method of a session (a plan's tensors on an engine) was called out of order or with a wrong tensor."""


class BadBatch(SessionError):
    """Error: a batch is invalid, or does not have the inputs that the recipe declares.

    The message does not name the data plugin; the code that catches this error adds the name.
    """


class RunFailed(ToyexpError):
    """Error: a run started but could not continue, for example because its loss became NaN."""


class RankFailed(RunFailed):
    """Error: a process of a distributed run failed or was lost. `trace` is its traceback, or "" if it sent none."""

    def __init__(self, fact: str, trace: str = ""):
        self.trace = trace
        super().__init__(fact)


class PluginFailed(RunFailed):
    """Error: an unexpected exception in a plugin. The message names the plugin, the exception, and when it occurred."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `word`, or None if none is similar.

    A choice is similar if it is spelled almost like the word, or if the word is one of its parts (`batch` in
    `batch_size`).
    """
    others = [c for c in choices if c != word]
    if word.lower() in others:
        return word.lower()
    parts = set(re.split("[._]", word))
    supersets = [choice for choice in others if parts <= set(re.split("[._]", choice))]
    anagrams = [choice for choice in others if sorted(choice) == sorted(word)]
    prefixes = [choice for choice in others if word.lower().startswith(f"{choice}_")]  # `adamw` for `adamw_torch`
    cutoff = 0.72 if len(word) > 3 else 0.66  # two letters of three
    close = difflib.get_close_matches(word.lower(), others, 1, cutoff)
    candidates = close or anagrams or difflib.get_close_matches(word, supersets, 1, cutoff=0.0) or prefixes
    return candidates[0] if candidates else None


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return the hint that ends an error message.

    It is "did you mean CHOICE?" if one of the choices is similar to `word`, else a list of all choices.
    """
    names = sorted(choices)
    best = nearest(word, names)
    if best:
        return f"did you mean {best}?"
    return f"choose one of: {', '.join(names)}" if names else "none is available"


def printable(text: str, limit: int = 60) -> str:
    """Return untrusted text as printable ASCII of at most `limit` characters."""
    safe = ascii(text)[1:-1]
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def require_visible(key: str, text: str) -> None:
    """Raise UserError if `text`, the value of the setting `key`, has line breaks or invisible characters."""
    joiners = "\u200c\u200d"  # some scripts need them
    if bad := next((c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in joiners), None):
        raise UserError(f"{key}={printable(text)}: contains the invisible character {bad!a}; leave it out")


def escape_controls(text: str) -> str:
    """Escape everything that a terminal would interpret, except newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def escape_cell(text: str) -> str:
    """Escape a name for a table cell: everything that `escape_controls` escapes, and also newlines and tabs."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")
