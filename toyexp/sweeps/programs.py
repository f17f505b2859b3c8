"""Which jobs are likely to compute the same steps on other numbers, by their settings."""

from __future__ import annotations

from collections.abc import Sequence

from toyexp.config.top_level import PARTS
from toyexp.sweeps.directory import Job
from toyexp.sweeps.job_configs import JobConfigs

SAME = ("optim", "recipe", "callbacks", "data")  # parts whose settings, other than their names, are often numbers alone
WORTH_IT = 4  # jobs of one program that are worth training together
OF_A_STEP = ("batch_size", "optim.accumulate", "recipe.rank", "recipe.targets", "experiment")


def programs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs that are likely to be of one program, together."""
    kinds: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        kinds.setdefault(tuple(filter(_shapes, job.overrides)), []).append(job)
    return [*kinds.values()]


def _shapes(word: str) -> bool:
    """Return whether a setting is likely to change what a step computes, beyond its numbers."""
    key = word.partition("=")[0].lstrip("+~")
    part, _, own = key.partition(".")
    return key in OF_A_STEP or (part in (*PARTS, "callbacks") and (not own or part not in SAME))


def advice(jobs: Sequence[Job], configs: JobConfigs) -> str:
    """Return that jobs could train together, or nothing."""
    kinds = [kind for kind in programs(jobs) if len(kind) >= WORTH_IT and configs.could_be_stacked(kind[0])]
    if not kinds:
        return ""
    count = sum(map(len, kinds))
    which = f"these {count} jobs" if count == len(jobs) else f"{count} of these {len(jobs)} jobs"
    return f"{which} could train together: sweep.launcher=stacked"
