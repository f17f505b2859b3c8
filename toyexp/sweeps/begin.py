"""Create the Runner of a sweep from a command line: of a new sweep, or of one that sweep.resume=DIR resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from toyexp.sweeps.combinations import check_unique, combinations, experiment_sweep
from toyexp.sweeps.directory import Job, SweepDir, SweepSpec
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.launcher import Launcher
from toyexp.sweeps.launchers.on_ray import OnRay
from toyexp.sweeps.launchers.on_submitit import OnSubmitit
from toyexp.sweeps.launchers.processes import InProcess, Processes, Serial
from toyexp.sweeps.launchers.stacks import Stacks
from toyexp.sweeps.runner import Runner
from toyexp.sweeps.search.searcher import Search
from toyexp.sweeps.search.space import parse_space
from toyexp.sweeps.sources import JobSource

JOB_FLAGS = ("--config-path", "--config-name", "--config-dir")  # flags that are passed on to jobs
LAUNCHERS: dict[str, type[Launcher]] = {cls.name: cls for cls in (Serial, Processes, Stacks, OnSubmitit, OnRay)}


def prepare_sweep(flags: Mapping[str, str], request: Request) -> Runner:
    """Create the runner of a new sweep. With sweep.resume=DIR, create the runner that resumes the sweep in DIR.

    `flags` maps flags of the command line to their values; `request` holds the other arguments. Raise UserError for
    invalid settings.
    """
    keys = Keys.from_registry(request.registry)
    for override in request.settings:  # errors that all jobs share are reported once
        if override.is_sweep_override() and _is_sweep_setting(override):
            raise UserError(f"{override.input_line}: takes one value, which applies to the whole sweep")
        if not override.is_sweep_override():
            check_brackets(override, keys)
            check_settings([override], keys, request.source)
        if override.key_or_group == "resume":
            raise UserError(f"{override.input_line}: resumes a single run; to resume a sweep, use sweep.resume=DIR")
        if override.key_or_group == "hydra.run.dir":
            raise UserError(f"{override.input_line}: applies to a single run; for a sweep, set hydra.sweep.dir=...")
    if "sweep.resume" in request.values:
        return _resume_sweep(flags, request, Path(request.values["sweep.resume"]))
    parsed = [*experiment_sweep(request), *request.settings]
    for override in parsed:
        check_blanks(override, keys)
    check_unique(parsed)
    shared_overrides = [o for o in parsed if not o.is_sweep_override() and not _is_sweep_setting(o)]
    sweep_overrides = [o for o in request.settings if _is_sweep_setting(o)]
    of_jobs = replace(request, settings=shared_overrides)
    settings = _settings(of_jobs, sweep_overrides)
    job_flags = {k: v if k == "--config-name" else str(Path(v).absolute()) for k, v in flags.items() if k in JOB_FLAGS}
    swept = [o for o in parsed if o.is_sweep_override()] if settings.search else []
    spec = SweepSpec(
        job_flags, input_lines(shared_overrides), input_lines(sweep_overrides), str(Path.cwd()), input_lines(swept)
    )
    jobs = [] if settings.search else [Job(number, [*words]) for number, words in enumerate(combinations(parsed))]
    return _make_runner(of_jobs, settings, spec, jobs)


def _resume_sweep(flags: Mapping[str, str], request: Request, path: Path) -> Runner:
    overrides = request.settings
    other_words = input_lines([o for o in overrides if not _is_sweep_setting(o) and o.key_or_group != "plugins"])
    for word in [*other_words, *(flag for flag in flags if flag in JOB_FLAGS)]:
        raise UserError(f"{word}: a resumed sweep keeps its settings; it accepts only sweep.* and plugins=[...]")
    folder = SweepDir.open(path.resolve() if ".." in path.parts else path)  # job directories must lie below it
    try:
        spec = folder.spec
        job_words = [word for job in folder.jobs for word in job.overrides]
        required_modules = parse_modules([*spec.settings, *spec.space, *job_words])
        if missing_modules := [name for name in required_modules if name not in request.modules]:
            raise UserError(
                f"sweep.resume={path}: its jobs use the local plugin {missing_modules[0]}; code is only loaded from "
                f"the command line: add 'plugins=[{','.join(required_modules)}]'"
            )
        if spec.cwd != str(Path.cwd()):
            if has_directory := Path(spec.cwd).is_dir():
                os.environ[START_DIRECTORY] = spec.cwd
            meaning = "that directory" if has_directory else f"{Path.cwd()}, since that directory no longer exists"
            began = f"the sweep was started in {printable(spec.cwd)}"
            print_line(f"{began}; relative paths in its settings refer to {meaning}")
        source = Source.from_flags(*(spec.flags.get(flag) for flag in JOB_FLAGS))
        of_jobs = replace(request, settings=parse(spec.settings), source=source)
        sweep_overrides = [o for o in overrides if _is_sweep_setting(o)]
        settings = _settings(of_jobs, [*parse(spec.sweep), *sweep_overrides])
        if fixed_keys := [o.key_or_group for o in sweep_overrides if o.key_or_group in SEARCH_IDENTITY]:
            reason = "this sweep is not a search"
            reason = "a resumed search can only change sweep.trials" if settings.search else reason
            raise UserError(f"{fixed_keys[0]}: {reason}")
        trials = list(dict.fromkeys(job.trial for job in folder.jobs))
        if settings.search and trials != list(range(len(trials))):
            problem = f"its jobs have trial numbers {printable(str(trials), 60)}, not 0, 1, ..."
            raise UserError(f"{folder.path / SWEEP_FILE}: is damaged: {problem}")
        return _make_runner(of_jobs, settings, spec, folder.jobs, folder)
    except BaseException:
        folder.close()
        raise


def _make_runner(
    request: Request, settings: Sweep, spec: SweepSpec, jobs: list[Job], folder: SweepDir | None = None
) -> Runner:
    """Create the runner of a sweep with the directory `folder`, or of a new one if that is None.

    `request` holds the settings that all jobs share.
    """
    source = JobSource(jobs)
    if settings.search:
        types = Keys.from_registry(request.registry).types
        keys = parse_space(settings.search, parse(spec.space), types)
        source = Search(settings, keys, jobs, spec.shared_args)
    launcher = _launcher_class(settings)(settings, source.samples, source.total, JobConfigs(request))
    return Runner(spec, source, launcher, folder)


def _launcher_class(settings: Sweep) -> type[Launcher]:
    return LAUNCHERS[settings.launcher] if settings.isolate else InProcess


def _is_sweep_setting(override: Any) -> bool:
    return bool(override.key_or_group.split(".")[0] == "sweep")


def _settings(request: Request, sweep_overrides: Sequence[Any]) -> Sweep:
    """Compose the sweep.* settings and check that the launcher supports them.

    The settings come from `sweep_overrides` and from the experiment preset that `request` chooses.
    """
    experiment = [o for o in request.settings if o.key_or_group == "experiment"]
    settings = replace(request, settings=[*experiment, *sweep_overrides]).compose().sweep_settings()
    if settings.isolate and getattr(os, "fork", None) is None:  # the output of jobs is read with POSIX pipes
        raise UserError("sweep.isolate=true: not supported on Windows; use sweep.isolate=false, or WSL")
    if not settings.isolate and settings.launcher != Serial.name:
        reason = f"runs jobs one after another in this process, not with sweep.launcher={settings.launcher}"
        raise UserError(f"sweep.isolate=false: {reason}")
    _launcher_class(settings).check(settings)
    return settings
