"""Parse the flags of a command line, and `resume=`; write error messages for unknown words."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import UserError, nearest, suggest
from toyexp.config.top_level import GROUPS, other_tools, translate_setting
from toyexp.interfaces.command import Arguments, Parser, parse_modules
from toyexp.training.settings import Settings

if TYPE_CHECKING:
    from toyexp.config.request import Request

SHORT_FLAGS = {
    "-m": "--multirun", "-c": "--cfg", "-p": "--package", "-i": "--info",
    "-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir",
}  # fmt: skip
# Allowed values of each flag; None: it takes no value, (): any value.
FLAGS: dict[str, tuple[str, ...] | None] = {
    "--multirun": None,
    "--dry-run": None,
    "--json": None,
    "--cfg": ("job", "hydra", "all"),
    "--resolve": None,
    "--package": (),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--config-path": (),
    "--config-name": (),
    "--config-dir": (),
    "--hydra-help": None,
}
EXAMPLES = {"--config-path": "my_directory", "--config-name": "config", "--config-dir": "my_directory"}
PRINTING_FLAGS = {"--cfg", "--info", "--hydra-help"}  # flags that only print
# Overrides known from Hydra, and the settings of toyexp that do the same.
HYDRA_CHOICES = {
    "hydra/launcher=basic": ["sweep.launcher=serial"],
    "hydra/launcher=joblib": ["sweep.launcher=processes"],
    "hydra/launcher=ray": ["sweep.launcher=ray"],
    "hydra/launcher=submitit_local": ["sweep.launcher=submitit", "sweep.submitit.cluster=local"],
    "hydra/launcher=submitit_slurm": ["sweep.launcher=submitit", "sweep.submitit.cluster=slurm"],
    "hydra/sweeper=basic": [],
}


def read_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str], str | None]:
    """Return flags as {long name: value}, settings, and the value of `resume=` (or None), parsed from a command line.

    Raise UserError for words that are invalid or have no effect.
    """
    flags, settings = split_flags(words)
    resume = None
    if "--multirun" not in flags:
        settings, resume = take_resume(settings)
    check_flags(flags, resume)
    return flags, settings, resume


def parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser(argument_default=argparse.SUPPRESS)
    for flag, choices in FLAGS.items():
        if choices is None:
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, choices=choices or None, metavar=EXAMPLES.get(flag))
    return parser


def split_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into flags {long name: value, or "" if it takes none} and settings.

    Raise UserError for any other word.
    """
    typed: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        flag = SHORT_FLAGS.get(option, option) + equals + value
        typed.append("--info=all" if flag == "--info" and following not in (FLAGS["--info"] or ()) else flag)
    arguments = Arguments()
    rest = parser().split(typed, arguments)
    settings: list[str] = []
    for i, word in enumerate(rest):
        if word.startswith("-"):
            raise unknown_option(word, rest[i + 1 :], FLAGS)
        if "=" not in word and word[:1] not in "~+":
            from toyexp.plugins.discovery import load  # deferred: only this error needs plugins

            raise unknown_word(word, settings, rest[i + 1 :], load(parse_modules(words)).offers["command"])
        settings += HYDRA_CHOICES.get(word, [word.replace("hydra.launcher.n_jobs=", "sweep.jobs=", 1)])
    flags = {f"--{name.replace('_', '-')}": "" if value is True else value for name, value in vars(arguments).items()}
    return flags, settings


def build_request(flags: Mapping[str, str], settings: Sequence[str]) -> Request:
    """Parse settings into a Request; the --config-* flags choose its configuration files."""
    from toyexp.config.request import Request
    from toyexp.config.schema import Source

    return Request.parse(
        settings, Source.from_flags(*map(flags.get, ("--config-path", "--config-name", "--config-dir")))
    )


def check_flags(flags: Mapping[str, str], resume: str | None) -> None:
    """Raise UserError for flags that contradict each other or have no effect."""
    for flag in ("--resolve", "--package"):
        if flag in flags and "--cfg" not in flags:
            raise UserError(f"{flag}: only has an effect with --cfg: toyexp --cfg job {flag}")
    showing = sorted(flags.keys() & PRINTING_FLAGS)
    if showing and "--dry-run" in flags:
        showing.append("--dry-run")
    if "--json" in flags and "--dry-run" not in flags:
        raise UserError("--json: needs --dry-run or a command; a run writes events.jsonl and result.json")
    if len(showing) > 1:
        raise UserError(f"{' '.join(showing)}: only one of these is allowed; leave out the others")
    if showing and "--multirun" in flags:
        raise UserError(f"{showing[0]}: prints one configuration; leave out -m and give each key one value")
    if showing and resume:
        saved = f"; the run's configuration is {resume}/config.yaml" if resume != "auto" else ""
        raise UserError(f"{showing[0]}: cannot be used with resume={resume}{saved}")
    for flag in sorted(flag for flag in flags if flag.startswith("--config-") and resume not in (None, "auto")):
        raise UserError(f"{flag}: resume={resume} uses the configuration of that run; leave {flag} out")


