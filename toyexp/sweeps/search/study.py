"""The thinking of a search, by Optuna: which point is next, which run is stopped, which key matters.

What it knows stands in a journal, which optuna-dashboard opens and which several processes may write.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.packages import prefix_unavailable, require_package
from toyexp.base.writing import open_for_writing
from toyexp.interfaces.model import lower_is_better
from toyexp.sweeps.search.space import Key, point, size

JOURNAL = "study.log"  # in the sweep's directory
NAME = "sweep"  # of the only study in it
DIGITS = 4  # of a number from an interval, which a person may have to type
DRAWS = 20  # of a point, until it is a new one
HOW = "pip install 'toyexp[search]'"
# What the state of CMA-ES is made of, which Optuna keeps as a pickle: nothing else is loaded from a journal.
OF_CMAES = {
    ("cmaes._cma", "CMA"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("_core", "core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("_core", "core")),
}


def require(search: str) -> Any:
    """Optuna, quiet; Unavailable when it, or what the search needs beside it, is missing or broken."""
    with prefix_unavailable(f"sweep.search={search}"):
        with require_package("optuna", HOW):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
        if search == "cmaes":
            with require_package("cmaes", HOW):
                import cmaes  # noqa: F401 - Optuna imports it where it is used
    return optuna


class Study:
    """The points of a search, and what came of them."""

    def __init__(self, folder: Path, search: str, metric: str, keys: Sequence[Key], seed: int):
        self._optuna = require(search)
        self._search, self._keys, self._seed = search, keys, seed
        self._space = {key.key: key.distribution(self._optuna.distributions) for key in keys}
        self.path = folder / JOURNAL
        with _whole(self.path):
            self._study = self._optuna.create_study(
                storage=_storage(self.path), study_name=NAME, load_if_exists=True,
                direction="minimize" if lower_is_better(metric) else "maximize",
            )  # fmt: skip
            for trial in self._trials():
                _check_attributes(trial.system_attrs)

    def ask(self, number: int) -> list[str]:
        """The settings of point `number`, which is the next one, or one that no job was noted down for."""
        trials = self._trials()
        taken = {tuple(self._words(trial.params)) for trial in trials[:number]}
        if trials[number:]:
            trial = self._optuna.trial.Trial(self._study, trials[number]._trial_id)
        else:
            trial = self._study.ask()
        if len(trial.params) < len(self._space):  # as if a sampler of the study's had drawn all values together
            trial.relative_search_space, trial._relative_params = self._space, self._drawn(trial, taken)
        return self._words({name: trial._suggest(name, found) for name, found in self._space.items()})

    def tell(self, number: int, score: float | None) -> None:
        """Notes what came of a point, once: its score, or None where it came to no end and is to be kept away from."""
        if self._trials()[number].state.is_finished():
            return
        if score is None:
            self._study.tell(number, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(number, score)

    def require(self, points: int) -> None:
        """Raises UserError unless as many points stand in the journal."""
        if (found := len(self._trials())) < points:
            raise UserError(f"{self.path}: holds {found} trials, and the sweep has begun {points}")

    def best(self) -> int | None:
        """The number of the best point, of those that came to their end."""
        if not any(trial.state == self._optuna.trial.TrialState.COMPLETE for trial in self._trials()):
            return None
        return int(self._study.best_trial.number)

    def importances(self) -> tuple[dict[str, float], str]:
        """Return the share of each key in the order of the points, or no shares and the reason.

        TPE orders points in the same way: completed ones by score, then pruned ones, the furthest first and at the same
        step by the score there, then those without a score.
        """
        from toyexp.results.importance import importance

        sign = 1 if self._study.direction.name == "MINIMIZE" else -1

        def place(trial: Any) -> tuple[float, ...]:
            if trial.state.name == "COMPLETE":
                return (0, sign * trial.value)
            steps = trial.intermediate_values
            return (1, -max(steps), sign * steps[max(steps)]) if steps else (2,)

        trials = [trial for trial in self._trials() if trial.state.is_finished()]
        order = sorted(set(map(place, trials)))
        values = {key.key: [trial.params.get(key.key) for trial in trials] for key in self._keys}
        return importance(values, [order.index(place(trial)) for trial in trials])

    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Each point, for a file."""
        for t in self._trials():
            yield {"trial": t.number, "values": dict(t.params), "state": t.state.name.lower(), "score": t.value}

    def _trials(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False))

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        return [key.setting(values[key.key]) for key in self._keys]

    def _drawn(self, of: Any, taken: Set[tuple[str, ...]]) -> Mapping[str, Any]:
        """The values of a trial, which none before it had where that can be: a run that is run again tells nothing."""
        if self._search == "grid":
            return point(self._keys, of.number)
        study, trial = self._study, of._cached_frozen_trial
        seed = (self._seed * 1_000_003 + trial.number) % 2**32  # of each point: a search goes on as it would have
        sampler = self._sampler(seed)
        together = sampler.infer_relative_search_space(study, trial)
        for _ in range(DRAWS):
            found = sampler.sample_relative(study, trial, together)
            for name, space in self._space.items():
                value = found[name] if name in found else sampler.sample_independent(study, trial, name, space)
                found[name] = _rounded(value, space)
            if tuple(self._words(found)) not in taken:
                return found
        if math.isfinite(count := size(self._keys)):  # few are left
            first = random.Random(seed).randrange(int(count))
            points = (point(self._keys, (first + more) % int(count)) for more in range(int(count)))
            return next((p for p in points if tuple(self._words(p)) not in taken), found)
        return found

    def _sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._search == "cmaes":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        return (samplers.TPESampler if self._search == "tpe" else samplers.RandomSampler)(seed=seed)


