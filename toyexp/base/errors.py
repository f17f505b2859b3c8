"""The errors a person can meet, and the words they are told in."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable


class ToyexpError(Exception):
    """Any error toyexp raises on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UserError(ToyexpError):
    """Bad input, found before anything is built: what was asked, what is true, what to type."""

    exit_code = 2


class Unavailable(UserError):
    """An engine or an optional package that was asked for and is not here, with the remedy in the text."""


class Absent(Unavailable):
    """An optional package that is not installed."""


class Broken(Unavailable):
    """What is here and does not work; `fact` is the text without the remedy."""

    def __init__(self, fact: str, remedy: str = ""):
        self.fact = fact
        super().__init__(f"{fact}; {remedy}" if remedy else fact)


class UnknownCharacter(UserError):
    """A text holds a character that a tokenizer has no token for."""

    def __init__(self, character: str, kind: str):
        self.character = character
        super().__init__(f"the character {character!r} is not in this {kind}")


class SessionError(ToyexpError):
    """A session used out of order or with a wrong tensor: names what was expected and what came."""


class BadBatch(SessionError):
    """A batch that is not what its plan says: whoever knows whose data it is names them."""


class RunFailed(ToyexpError):
    """A run that started and could not go on, such as one whose loss became NaN."""


class RankFailed(RunFailed):
    """Another process of the run that failed, or is gone; `trace` is the traceback that it told, if it could."""

    def __init__(self, fact: str, trace: str = ""):
        self.trace = trace
        super().__init__(fact)


class PluginFailed(RunFailed):
    """A plugin that raised something it did not mean to: names it, when that was, and what it said."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, with its letters or all its parts (batch: batch_size); None when none is."""
    others = [c for c in choices if c != word]
    if word.lower() in others:
        return word.lower()
    parts = set(re.split("[._]", word))
    wider = [choice for choice in others if parts <= set(re.split("[._]", choice))]
    swapped = [choice for choice in others if sorted(choice) == sorted(word)]
    begun = [choice for choice in others if word.lower().startswith(f"{choice}_")]  # adamw_torch: adamw
    cutoff = 0.72 if len(word) > 3 else 0.66  # of three letters two
    close = difflib.get_close_matches(word.lower(), others, 1, cutoff)
    found = close or swapped or difflib.get_close_matches(word, wider, 1, cutoff=0.0) or begun
    return found[0] if found else None


def suggest(word: str, choices: Iterable[str]) -> str:
    """A hint that ends an error: the nearest choice, or all of them when none is near."""
    names = sorted(choices)
    best = nearest(word, names)
    if best:
        return f"did you mean {best}?"
    return f"there is: {', '.join(names)}" if names else "there is none"


def printable(text: str, limit: int = 60) -> str:
    """Text from a stranger's file, made safe to print: ASCII, no control characters, at most `limit` characters."""
    safe = ascii(text)[1:-1]
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def require_visible(asked: str, text: str) -> None:
    """Raise UserError for a name with line breaks, or marks that change how text near them is shown."""
    joiners = "\u200c\u200d"  # which some scripts are written with
    if bad := next((c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in joiners), None):
        raise UserError(f"{asked}={printable(text)}: holds {bad!a}, which nobody can see; leave it out")


def escape_controls(text: str) -> str:
    """Text with whatever a terminal would obey escaped; lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def escape_cell(text: str) -> str:
    """The same of a name that stands in a line of a table: new lines and tabs are escaped too."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")
