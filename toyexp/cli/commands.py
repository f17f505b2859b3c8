"""Table of the built-in sub-commands and their options. Running a command imports the module that implements it.

Built-in commands are registered through the same hook as commands of plugins. A plugin cannot use a built-in name.
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

Option = tuple[str, dict[str, Any]]  # a flag, and keywords of add_argument
NO_SETTINGS = ("describe", "generate", "merge", "models", "new", "plugins", "predict", "serve")
SETTINGS_ONLY = ("bench", "data", "parity")


class BuiltInCommand(Command):
    """A sub-command that is implemented by a module in toyexp/cli/ with a usage text, HELP, and a function `run`.

    A module with several commands has a usage text and a function for each of them. The command `export`, for example,
    has HELP_EXPORT and run_export. argparse inserts the list of options below the line `options` of the usage text.
    """

    module: ClassVar[str]  # name of a module with several commands; empty if the module is named like the command
    options: ClassVar[Sequence[Option]]

    def _load(self, name: str) -> Any:
        several = f"_{self.name}" if self.module else ""
        module = import_module(f"toyexp.cli.{self.module or self.name}")
        return getattr(module, name + (several.upper() if name == "HELP" else several))

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to an argparse parser."""
        for flag, how in self.options:
            parser.add_argument(flag, **how)

    def usage(self, modules: Sequence[str] = ()) -> str:
        """Return the text of `toyexp NAME --help`.

        If HELP is a function (because it lists plugins), call it with `modules`, the names of local plugin modules.
        """
        text, parser = self._load("HELP"), Parser(self.name, usage=argparse.SUPPRESS)
        self.configure(parser)
        text = text(modules) if callable(text) else text
        parser.description, _, parser.epilog = text.partition("\noptions\n")
        return parser.format_help().rstrip()

    def read(self, words: Sequence[str]) -> Arguments:
        """Parse the words after `toyexp NAME`; raise UserError for a setting that the command does not take.

        The words of `completion` are not parsed, because they contain the user's unfinished command line. The words
        after `--` of `serve` are not parsed, because they are options of another program.
        """
        if self.completions == "shells":
            return Arguments(rest=list(words))
        end = list(words).index("--") if self.name == "serve" and "--" in words else len(words)
        arguments = super().read(words[:end])
        arguments.passed = list(words[end + 1 :])
        for word in arguments.rest:
            if self.name in NO_SETTINGS and "=" in word and not os.path.lexists(word):
                if (flag := f"--{word.partition('=')[0]}") in self.parser().options:
                    raise UserError(f"{self.name} {word}: is an option here; type {flag} {word.partition('=')[2]}")
                problem = f"is a setting of a run; {self.name} only takes plugins=[...]"
                raise UserError(f"{self.name} {word}: {problem}; see toyexp {self.name} --help")
            if self.name in SETTINGS_ONLY and "=" not in word and word[:1] not in "~+":
                raise UserError(f"{self.name} {word}: expected key=value; see toyexp {self.name} --help")
        return arguments

    def unknown_option(self, word: str, after: Sequence[str]) -> UserError:
        """Return the error for an option `word` that the command does not have; `after` are the words that follow it.

        If the option is a setting typed with dashes, such as --lr 0.1, the message shows how to type it: lr=0.1.
        """
        from toyexp.config.flags import dashed_setting, other_tools

        if self.name == "serve":
            return UserError(f"serve {word}: options of llama-server come after --: toyexp serve RUN -- {word}")
        setting = dashed_setting(word, after) if "settings" in self.completions else None
        if self.name == "generate" and (option := other_tools("generate").get(word.partition("=")[0])):
            return UserError(f"generate {word}: unknown option; use {option}")
        # Of the commands that take settings, only parity takes `steps`, and none takes `epochs`.
        if setting and not setting.startswith("epochs=" if self.name == "parity" else ("steps=", "epochs=")):
            return UserError(f"{self.name} {word}: settings have no dashes: {setting}")
        return super().unknown_option(word, after)

    def run(self, arguments: Arguments) -> int:
        """Run the command and return its exit code."""
        return int(self._load("run")(arguments))


def _command(name: str, about: str, completions: str, *options: Option, module: str = "") -> type[Command]:
    space = {"name": name, "options": options, "completions": completions, "module": module, "__doc__": about}
    return dataclass(type(name.title(), (BuiltInCommand,), {**space, "__module__": __name__}))


def _switch(flag: str, about: str) -> Option:
    return flag, {"action": "store_true", "help": about}


def _value(flag: str, example: str, about: str, type: Callable[[str], Any] | None = None) -> Option:
    return flag, {"metavar": example, "help": about, "type": type}


