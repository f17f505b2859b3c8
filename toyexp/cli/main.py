"""The command line: `python -m toyexp [key=value ...]` runs an experiment, `-m` sweeps, and a few sub-commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import toyexp
from toyexp.base.attribution import attributed, of_a_part
from toyexp.base.errors import PluginFailed, RunFailed, UserError, printable
from toyexp.base.exit_codes import exit_code_of
from toyexp.base.files import working_directory
from toyexp.base.formatting import short
from toyexp.base.ranks import started_ranks
from toyexp.base.terminal import say, status
from toyexp.base.threads import available_cores
from toyexp.base.user_paths import at_home
from toyexp.base.writing import possible_names
from toyexp.cli.commands import COMMANDS, find
from toyexp.cli.flags import SHOWING, read, request_of
from toyexp.interfaces.command import Command, modules_in
from toyexp.sweeps.combinations import STACK, TRIAL, follow_the_sweep, is_a_job

if TYPE_CHECKING:
    from toyexp.config.compose import Composed
    from toyexp.config.request import Request
    from toyexp.sweeps.runner import Asked
    from toyexp.training.provenance import Record
    from toyexp.training.resume import Resumed
    from toyexp.training.run_config import Prepared, Result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0 done, 1 failed, 2 bad input, 130/143 interrupted."""
    typed = sys.argv[1:] if argv is None else argv
    return exit_code_of(partial(answer, typed), lambda error: explained(error, typed))


def explained(error: str, typed: Sequence[str]) -> str:
    """An error with the page of the documentation that is about it; the sweep of a job tells its error itself."""
    from toyexp.cli.pages import with_page

    return error if is_a_job() else with_page(error, typed[0] if typed else "")


def _owners() -> Mapping[type, str]:
    from toyexp.plugins.rules import owners  # deferred: what nothing went wrong with has no use for it

    return owners()


@possible_names()
@of_a_part(_owners)
def answer(typed: Sequence[str]) -> int:
    """Does what a command line asks for; returns the exit code."""
    follow_the_sweep()
    words = list(typed)
    if words[:1] in (["-sc"], ["--shell-completion"]):  # Hydra's words for it
        words = ["completion", *(word.removeprefix("install=") for word in words[1:])]
    if words[:1] != ["completion"]:  # which completes what is typed as it is typed
        words = at_home(words)
    if words and words[0].isidentifier() and (command := find(words[0], words)):
        if started_ranks().count > 1:
            raise UserError(f"{words[0]}: is done by one process; torchrun starts the ranks of a run")
        status("")
        return _call(command, words[1:])
    if {"-h", "--help"} & {*words} and not words[0].isidentifier():  # a word that is no command is an error below
        return answer(["help"])
    if "--version" in words:
        status("")
        print(f"toyexp {toyexp.__version__}")
        return 0
    return run(words)


def _call(command: Command, words: Sequence[str]) -> int:
    """Runs a sub-command; what one of a plugin raises without meaning to is told as its failure."""

    def do() -> int:
        if "-h" not in words and "--help" not in words:
            return command.run(command.read(words))
        print(command.usage(modules_in(words)))
        return 0

    if command.name in COMMANDS:
        return do()
    try:
        with attributed(f"command.{command.name}", "while it ran"):
            code = do()
        if type(code) is not int or not 0 <= code < 256:
            what = f"{printable(repr(code))}; an exit code is a number from 0, which is done, to 255"
            raise PluginFailed(f"command.{command.name} gave {what}")
        return code
    except RunFailed as error:
        if isinstance(error.__cause__, BrokenPipeError):  # whoever reads what it prints has gone
            raise error.__cause__ from None
        raise


# -- running --------------------------------------------------------------------------------------------------------


def run(words: Sequence[str]) -> int:
    """Composes and runs one experiment, or a sweep with -m."""
    available_cores()  # which refuses a TOYEXP_CORES that cannot be, also where engine.threads is what counts
    working_directory()  # which says so when it is gone: runs are written there
    flags, settings, resume = read(words)
    request = request_of(flags, settings)
    if STACK in os.environ:
        from toyexp.sweeps.launchers.stack import train_stack

        return train_stack(request, ready)
    if flags.keys() & SHOWING:
        from toyexp.cli.inspect import inspect

        status("")
        return inspect(flags, request)
    if "--dry-run" in flags and started_ranks().count > 1:
        raise UserError("--dry-run: is done by one process; torchrun starts the ranks of a run")
    if "--multirun" in flags or "sweep.resume" in request.values:
        if started_ranks().count > 1:
            raise UserError("-m: a sweep starts its own processes; torchrun starts the ranks of one run")
        from toyexp.sweeps.begin import sweep

        return sweep(many_runs(flags, request))
    if "--dry-run" in flags:
        _require_one_run(request)
        return _dry_run(flags, request, resume)
    if started_ranks().rank:
        _require_one_run(request)
        of_run = request if resume in (None, "auto") else request.of_run(Path(str(resume)))
        of_run.parts().engine.follow()  # it takes part in the first rank's run
        return 0
    from toyexp.cli.pages import after_a_run, nothing_yet
    from toyexp.training.resume import AUTO, Complete
    from toyexp.training.verdict import print_result

    first = not words and nothing_yet()
    try:
        print_result(result := carry_out(*one_run(request, resume)))
    except Complete as error:
        if resume != AUTO:
            raise
        say(f"{error}, or without resume=auto for a new run")
        return 0
    if first:
        say("\n".join(after_a_run(result)))
    return 0


