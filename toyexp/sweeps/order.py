"""What starts a job: its directory, its log, and the command lines that begin or resume it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.base.formatting import short
from toyexp.base.ownership import Owned, keep_aside, lock, require_empty
from toyexp.training import checkpoint


@dataclass(frozen=True)
class Order:
    """What it takes to run a job, on this machine or another one that sees its files."""

    directory: Path
    log: Path
    first: Sequence[str]  # the words that begin it
    again: Sequence[str]  # the words that resume it
    goes_on: bool  # it was begun before
    cores: int = 0  # its share of the machine; 0: all
    gpus: Sequence[str] = ()  # those that it alone has; none: all that there are
    environment: Mapping[str, str] = field(default_factory=dict)  # of its process alone
    files: Sequence[int] = ()  # open ones that its process is handed: see FILES
    several: bool = False  # its process trains a stack, whose jobs check their own directories

    def words(self) -> Sequence[str]:
        """Return the command line of its process; UserError if its directory holds anything but its own run."""
        if self.several:
            return self.first
        place, retry = self.directory, "move that away, then go on with sweep.retry=true"
        if os.path.lexists(place) and not place.is_dir():
            raise UserError(f"{short(place)}: is where this job runs, and is no directory; {retry}")
        if self.goes_on and is_begun(place):
            return self.again
        try:
            require_empty(place, "hydra.sweep.dir")
        except Owned:
            raise
        except UserError:
            raise UserError(f"{short(place)}: is where this job runs, and is not empty; {retry}") from None
        return self.first


def is_begun(directory: Path) -> bool:
    """Return whether a directory has a checkpoint to resume. A run without one is moved aside."""
    if not directory.exists():
        return False
    if checkpoint.steps(directory / "checkpoints"):
        return True
    os.close(lock(directory))  # raises UserError while a process writes there
    keep_aside(directory)
    return False
