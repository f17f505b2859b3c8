"""toyexp's own sub-commands: what each is for and which options it has; what does it is loaded when it is called.

They are offered as those of plugins are, and nobody can take over their names.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, cast

from toyexp.base.errors import UserError
from toyexp.base.validators import is_integer
from toyexp.config.top_level import TEXT_LIMITS
from toyexp.interfaces.command import Arguments, Command, Parser, parse_modules
from toyexp.interfaces.hooks import Register, hookimpl

Option = tuple[str, dict[str, Any]]  # what argparse takes
NO_SETTINGS = ("describe", "generate", "merge", "models", "new", "plugins", "predict")
SETTINGS_ONLY = ("bench", "parity")


class BuiltInCommand(Command):
    """One of them: a module of toyexp/cli/ says how it is used, HELP, and does it, run.

    In a module of several commands these are HELP_NAME and run_name. A line `options` of HELP stands for the options.
    """

    module: ClassVar[str]
    options: ClassVar[Sequence[Option]]

    def _load(self, what: str) -> Any:
        several = f"_{self.name}" if self.module else ""
        module = import_module(f"toyexp.cli.{self.module or self.name}")
        return getattr(module, what + (several.upper() if what == "HELP" else several))

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the table."""
        for flag, how in self.options:
            parser.add_argument(flag, **how)

    def usage(self, modules: Sequence[str] = ()) -> str:
        """What `toyexp NAME --help` prints; a HELP that tells of plugins is a function of the local ones."""
        told, parser = self._load("HELP"), Parser(self.name, usage=argparse.SUPPRESS)
        self.configure(parser)
        text = told(modules) if callable(told) else told
        parser.description, _, parser.epilog = text.partition("\noptions\n")
        return parser.format_help().rstrip()

    def read(self, words: Sequence[str]) -> Arguments:
        """Parse the words; those that a shell hands over for completion are another command line's, and stay."""
        if self.takes == "shells":
            return Arguments(rest=list(words))
        found = super().read(words)
        for word in found.rest:
            if self.name in NO_SETTINGS and "=" in word and not os.path.lexists(word):
                what = f"is a setting of a run; {self.name} takes none but plugins=[...]"
                raise UserError(f"{self.name} {word}: {what}; see toyexp {self.name} --help")
            if self.name in SETTINGS_ONLY and "=" not in word and word[:1] not in "~+":
                raise UserError(f"{self.name} {word}: is no setting; write key=value; see toyexp {self.name} --help")
        return found

    def unknown_option(self, word: str, after: Sequence[str]) -> UserError:
        """An error about a word with dashes that is none of its options; it may be a setting."""
        from toyexp.config.flags import dashed_setting, other_tools

        setting = dashed_setting(word, after) if "settings" in self.takes else None
        if self.name == "generate" and (ours := other_tools("generate").get(word.partition("=")[0])):
            return UserError(f"generate {word}: there is no such option; here it is {ours}")
        # Only parity takes a number of steps, and none of these commands takes epochs.
        if setting and not setting.startswith("epochs=" if self.name == "parity" else ("steps=", "epochs=")):
            return UserError(f"{self.name} {word}: a setting has no dashes: {setting}")
        return super().unknown_option(word, after)

    def run(self, arguments: Arguments) -> int:
        """Does it; returns the exit code."""
        return int(self._load("run")(arguments))


def _command(name: str, about: str, takes: str, *options: Option, module: str = "") -> type[Command]:
    space = {"name": name, "options": options, "takes": takes, "module": module, "__doc__": about}
    return dataclass(type(name.title(), (BuiltInCommand,), {**space, "__module__": __name__}))


def _switch(flag: str, about: str) -> Option:
    return flag, {"action": "store_true", "help": about}


def _value(flag: str, example: str, about: str, type: Callable[[str], Any] | None = None) -> Option:
    return flag, {"metavar": example, "help": about, "type": type}


def _number(flag: str, example: str, about: str, high: float = 10**6) -> Option:
    return _value(flag, example, about, number(*TEXT_LIMITS.get(flag, (1, high)), whole=example.isdigit()))


def number(low: float, high: float = math.inf, whole: bool = False) -> Callable[[str], float]:
    """Return the `type` of an option that takes a finite number from low to high."""

    def parse(text: str) -> float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            limits = f"from {low} to {high}" if whole else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"takes a {'whole ' if whole else ''}number {limits}")
        return value

    return parse


def ids(text: str) -> list[int]:
    """Return token ids that stand between commas or spaces."""
    parts = re.split(r"\s*,\s*|\s+", text.strip())
    if not all(is_integer(part, 0, 2**31 - 1) for part in parts):
        raise argparse.ArgumentTypeError("takes token ids with commas between them, such as 1,2,3")
    return [int(part) for part in parts]


