"""The command line: `toyexp [key=value ...]` trains a run, `-m` runs a sweep, `toyexp COMMAND` runs a sub-command."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import toyexp
from toyexp.base.attribution import attribute_errors, attribute_part_errors
from toyexp.base.errors import PluginFailed, RunFailed, UserError, printable
from toyexp.base.exit_codes import run_to_exit_code
from toyexp.base.files import working_directory
from toyexp.base.packages import pause_collection
from toyexp.base.ranks import started_ranks
from toyexp.base.terminal import choose_colour, print_line, print_usage, show_status, silence
from toyexp.base.threads import available_cores
from toyexp.base.user_paths import expand_overrides
from toyexp.base.writing import reject_bad_names
from toyexp.cli.commands import COMMANDS, find
from toyexp.config.flags import PRINTING_FLAGS, build_request, read_flags
from toyexp.interfaces.callback import Callback
from toyexp.interfaces.command import Command, parse_modules
from toyexp.sweeps.combinations import STACK, TRIAL, exit_with_sweep, is_job

if TYPE_CHECKING:
    from toyexp.config.request import Request


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default sys.argv, print its error if it fails, and return its exit code.

    The code is 0 for success, 1 for failure, 2 for invalid input, and 130 or 143 after SIGINT or SIGTERM.
    """
    typed = sys.argv[1:] if argv is None else argv
    return run_to_exit_code(partial(run_words, typed), lambda error: add_page(error, typed))


def add_page(error: str, typed: Sequence[str]) -> str:
    """Append to an error message the name of the page that explains it; `typed` are the words of the command line.

    In the process of a sweep's job, return the message unchanged, because the sweep's own process prints it.
    """
    from toyexp.cli.pages import add_page

    return error if is_job() else add_page(error, typed[0] if typed else "")


@reject_bad_names()
@attribute_part_errors()
def run_words(typed: Sequence[str]) -> int:
    """Execute the words of a command line (a sub-command, the help, the version, or training); return the exit code."""
    exit_with_sweep()
    words = list(typed)
    if words[:1] in (["-sc"], ["--shell-completion"]):  # Hydra's flags for completion
        words = ["completion", *(word.removeprefix("install=") for word in words[1:])]
    if words[:1] != ["completion"]:  # completion needs the words as typed
        words = expand_overrides(choose_colour(words))
    if words and words[0].isidentifier() and (command := find(words[0], words)):
        if started_ranks().count > 1:
            raise UserError(f"{words[0]}: runs in one process; only use torchrun to train")
        gc.enable()
        show_status("")
        if command.name in COMMANDS:
            return _call(command, words[1:])
        return _call_plugin_command(command, words[1:])
    if {"-h", "--help"} & {*words} and not words[0].isidentifier():  # an unknown command is an error below
        return _call(COMMANDS["help"](), [])
    if "--version" in words:
        show_status("")
        print(f"toyexp {toyexp.__version__}")
        return 0
    return run(words)


def _call(command: Command, words: Sequence[str]) -> int:
    if not {"-h", "--help"} & {*takewhile("--".__ne__, words)}:
        return command.run(command.read(words))
    print_usage(command.usage(parse_modules(words)))
    return 0


def _call_plugin_command(command: Command, words: Sequence[str]) -> int:
    """Run a plugin's sub-command and return its exit code.

    Raise RunFailed, with the plugin's name, for an unexpected exception, and PluginFailed for an invalid exit code.
    """
    try:
        with attribute_errors(f"command.{command.name}", "while it ran"):
            code = _call(command, words)
    except RunFailed as error:
        if isinstance(error.__cause__, BrokenPipeError):  # the reader of the output has exited
            raise error.__cause__ from None
        raise
    if type(code) is not int or not 0 <= code < 256:
        problem = f"{printable(repr(code))}; an exit code must be a whole number from 0 (success) to 255"
        raise PluginFailed(f"command.{command.name} returned {problem}")
    return code


# -- running --------------------------------------------------------------------------------------------------------


def run(words: Sequence[str]) -> int:
    """Run the words that follow `toyexp` without a sub-command, and return the exit code.

    They train one run, or with -m a sweep. With --dry-run they only estimate its time and memory, and with flags such
    as --cfg they only print information.
    """
    available_cores()  # validates TOYEXP_CORES, even if engine.threads overrides it
    working_directory()  # raises if the directory, into which runs are written, is gone
    flags, settings, resume = read_flags(words)
    request = build_request(flags, settings)
    gc.freeze()  # collections skip what exists now: mostly imported modules
    gc.enable()
    if STACK in os.environ:
        from toyexp.sweeps.launchers.stack_process import train_stack

        return train_stack(request)
    if flags.keys() & PRINTING_FLAGS:
        from toyexp.cli.inspect import inspect

        show_status("")
        return inspect(flags, request)
    several = "--multirun" in flags or "sweep.resume" in request.values
    if started_ranks().count > 1 and (several or "--dry-run" in flags):
        problem = "-m: a sweep starts its own processes" if several else "--dry-run: runs in one process"
        raise UserError(f"{problem}; only use torchrun to train one run")
    if several:
        return _sweep(flags, request)
    from toyexp.training.resume import AUTO, Complete

    try:
        if "--dry-run" not in flags:
            return _train(request, resume, not words)
        from toyexp.cli.dry_run import dry_run

        return dry_run(request, resume, "--json" in flags)
    except Complete as error:
        if resume != AUTO:
            raise
        print_line(f"{error}; for a new run leave out resume=auto")
        return 0


def _train(request: Request, resume: str | None, is_bare: bool) -> int:
    """Train one run, print its result and a command to try next, and return 0.

    `resume` is the directory of a run to resume, "auto", or None for a new run. If the user typed no words (`is_bare`)
    and there was no outputs/ yet, print several commands to try next.
    """
    from toyexp.cli.pages import run_hints
    from toyexp.runner.one_run import follow, prepare_request
    from toyexp.training.verdict import print_result

    if started_ranks().rank:
        follow(request, resume)
        return 0
    callbacks: Mapping[str, Callback] = {}
    if TRIAL in os.environ:
        from toyexp.sweeps.search.pruning import (
            pop_pruning_callback,  # lets the search prune this run
        )

        callbacks = pop_pruning_callback()
    is_first = is_bare and not os.path.lexists("outputs")
    with pause_collection():
        ready = prepare_request(request, resume, callbacks)
        gc.freeze()
    with contextlib.ExitStack() as stack:
        if ready.resumed is not None and not is_job():
            from toyexp.sweeps.directory import update_summary

            stack.enter_context(update_summary(ready.directory, resumed=True))
        result = ready.run()
    print_result(result)
    if not is_job():
        print_line("\n".join(run_hints(result, is_first)))
    return 0


def _sweep(flags: Mapping[str, str], request: Request) -> int:
    from toyexp.cli.pages import sweep_hints
    from toyexp.config.schema import START_DIRECTORY
    from toyexp.sweeps.begin import prepare_sweep

    try:
        with silence("--json" in flags):
            runner = prepare_sweep(flags, request)
        if "--dry-run" not in flags:
            code = runner.run()
            if not code and runner.folder and len(runner.source.jobs) > 1:
                print_line("\n".join(sweep_hints(runner.folder.path, runner.best_model())))
            return code
        from toyexp.cli.dry_run import dry_run_sweep

        return dry_run_sweep(runner, "--json" in flags)
    finally:
        os.environ.pop(START_DIRECTORY, None)
