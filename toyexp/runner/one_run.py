"""Prepare and run one experiment; the command line, the Python API and jobs of a sweep share this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from toyexp.base.errors import UserError
from toyexp.base.formatting import short_path
from toyexp.base.memory import convert_memory_errors
from toyexp.base.ownership import require_empty
from toyexp.base.terminal import print_line, show_status
from toyexp.config.compose import Composition
from toyexp.config.request import Request
from toyexp.interfaces.callback import Callback
from toyexp.training.experiment import execute, prepare
from toyexp.training.provenance import MOVED, Origin, read_origin, source_digests
from toyexp.training.resume import (
    AUTO,
    ResumeState,
    find_newest,
    load_resume_state,
    require_run,
    restore_filled_settings,
)
from toyexp.training.run_config import Config, Prepared, Result


class PreparedRun(NamedTuple):
    """A run that was built and checked but has not started.

    It has the path of the run's directory and, if the run is resumed, its checkpoint.
    """

    prepared: Prepared
    directory: Path
    resumed: ResumeState | None

    def run(self) -> Result:
        """Train the run and print its progress."""
        return execute(self.prepared, self.directory, print_line, self.resumed)


def prepare_request(
    request: Request, resume: str | None = None, callbacks: Mapping[str, Callback] | None = None
) -> PreparedRun:
    """Build and check the run that a request describes, without training it.

    `resume` is None for a new run, or the directory of the run to resume. With "auto", resume the newest run of the
    same name that has a checkpoint; if there is none, prepare a new run. Raise UserError for invalid settings.
    """
    request, composed, resume_directory = locate(request, resume)
    if resume == AUTO:
        parent, name = _locate_parent(composed)
        nothing = f"no run named {name} with a checkpoint below {parent}; starting a new run"
        print_line(f"resume  {short_path(resume_directory) if resume_directory else nothing}")
    return prepare_run(composed, resume=resume_directory, callbacks=callbacks)


def locate(request: Request, resume: str | None) -> tuple[Request, Composition, Path | None]:
    """Compose the configuration of a request, and find the directory of the run that `resume` names.

    Return three values: the request, which has the saved settings of the run if `resume` is a directory; the
    configuration; the directory, or None for a new run. Raise UserError for settings that only sweeps have.
    """
    is_job = any(o.key_or_group == "hydra.job.num" for o in request.settings)
    prefixes = ("sweep.",) if is_job else ("sweep.", "hydra.sweep.")  # a job's arguments include hydra.sweep.*
    for override in request.settings:
        if f"{override.key_or_group}.".startswith(prefixes):
            raise UserError(f"{override.input_line}: applies to sweeps; add -m to start one, or sweep.resume=DIR")
    if resume is None:
        return request, request.compose(), None
    if resume != AUTO:
        require_run(Path(resume), "resume")
        for override in request.settings:
            if override.key_or_group == "hydra.run.dir":
                conflict = f"contradicts resume={resume}, since a resumed run stays in its directory"
                raise UserError(f"{override.input_line}: {conflict}; leave out {override.key_or_group}")
        request = request.use_saved_config(Path(resume))
        return request, request.compose(), Path(resume).absolute()
    composed = request.compose()
    return request, composed, find_newest(*_locate_parent(composed))


def _locate_parent(composed: Composition) -> tuple[Path, str]:
    composed.apply_base()
    return composed.directory("hydra.run.dir").parent, str(composed.cfg.name)


def follow(request: Request, resume: str | None = None) -> None:
    """If this process is a worker rank, join the run and return when the run ends. On rank 0, return at once."""
    _, composed, _ = locate(request, None if resume == AUTO else resume)
    composed.build_config().engine.follow()


def prepare_run(
    composed: Composition, directory: Path | None = None, resume: Path | None = None,
    callbacks: Mapping[str, Callback] | None = None,
) -> PreparedRun:  # fmt: skip
    """Build and check the run of one configuration, with additional `callbacks`.

    If `resume` is given, the run continues from the checkpoint in the directory `resume`. Otherwise it is a new run.
    Its directory is `directory` or, if that is None, the one that hydra.run.dir sets.
    """
    show_status("starting the engine")
    source = composed.source
    origin = source.origin if source.origin.cwd else read_origin(source.directory)  # the run that this one repeats
    with convert_memory_errors(), origin.explain_missing_paths(MOVED):
        built = composed.build_config()
        built.callbacks.update(callbacks or {})
        run_directory = resume or directory or composed.directory("hydra.run.dir")
        with composed.locate_errors():
            run = prepare_parts(built, run_directory, resume is not None)
        if resume:
            return run
        return run._replace(prepared=_warn_of_changes(run.prepared, origin, source.directory, composed))


def prepare_parts(config: Config, directory: Path, is_resumed: bool, key: str = "hydra.run.dir") -> PreparedRun:
    """Prepare a run from parts (model, data, engine, ...) that are built already.

    The run is new, or with `is_resumed` it continues from the checkpoint in `directory`. Raise UserError, which names
    the setting `key`, if the directory of a new run is not empty.
    """
    config.engine.follow()  # rank 0 starts the other ranks
    if is_resumed:
        restore_filled_settings(directory, config.data)
    else:
        require_empty(directory, key)
    show_status("reading the data")
    prepared = prepare(config)
    return PreparedRun(prepared, directory, load_resume_state(directory, prepared) if is_resumed else None)


def _warn_of_changes(prepared: Prepared, origin: Origin, repeated: Path, composed: Composition) -> Prepared:
    if {"data", "recipe", "model"} & {o.key_or_group.split(".")[0] for o in composed.typed} or not origin.sources:
        return prepared
    changes = [
        f"this run repeats {short_path(repeated)}, but {change}"
        for change in origin.list_changes(source_digests(prepared))
    ]
    return replace(prepared, warnings=[*prepared.warnings, *changes[:1]])
