"""How many threads a computation may use, and how they wait for one another."""

from __future__ import annotations

import os
import time
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.base.validators import MAX_INT, is_integer

_WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # either one is the user's own choice of how threads wait


MAX_THREADS = 512  # that ggml takes; of OpenMP's too many ends the process

CORES_VARIABLE = (
    "TOYEXP_CORES"  # how many of the machine's cores a process shall use: jobs side by side each have their share
)


def available_cores() -> int:
    """Return how many cores this process uses: all, or what TOYEXP_CORES says; UserError for what is no number."""
    given = os.environ.get(CORES_VARIABLE, "")
    if given and not is_integer(given, 0, MAX_INT):
        raise UserError(f"{CORES_VARIABLE}={given}: takes how many cores to use, from 1; 0, or nothing, for all")
    return min(int(given or 0) or MAX_INT, machine_cores())


def machine_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def core_variables(count: int) -> dict[str, str]:
    """What tells a process and its libraries of its share of the machine's cores; 0: nothing."""
    libraries = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
    return (
        {CORES_VARIABLE: str(count), **{name: os.environ.get(name, str(count)) for name in libraries}} if count else {}
    )


def reduce_spinning() -> None:
    """Let GNU OpenMP's threads spin less: on busy cores spinning makes a run 20 to 50 times slower."""
    if not _WAIT_VARIABLES & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"


def check_threads(threads: int) -> None:
    """Raises UserError for a number of threads that cannot be, where 0 means as many as there are cores."""
    if not 0 <= threads <= MAX_THREADS:
        raise UserError(f"engine.threads={threads}: must be from 0 (all cores) to {MAX_THREADS}")


def crowding_note(threads: int, watched: bool = True) -> str:
    """Return a remark if so many threads would share cores, with each other or, if `watched`, with other processes."""
    cores = machine_cores()
    if threads > cores:
        return f"{threads} threads share {cores} cores; engine.threads={cores} is faster"
    if threads == 1 or not watched or threads + (busy := min(count_busy(), cores)) <= cores:
        return ""
    return f"{busy} of {cores} cores busy; engine.threads={max(1, cores - busy)} may be faster"


def count_busy() -> int:
    """How many other processes run, the fewest at three moments: threads that have just worked need one to rest."""
    fewest = MAX_INT
    for _ in range(3):  # one moment says little: only what goes on is a crowd
        time.sleep(0.001)
        fewest = min(fewest, _count_busy_now())
    return fewest


def _count_busy_now() -> int:
    """Processes other than this one that run right now; 0 where the system does not tell."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0
    return running - 1
