"""What is typed from the habit of other tools (`--lr 0.1`, `lr = 0.1`, `train`), and how it is written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from toyexp.base.errors import UserError, choose, nearest

VERBS = ("train", "run", "fit", "start", "sweep")
ELSEWHERE = {  # what other tools call their commands, and what does that here
    "report": "compare outputs --html report.html", "plot": "'callbacks=[default,plots]'", "list": "plugins",
    "ls": "runs", "chat": "generate MODEL --chat", "evaluate": "eval MODEL", "test": "eval MODEL",
    "infer": "generate MODEL --prompt TEXT", "inference": "generate MODEL --prompt TEXT",
    "complete": "generate MODEL --prompt TEXT", "convert": "export MODEL --type q8_0",
    "quantize": "export MODEL --type q8_0", "init": "new KIND NAME", "create": "new KIND NAME",
    "info": "describe MODEL", "show": "describe MODEL", "version": "--version", "docs": "help TOPIC",
    "check": "doctor", "benchmark": "bench engine=cpu,ggml", "diff": "compare RUN RUN",
}  # fmt: skip


def no_option(word: str, after: Sequence[str], flags: Collection[str]) -> UserError:
    """An error about a word with dashes that is no flag, by what comes `after` it."""
    if setting := setting_with_dashes(word, after):
        return UserError(f"{word}: a setting has no dashes: {setting}")
    if "=" in word:
        return UserError(f"{word}: a setting has no dashes: {word.lstrip('-')}")
    return UserError(f"{word}: there is no such option; {choose(word, flags)}")


def setting_with_dashes(word: str, after: Sequence[str]) -> str | None:
    """The setting that is meant by a word such as --lr, if there is one of that name."""
    name, equals, value = word.partition("=")
    return _setting(name.lstrip("-"), value if equals else _value(after)) if len(name) > 2 else None


def no_setting(word: str, before: Sequence[str], after: Sequence[str], commands: Collection[str]) -> UserError:
    """An error about a word that is neither a command nor a setting, by what stands around it."""
    if word in VERBS:
        many = "-m seed=1,2" if word == "sweep" else "recipe=warm"
        hint = f"settings alone make a run: toyexp {many}"
    elif not before and word in ELSEWHERE:
        hint = f"that is: toyexp {ELSEWHERE[word]}"
    elif before and before[-1].endswith("="):
        hint = f"did you mean {before[-1]}{word}? there is no space around ="
    elif setting := _setting(*word.split(":", 1)) if ":" in word else _setting(word, _value(after)):
        hint = f"did you mean {setting}?"
    elif word in commands:
        hint = f"a command comes first: toyexp {word} ..."
    elif near := nearest(word, commands):
        hint = f"did you mean {near}?"
    else:
        hint = f"commands: {', '.join(commands)}; settings: key=value"
    return UserError(f"{word!r} is neither a command nor a setting; {hint}")


def _value(after: Sequence[str]) -> str:
    """The value that stands behind a key with a space between, or dots where none does."""
    words = [word for word in after[:2] if not word.startswith("-")]
    text = "".join(words if words[:1] == ["="] else words[:1])
    return text.removeprefix("=") if text.startswith("=") or "=" not in text else "..."


def _setting(name: str, value: str) -> str | None:
    """The setting that is meant, such as lr=0.1, if there is one of that name."""
    from toyexp.config.top_level import GROUPS, in_our_words
    from toyexp.training.settings import Settings

    key = name.replace("-", "_")
    known = {*GROUPS, *(f.name for f in dataclasses.fields(Settings))}
    if key in known or key.partition(".")[0] in GROUPS:
        return f"{key}={value or '...'}"
    return in_our_words(key, value or "...")
