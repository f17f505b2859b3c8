"""How many threads a computation may use, and how they wait for one another."""

from __future__ import annotations

import os

_CHOSEN_BY = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}  # either one is the user's own choice of how threads wait


def available_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux can tell
        return os.cpu_count() or 1


def calm_threads() -> None:
    """Lets GNU OpenMP's threads spin less at barriers, unless the user chose; call it before a library loads OpenMP.

    They spin for milliseconds by default. With one other busy process on two cores that made a nano run on torch 20 to
    50 times slower; this much spinning costs an idle machine about 5 %.
    """
    if not _CHOSEN_BY & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"
