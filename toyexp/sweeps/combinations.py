"""Compute the combinations of values that a sweep tries, and end the process of a job when its sweep exits."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toyexp.base.errors import UserError
from toyexp.base.signals import end_with_sweep
from toyexp.config.top_level import MAX_JOBS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from toyexp.config.request import Request

LIFELINE = "TOYEXP_LIFELINE"  # set for the process of a job
TRIAL = "TOYEXP_TRIAL"  # set for a job that a search may prune
STACK = "TOYEXP_STACK"  # set for a process that trains several jobs: a directory with the next two files
JOBS_FILE, REPORTS = "jobs.json", "reports"  # the list of jobs, and a pipe in which the process reports their progress


def experiment_sweep(request: Request) -> list[Override]:
    """Return the swept settings of the chosen experiment preset: the overrides that have several values.

    Settings that are also given on the command line are left out.
    """
    from toyexp.config.words import parse

    experiment = [o for o in request.settings if o.key_or_group == "experiment" and not o.is_sweep_override()]
    given_keys = {o.key_or_group for o in request.settings}
    sweeps = replace(request, settings=experiment).compose().sweeps
    return parse([f"{key}={values}" for key, values in sweeps.items() if key not in given_keys])


def check_unique(parsed: Sequence[Override]) -> None:
    """Raise UserError if an override with several values is followed by another override of the same key.

    Without this check the last override would apply, as it does in a single run.
    """
    several: dict[str, Override] = {}
    for override in parsed:
        key = str(override.get_key_element()).lstrip("+~")
        if (earlier := several.get(key)) is not None:
            overrides = f"{earlier.input_line} {override.input_line}"
            raise UserError(f"{overrides}: {key} is given twice; {_suggest_merge(key, earlier, override)}")
        if override.is_sweep_override():
            several[key] = override


def _suggest_merge(key: str, *overrides: Override) -> str:
    if not all(o.is_choice_sweep() and "(" not in str(o.input_line) for o in overrides):
        return "give its values once"
    values = dict.fromkeys(word.partition("=")[2] for o in overrides for word, _ in sweep_values(o))
    return f"list all its values once: {key}={','.join(values)}"


def combinations(parsed: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of each job: one value of every swept key, with the last key varying fastest."""
    lists = [list(sweep_values(o)) for o in parsed if o.is_sweep_override()]
    if (count := math.prod(map(len, lists))) > MAX_JOBS:
        raise UserError(f"{count} combinations of values: a sweep has at most {MAX_JOBS} jobs")
    return list(itertools.product(*([word for word, _ in words] for words in lists)))


def sweep_values(override: Override) -> Iterator[tuple[str, Any]]:
    """Yield each value of a swept key, as an override (such as lr=0.1) and as the parsed value (0.1).

    Raise UserError if the values cannot be listed (an interval, a glob, an invalid range), if there are none or too
    many, or if a value occurs twice.
    """
    from hydra.core.override_parser.types import Override, Transformer, ValueType
    from hydra.errors import HydraException

    line = override.input_line
    if override.is_interval_sweep():
        raise UserError(
            f"{line}: an interval has infinitely many values; use range(...), a list, or a search: "
            "sweep.search=tpe sweep.trials=20"
        )
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{line}: globs are not supported; list the values: {override.get_key_element()}=a,b")
    try:
        values = list(itertools.islice(override.sweep_iterator(), MAX_JOBS + 1))
    except (HydraException, ArithmeticError, ValueError, TypeError):
        raise UserError(f"{line}: a range needs numbers, and a step other than 0: range(0,10,2)") from None
    if not values:
        raise UserError(f"{line}: has no values")
    if len(values) > MAX_JOBS:
        raise UserError(f"{line}: a sweep has at most {MAX_JOBS} jobs")
    texts: set[str] = set()
    parts = str(line).partition("=")[2].split(",")
    for value, part in zip(values, parts if len(parts) == len(values) else itertools.repeat(""), strict=False):
        if (text := Transformer.str(value)) in texts:
            raise UserError(f"{line}: lists {text} twice, which would train the same job twice")
        texts.add(text)
        if type(value) is int and part.replace("_", "") == text:  # keep names such as name=2024_01,2024_02 as typed
            text = part
        yield f"{override.get_key_element()}={text}", Override._convert_value(value)


_follows = False


def is_job() -> bool:
    """Return True if a sweep started this process."""
    return _follows


def exit_with_sweep() -> None:
    """Start a thread that makes this process save and exit, as after SIGTERM, when the sweep that started it exits.

    Do nothing if no sweep started this process. The sweep holds the write end of the job's standard input and never
    writes to it, so end of file means that the sweep has exited.
    """
    if os.environ.pop(LIFELINE, None) is None:  # removed, so that child processes do not inherit it
        return
    global _follows
    _follows = True
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # sent to all processes by clusters; the launcher handles it

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        end_with_sweep()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
