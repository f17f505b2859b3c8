"""A sweep from its command line: the jobs that its values make, or those of one that is gone on with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.ownership import SWEEP_FILE
from toyexp.base.terminal import print_line
from toyexp.config.keys import Keys
from toyexp.config.mistakes import check_blanks, check_brackets, check_settings
from toyexp.config.request import Request
from toyexp.config.schema import START_DIRECTORY, Source
from toyexp.config.top_level import SEARCH_IDENTITY, Sweep
from toyexp.config.words import input_lines, parse
from toyexp.interfaces.command import parse_modules
from toyexp.sweeps.combinations import check_once, combinations, own_sweep, swept
from toyexp.sweeps.directory import Job, SweepDir, shared_words
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.launchers.on_ray import OnRay
from toyexp.sweeps.launchers.on_submitit import OnSubmitit
from toyexp.sweeps.launchers.processes import InProcess, Processes, Serial
from toyexp.sweeps.launchers.stacks import Stacks
from toyexp.sweeps.runner import Asked, Runner
from toyexp.sweeps.search.searcher import Search
from toyexp.sweeps.search.space import space
from toyexp.sweeps.sources import JobSource

FLAGS = ("--config-path", "--config-name", "--config-dir")  # those that a job is run with too
LAUNCHERS: dict[str, type[Launcher]] = {cls.name: cls for cls in (Serial, Processes, Stacks, OnSubmitit, OnRay)}


def prepare_sweep(flags: Mapping[str, str], request: Request) -> Runner:
    """Return what runs the jobs of a sweep, new or resumed."""
    keys = Keys.from_registry(request.registry)
    for override in request.settings:  # what is wrong in every job is told once, before the first
        if override.is_sweep_override() and _is_own(override):
            raise UserError(f"{override.input_line}: takes one value")
        if not override.is_sweep_override():
            check_brackets(override, keys)
            check_settings([override], keys, request.source)
        if override.key_or_group == "resume":
            raise UserError(f"{override.input_line}: continues one run; a sweep goes on with sweep.resume=DIR")
        if override.key_or_group == "hydra.run.dir":
            raise UserError(f"{override.input_line}: is of one run; a sweep and its jobs go to hydra.sweep.dir=...")
    if "sweep.resume" in request.values:
        return _resumed(flags, request, Path(request.values["sweep.resume"]))
    parsed = [*own_sweep(request), *request.settings]
    for override in parsed:
        check_blanks(override, keys)
    check_once(parsed)
    fixed = [o for o in parsed if not o.is_sweep_override() and not _is_own(o)]
    own = [o for o in request.settings if _is_own(o)]
    of_jobs = replace(request, settings=fixed)
    settings = _settings(of_jobs, own)
    kept = {k: v if k == "--config-name" else str(Path(v).absolute()) for k, v in flags.items() if k in FLAGS}
    memory = {
        "flags": kept,
        "settings": input_lines(fixed),
        "sweep": input_lines(own),
        "cwd": str(Path.cwd()),
        "space": [],
    }
    source: JobSource
    values: dict[str, Any] = {}
    if settings.search is not None:
        memory["space"] = input_lines([o for o in parsed if o.is_sweep_override()])
        source = Search(settings, space(settings.search, parsed, keys.types), [], shared_words(memory))
    else:
        source = JobSource([Job(number, list(varied)) for number, varied in enumerate(combinations(parsed))])
        values = {word: value for o in parsed if o.is_sweep_override() for word, value in swept(o)}
    configs = JobConfigs(of_jobs, values)
    return Runner(
        Asked(flags, request.modules, settings, memory), source, _launcher(settings, source, configs), configs
    )


def _launcher(settings: Sweep, source: JobSource, configs: JobConfigs) -> Launcher:
    """Return what runs jobs from a source."""
    return _launcher_class(settings)(settings, source.samples, source.total, configs)


def _resumed(flags: Mapping[str, str], request: Request, path: Path) -> Runner:
    typed = request.settings
    others = input_lines([o for o in typed if not _is_own(o) and o.key_or_group != "plugins"])
    for word in [*others, *(flag for flag in flags if flag in FLAGS)]:
        raise UserError(f"{word}: a sweep keeps its settings; beside sweep.resume go sweep.* and plugins=[...] alone")
    folder = SweepDir.open(path.resolve() if ".." in path.parts else path)  # below which its jobs lie
    try:
        memory = folder.asked
        wanted = parse_modules(memory["settings"])
        if missing := [name for name in wanted if name not in request.modules]:
            raise UserError(
                f"sweep.resume={path}: its jobs use the local plugin {missing[0]}; code is only loaded from the "
                f"command line: add 'plugins=[{','.join(wanted)}]'"
            )
        if memory["cwd"] != str(Path.cwd()):
            if there := Path(memory["cwd"]).is_dir():
                os.environ[START_DIRECTORY] = memory["cwd"]
            if "--json" not in flags:
                where = f"are from there{'' if there else f', which is gone: they are from {Path.cwd()}'}"
                print_line(f"begun in {printable(memory['cwd'])}: relative paths in its settings {where}")
        source = Source.from_flags(*(memory["flags"].get(flag) for flag in FLAGS))
        of_jobs = replace(request, settings=parse(memory["settings"]), source=source)
        own = [o for o in typed if _is_own(o)]
        settings = _settings(of_jobs, [*parse(memory["sweep"]), *own])
        if fixed := [o.key_or_group for o in own if o.key_or_group in SEARCH_IDENTITY]:
            what = "search is what it began as, but for sweep.trials" if settings.search else "sweep is no search"
            raise UserError(f"{fixed[0]}: this {what}")
        configs = JobConfigs(of_jobs, {})
        jobs = _source(settings, folder, Keys.from_registry(request.registry).types)
        launcher = _launcher(settings, jobs, configs)
        return Runner(Asked(flags, request.modules, settings, memory), jobs, launcher, configs, folder)
    except BaseException:
        folder.close()
        raise


def _launcher_class(settings: Sweep) -> type[Launcher]:
    return LAUNCHERS[settings.launcher] if settings.isolate else InProcess


def _source(settings: Sweep, folder: SweepDir, types: Callable[[str], set[Any]]) -> JobSource:
    """Return what goes on with the jobs of a directory."""
    if settings.search is None:
        return JobSource(folder.jobs)
    trials = list(dict.fromkeys(job.trial for job in folder.jobs))
    if trials != list(range(len(trials))):
        raise UserError(f"{folder.path / SWEEP_FILE}: is damaged: its jobs are of trials {printable(str(trials), 60)}")
    keys = space(settings.search, parse(folder.asked["space"]), types)
    return Search(settings, keys, folder.jobs, shared_words(folder.asked))


def _is_own(override: Any) -> bool:
    return bool(override.key_or_group.split(".")[0] == "sweep")


def _settings(request: Request, own: Sequence[Any]) -> Sweep:
    """How the jobs are run; an experiment that is chosen may say so too."""
    chosen = [o for o in request.settings if o.key_or_group == "experiment"]
    settings = replace(request, settings=[*chosen, *own]).compose().sweep_settings()
    if settings.isolate and getattr(os, "fork", None) is None:  # only pipes of POSIX can be waited for so
        raise UserError("sweep.isolate=true: no jobs in processes of their own on Windows; sweep.isolate=false, or WSL")
    if not settings.isolate and settings.launcher != Serial.name:
        what = f"runs one job after another in this process, without {settings.launcher}"
        raise UserError(f"sweep.isolate=false: {what}")
    _launcher_class(settings).check(settings)
    return settings