def take_resume(settings: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the settings without `resume=`, and its value, or None if it is absent or null.

    Hydra does not parse the value, because a path may contain special characters.
    """
    values = [word.lstrip("+").removeprefix("resume=") for word in settings if word.lstrip("+").startswith("resume=")]
    if not values or values[-1] == "null":
        return list(settings), None
    value = values[-1]
    if other := next((text for text in values if text != value), None):
        raise UserError(f"resume={value}: contradicts resume={other}; leave one of them out")
    if not value:
        raise UserError("resume=: needs the directory of a run, or auto for the newest run of this name")
    if value[:1] in ("'", '"') and value[-1:] == value[:1] and not Path(value).exists():
        value = value[1:-1]
    return [word for word in settings if not word.lstrip("+").startswith("resume=")], value


# -- habits from other tools: `--lr 0.1`, `lr = 0.1`, `train` -------------------------------------------------------


VERBS = ("train", "run", "fit", "start", "sweep")


def unknown_option(word: str, after: Sequence[str], flags: Collection[str]) -> UserError:
    """Return an error about the unknown flag `word`. `after` holds the next words, which may begin with its value."""
    if setting := dashed_setting(word, after) or (word.lstrip("-") if "=" in word else None):
        return UserError(f"{word}: settings have no dashes: {setting}")
    return UserError(f"{word}: unknown option; {suggest(word, [*flags, '--color', '--help', '--version'])}")


def dashed_setting(word: str, after: Sequence[str]) -> str | None:
    """Return the setting for a word such as --lr, as `lr=0.1`; None if there is no such setting.

    The value is taken from `word` itself, as in --lr=0.1, or from `after`, the words that follow.
    """
    name, equals, value = word.partition("=")
    return _setting(name.lstrip("-"), value if equals else _value(after)) if len(name) > 2 else None


def unknown_word(word: str, before: Sequence[str], after: Sequence[str], commands: Collection[str]) -> UserError:
    """Return an error about a word that is neither a command nor a setting.

    `before` and `after` are the words before and after it on the command line; `commands` are the known commands.
    """
    if word in VERBS:
        settings = "-m seed=1,2" if word == "sweep" else "recipe=warm"
        hint = f"to train, type only settings: toyexp {settings}"
    elif not before and word in other_tools("commands"):
        hint = f"use: toyexp {other_tools('commands')[word]}"
    elif before and before[-1].endswith("="):
        hint = f"did you mean {before[-1]}{word}? no spaces are allowed around ="
    elif setting := _setting(*map(str.strip, word.split(":", 1))) if ":" in word else _setting(word, _value(after)):
        hint = f"did you mean {setting}?"
    elif word in commands:
        hint = f"the command must come first: toyexp {word} ..."
    elif suggestion := nearest(word, commands):
        hint = f"did you mean {suggestion}?"
    else:
        hint = f"commands: {', '.join(commands)}; settings: key=value"
    return UserError(f"{word!r} is neither a command nor a setting; {hint}")


def _value(after: Sequence[str]) -> str:
    """Return the value that follows a key, as in `lr 0.1` or `lr = 0.1`; "" or `...` if no value follows."""
    words = [word for word in after[:2] if not word.startswith("-")]
    text = "".join(words if words[:1] == ["="] else words[:1])
    return text.removeprefix("=") if text.startswith("=") or "=" not in text else "..."


def _setting(name: str, value: str) -> str | None:
    """Return `key=value` for a key of toyexp, or the equivalent of a key of another tool; None for an unknown key."""
    key = name.replace("-", "_")
    keys = {*GROUPS, *(f.name for f in dataclasses.fields(Settings))}
    if key in keys or key.partition(".")[0] in GROUPS:
        return f"{key}={value or '...'}"
    return translate_setting(key, value or "...")