JSON = _switch("--json", "print it as JSON")
FORCE = _switch("--force", "replace what is there already, if it is a model that no run wrote")
ENGINE = "auto (the best engine here), or any engine with its settings (cpu:dtype=float64:threads=1)"
PLOT = "a picture too, .svg, .png or .pdf (pip install 'toyexp[plots]')"
BUILT_IN = (
    _command("plugins", "What can be asked for, and which plugins and engines are broken.", "names",
        _switch("--matrix", "which recipe trains which model, and why not"),
        _value("--check", "my_module.py", "whether a plugin, a directory or a file, keeps what its kind promises"),
        _switch("--json", "with --check: print it as JSON")),
    _command("new", "A plugin to begin with: a package that works, and its test.", "kinds",
        _value("--into", "DIR", "where that directory is made, if need be; this one unless told")),
    _command("doctor", "Which engines work here, and why the others do not.", "settings",
        _switch("--numerics", "whether engines compute every op and a short training as float64 does"),
        _switch("--graph", "which ops of a training step run on which device")),
    _command("parity", "Whether several engines compute the same numbers, within tolerances.", "settings",
        _value("--loss", "1e-3", "largest difference of one step's loss", number(0)),
        _value("--gradient", "1e-3", "worst relative error of one tensor's gradient, on the first batch", number(0)),
        _value("--weights", "1e-3", "worst difference of one tensor at the end, by how far it moved", number(0)),
        _switch("--all", "list every tensor, not only those that differ most"),
        _value("--plot", "parity.svg", PLOT), JSON),
    _command("bench", "Engines side by side on this machine: their speed, and their memory.", "settings",
        _number("--rounds", "7", "turns that each of them gets (7)"),
        _number("--steps", "100", "steps of a turn (as many as take about 0.3 s)"),
        _switch("--baseline", "beside them loops that do no more than train; see below"),
        _switch("--no-peak", "leave out the share of the peak, which takes its time to find"),
        _switch("--no-memory", "leave out what needs a process for each: memory, and the wait for the first step"),
        _value("--plot", "bench.svg", PLOT), JSON),
    _command("eval", "The held-out loss of a model in a file.", "file settings",
        _value("--data", "book.txt", "what to evaluate on; see below"),
        _value("--adapter", "adapter.gguf", "a LoRA adapter on the model: of a run, a file, or a directory of PEFT's"),
        JSON, module="files"),
    _command("describe", "What is in a GGUF file, and what can be done with it here.", "file",
        _switch("--metadata", "every key of the file"),
        _switch("--tensors", "every tensor: its shape, type and place"), JSON, module="files"),
    _command("models", "The GGUF files on this machine, and what each is good for here.", "directory", JSON,
        module="files"),
    _command("generate", "Text from a model in a file, as it comes.", "file",
        _value("--prompt", "TEXT", "what to continue; - reads it from standard input", str),
        _value("--ids", "1,2,3", "token ids in its place; a file without a tokenizer answers in ids too", ids),
        _switch("--chat", "the prompt is a user's message; without a prompt a conversation; see below"),
        _value("--system", "TEXT", "with --chat: what the model is told before the first message"),
        _number("--tokens", "64", "tokens to write at most (64; of an answer in a conversation 512)"),
        _number("--temperature", "0.8", "logits are divided by it; 0: always the likeliest token (0.8)"),
        _number("--top-k", "40", "choose among this many of the likeliest tokens; 0: all (40)"),
        _number("--top-p", "0.95", "and among the fewest that together have this probability; 1: all (0.95)"),
        _number("--min-p", "0.1", "and among those with this share of the likeliest one's probability; 0: all (0)"),
        _number("--seed", "1", "another text for the same prompt (0)"),
        _value("--adapter", "adapter.gguf", "a LoRA adapter on the model: of a run, a file, or a directory of PEFT's"),
        _value("--engine", "cpu", f"{ENGINE}, or llama.cpp (llama.cpp:threads=1); see below"),
        _switch("--json", "one JSON object at the end in place of the text; in a conversation one for each answer")),
    _command("predict", "Which class images are of, by a model that was trained on images.", "file",
        _number("--top", "3", "this many of the likeliest classes of each (1)"),
        _value("--csv", "classes.csv", "a row for each image: file, class, probability, ..., error; a new file"),
        _value("--engine", "cpu", ENGINE), JSON, module="files"),
    _command("export", "A model's file again in another type.", "file",
        _value("--type", "q8_0", "one of the types below"), _value("--to", "small.gguf", "where to"), FORCE,
        _switch("--requantize", "round numbers again that were already rounded to a quantised type"), JSON,
        module="files"),
    _command("merge", "A model with a LoRA adapter added to it, as one file.", "file",
        _value("--out", "merged.gguf", "where to"), FORCE,
        _value("--type", "f16", "of the weights that change: f32 (exact) f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 (f32)"),
        JSON, module="files"),
    _command("runs", "The runs that are here: when, what, how far, how well.", "directory",
        _value("--sort", "loss", "by a column or a setting, from the smallest; --sort -loss from the largest"),
        _number("--last", "20", "this many of the last", 1 << 40),
        _switch("--csv", "every column, for a spreadsheet"), _switch("--json", "the same with the scores")),
    _command("compare", "Runs and sweeps side by side: what differs, and how well each did.", "directory",
        _value("--metric", "accuracy", "the held-out score that decides (loss, or the sweep's own sweep.metric)"),
        _switch("--pool", "count equal runs of different directories or names as one point; see below"),
        _switch("--csv", "a row for each run"), _switch("--json", "the points, their runs, and what differs"),
        _value("--html", "report.html", "everything in one file, without a network (pip install 'toyexp[report]')"),
        _value("--plot", "curves.svg", "a picture to print, .svg, .png or .pdf (pip install 'toyexp[plots]')"),
        module="runs"),
    _command("completion", "What makes a shell complete command lines.", "shells"),
    _command("help", "How to use the command line, and the pages of the documentation.", "topics", module="pages"),
)  # fmt: skip
COMMANDS: Mapping[str, type[Command]] = {command.name: command for command in BUILT_IN}


@hookimpl
def register_commands(register: Register) -> None:
    """Offers all of them."""
    for command in BUILT_IN:
        register(command)


def find(name: str, words: Sequence[str]) -> Command | None:
    """The command of that name, if there is one; plugins are only loaded, with those that `words` name, for others."""
    if name in COMMANDS:
        return COMMANDS[name]()
    from toyexp.plugins.discovery import load

    registry = load(parse_modules(words))
    broken = any(("command", name) in problem.offered for problem in registry.problems)
    if not broken and name not in registry.offers["command"]:
        return None
    return cast("type[Command]", registry.get("command", name))()
