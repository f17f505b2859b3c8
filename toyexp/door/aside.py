"""What a call changes in the process that calls, and nobody is to find there afterwards."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from toyexp.base.errors import RunFailed, UserError, printable
from toyexp.base.files import working_directory
from toyexp.base.ranks import started_ranks
from toyexp.base.terminal import silent, status
from toyexp.base.threads import available_cores
from toyexp.base.words import short

_turn = threading.RLock()  # Hydra, the environment and the working directory are those of the process


@contextlib.contextmanager
def aside(call: str, quiet: bool = False) -> Iterator[None]:
    """Around all that is done: one call at a time, and what it changes globally is put back.

    That is random state, environment (but for what libraries read once, as they start), working directory, logging,
    where modules are looked for, and what Hydra knows. UserError under torchrun, which starts the ranks of a command.
    """
    from toyexp.config.guest import own_hydra
    from toyexp.sweep.contained import contained

    if not isinstance(quiet, bool):
        raise UserError(f"{call} quiet: is True or False, and is {printable(repr(quiet))}")
    if started_ranks().count > 1:
        raise UserError(f"{call}: is done by one process; torchrun starts the ranks of `toyexp ...`")
    available_cores()  # which refuses a TOYEXP_CORES that cannot be
    working_directory()  # which says so when it is gone
    with _turn, contained(), own_hydra(), silent(quiet), path_as_it_was():
        try:
            yield
        finally:
            status("")


@contextlib.contextmanager
def path_as_it_was() -> Iterator[None]:
    """Modules are afterwards looked for where they were, and no more where local plugins stand."""
    path = list(sys.path)
    try:
        yield
    finally:
        for place in [place for place in sys.path if place not in path]:
            sys.path.remove(place)


@contextlib.contextmanager
def what_is_left(where: Path, call: str) -> Iterator[None]:
    """Says of a run that fails or is interrupted how it is looked at from here, and gone on with."""
    try:
        yield
    except (RunFailed, KeyboardInterrupt) as error:
        if (where / "config.yaml").is_file():
            going_on = f"; go on: {call}resume={short(where)!r})" if any(where.glob("checkpoints/step-*")) else ""
            error.add_note(f"what it left: toyexp.open({short(where)!r}){going_on}")
        raise
