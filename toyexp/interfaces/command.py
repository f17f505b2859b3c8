"""A sub-command: what `toyexp NAME ...` does."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from toyexp.base.errors import UserError, choose
from toyexp.base.terminal import tell
from toyexp.base.writing import dump_json


@dataclass(frozen=True)
class Arguments:
    """The words behind a sub-command, told apart."""

    switches: set[str]
    values: dict[str, str]  # by option
    rest: list[str]  # files, names and settings
    modules: list[str]  # the local plugins of plugins=[...]

    @property
    def settings(self) -> list[str]:
        """The rest as settings of a run, with its plugins."""
        return [*self.rest, *([f"plugins=[{','.join(self.modules)}]"] if self.modules else [])]


class Answer(ABC):
    """Base of dataclasses that hold what a command found out."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data, for --json."""
        return asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def lines(self) -> list[str]:
        """Return it in lines, for a person."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def show(self, arguments: Arguments) -> int:
        """Print it in lines, or with --json as JSON, and return exit code 0."""
        tell(dump_json(self.plain(), indent=2) if "--json" in arguments.switches else str(self))
        return 0


@dataclass
class Command(ABC):
    """What `toyexp NAME ...` does; the first line of a subclass's docstring is its line in `toyexp --help`."""

    plugin_kind: ClassVar[str] = "command"
    name: ClassVar[str]
    switches: ClassVar[Sequence[str]] = ()  # options that take nothing: --json
    values: ClassVar[Mapping[str, str]] = {}  # options that take a value, each with an example
    takes: ClassVar[str] = "file settings"  # what TAB offers beside them: any of file, directory, settings, names

    def usage(self, modules: Sequence[str] = ()) -> str:
        """What `toyexp NAME --help` prints; `modules` are the local plugins beside it."""
        options = [*self.switches, *(f"{option} {example}" for option, example in self.values.items())]
        words = " ".join(["usage: toyexp", self.name, *(f"[{option}]" for option in options), "..."])
        return f"{words}\n\n{inspect.cleandoc(self.__doc__ or '')}"

    def read(self, words: Sequence[str]) -> Arguments:
        """Tells the words apart; UserError for an option that there is not, and one without its value."""
        found = Arguments(set(), {}, [], modules_in(words))
        left = [word for word in words if not word.startswith("plugins=")]
        while left:
            word = left.pop(0)
            flag, equals, value = word.partition("=")
            if flag in self.switches:
                if equals:
                    raise UserError(f"{word}: {flag} takes no value")
                found.switches.add(flag)
            elif flag in self.values:
                if not equals and (not left or left[0] in self.switches or left[0] in self.values):
                    raise UserError(f"{flag} needs a value, such as {flag} {self.values[flag]}")
                value = value if equals else left.pop(0)
                if (other := found.values.setdefault(flag, value)) != value:
                    raise UserError(f"{flag} {value}: was given already, as {other}; leave one of them out")
            elif word.startswith("-"):
                raise self.no_option(word, left)
            else:
                found.rest.append(word)
        return found

    def no_option(self, word: str, after: Sequence[str]) -> UserError:
        """An error about a word with dashes that is none of its options, and what comes `after` it."""
        flag, known = word.partition("=")[0], sorted([*self.switches, *self.values])
        parts = re.split("[-_]", flag.lstrip("-"))  # of --max_new_tokens
        meant = [option for option in known if f"-{flag}" == option[:3] or option[2:] in parts]
        if len(meant) == 1:
            hint = f"did you mean {meant[0]}?"
        else:
            hint = f"there is: {', '.join(meant)}" if meant else choose(flag, known)
        return UserError(f"{self.name} {word}: there is no such option; {hint}")

    @abstractmethod
    def run(self, arguments: Arguments) -> int:
        """Does it; returns the exit code: 0 done, 1 failed. UserError for bad input makes it 2."""


def modules_in(words: Iterable[str]) -> list[str]:
    """The local modules that `plugins=[...]` on a command line names; UserError for what is no module's name."""
    found: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if key.lstrip("+") != "plugins" or not equals:
            continue
        names = [name.strip(" '\"") for name in text.strip("[] ").split(",")] if text != "[]" else []
        if re.search(r"\]\s*,", text):
            one = ",".join(re.findall(r"[^\[\],\s'\"]+", text))
            raise UserError(f"{word}: several lists, and all runs have the same plugins: plugins=[{one}]")
        modules = all(name.replace(".", "_").isidentifier() and name != "null" for name in names)
        if not modules or (len(names) > 1 and text[:1] != "["):
            several = text if len(names) > 1 else "my_module"
            raise UserError(f"{word}: takes names of Python modules, such as plugins=[{several.strip('[]')}]")
        found += names
    return found
