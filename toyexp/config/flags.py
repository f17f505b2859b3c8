"""What stands on a command line beside settings: flags, and what to go on with."""

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
# What a flag takes: None is nothing, () anything, and otherwise one of these words.
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
PRINTING_FLAGS = {"--cfg", "--info", "--hydra-help"}  # and nothing is run
# What people know from Hydra, in our words.
HYDRA_CHOICES = {
    "hydra/launcher=basic": ["sweep.launcher=serial"],
    "hydra/launcher=joblib": ["sweep.launcher=processes"],
    "hydra/launcher=ray": ["sweep.launcher=ray"],
    "hydra/launcher=submitit_local": ["sweep.launcher=submitit", "sweep.submitit.cluster=local"],
    "hydra/launcher=submitit_slurm": ["sweep.launcher=submitit", "sweep.submitit.cluster=slurm"],
    "hydra/sweeper=basic": [],
}


def read_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str], str | None]:
    """The flags, the settings, and what to go on with; UserError for what cannot be read, or has no effect."""
    flags, settings = split_flags(words)
    resume = None
    if "--multirun" not in flags:
        settings, resume = take_resume(settings)
    check_flags(flags, resume)
    return flags, settings, resume


def parser() -> Parser:
    """Return the parser of the flags."""
    parser = Parser(argument_default=argparse.SUPPRESS)
    for flag, takes in FLAGS.items():
        if takes is None:
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, choices=takes or None)
    return parser


def split_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags with their values, by their long names, and the settings; UserError for what is neither."""
    typed: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        given, equals, value = word.partition("=")
        flag = SHORT_FLAGS.get(given, given) + equals + value
        typed.append("--info=all" if flag == "--info" and following not in (FLAGS["--info"] or ()) else flag)
    found = Arguments()
    rest = parser().split(typed, found)
    settings: list[str] = []
    for i, word in enumerate(rest):
        if word.startswith("-"):
            raise unknown_option(word, rest[i + 1 :], FLAGS)
        if "=" not in word and word[:1] not in "~+":
            from toyexp.plugins.discovery import load  # deferred: to read a command line needs no plugins

            raise unknown_word(word, settings, rest[i + 1 :], load(parse_modules(words)).offers["command"])
        settings += HYDRA_CHOICES.get(word, [word.replace("hydra.launcher.n_jobs=", "sweep.jobs=", 1)])
    flags = {f"--{name.replace('_', '-')}": "" if value is True else value for name, value in vars(found).items()}
    return flags, settings


def build_request(flags: Mapping[str, str], settings: Sequence[str]) -> Request:
    """Return what the settings ask for, beside the configuration that the flags name."""
    from toyexp.config.request import Request
    from toyexp.config.schema import Source

    return Request.parse(
        settings, Source.from_flags(*map(flags.get, ("--config-path", "--config-name", "--config-dir")))
    )


def check_flags(flags: Mapping[str, str], resume: str | None) -> None:
    """Raises UserError for flags of which one would be passed over in silence."""
    for flag in ("--resolve", "--package"):
        if flag in flags and "--cfg" not in flags:
            raise UserError(f"{flag}: goes with --cfg, which shows the configuration: toyexp --cfg job {flag}")
    showing = sorted(flags.keys() & PRINTING_FLAGS)
    if showing and "--dry-run" in flags:
        showing.append("--dry-run")
    if "--json" in flags and "--dry-run" not in flags:
        raise UserError("--json: goes with --dry-run, or behind a command; a run writes events.jsonl and result.json")
    if len(showing) > 1:
        raise UserError(f"{' '.join(showing)}: show one thing at a time; leave out all but one")
    if showing and "--multirun" in flags:
        raise UserError(f"{showing[0]}: is about one configuration; leave out -m and give each key one value")
    if showing and resume:
        saved = f"; that of a run is the file {resume}/config.yaml" if resume != "auto" else ""
        raise UserError(f"{showing[0]}: shows what settings compose, whatever resume={resume} goes on with{saved}")
    for flag in sorted(flag for flag in flags if flag.startswith("--config-") and resume not in (None, "auto")):
        raise UserError(f"{flag}: resume={resume} goes on with that run's own configuration; leave {flag} out")


def take_resume(settings: Sequence[str]) -> tuple[list[str], str | None]:
    """The settings without `resume=`, and its value as it was typed: a path may hold what means something to Hydra."""
    given = [word.lstrip("+").removeprefix("resume=") for word in settings if word.lstrip("+").startswith("resume=")]
    if not given or given[-1] == "null":
        return list(settings), None
    value = given[-1]
    if other := next((text for text in given if text != value), None):
        raise UserError(f"resume={value}: was given already, as resume={other}; leave one of them out")
    if not value:
        raise UserError("resume=: takes the directory of a run, or auto for the newest of this name")
    if value[:1] in ("'", '"') and value[-1:] == value[:1] and not Path(value).exists():
        value = value[1:-1]
    return [word for word in settings if not word.lstrip("+").startswith("resume=")], value


# -- the habits of other tools: `--lr 0.1`, `lr = 0.1`, `train` -------------------------------------------------------


VERBS = ("train", "run", "fit", "start", "sweep")


def unknown_option(word: str, after: Sequence[str], flags: Collection[str]) -> UserError:
    """An error about a word with dashes that is no flag, by what comes `after` it."""
    if setting := dashed_setting(word, after) or (word.lstrip("-") if "=" in word else None):
        return UserError(f"{word}: a setting has no dashes: {setting}")
    return UserError(f"{word}: there is no such option; {suggest(word, flags)}")


def dashed_setting(word: str, after: Sequence[str]) -> str | None:
    """The setting that is meant by a word such as --lr, if there is one of that name."""
    name, equals, value = word.partition("=")
    return _setting(name.lstrip("-"), value if equals else _value(after)) if len(name) > 2 else None


def unknown_word(word: str, before: Sequence[str], after: Sequence[str], commands: Collection[str]) -> UserError:
    """An error about a word that is neither a command nor a setting, by what stands around it."""
    if word in VERBS:
        many = "-m seed=1,2" if word == "sweep" else "recipe=warm"
        hint = f"settings alone make a run: toyexp {many}"
    elif not before and word in other_tools("commands"):
        hint = f"that is: toyexp {other_tools('commands')[word]}"
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
    key = name.replace("-", "_")
    known = {*GROUPS, *(f.name for f in dataclasses.fields(Settings))}
    if key in known or key.partition(".")[0] in GROUPS:
        return f"{key}={value or '...'}"
    return translate_setting(key, value or "...")
