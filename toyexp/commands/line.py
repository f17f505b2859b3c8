"""The command line: `python -m toyexp [key=value ...]` runs an experiment, `-m` sweeps, and a few sub-commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toyexp.base.errors import RunFailed, ToyexpError, UserError
from toyexp.base.home import with_home, with_quotes
from toyexp.base.signals import Signals, end_process, hidden_interrupt, stop_signals
from toyexp.base.terminal import complain, drop_output, fit_encoding, hold_standard_files, output_fails, say, status
from toyexp.base.threads import available_cores
from toyexp.base.words import short
from toyexp.commands.flags import FLAGS, SHOWING, check_flags, split, take_resume
from toyexp.commands.registered import show_help, show_version
from toyexp.commands.table import COMMANDS
from toyexp.contract.registry import Registry, load
from toyexp.sweep.request import follow_the_sweep, in_our_words, local_modules
from toyexp.training.introduction import print_result

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from toyexp.config.schema import Source
    from toyexp.training.parts import Result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0 done, 1 failed, 2 bad input, 130/143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["completion"]:  # which completes what is typed as it is typed
        words = [word if os.path.lexists(word) else with_quotes(with_home(word)) for word in words]
    follow_the_sweep()
    hold_standard_files()
    fit_encoding()
    signals: Signals | None = None
    try:
        with stop_signals() as signals:
            code = _answer(words)
            if sys.stdout:
                sys.stdout.flush()  # while an error of it can still be told
            return code
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except BrokenPipeError:  # `toyexp plugins | head`
        drop_output()
        return 0
    except Exception as error:
        # It came in the middle of someone's clean-up, or of native code that raises its own error, as imports in C do.
        hidden = hidden_interrupt(error) or (signals.last_word() if signals else None)
        if hidden is not None and not isinstance(error, RunFailed):
            return _interrupted(hidden)
        from toyexp.base.packages import broken_requirement

        match error:
            case ToyexpError():
                complain(f"error: {error}")
                return error.exit_code
            case MemoryError():
                complain(f"error: out of memory{f' ({error})' if str(error) else ''}")
                return 1
            case _ if (broken := broken_requirement(error)) is not None:
                complain(f"error: {broken}")
                return 1
            case OSError():  # a disk that is full, a directory that went away, too many open files
                what = error.filename or ("the output could not be written" if output_fails() else "a file")
                complain(f"error: {what}: {error.strerror or error}")
                return 1
        raise
    finally:
        status("")


def _answer(words: Sequence[str]) -> int:
    """Does what a command line asks for; returns the exit code."""
    if words and words[0] in COMMANDS:
        status("")
        return COMMANDS[words[0]](words[1:])
    if words and words[0] in ("-sc", "--shell-completion"):  # Hydra's words for it
        return COMMANDS["completion"]([word.removeprefix("install=") for word in words[1:]])
    if "-h" in words or "--help" in words:
        status("")
        return show_help()
    if "--version" in words:
        status("")
        return show_version()
    return run(words)


def _interrupted(error: KeyboardInterrupt) -> int:
    complain(str(error) or "interrupted")
    return end_process(getattr(error, "exit_code", 130))


# -- running --------------------------------------------------------------------------------------------------------


def run(words: Sequence[str]) -> int:
    """Composes and runs one experiment, or a sweep with -m."""
    available_cores()  # which refuses a TOYEXP_CORES that cannot be, also where engine.threads is what counts
    flags, settings = split(words)
    settings = in_our_words(settings)
    resume = None
    if "--multirun" not in flags:
        settings, resume = take_resume(settings)
    from toyexp.config import build as config
    from toyexp.config import mistakes, schema
    from toyexp.training.resume import AUTO, Complete, OtherExperiment, find_newest, require_run

    parsed = mistakes.parse(settings)
    modules = local_modules(parsed)
    registry = load(modules)
    schema.store_schemas(registry)
    source = schema.Source.of(flags.get("--config-path"), flags.get("--config-name"), flags.get("--config-dir"))
    keys = {o.key_or_group: str(o.input_line) for o in parsed}
    check_flags(flags, resume)
    if flags.keys() & SHOWING:
        status("")
        return inspect(flags, settings, registry, source)
    if "--multirun" in flags or "sweep.resume" in keys:
        return sweep(parsed, flags, registry, modules, source)
    many = ("sweep.",) if "hydra.job.num" in keys else ("sweep.", "hydra.sweep.")  # a job has those of its sweep
    for line in (line for key, line in keys.items() if f"{key}.".startswith(many)):
        raise UserError(f"{line}: is about many runs; add -m to sweep, or sweep.resume=DIR to go on with a sweep")
    if resume is not None and resume != AUTO:
        require_run(Path(resume), "resume")
        if "hydra.run.dir" in keys:
            raise UserError(f"{keys['hydra.run.dir']}: resume={resume} goes on in that directory; leave it out")
        asked = {o.key_or_group: str(o.value()) for o in parsed if not o.is_sweep_override()}
        source = schema.Source.of_run(Path(resume), asked, registry, modules)
    cfg = config.compose(settings, registry, source)
    found = Path(resume).absolute() if resume else None
    if resume == AUTO:
        config.settle(cfg, registry)
        parent = config.directory(cfg, "hydra.run.dir").parent
        found = find_newest(parent, str(cfg.name))
        nothing = f"no run named {cfg.name} with a checkpoint below {parent}: a new one"
        say(f"resume  {short(found) if found else nothing}")
    try:
        result = experiment(cfg, registry, modules, lambda: config.directory(cfg, "hydra.run.dir"), found)
    except Complete as error:
        if resume != AUTO:
            raise
        say(f"{error}, or without resume=auto for a new run")
        return 0
    except OtherExperiment as error:
        if resume != AUTO:
            raise
        raise UserError(f"{error}; a new run takes a name=... of its own, or no resume=auto") from None
    print_result(result)
    return 0


def experiment(
    cfg: DictConfig,
    registry: Registry,
    modules: Sequence[str],
    directory: Callable[[], Path],
    resume: Path | None = None,
) -> Result:
    """Builds, checks and runs one composed configuration, or goes on with the run in `resume`.

    `directory` is asked once the settings were checked, before the data is opened.
    """
    from toyexp.base.memory import running_out
    from toyexp.base.ownership import require_empty
    from toyexp.config.build import build
    from toyexp.training.experiment import execute, prepare
    from toyexp.training.resume import load as load_run
    from toyexp.training.resume import recall

    status("starting the engine")
    with running_out():
        built = build(cfg, registry, modules)
        if resume:
            recall(resume, built.data)
        where = resume or directory()
        if resume is None:
            require_empty(where, "hydra.run.dir")
        status("reading the data")
        prepared = prepare(built)
        resumed = load_run(where, prepared) if resume else None
    return execute(prepared, where, say, resumed)


def sweep(
    parsed: Sequence[Override], flags: dict[str, str], registry: Registry, modules: Sequence[str], source: Source
) -> int:
    """Runs every combination of the values, or goes on with a sweep."""
    from toyexp.sweep.runner import Asked
    from toyexp.sweep.runner import sweep as run_jobs

    def one(cfg: DictConfig, directory: Path) -> Result:
        return experiment(cfg, registry, modules, lambda: directory)

    return run_jobs(Asked(flags, parsed, modules, registry, source, one, run))


def inspect(flags: dict[str, str], settings: Sequence[str], registry: Registry, source: Source) -> int:
    """Shows what Hydra knows, without running: --cfg, --info and --hydra-help."""
    import hydra

    from toyexp.config import build as config
    from toyexp.config import mistakes

    if "--hydra-help" not in flags:
        cfg = config.compose(settings, registry, source)
        if "--package" in flags:
            config.require_node(cfg, flags["--package"])
    shown = [w for f, v in flags.items() if not f.startswith(("--config", "--multirun"))
             for w in ([f] if FLAGS[f] is None else [f, v])]  # fmt: skip
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["toyexp", *shown, *source.overrides(), *settings]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions instead of Hydra's words and exit 1
    try:
        hydra.main(version_base="1.3", config_path=str(source.directory), config_name=source.name)(lambda cfg: None)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    except OSError:  # of what takes the output
        raise
    except Exception as error:
        raise UserError(f"{' '.join(shown)}: {mistakes.in_plain_words(error)}") from None
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full
    return 0
