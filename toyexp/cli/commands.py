"""toyexp's own sub-commands: what each is for and which options it has; what does it is loaded when it is called.

They are offered as those of plugins are, and nobody can take over their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from importlib import import_module
from typing import Any, ClassVar, cast

from toyexp.base.errors import UserError
from toyexp.interfaces.command import Arguments, Command, modules_in
from toyexp.interfaces.hooks import Register, hookimpl


class Shipped(Command):
    """One of them: a module of toyexp/cli/ says how it is used, HELP, and does it, run."""

    module: ClassVar[str]

    def _load(self) -> Any:
        return import_module(f"toyexp.cli.{self.module}")

    def usage(self, modules: Sequence[str] = ()) -> str:
        """What `toyexp NAME --help` prints; a HELP that tells of plugins is a function of the local ones."""
        told = self._load().HELP
        return str(told(modules) if callable(told) else told)

    def read(self, words: Sequence[str]) -> Arguments:
        """Tells the words apart; those that a shell hands over for completion are another command line's, and stay."""
        if self.takes == "shells":
            return Arguments(set(), {}, list(words), [])
        found = super().read(words)
        if "" in found.rest:
            raise UserError(f"{self.name} '': is empty (a variable that is not set?); leave it out")
        for option in (option for option, value in found.values.items() if not value and option != "--prompt"):
            what = f"{self.name} {option} '': is empty (a variable that is not set?)"
            raise UserError(f"{what}; leave it out, or give it a value, such as {self.values[option]}")
        return found

    def no_option(self, word: str, after: Sequence[str]) -> UserError:
        """An error about a word with dashes that is none of its options; it may be a setting."""
        from toyexp.config.flags import other_tools, setting_with_dashes

        setting = setting_with_dashes(word, after) if "settings" in self.takes else None
        if self.name == "generate" and (ours := other_tools("generate").get(word.partition("=")[0])):
            return UserError(f"generate {word}: there is no such option; here it is {ours}")
        # Only parity takes a number of steps, and none of these commands takes epochs.
        if setting and not setting.startswith("epochs=" if self.name == "parity" else ("steps=", "epochs=")):
            return UserError(f"{self.name} {word}: a setting has no dashes: {setting}")
        return super().no_option(word, after)

    def run(self, arguments: Arguments) -> int:
        """Does it; returns the exit code."""
        return int(self._load().run(arguments))


def _shipped(
    name: str, about: str, switches: str = "", values: Mapping[str, str] | None = None, takes: str = "",
    module: str = "",
) -> type[Command]:  # fmt: skip
    told = {"switches": tuple(switches.split()), "values": values or {}, "takes": takes, "module": module or name}
    space = {"name": name, "__doc__": about, "__module__": __name__, **told}
    return cast("type[Command]", make_dataclass(name.title(), [], bases=(Shipped,), namespace=space))


OWN = (
    _shipped(
        "plugins", "What can be asked for, and which plugins and engines are broken.", "--matrix --json",
        {"--check": "my_module.py"}, "names",
    ),
    _shipped("new", "A plugin to begin with: a package that works, and its test.", "", {"--into": "DIR"}, "kinds"),
    _shipped(
        "doctor", "Which engines work here, and why the others do not.", "--graph --numerics", takes="settings"
    ),
    _shipped(
        "parity", "Whether several engines compute the same numbers, within tolerances.", "--all --json",
        {"--loss": "1e-3", "--gradient": "1e-3", "--weights": "1e-3", "--plot": "parity.svg"}, "settings",
    ),
    _shipped(
        "bench", "Engines side by side on this machine: their speed, and their memory.",
        "--baseline --no-peak --no-memory --json", {"--rounds": "7", "--steps": "100", "--plot": "bench.svg"},
        "settings",
    ),
    _shipped(
        "eval", "The held-out loss of a model in a file.", "--json",
        {"--data": "book.txt", "--adapter": "adapter.gguf"}, "file settings", module="evaluate",
    ),
    _shipped(
        "describe", "What is in a GGUF file, and what can be done with it here.", "--metadata --tensors --json",
        takes="file",
    ),
    _shipped("models", "The GGUF files on this machine, and what each is good for here.", "--json", takes="directory"),
    _shipped(
        "generate", "Text from a model in a file, as it comes.", "--chat --json",
        {
            "--prompt": "'Once upon a time'", "--system": "'Be brief.'", "--adapter": "adapter.gguf",
            "--engine": "cpu", "--ids": "1,2,3", "--tokens": "1", "--top-k": "1", "--seed": "1",
            "--temperature": "1", "--top-p": "1", "--min-p": "1",
        },
        "file",
    ),
    _shipped(
        "predict", "Which class images are of, by a model that was trained on images.", "--json",
        {"--top": "3", "--csv": "classes.csv", "--engine": "cpu"}, "file",
    ),
    _shipped(
        "export", "A model's file again in another type.", "--force --requantize --json",
        {"--type": "q8_0", "--to": "small.gguf"}, "file",
    ),
    _shipped(
        "merge", "A model with a LoRA adapter added to it, as one file.", "--force --json",
        {"--out": "merged.gguf", "--type": "f16"}, "file",
    ),
    _shipped(
        "runs", "The runs that are here: when, what, how far, how well.", "--json --csv",
        {"--sort": "loss", "--last": "20"}, "directory",
    ),
    _shipped(
        "compare", "Runs and sweeps side by side: what differs, and how well each did.", "--json --csv --pool",
        {"--metric": "accuracy", "--html": "report.html", "--plot": "curves.svg"}, "directory",
    ),
    _shipped("completion", "What makes a shell complete command lines.", takes="shells"),
    _shipped(
        "help", "How to use the command line, and the pages of the documentation.", takes="topics", module="pages"
    ),
)  # fmt: skip
COMMANDS: Mapping[str, type[Command]] = {command.name: command for command in OWN}


@hookimpl
def register_commands(register: Register) -> None:
    """Offers all of them."""
    for command in OWN:
        register(command)


def find(name: str, words: Sequence[str]) -> Command | None:
    """The command of that name, if there is one; plugins are only loaded, with those that `words` name, for others."""
    if name in COMMANDS:
        return COMMANDS[name]()
    from toyexp.plugins.discovery import load

    registry = load(modules_in(words))
    broken = any(("command", name) in problem.offered for problem in registry.problems)
    if not broken and name not in registry.offers["command"]:
        return None
    return cast("type[Command]", registry.get("command", name))()
