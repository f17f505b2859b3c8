"""Base class of sub-commands, `toyexp NAME ...`, and the argument parser that they share."""

from __future__ import annotations

import argparse
import html
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NoReturn

from toyexp.base.errors import UserError, suggest
from toyexp.base.terminal import print_output
from toyexp.base.writing import dump_json

MODEL_CODE = "model.path"  # besides `plugins`, the only setting that names code: my_module:Net


class Arguments(argparse.Namespace):
    """Parsed arguments of a sub-command. Each option is an attribute, as in argparse.

    `rest` holds the other words of the command line, without options and `plugins=[...]`.
    """

    rest: list[str]  # files, names and overrides
    modules: list[str]  # names of local plugin modules, from plugins=[...]
    passed: list[str]  # of `serve`: the words after `--`

    @property
    def settings(self) -> list[str]:
        """The overrides for a run: `rest` and, if the user named local plugins, the word `plugins=[...]`."""
        return [*self.rest, *([f"plugins=[{','.join(self.modules)}]"] if self.modules else [])]


class StoreOnce(argparse.Action):
    """Default argparse action of options. It stores the value.

    Raises UserError if the option is repeated with another value.
    """

    value: Any = None

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        """Store the value. Raise UserError if the option was given before with another value."""
        if self.value not in (None, values):
            raise UserError(f"{option_string} {values}: was given already, as {self.value}; leave one of them out")
        self.value = values
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises one-line UserErrors.

    Options cannot be abbreviated, and may appear anywhere among the words of the command line. An option without
    `type=` rejects an empty value; one with `type=str` accepts it.
    """

    def __init__(self, command: str = "", **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(f"toyexp {command}", add_help=False, allow_abbrev=False, formatter_class=formatter, **options)
        self.command = command
        self.register("action", None, StoreOnce)

    def split(self, words: Sequence[str], arguments: Arguments) -> list[str]:
        """Store the options among `words` as attributes of `arguments`, and return the other words in their order."""
        joined_words: list[str] = []
        for word in words:
            option = self.options.get(joined_words[-1]) if joined_words else None
            if option and option.nargs != 0 and re.match("-[^-]", word) and word not in self.options:
                joined_words[-1] += f"={word}"  # argparse takes a value that begins with a dash for an option
            else:
                joined_words.append(word)
        return self.parse_known_args(joined_words, arguments)[1]

    @property
    def options(self) -> Mapping[str, argparse.Action]:
        """The argparse action of each option, keyed by its flag, such as `--json`."""
        return self._option_string_actions

    def error(self, message: str) -> NoReturn:
        """Raise UserError with a reworded form of argparse's error `message`.

        The new message begins with the name of the option that caused the error.
        """
        name, _, problem = message.removeprefix("argument ").partition(": ")
        flag = name.rpartition("/")[2]
        if flag not in self.options:
            raise UserError(message)
        if problem.startswith("expected"):
            raise UserError(f"{flag} needs a value{self._example(flag)}")
        raise UserError(f"{flag} takes no value" if problem.startswith("ignored") else f"{flag}: {problem}")

    def _example(self, flag: str) -> str:
        option = self.options[flag]
        example = f", such as {flag} {option.metavar}" if option.metavar else ""
        return f": {', '.join(map(str, option.choices))}" if option.choices else example

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        flag = action.option_strings[-1]
        if not text and action.type is not str:
            problem = f"{self.command} {flag} '': is empty (an unset shell variable?)".strip()
            raise UserError(f"{problem}; leave it out, or give it a value{self._example(flag)}")
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            kind = "a whole number" if action.type is int else "a number" if action.type is float else ""
            problem = f"must be {kind}" if kind else error.message
            raise UserError(f"{flag} {text}: {problem}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"{action.option_strings[-1]} {value}: {suggest(str(value), map(str, action.choices))}")


class Answer(ABC):
    """Base of dataclasses that hold the result of a command, to print it as text or as JSON."""

    def plain(self) -> dict[str, Any]:
        """Return the result as a dict that can be written as JSON, for the option --json."""
        return asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the result as lines of text."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def show(self, arguments: Arguments) -> int:
        """Print the result as text, or as JSON with --json, and return exit code 0."""
        if arguments.json:
            print_output(dump_json(self.plain(), indent=2))
            return 0
        for line in self.lines():
            print_output(line)
        return 0


@dataclass
class Command(ABC):
    """Base of sub-commands `toyexp NAME ...`.

    The first line of a subclass's docstring describes the command in `toyexp --help`.
    """

    plugin_kind: ClassVar[str] = "command"
    name: ClassVar[str]
    completions: ClassVar[str] = "file settings"  # what a shell completes: file, directory, settings, names

    def configure(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - most need not implement it
        """Declare options as with argparse: `parser.add_argument("--top", type=int, help=...)`."""

    def parser(self) -> Parser:
        """Return a parser with the command's options and its docstring as the description."""
        parser = Parser(self.name, usage="%(prog)s [options] ...", description=inspect.cleandoc(self.__doc__ or ""))
        self.configure(parser)
        return parser

    def usage(self, modules: Sequence[str] = ()) -> str:
        """Return the text of `toyexp NAME --help`.

        `modules` are the names of local plugins. A subclass may list the parts that they register.
        """
        return self.parser().format_help().rstrip()

    def read(self, words: Sequence[str]) -> Arguments:
        """Parse the words after `toyexp NAME`.

        Raise UserError for an unknown option, an option without its value, and an empty word.
        """
        typed = [word for word in words if not word.startswith("plugins=")]
        arguments = Arguments(modules=parse_modules(words))
        rest = self.parser().split(typed, arguments)
        for i, word in enumerate(rest):
            if word.startswith("-"):
                raise self.unknown_option(word, rest[i + 1 :])
        if "" in rest:
            raise UserError(f"{self.name} '': is empty (an unset shell variable?); give it a value, or leave it out")
        arguments.rest = rest
        return arguments

    def unknown_option(self, word: str, following: Sequence[str]) -> UserError:
        """Return the error for an unknown option `word`; `following` are the words after it."""
        flag, flags = word.partition("=")[0], sorted([*self.parser().options, "--color", "--help"])
        parts = re.split("[-_]", flag.lstrip("-"))  # such as max, new and tokens of --max_new_tokens
        similar = [option for option in flags if f"-{flag}" == option[:3] or option[2:] in parts]
        if len(similar) == 1:
            hint = f"did you mean {similar[0]}?"
        else:
            hint = f"choose one of: {', '.join(similar)}" if similar else suggest(flag, flags)
        return UserError(f"{self.name} {word}: unknown option; {hint}")

    @abstractmethod
    def run(self, arguments: Arguments) -> int:
        """Execute the command and return its exit code: 0 for success, 1 for failure.

        If it raises UserError, toyexp exits with 2.
        """


def parse_modules(words: Iterable[str]) -> list[str]:
    """Return the module names in all `words` of the form `plugins=[a,b]` or `model.path=a:Net`.

    Raise UserError for an invalid name in `plugins`.
    """
    modules: list[str] = []
    of_models: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if key.lstrip("+") == MODEL_CODE:
            of_models += re.findall(r"([^\W\d][\w.]*)\\?:[^\W\d]", text)
        if key.lstrip("+") != "plugins" or not equals:
            continue
        names = re.findall(r"[^\[\],\s'\"]+", text)
        are_modules = all(name.replace(".", "_").isidentifier() and name != "null" for name in names)
        if not are_modules or not re.fullmatch(r"\[[^\[\]]*\]|[^\[\],\s]+", text):
            example = ",".join(names) if names and are_modules else "my_module"
            raise UserError(f"{word}: takes names of Python modules, such as plugins=[{example}]")
        modules += names
    return [*modules, *(name for name in dict.fromkeys(of_models) if name not in modules)]
