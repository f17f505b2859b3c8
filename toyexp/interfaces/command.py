"""A sub-command: what `toyexp NAME ...` does."""

from __future__ import annotations

import argparse
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NoReturn

from toyexp.base.errors import UserError, suggest
from toyexp.base.terminal import print_output
from toyexp.base.writing import dump_json


class Arguments(argparse.Namespace):
    """Words behind a sub-command: an attribute for each option, as argparse has it, and the words beside them."""

    rest: list[str]  # files, names and settings
    modules: list[str]  # the local plugins of plugins=[...]

    @property
    def settings(self) -> list[str]:
        """The rest as settings of a run, with its plugins."""
        return [*self.rest, *([f"plugins=[{','.join(self.modules)}]"] if self.modules else [])]


class StoreOnce(argparse.Action):
    """What an option does unless it names another action: store its value, and refuse a second one that differs."""

    given: Any = None

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        """Store the value."""
        if self.given not in (None, values):
            raise UserError(f"{option_string} {values}: was given already, as {self.given}; leave one of them out")
        self.given = values
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line; options are typed in full, and stand anywhere among other words.

    An option without `type=` refuses an empty value; one with `type=str` takes it.
    """

    def __init__(self, command: str = "", **more: Any):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(f"toyexp {command}", add_help=False, allow_abbrev=False, formatter_class=form, **more)
        self.command = command
        self.register("action", None, StoreOnce)

    def split(self, words: Sequence[str], found: Arguments) -> list[str]:
        """Set what the options say in `found`, and return the other words in their order."""
        joined: list[str] = []
        for word in words:
            option = self.options.get(joined[-1]) if joined else None
            if option and option.nargs != 0 and re.match("-[^-]", word) and word not in self.options:
                joined[-1] += f"={word}"  # a value that begins with a dash, which argparse takes for an option
            else:
                joined.append(word)
        return self.parse_known_args(joined, found)[1]

    @property
    def options(self) -> Mapping[str, argparse.Action]:
        """All options by what one types."""
        return self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """Raise UserError; argparse names the option in front of its message."""
        name, _, what = message.removeprefix("argument ").partition(": ")
        flag = name.rpartition("/")[2]
        if flag not in self.options:
            raise UserError(message)
        if what.startswith("expected"):
            raise UserError(f"{flag} needs a value{self._such(flag)}")
        raise UserError(f"{flag} takes no value" if what.startswith("ignored") else f"{flag}: {what}")

    def _such(self, flag: str) -> str:
        option = self.options[flag]
        such = f", such as {flag} {option.metavar}" if option.metavar else ""
        return f": {', '.join(map(str, option.choices))}" if option.choices else such

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        flag = action.option_strings[-1]
        if not text and action.type is not str:
            what = f"{self.command} {flag} '': is empty (an unset shell variable?)".strip()
            raise UserError(f"{what}; leave it out, or give it a value{self._such(flag)}")
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            kind = "a whole number" if action.type is int else "a number" if action.type is float else ""
            what = f"must be {kind}" if kind else error.message
            raise UserError(f"{flag} {text}: {what}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"{action.option_strings[-1]} {value}: {suggest(str(value), map(str, action.choices))}")


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
        print_output(dump_json(self.plain(), indent=2) if arguments.json else str(self))
        return 0


@dataclass
class Command(ABC):
    """What `toyexp NAME ...` does; the first line of a subclass's docstring is its line in `toyexp --help`."""

    plugin_kind: ClassVar[str] = "command"
    name: ClassVar[str]
    takes: ClassVar[str] = "file settings"  # what TAB offers beside options: file, directory, settings, names

    def configure(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - most need not implement it
        """Declare the options, as argparse does it: `parser.add_argument("--top", type=int, help=...)`."""

    def parser(self) -> Parser:
        """Return a parser with its options; its description is what it does."""
        parser = Parser(self.name, usage="%(prog)s [options] ...", description=inspect.cleandoc(self.__doc__ or ""))
        self.configure(parser)
        return parser

    def usage(self, modules: Sequence[str] = ()) -> str:
        """Return what `toyexp NAME --help` prints; `modules` are the local plugins beside it."""
        return self.parser().format_help().rstrip()

    def read(self, words: Sequence[str]) -> Arguments:
        """Parse the words; UserError for an option that there is not, and one without its value."""
        typed = [word for word in words if not word.startswith("plugins=")]
        found = Arguments(modules=parse_modules(words))
        rest = self.parser().split(typed, found)
        for i, word in enumerate(rest):
            if word.startswith("-"):
                raise self.unknown_option(word, rest[i + 1 :])
        if "" in rest:
            raise UserError(f"{self.name} '': is empty (an unset shell variable?); leave it out")
        found.rest = rest
        return found

    def unknown_option(self, word: str, after: Sequence[str]) -> UserError:
        """Return an error about a word with dashes that is none of its options, and what comes `after` it."""
        flag, known = word.partition("=")[0], sorted(self.parser().options)
        parts = re.split("[-_]", flag.lstrip("-"))  # of --max_new_tokens
        meant = [option for option in known if f"-{flag}" == option[:3] or option[2:] in parts]
        if len(meant) == 1:
            hint = f"did you mean {meant[0]}?"
        else:
            hint = f"there is: {', '.join(meant)}" if meant else suggest(flag, known)
        return UserError(f"{self.name} {word}: unknown option; {hint}")

    @abstractmethod
    def run(self, arguments: Arguments) -> int:
        """Does it; returns the exit code: 0 done, 1 failed. UserError for bad input makes it 2."""


def parse_modules(words: Iterable[str]) -> list[str]:
    """The local modules that `plugins=[...]` on a command line names; UserError for what is no module's name."""
    found: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if key.lstrip("+") != "plugins" or not equals:
            continue
        names = re.findall(r"[^\[\],\s'\"]+", text)
        are_modules = all(name.replace(".", "_").isidentifier() and name != "null" for name in names)
        if not are_modules or not re.fullmatch(r"\[[^\[\]]*\]|[^\[\],\s]+", text):
            such = ",".join(names) if names and are_modules else "my_module"
            raise UserError(f"{word}: takes names of Python modules, such as plugins=[{such}]")
        found += names
    return found
