"""`toyexp.open(...)`: a run or a sweep that is there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from toyexp.base.ownership import SWEEP
from toyexp.contract.plugins import load
from toyexp.door.aside import path_as_it_was
from toyexp.door.result import Result, require_run
from toyexp.door.sweeping import SweepResult
from toyexp.door.words import place


def open(path: str | os.PathLike[str], plugins: Sequence[str] = ()) -> Result | SweepResult:
    """The run in a directory, whatever became of it, or the sweep; of a job of a sweep, that run.

    `plugins` are the local modules that it takes to read its model: those of `plugins=[...]` when it was begun.

    Raises UserError for a directory that holds neither, and for a sweep whose files are damaged.
    """
    with path_as_it_was():
        directory, registry = place("toyexp.open", path), load(plugins)
    if (directory / SWEEP).is_file():
        return SweepResult(directory, registry)
    require_run(directory)
    return Result(directory, registry)
