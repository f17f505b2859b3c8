"""The sub-commands by name: what each is for, what it takes, and where it lives, which is loaded when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Command:
    """One sub-command."""

    function: str  # of toyexp/commands/registered.py
    about: str
    takes: str = "file settings"  # beside its options, for completion

    def __call__(self, words: Sequence[str]) -> int:
        """Runs it on the words behind its name; returns the exit code."""
        code: int = getattr(import_module("toyexp.commands.registered"), self.function)(words)
        return code


COMMANDS = {
    "plugins": Command("plugins", "what can be asked for, and which plugins and engines are broken", "names"),
    "doctor": Command("doctor", "which engines work here, and why the others do not", "settings"),
    "parity": Command("parity", "whether several engines compute the same numbers, within tolerances", "settings"),
    "bench": Command("bench", "engines side by side on this machine: their speed, and their memory", "settings"),
    "eval": Command("evaluate", "the held-out loss of a model in a file"),
    "describe": Command("describe", "what is in a GGUF file, and what can be done with it here", "file"),
    "models": Command("models", "the GGUF files on this machine, and what each is good for here", "directory"),
    "generate": Command("generate", "text from a model in a file, as it comes", "file"),
    "export": Command("export", "a model's file again in another type", "file"),
    "completion": Command("completion", "what makes a shell complete command lines", "shells"),
    "help": Command("show_help", "how to use the command line", ""),
}