class Judge:
    """Says in the process of a run whether it goes on, from its `first` step on at which that is asked."""

    def __init__(self, journal: Path, number: int, prune: str, first: int):
        optuna = require("tpe")
        with _whole(journal):
            sampler = optuna.samplers.RandomSampler()  # of which nothing is asked
            self._study = optuna.load_study(study_name=NAME, storage=_storage(journal), sampler=sampler)
            own = self._study.get_trials(deepcopy=False)[number]
            self._trial, self._told = optuna.trial.Trial(self._study, own._trial_id), set(own.intermediate_values)
        self._number, self._first = number, first
        self._median = optuna.pruners.MedianPruner(n_warmup_steps=first) if prune == "median" else None

    def stops(self, step: int, score: float) -> bool:
        """Notes the score of an eval; whether the run is to end there.

        A run that goes on from its checkpoint asks again what it may have asked before it was killed, and is told the
        same: of itself, only what it knew at that step counts.
        """
        if step not in self._told:
            self._trial.report(score, step)
        trials = self._study.get_trials(deepcopy=False)
        if self._median is None:
            return self._is_halved(step, score, trials)
        own = copy.copy(trials[self._number])
        own.intermediate_values = {known: value for known, value in own.intermediate_values.items() if known <= step}
        return bool(self._median.prune(self._study, own))

    def _is_halved(self, step: int, score: float, trials: Sequence[Any]) -> bool:
        """Asynchronous successive halving (https://arxiv.org/abs/1810.05934): of those that came here the better half.

        That is asked at `first`, and at twice, four, eight times that step.
        """
        times, beside = divmod(step, self._first)
        if beside or times & (times - 1):
            return False
        sign = 1 if self._study.direction.name == "MINIMIZE" else -1
        known = sorted(sign * t.intermediate_values[step] for t in trials if step in t.intermediate_values)
        return not sign * score <= known[max(len(known) // 2, 1) - 1]


def _storage(path: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    os.close(open_for_writing(path))
    return JournalStorage(JournalFileBackend(str(path)))


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Tells what is wrong with a journal, which may come from a stranger."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be used ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: is damaged: {printable(f'{type(error).__name__}: {error}', 200)}") from None


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raises UnpicklingError for a state of CMA-ES that holds anything else: loading a pickle runs what it names."""
    parts = {key: str(value) for key, value in attributes.items() if "optimizer" in key}
    if parts:
        joined = "".join(parts[key] for key in sorted(parts, key=lambda key: int(key.rpartition(":")[2])))
        _Plain(io.BytesIO(bytes.fromhex(joined))).load()


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in OF_CMAES:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


def _rounded(value: Any, distribution: Any) -> Any:
    if not isinstance(value, float) or getattr(distribution, "step", None) is not None:
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), distribution.low), distribution.high)
