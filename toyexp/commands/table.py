"""toyexp's own sub-commands: what each is for and which options it has; what does it is loaded when it is called.

They are offered as those of plugins are, and nobody can take over their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, cast

from toyexp.contract.command import Arguments, Command, modules_in
from toyexp.contract.hooks import Register, hookimpl


@dataclass
class Shipped(Command):
    """One of them: a module of toyexp/commands/ says how it is used, HELP, and does it, run."""

    module: ClassVar[str]

    def _load(self) -> Any:
        return import_module(f"toyexp.commands.{self.module}")

    def usage(self, modules: Sequence[str] = ()) -> str:
        """What `toyexp NAME --help` prints."""
        return str(self._load().HELP)

    def run(self, arguments: Arguments) -> int:
        """Does it; returns the exit code."""
        code: int = self._load().run(arguments)
        return code


@dataclass
class Plugins(Shipped):
    """What can be asked for, and which plugins and engines are broken."""

    name: ClassVar[str] = "plugins"
    module: ClassVar[str] = "plugins"
    switches: ClassVar[Sequence[str]] = ("--matrix",)
    takes: ClassVar[str] = "names"


@dataclass
class Doctor(Shipped):
    """Which engines work here, and why the others do not."""

    name: ClassVar[str] = "doctor"
    module: ClassVar[str] = "doctor"
    switches: ClassVar[Sequence[str]] = ("--graph", "--numerics")
    takes: ClassVar[str] = "settings"


@dataclass
class Parity(Shipped):
    """Whether several engines compute the same numbers, within tolerances."""

    name: ClassVar[str] = "parity"
    module: ClassVar[str] = "parity"
    switches: ClassVar[Sequence[str]] = ("--all", "--json")
    values: ClassVar[Mapping[str, str]] = {"--loss": "1e-3", "--gradient": "1e-3", "--weights": "1e-3"}
    takes: ClassVar[str] = "settings"


@dataclass
class Bench(Shipped):
    """Engines side by side on this machine: their speed, and their memory."""

    name: ClassVar[str] = "bench"
    module: ClassVar[str] = "bench"
    switches: ClassVar[Sequence[str]] = ("--baseline", "--no-memory", "--json")
    values: ClassVar[Mapping[str, str]] = {"--rounds": "7", "--steps": "100"}
    takes: ClassVar[str] = "settings"


@dataclass
class Eval(Shipped):
    """The held-out loss of a model in a file."""

    name: ClassVar[str] = "eval"
    module: ClassVar[str] = "evaluate"
    switches: ClassVar[Sequence[str]] = ("--json",)
    values: ClassVar[Mapping[str, str]] = {"--data": "book.txt"}


@dataclass
class Describe(Shipped):
    """What is in a GGUF file, and what can be done with it here."""

    name: ClassVar[str] = "describe"
    module: ClassVar[str] = "describe"
    switches: ClassVar[Sequence[str]] = ("--metadata", "--tensors", "--json")
    takes: ClassVar[str] = "file"


@dataclass
class Models(Shipped):
    """The GGUF files on this machine, and what each is good for here."""

    name: ClassVar[str] = "models"
    module: ClassVar[str] = "models"
    switches: ClassVar[Sequence[str]] = ("--json",)
    takes: ClassVar[str] = "directory"


@dataclass
class Generate(Shipped):
    """Text from a model in a file, as it comes."""

    name: ClassVar[str] = "generate"
    module: ClassVar[str] = "generate"
    switches: ClassVar[Sequence[str]] = ("--chat", "--json")
    values: ClassVar[Mapping[str, str]] = {
        "--prompt": "'Once upon a time'", "--adapter": "adapter.gguf", "--engine": "cpu", "--ids": "1,2,3",
        "--tokens": "1", "--top-k": "1", "--seed": "1", "--temperature": "1", "--top-p": "1", "--min-p": "1",
    }  # fmt: skip
    takes: ClassVar[str] = "file"


@dataclass
class Export(Shipped):
    """A model's file again in another type."""

    name: ClassVar[str] = "export"
    module: ClassVar[str] = "export"
    switches: ClassVar[Sequence[str]] = ("--force", "--requantize", "--json")
    values: ClassVar[Mapping[str, str]] = {"--type": "q8_0", "--to": "small.gguf"}
    takes: ClassVar[str] = "file"

    def usage(self, modules: Sequence[str] = ()) -> str:
        """With the types of all formats."""
        from toyexp.contract.registry import load

        return str(self._load().help_text(load(modules)))


@dataclass
class Completion(Shipped):
    """What makes a shell complete command lines."""

    name: ClassVar[str] = "completion"
    module: ClassVar[str] = "shells"
    takes: ClassVar[str] = "shells"

    def read(self, words: Sequence[str]) -> Arguments:
        """The words as they are: they may be those of another command line."""
        return Arguments(set(), {}, list(words), [])


@dataclass
class Help(Shipped):
    """How to use the command line."""

    name: ClassVar[str] = "help"
    module: ClassVar[str] = "help"
    takes: ClassVar[str] = ""

    def usage(self, modules: Sequence[str] = ()) -> str:
        """The page itself."""
        return str(self._load().page())


OWN = (Plugins, Doctor, Parity, Bench, Eval, Describe, Models, Generate, Export, Completion, Help)
COMMANDS: Mapping[str, type[Command]] = {command.name: command for command in OWN}


@hookimpl
def register_commands(register: Register) -> None:
    """Offers all of them."""
    for command in COMMANDS.values():
        register(command)


def find(name: str, words: Sequence[str]) -> Command | None:
    """The command of that name, if there is one; plugins are only loaded, with those that `words` name, for others."""
    if name in COMMANDS:
        return COMMANDS[name]()
    from toyexp.contract.registry import load

    registry = load(modules_in(words))
    broken = any(("command", name) in problem.offered for problem in registry.problems)
    if not broken and name not in registry.offers["command"]:
        return None
    return cast("type[Command]", registry.get("command", name))()
