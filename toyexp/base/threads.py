"""Number of threads that a computation may use, and how waiting threads behave."""

from __future__ import annotations

import os
import time
from pathlib import Path

from toyexp.base.errors import UserError
from toyexp.base.validators import MAX_INT, is_integer

_WAIT_VARIABLES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # how threads wait; if the user set one, it is kept


MAX_THREADS = 512  # ggml's limit; too many OpenMP threads end the process

CORES_VARIABLE = "TOYEXP_CORES"  # environment variable: number of cores for this process; parallel jobs share them


def available_cores() -> int:
    """Return the number of cores to use: $TOYEXP_CORES or, if unset, all. Raise UserError for an invalid value."""
    text = os.environ.get(CORES_VARIABLE, "")
    if text and not is_integer(text, 0, MAX_INT):
        raise UserError(f"{CORES_VARIABLE}={text}: must be a number of cores from 1; 0 or unset uses all")
    return min(int(text or 0) or MAX_INT, machine_cores())


def machine_cores() -> int:
    """Return the number of cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def core_variables(count: int) -> dict[str, str]:
    """Return environment variables that limit a process and its libraries to `count` cores; {} if `count` is 0."""
    libraries = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
    variables = {CORES_VARIABLE: str(count), **{name: os.environ.get(name, str(count)) for name in libraries}}
    return variables if count else {}


def reduce_spinning() -> None:
    """Make waiting GNU OpenMP threads spin less.

    Spinning means that a thread checks for work all the time. If all cores are busy, it makes a run 20 to 50 times
    slower.
    """
    if not _WAIT_VARIABLES & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"


def check_threads(threads: int) -> None:
    """Raise UserError for an invalid number of threads; 0 means one per core."""
    if not 0 <= threads <= MAX_THREADS:
        raise UserError(f"engine.threads={threads}: must be from 0 (all cores) to {MAX_THREADS}")


def crowding_note(threads: int, watched: bool = True) -> str:
    """Return a note if `threads` is more than the number of cores, else "" (no note).

    If `watched`, also return a note if other processes leave fewer free cores than `threads`.
    """
    cores = machine_cores()
    if threads > cores:
        return f"{threads} threads share {cores} cores; engine.threads={cores} is faster"
    if threads == 1 or not watched or threads + (busy := min(count_busy(), cores)) <= cores:
        return ""
    return f"{busy} of {cores} cores busy; engine.threads={max(1, cores - busy)} may be faster"


def count_busy() -> int:
    """Return how many threads are running on this machine, other than this thread: the minimum of three samples."""
    fewest = MAX_INT
    for _ in range(3):  # a thread that has just finished still counts for a moment
        time.sleep(0.001)
        fewest = min(fewest, _count_busy_now())
    return fewest


def _count_busy_now() -> int:
    """Return how many threads are running on this machine now, other than this thread; 0 if unknown."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return 0
    return running - 1
