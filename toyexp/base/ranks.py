"""Rank of this process in a distributed run, from the environment variables that `torchrun` sets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from toyexp.base.errors import UserError, printable
from toyexp.base.validators import MAX_INT, is_integer

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
TASK_VARIABLES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")  # set by srun and mpirun
MAX_PORT = 65535  # highest port

FORK_SERVER_FILE = "TOYEXP_FORKS"  # variable with the descriptor from which a sweep's fork server reads jobs


@dataclass(frozen=True)
class Ranks:
    """Rank of a process, from 0, and the number of ranks."""

    rank: int
    count: int


def started_ranks() -> Ranks:
    """Return this process's rank and the number of ranks, from the environment variables that `torchrun` sets.

    Return rank 0 of 1 if one of the variables is not set. Raise UserError for invalid values.
    """
    values = {name: os.environ.get(name, "") for name in RANK_VARIABLES}
    if not all(values.values()):
        return Ranks(0, 1)
    count = values["WORLD_SIZE"]
    if not is_integer(count, 1, MAX_INT) or not is_integer(values["RANK"], 0, int(count) - 1):
        setting = f"RANK={printable(values['RANK'])}, WORLD_SIZE={printable(count)}"
        raise UserError(f"{setting}: RANK must be a whole number from 0 to WORLD_SIZE - 1")
    if not is_integer(values["MASTER_PORT"], 1, MAX_PORT):
        raise UserError(f"MASTER_PORT={printable(values['MASTER_PORT'])}: must be a port from 1 to {MAX_PORT}")
    return Ranks(int(values["RANK"]), int(count))


def rank_warnings() -> list[str]:
    """Warn if environment variables announce several processes that will not train together.

    Return a list with one warning, or an empty list. `srun` and `mpirun` set such variables; a user may also have set
    only some of the variables that `torchrun` sets.
    """
    if started_ranks().count > 1:
        return []
    values = {name: value for name in RANK_VARIABLES if (value := os.environ.get(name, ""))}
    solo = {"RANK": "0", "WORLD_SIZE": "1"}
    changed = [f"{name}={printable(values[name])}" for name in solo if values.get(name, solo[name]) != solo[name]]
    missing = [name for name in RANK_VARIABLES if name not in values]
    if changed and missing:
        rule = f"a rank has {', '.join(RANK_VARIABLES[:-1])} and {RANK_VARIABLES[-1]}, as torchrun sets them"
        return [f"{', '.join(changed)}: {rule}; {', '.join(missing)} is not set, so this process trains alone"]
    name = next(filter(os.environ.get, TASK_VARIABLES), None)
    if name is None or not is_integer(count := os.environ[name], 2, MAX_INT):
        return []
    return [f"{name}={count}: each of these processes trains a run of its own; use torchrun for one distributed run"]
