"""A sweep from its command line: the jobs that its values make, or those of one that is gone on with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError, printable
from toyexp.base.ownership import SWEEP
from toyexp.base.terminal import say
from toyexp.interfaces.command import modules_in
from toyexp.sweeps.combinations import check_once, combinations, own_sweep, swept
from toyexp.sweeps.directory import Job, SweepDir
from toyexp.sweeps.launchers.processes import require
from toyexp.sweeps.runner import Asked, Runner
from toyexp.sweeps.search.space import space

if TYPE_CHECKING:
    from toyexp.config.request import Request
    from toyexp.config.top_level import Sweep

FLAGS = ("--config-path", "--config-name", "--config-dir")  # those that a job is run with too


def sweep(asked: Asked) -> int:
    """Runs every combination of the values, or goes on with a sweep; returns the exit code."""
    from toyexp.config.schema import BEGUN

    try:
        runner, jobs = prepared(asked)
        return runner.foresee(jobs) if "--dry-run" in asked.flags else runner.run(jobs)
    finally:
        os.environ.pop(BEGUN, None)


def prepared(asked: Asked) -> tuple[Runner, Sequence[Job]]:
    """What runs the jobs of a sweep, new or gone on with, and those that there are to run yet."""
    from toyexp.config.keys import Keys
    from toyexp.config.mistakes import check_blanks, check_listed, check_settings
    from toyexp.config.words import lines

    request = asked.request
    keys = Keys.of(request.registry)
    for override in request.settings:  # what is wrong in every job is told once, before the first
        if override.is_sweep_override() and _is_own(override):
            raise UserError(f"{override.input_line}: takes one value")
        if not override.is_sweep_override():
            check_listed(override, keys)
            check_settings([override], keys, request.source)
        if override.key_or_group == "resume":
            raise UserError(f"{override.input_line}: continues one run; a sweep goes on with sweep.resume=DIR")
        if override.key_or_group == "hydra.run.dir":
            raise UserError(f"{override.input_line}: is of one run; a sweep and its jobs go to hydra.sweep.dir=...")
    if "sweep.resume" in request.values:
        return _go_on(asked, Path(request.values["sweep.resume"]))
    parsed = [*own_sweep(request), *request.settings]
    for override in parsed:
        check_blanks(override, keys)
    check_once(parsed)
    fixed = [o for o in parsed if not o.is_sweep_override() and not _is_own(o)]
    own = [o for o in request.settings if _is_own(o)]
    flags = {k: v if k == "--config-name" else str(Path(v).absolute()) for k, v in asked.flags.items() if k in FLAGS}
    memory = {"flags": flags, "settings": lines(fixed), "sweep": lines(own), "cwd": str(Path.cwd()), "space": []}
    of_jobs = replace(request, settings=fixed)
    settings = _settings(of_jobs, own)
    if settings.search is not None:
        from toyexp.sweeps.search.searcher import Searcher

        memory["space"] = lines([o for o in parsed if o.is_sweep_override()])
        return Searcher(asked, of_jobs, settings, [], memory, space(settings.search, parsed, keys.types)), []
    jobs = [Job(number, list(varied)) for number, varied in enumerate(combinations(parsed))]
    values = {word: value for o in parsed if o.is_sweep_override() for word, value in swept(o)}
    return Runner(asked, of_jobs, settings, jobs, memory, values), jobs


def _go_on(asked: Asked, path: Path) -> tuple[Runner, Sequence[Job]]:
    from toyexp.config.schema import BEGUN, Source
    from toyexp.config.words import lines, parse

    typed = asked.request.settings
    others = lines([o for o in typed if not _is_own(o) and o.key_or_group != "plugins"])
    for word in [*others, *(flag for flag in asked.flags if flag in FLAGS)]:
        raise UserError(f"{word}: a sweep keeps its settings; beside sweep.resume go sweep.* and plugins=[...] alone")
    folder = SweepDir.open(path.resolve() if ".." in path.parts else path)  # below which its jobs lie
    try:
        memory = folder.asked
        wanted = modules_in(memory["settings"])
        if missing := [name for name in wanted if name not in asked.request.modules]:
            raise UserError(
                f"sweep.resume={path}: its jobs use the local plugin {missing[0]}; code is only loaded from the "
                f"command line: add 'plugins=[{','.join(wanted)}]'"
            )
        if memory["cwd"] != str(Path.cwd()):
            if there := Path(memory["cwd"]).is_dir():
                os.environ[BEGUN] = memory["cwd"]
            if "--json" not in asked.flags:
                where = f"are from there{'' if there else f', which is gone: they are from {Path.cwd()}'}"
                say(f"begun in {printable(memory['cwd'])}: relative paths in its settings {where}")
        source = Source.of(*(memory["flags"].get(flag) for flag in FLAGS))
        request = replace(asked.request, settings=parse(memory["settings"]), source=source)
        own = [o for o in typed if _is_own(o)]
        settings = _settings(request, [*parse(memory["sweep"]), *own])
        runner = _runner(asked, request, settings, folder, [o.key_or_group for o in own])
    except BaseException:
        folder.close()
        raise
    return runner, runner.unfinished()


def _runner(asked: Asked, request: Request, settings: Sweep, folder: SweepDir, own: Sequence[str]) -> Runner:
    """What goes on with the jobs of a directory."""
    from toyexp.config.keys import Keys
    from toyexp.config.top_level import COMPARED
    from toyexp.config.words import parse

    if fixed := [key for key in own if key in COMPARED]:
        what = "search is what it began as, but for sweep.trials" if settings.search else "sweep is no search"
        raise UserError(f"{fixed[0]}: this {what}")
    memory = folder.asked
    if settings.search is None:
        return Runner(asked, request, settings, folder.jobs, memory, {}, folder)
    from toyexp.sweeps.search.searcher import Searcher

    trials = list(dict.fromkeys(job.trial for job in folder.jobs))
    if trials != list(range(len(trials))):
        raise UserError(f"{folder.path / SWEEP}: is damaged: its jobs are of trials {printable(str(trials), 60)}")
    keys = space(settings.search, parse(memory["space"]), Keys.of(request.registry).types)
    return Searcher(asked, request, settings, folder.jobs, memory, keys, folder)


def _is_own(override: Any) -> bool:
    return bool(override.key_or_group.split(".")[0] == "sweep")


def _settings(request: Request, own: Sequence[Any]) -> Sweep:
    """How the jobs are run; an experiment that is chosen may say so too."""
    chosen = [o for o in request.settings if o.key_or_group == "experiment"]
    settings = replace(request, settings=[*chosen, *own]).compose().sweep_settings()
    if settings.isolate and getattr(os, "fork", None) is None:  # only pipes of POSIX can be waited for so
        raise UserError("sweep.isolate=true: no jobs in processes of their own on Windows; sweep.isolate=false, or WSL")
    require(settings.launcher)
    return settings
