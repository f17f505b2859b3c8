"""What the jobs of a sweep are forked from begins to load as soon as the typed words say that there will be jobs.

To load it takes longer than to look at the settings, and needs of them little: that is guessed here from the words
alone. Where the sweep finds that it is otherwise, it has the process begin again.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from toyexp.base.errors import UserError
from toyexp.base.home import at_home
from toyexp.base.threads import available_cores, of_cores
from toyexp.sweep.forking import FORKED, PLATFORMS, Loading
from toyexp.sweep.gpus import Gpus, stacks_of, visible

SWEEPS = {"-m", "--multirun"}
OF_JOBLIB = {"KMP_INIT_AT_FORK": "FALSE"}  # what it adds to the environment of a process that imports it
UNLIKE = {"plugins", "sweep.resume", "sweep.isolate", "sweep"}  # keys of sweeps of which less is known beforehand
BESIDE = {*SWEEPS, "--json"}  # flags that leave the words of a sweep what they are
_begun: Loading | None = None  # that no sweep has asked for yet


@contextlib.contextmanager
def loading(typed: Sequence[str]) -> Iterator[None]:
    """Meanwhile it loads what the words of a sweep name, if they do; what no sweep has asked for is ended."""
    global _begun
    try:
        with contextlib.suppress(UserError, OSError, ValueError, OverflowError):  # which is told when it is its turn
            if guess := _guess(at_home(typed)):
                _begun = Loading(guess.environment)
                _begun.tell(guess.words, guess.stacks, sure=False)
        yield
    finally:
        if _begun:
            _begun.end()
        _begun = None


def taken(environment: Mapping[str, str]) -> Loading:
    """What has begun already, if that was in this environment and here; else it begins now."""
    global _begun
    early, _begun = _begun, None
    if early and (early.environment, early.directory) == (environment, Path.cwd()):
        return early
    if early:
        early.end()
    return Loading(environment)


class _Guess(NamedTuple):
    """What the jobs of a sweep will share, as it seems."""

    environment: Mapping[str, str]
    words: Sequence[str]
    stacks: bool


def _guess(words: Sequence[str]) -> _Guess | None:
    settings = [word for word in words if not word.startswith("-")]
    given = {key.lstrip("+~"): value for key, _, value in (word.partition("=") for word in settings)}
    # A preset may choose the launcher; a person's own code is loaded once it is known that it will be used.
    launcher = given.get("sweep.launcher", "" if "experiment" in given else "serial")
    flags = {word for word in words if word.startswith("-")}
    told = all("=" in word for word in settings) and flags & SWEEPS and flags <= BESIDE
    unlike = any(key in UNLIKE or key.startswith("hydra/") for key in given)
    if launcher not in FORKED or sys.platform not in PLATFORMS or not told or unlike:
        return None
    shared = [word for word in settings if not word.startswith("sweep.") and "(" not in word and _values(word) == 1]
    added = OF_JOBLIB if launcher == "joblib" else {}
    environment = {**added, **os.environ, **of_cores(_cores(launcher, given, settings))}
    return _Guess(environment, shared, launcher == "stacked")


def _cores(launcher: str, given: Mapping[str, str], settings: Sequence[str]) -> int:
    """Those of each process, as `share_of` has it for jobs that compute where most do; 0: all."""
    if launcher == "serial":
        return 0
    cores, gpus, count = available_cores(), Gpus(visible()), math.prod(map(_values, settings))
    most, per_gpu = (int(given.get(f"sweep.{key}") or 0) for key in ("jobs", "per_gpu"))
    if launcher == "stacked":
        at_once = gpus.at_once(1, per_gpu or (1 if most else stacks_of(count, gpus.at_once(1), cores)))
        return max(cores // (at_once or max(min(cores, count), 1)), 1)
    limit = min(most, count) or cores
    at_once = gpus.at_once(1, max(per_gpu, 1))
    return max(cores // (min(limit, at_once) if at_once and (per_gpu or not most) else limit), 1)


def _values(word: str) -> int:
    """How many values a word gives to its key; what is written in another way than most are counts as one."""
    text = word.partition("=")[2].replace(" ", "")
    if numbers := re.fullmatch(r"range\((-?\d+(?:,-?\d+){0,2})\)", text):
        with contextlib.suppress(ValueError):  # a step of 0
            return max(len(range(*map(int, numbers[1].split(",")))), 1)
    return 1 if set(text) & set("([{'\"") else text.count(",") + 1