def one_run(request: Request, resume: str | None = None) -> tuple[Prepared, Path, Resumed | None]:
    """A run that is ready, and what it goes on from: nothing, a run that is named, or with auto the newest of its name.

    Raises UserError for settings that cannot work, and where there is nothing to go on with.
    """
    from toyexp.training.resume import AUTO, OtherExperiment

    _require_one_run(request)
    if resume is None:
        return ready(request.compose())
    if resume != AUTO:
        return ready(_of_run(request, Path(resume)).compose(), resume=Path(resume).absolute())
    composed = request.compose()
    found, parent, name = _newest(composed)
    nothing = f"no run named {name} with a checkpoint below {parent}: a new one"
    say(f"resume  {short(found) if found else nothing}")
    try:
        return ready(composed, resume=found)
    except OtherExperiment as error:
        raise UserError(f"{error}; a new run takes a name=... of its own, or no resume=auto") from None


def _dry_run(flags: Mapping[str, str], request: Request, resume: str | None) -> int:
    """Says what a run would be; its errors are the run's."""
    from toyexp.base.memory import running_out
    from toyexp.cli.dry_run import foresee
    from toyexp.interfaces.command import Arguments
    from toyexp.training.resume import Complete

    found = None if resume in (None, "auto") else Path(str(resume))
    request = _of_run(request, found) if found else request
    composed = request.compose()
    found = _newest(composed)[0] if resume == "auto" else found and found.absolute()
    try:
        prepared, where, resumed = ready(composed, resume=found)
    except Complete as error:
        if resume != "auto":
            raise
        say(f"{error}, or without resume=auto for a new run")
        return 0
    status("taking a few steps")
    with running_out():
        answer = foresee(request, composed, prepared, where, resumed)
    status("")
    return answer.show(Arguments(set(flags), {}, [], []))


def _require_one_run(request: Request) -> None:
    """Raises UserError for a setting that is about many runs."""
    of_job = any(o.key_or_group == "hydra.job.num" for o in request.settings)
    many = ("sweep.",) if of_job else ("sweep.", "hydra.sweep.")  # a job has those of its sweep
    for override in request.settings:
        if f"{override.key_or_group}.".startswith(many):
            raise UserError(
                f"{override.input_line}: is about many runs; add -m to sweep, or sweep.resume=DIR to go on with a sweep"
            )


def _of_run(request: Request, run: Path) -> Request:
    """What going on with a run is asked of, in its directory."""
    from toyexp.training.resume import require_run

    require_run(run, "resume")
    for override in request.settings:
        if override.key_or_group == "hydra.run.dir":
            raise UserError(f"{override.input_line}: resume={run} goes on in that directory; leave it out")
    return request.of_run(run)


def _newest(composed: Composed) -> tuple[Path | None, Path, str]:
    """The run that resume=auto goes on with, if there is one, where it was looked for, and by what name."""
    from toyexp.training.resume import find_newest

    composed.settle()
    parent, name = composed.directory("hydra.run.dir").parent, str(composed.cfg.name)
    return find_newest(parent, name), parent, name


@of_a_part(_owners)  # each job of a sweep by itself
def experiment(composed: Composed, directory: Path | None = None, resume: Path | None = None) -> Result:
    """Builds, checks and runs one configuration in a directory, its own unless told, or goes on with a run."""
    return carry_out(*ready(composed, directory, resume))


def carry_out(prepared: Prepared, where: Path, resumed: Resumed | None) -> Result:
    """Runs what is prepared; what becomes of a job that goes on by itself stands in its sweep's files too."""
    from toyexp.training.experiment import execute

    if resumed is None or is_a_job():  # whose sweep sees to it
        return execute(prepared, where, say, resumed)
    from toyexp.sweeps.directory import kept_up

    with kept_up(where):
        return execute(prepared, where, say, resumed)


def ready(
    composed: Composed, directory: Path | None = None, resume: Path | None = None
) -> tuple[Prepared, Path, Resumed | None]:
    """A run that is built and checked, where it goes, and what it goes on from; nothing is written yet."""
    from toyexp.base.memory import running_out
    from toyexp.base.ownership import require_empty
    from toyexp.training.experiment import prepare
    from toyexp.training.provenance import MOVED, recorded
    from toyexp.training.resume import load as load_run
    from toyexp.training.resume import recall

    status("starting the engine")
    source = composed.source
    begun = source.begun if source.begun.cwd else recorded(source.directory)  # of the run that a new one repeats
    with running_out(), begun.told(MOVED):
        built = composed.parts()
        if TRIAL in os.environ:
            from toyexp.sweeps.search.pruning import (
                taken,  # deferred: a run of no search need not load what a search does
            )

            built.callbacks.update(taken())
        built.engine.follow()  # the first rank, which has the others come
        if resume:
            recall(resume, built.data)
        where = resume or directory or composed.directory("hydra.run.dir")
        if resume is None:
            require_empty(where, "hydra.run.dir")
        status("reading the data")
        try:
            prepared = prepare(built)
        except UserError:
            with composed.placed():
                raise
        if resume:
            return prepared, where, load_run(where, prepared)
        return _compared(prepared, begun, source.directory, composed), where, None


def _compared(prepared: Prepared, begun: Record, repeated: Path, composed: Composed) -> Prepared:
    """Return the run with a warning if it repeats another one whose data or files were others, and none was typed."""
    from toyexp.training.provenance import sources_of

    if {"data", "recipe", "model"} & {o.key_or_group.split(".")[0] for o in composed.given} or not begun.sources:
        return prepared
    told = [f"{short(repeated)}: this run repeats it, but {change}" for change in begun.differing(sources_of(prepared))]
    return replace(prepared, warnings=[*prepared.warnings, *told[:1]])


def many_runs(flags: Mapping[str, str], request: Request) -> Asked:
    """What a sweep is asked for, and how its jobs are run."""
    from toyexp.sweeps.runner import Asked

    return Asked(flags, request, experiment, run)