def _number(flag: str, example: str, about: str, high: float = 10**6) -> Option:
    return _value(flag, example, about, number(*TEXT_LIMITS.get(flag, (1, high)), integer=example.isdigit()))


def number(low: float, high: float = math.inf, integer: bool = False) -> Callable[[str], float]:
    """Return a function that parses a number, for argparse's `type=`. It rejects a number outside `low` to `high`.

    If `integer` is True, the function parses an int, otherwise a float.
    """

    def parse(text: str) -> float:
        try:
            value = int(text) if integer else float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            most = f"2^{int(high).bit_length()} - 1" if integer and high > 10**6 else high
            limits = f"from {low} to {most}" if integer else f"from {low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be a {'whole ' if integer else ''}number {limits}")
        return value

    return parse


def ids(text: str) -> list[int]:
    """Parse the value of --ids: token ids separated by commas or spaces."""
    parts = re.split(r"\s*,\s*|\s+", text.strip())
    if not all(is_integer(part, 0, 2**31 - 1) for part in parts):
        raise argparse.ArgumentTypeError("must be token ids separated by commas, such as 1,2,3")
    return [int(part) for part in parts]


JSON = _switch("--json", "print the result as JSON")
FORCE = _switch("--force", "overwrite an existing model, unless a run wrote it")
ENGINE = "auto (default: the best engine on this machine), or an engine with its settings (cpu:dtype=float64:threads=1)"
PLOT = "also draw a plot: .svg, .png or .pdf (pip install 'toyexp[plots]')"
COLUMN_WIDTHS = "with --plot: fit a journal's column, 3.5 in (single) or 7.2 in (double) wide"
COLUMN: Option = ("--column", {"choices": ("single", "double"), "help": COLUMN_WIDTHS})
BUILT_IN = (
    _command("plugins", "List plugins and their settings; report broken plugins and engines.", "names",
        _switch("--matrix", "show which recipe can train which model, and why not"),
        _value("--check", "my_module.py", "run the conformance tests of a plugin: a directory or a file"),
        _switch("--json", "with --check: print the result as JSON")),
    _command("new", "Create a plugin from a template: a working package with a test.", "kinds",
        _value("--into", "DIR", "parent directory, created if needed (default: the current directory)")),
    _command("data", "Show what a run's data holds, and rows as the model reads them.", "settings",
        _number("--rows", "2", "number of rows to print (default: 2)"),
        _switch("--ids", "print each token on a line, with its id"), JSON),
    _command("doctor", "Check which engines work on this machine, and why others do not.", "settings",
        _switch("--numerics", "compare every op and a short training of each engine with float64"),
        _switch("--graph", "show which ops of a training step run on which device")),
    _command("parity", "Compare the results of several engines, within tolerances.", "settings",
        _value("--loss", "1e-3", "maximum difference of the loss at any step", number(0)),
        _value("--gradient", "1e-3", "maximum relative error of a tensor's gradient, on the first batch", number(0)),
        _value("--weights", "1e-3", "maximum error of a tensor after training, relative to its change", number(0)),
        _switch("--all", "list every tensor, not only the worst ones"),
        _value("--plot", "parity.svg", PLOT), COLUMN, JSON),
    _command("bench", "Compare the speed and memory of engines on this machine.", "settings",
        _number("--rounds", "7", "number of timed rounds per engine (default: 7)"),
        _number("--steps", "100", "steps per round (default: as many as take about 0.3 s)"),
        _switch("--baseline", "also time plain training loops; see below"),
        _switch("--no-peak", "do not measure the peak speed of matrix products (faster)"),
        _switch("--no-memory", "do not measure memory and startup time, which need a process per engine (faster)"),
        _value("--plot", "bench.svg", PLOT), COLUMN, JSON),
    _command("eval", "Evaluate a model file on held-out data.", "file settings",
        _value("--data", "book.txt", "data to evaluate on; see below"),
        _value("--choices", "questions.jsonl", "multiple-choice questions: question, choices, answer"),
        _value("--adapter", "adapter.gguf", "LoRA adapter to apply: a run, an adapter.gguf, or a PEFT directory"),
        JSON, module="files"),
    _command("describe", "Show what a GGUF file contains and what it can be used for.", "file",
        _switch("--metadata", "show every metadata key"),
        _switch("--tensors", "show every tensor: shape, type and offset"), JSON, module="files"),
    _command("models", "List GGUF files on this machine and what each can be used for.", "directory", JSON,
        module="files"),
    _command("generate", "Generate text with a model file.", "file",
        _value("--prompt", "TEXT", "prompt; - reads it from standard input", str),
        _value("--ids", "1,2,3", "prompt as token ids; the output is ids too if there is no tokenizer", ids),
        _switch("--chat", "use the chat template; without --prompt, hold a conversation; see below"),
        _value("--system", "TEXT", "with --chat: the system message"),
        _number("--tokens", "64", "maximum number of new tokens (default: 64; 512 per answer in a conversation)"),
        _number("--temperature", "0.8", "sampling temperature; 0: greedy decoding (default: 0.8)"),
        _number("--top-k", "40", "sample from the k most likely tokens; 0: all (default: 40)"),
        _number("--top-p", "0.95", "nucleus sampling: total probability of the tokens kept; 1: all (default: 0.95)"),
        _number("--min-p", "0.1", "minimum probability relative to the most likely token; 0: all (default: 0)"),
        _number("--seed", "1", "random seed (default: 0)"),
        _value("--adapter", "adapter.gguf", "LoRA adapter to apply: a run, an adapter.gguf, or a PEFT directory"),
        _value("--engine", "cpu", f"{ENGINE}, or llama.cpp (llama.cpp:threads=1); see below"),
        _switch("--json", "print one JSON object instead of the text; in a conversation, one per answer")),
    _command("predict", "Classify images with a model file.", "file",
        _number("--top", "3", "show the k most likely classes per image (default: 1)"),
        _value("--csv", "classes.csv", "write a CSV file, one row per image: file, class, ..., label, correct, error"),
        _value("--html", "wrong.html", "write a page with the wrongly classified images and the confusions"),
        _value("--engine", "cpu", ENGINE), JSON, module="files"),
    _command("export", "Convert a model file to another quantisation or format.", "file",
        _value("--type", "q8_0", "one of the types below"), _value("--to", "small.gguf", "output path"), FORCE,
        _switch("--requantize", "allow quantising weights that are already quantised"),
        _value("--new-tokens", "'<|a|>,<|b|>'", "tokens to add to the vocabulary; write a GGUF, and train from it"),
        _switch("--ollama", "write a Modelfile for Ollama beside the GGUF; without --type the model is not converted"),
        _value("--system", "TEXT", "with --ollama: the system message (default: data.system of the run)"),
        JSON, module="files"),
    _command("merge", "Merge a LoRA adapter into a base model.", "file",
        _value("--out", "merged.gguf", "output path"), FORCE,
        _value("--type", "f16", "type of merged weights: f32 (exact) f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 (default: f32)"),
        JSON, module="files"),
    _command("serve", "Serve a model over HTTP with llama.cpp's llama-server.", "file", module="files"),
    _command("runs", "List runs with their settings, state and loss.", "directory",
        _value("--sort", "loss", "sort by a column or setting, ascending; descending with a minus: --sort -loss"),
        _number("--last", "20", "show only the last n runs", (1 << 40) - 1),
        _switch("--csv", "print every column as CSV"), _switch("--json", "print the runs with all metrics as JSON")),
    _command("compare", "Compare runs and sweeps: their settings and results.", "directory",
        _value("--metric", "accuracy", "held-out metric to rank by (default: loss, or the sweep.metric of a search)"),
        _switch("--pool", "group equal runs even if their directories or names differ; see below"),
        _switch("--csv", "print one CSV row per run"), _switch("--json", "print groups, runs and settings as JSON"),
        _value("--html", "report.html", "write a self-contained HTML report (pip install 'toyexp[report]')"),
        _value("--plot", "curves.svg", "draw a plot: .svg, .png or .pdf (pip install 'toyexp[plots]')"), COLUMN,
        module="runs"),
    _command("completion", "Print a shell completion script.", "shells"),
    _command("help", "Show usage, or a page of the documentation.", "topics", module="pages"),
)  # fmt: skip
COMMANDS: Mapping[str, type[Command]] = {command.name: command for command in BUILT_IN}


@hookimpl
def register_commands(register: Register) -> None:
    """Register all built-in commands."""
    for command in BUILT_IN:
        register(command)


def find(name: str, words: Sequence[str]) -> Command | None:
    """Return the command of this name, or None if there is none.

    If the name is not built in, load the installed plugins and the local ones that plugins=[...] in `words` names.
    """
    if name in COMMANDS:
        return COMMANDS[name]()
    from toyexp.plugins.discovery import load

    registry = load(parse_modules(words))
    broken = any(("command", name) in problem.offered for problem in registry.problems)
    if not broken and name not in registry.offers["command"]:
        return None
    return cast("type[Command]", registry.get("command", name))()
