"""How many threads a computation may use, and how they wait for one another."""

from __future__ import annotations

import os
import time
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.base.validators import MOST, is_whole

_CHOSEN_BY = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # either one is the user's own choice of how threads wait


MOST_THREADS = 512  # that ggml takes; of OpenMP's too many ends the process

CORES = "TOYEXP_CORES"  # how many of the machine's cores a process shall use: jobs side by side each have their share


def available_cores() -> int:
    """Return how many cores this process uses: all, or what TOYEXP_CORES says; UserError for what is no number."""
    given = os.environ.get(CORES, "")
    if given and not is_whole(given, 0, MOST):
        raise UserError(f"{CORES}={given}: takes how many cores to use, from 1; 0, or nothing, for all")
    return min(int(given or 0) or MOST, machine_cores())


def machine_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def of_cores(count: int) -> dict[str, str]:
    """What tells a process and its libraries of its share of the machine's cores; 0: nothing."""
    libraries = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
    return {CORES: str(count), **{name: os.environ.get(name, str(count)) for name in libraries}} if count else {}


def calm_threads() -> None:
    """Let GNU OpenMP's threads spin less: on busy cores spinning makes a run 20 to 50 times slower."""
    if not _CHOSEN_BY & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"


def check_threads(threads: int) -> None:
    """Raises UserError for a number of threads that cannot be, where 0 means as many as there are cores."""
    if not 0 <= threads <= MOST_THREADS:
        raise UserError(f"engine.threads={threads}: must be from 0 (all cores) to {MOST_THREADS}")


def crowding(threads: int, watched: bool = True) -> str:
    """Return a remark if so many threads would share cores, with each other or, if `watched`, with other processes."""
    cores = machine_cores()
    if threads > cores:
        return f"{threads} threads share {cores} cores; engine.threads={cores} is faster"
    if threads == 1 or not watched or threads + (busy := min(others_running(), cores)) <= cores:
        return ""
    return f"{busy} of {cores} cores busy; engine.threads={max(1, cores - busy)} may be faster"


def others_running() -> int:
    """How many other processes run, the fewest at three moments: threads that have just worked need one to rest."""
    fewest = MOST
    for _ in range(3):  # one moment says little: only what goes on is a crowd
        time.sleep(0.001)
        fewest = min(fewest, _running())
    return fewest


def _running() -> int:
    """Processes other than this one that run right now; 0 where the system does not tell."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0
    return running - 1
