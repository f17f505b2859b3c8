"""The Optuna study of a search: it chooses trials, prunes runs and computes the importance of keys.

Its state is in a journal file, which optuna-dashboard can open and several processes may write.
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
from toyexp.sweeps.search.space import Key, count_points, nth_point

JOURNAL = "study.log"  # file in the sweep's directory
STUDY_NAME = "sweep"  # name of the only study in the journal
DIGITS = 4  # significant digits of a value from an interval, so that it can be typed
MAX_DRAWS = 20  # attempts to draw a trial that differs from all earlier ones
INSTALL_HINT = "pip install 'toyexp[search]'"
# Classes in the pickled state of CMA-ES that Optuna stores. Nothing else is unpickled from a journal.
CMAES_CLASSES = {
    ("cmaes._cma", "CMA"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("_core", "core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("_core", "core")),
}


def require_optuna(search: str) -> Any:
    """Import Optuna and silence its log. Raise Unavailable if a package for the search is missing or broken."""
    with prefix_unavailable(f"sweep.search={search}"):
        with require_package("optuna", INSTALL_HINT):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
        if search == "cmaes":
            with require_package("cmaes", INSTALL_HINT):
                import cmaes  # noqa: F401 - Optuna imports it where it is used
    return optuna


class Study:
    """The trials of a search and their scores."""

    def __init__(self, folder: Path, search: str, metric: str, keys: Sequence[Key], seed: int):
        self._optuna = require_optuna(search)
        self._search, self._keys, self._seed = search, keys, seed
        self._space = {key.key: key.distribution(self._optuna.distributions) for key in keys}
        self.path = folder / JOURNAL
        with _guard_journal(self.path):
            self._study = self._optuna.create_study(
                storage=_storage(self.path), study_name=STUDY_NAME, load_if_exists=True,
                direction="minimize" if lower_is_better(metric) else "maximize",
            )  # fmt: skip
            for trial in self._trials():
                _check_attributes(trial.system_attrs)

    def ask(self, number: int) -> list[str]:
        """Return the overrides of trial `number`. Optuna chooses their values if the trial is new.

        A sweep that was killed may have stored this trial before it started a job of it. In this case, return the
        stored values.
        """
        trials = self._trials()
        earlier_values = {tuple(self._words(trial.params)) for trial in trials[:number]}
        if trials[number:]:
            trial = self._optuna.trial.Trial(self._study, trials[number]._trial_id)
        else:
            trial = self._study.ask()
        if len(trial.params) < len(self._space):  # set the values as if a sampler had drawn all of them jointly
            trial.relative_search_space, trial._relative_params = self._space, self._sample(trial, earlier_values)
        return self._words({name: trial._suggest(name, distribution) for name, distribution in self._space.items()})

    def tell(self, number: int, score: float | None) -> None:
        """Store the score of a trial in the study, unless it is stored already.

        If `score` is None, the trial counts as pruned, so that the sampler avoids its values.
        """
        state = self._optuna.trial.TrialState.PRUNED if score is None else None
        self._study.tell(number, score, state, skip_if_finished=True)

    def require_trials(self, points: int) -> None:
        """Raise UserError if the journal holds fewer than `points` trials."""
        if (count := len(self._trials())) < points:
            raise UserError(f"{self.path}: is damaged: holds {count} of the {points} trials that the sweep started")

    def best(self) -> int | None:
        """Return the number of the best completed trial, or None if no trial has completed."""
        if not any(trial.state == self._optuna.trial.TrialState.COMPLETE for trial in self._trials()):
            return None
        return int(self._study.best_trial.number)

    def importances(self) -> tuple[dict[str, float], str]:
        """Return a dict with the importance of each key for the ranking of the trials, and an empty text.

        If the importance cannot be computed, return an empty dict and a text that says why. The ranking is that of
        Optuna's sampler TPE. Completed trials come first, by score. Pruned trials follow: those pruned at a later step
        first, and at the same step by score. Trials without any score come last.
        """
        from toyexp.results.importance import compute_shares

        sign = 1 if self._study.direction.name == "MINIMIZE" else -1

        def rank(trial: Any) -> tuple[float, ...]:
            if trial.state.name == "COMPLETE":
                return (0, sign * trial.value)
            steps = trial.intermediate_values
            return (1, -max(steps), sign * steps[max(steps)]) if steps else (2,)

        trials = [trial for trial in self._trials() if trial.state.is_finished()]
        ranks = sorted(set(map(rank, trials)))
        values = {key.key: [trial.params.get(key.key) for trial in trials] for key in self._keys}
        return compute_shares(values, [ranks.index(rank(trial)) for trial in trials])

    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Yield each trial as a dict: its number, values by key, state and score; of a pruned trial, also its step."""
        for t in self._trials():
            state, step = t.state.name.lower(), max(t.intermediate_values, default=None)
            yield {"trial": t.number, "values": dict(t.params), "state": state, "score": t.value,
                   "step": step if state == "pruned" else None}  # fmt: skip

    def _trials(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False))

    def _words(self, values: Mapping[str, Any]) -> list[str]:
        return [key.setting(values[key.key]) for key in self._keys]

    def _sample(self, open_trial: Any, earlier_values: Set[tuple[str, ...]]) -> Mapping[str, Any]:
        """Sample the values of a trial.

        Try to avoid values of earlier trials, because repeating a run adds no information.
        """
        if self._search == "grid":
            return nth_point(self._keys, open_trial.number)
        study, trial = self._study, open_trial._cached_frozen_trial
        seed = (self._seed * 1_000_003 + trial.number) % 2**32  # a resumed search draws the same values
        sampler = self._sampler(seed)
        together = sampler.infer_relative_search_space(study, trial)
        for _ in range(MAX_DRAWS):
            values = sampler.sample_relative(study, trial, together)
            for name, space in self._space.items():
                value = values[name] if name in values else sampler.sample_independent(study, trial, name, space)
                values[name] = _round(value, space)
            if tuple(self._words(values)) not in earlier_values:
                return values
        if math.isfinite(count := count_points(self._keys)):  # few combinations are left
            first = random.Random(seed).randrange(int(count))
            points = (nth_point(self._keys, (first + more) % int(count)) for more in range(int(count)))
            return next((p for p in points if tuple(self._words(p)) not in earlier_values), values)
        return values

    def _sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._search == "cmaes":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        return (samplers.TPESampler if self._search == "tpe" else samplers.RandomSampler)(seed=seed)


class Judge:
    """Judge of one run of a search: it decides after an evaluation whether to stop (prune) the run early.

    It runs in the process that trains the run, and decides from step `first` on.
    """

    def __init__(self, journal: Path, number: int, prune: str, first: int):
        optuna = require_optuna("tpe")
        with _guard_journal(journal):
            sampler = optuna.samplers.RandomSampler()  # required by Optuna, never used
            self._study = optuna.load_study(study_name=STUDY_NAME, storage=_storage(journal), sampler=sampler)
            frozen_trial = self._study.get_trials(deepcopy=False)[number]
            self._trial = optuna.trial.Trial(self._study, frozen_trial._trial_id)
            self._reported_steps = set(frozen_trial.intermediate_values)
        self._number, self._first = number, first
        self._median = optuna.pruners.MedianPruner(n_warmup_steps=first) if prune == "median" else None

    def should_stop(self, step: int, score: float) -> bool:
        """Store the score of an evaluation, and return True if the run should stop.

        A resumed run may repeat evaluations that it made before. Scores that this run stored for steps after `step` are
        then ignored, so that the result is the same as the first time.
        """
        if step not in self._reported_steps:
            self._trial.report(score, step)
        trials = self._study.get_trials(deepcopy=False)
        if self._median is None:
            return self._loses_halving(step, score, trials)
        frozen_trial = copy.copy(trials[self._number])
        frozen_trial.intermediate_values = {
            eval_step: value for eval_step, value in frozen_trial.intermediate_values.items() if eval_step <= step
        }
        return bool(self._median.prune(self._study, frozen_trial))

    def _loses_halving(self, step: int, score: float, trials: Sequence[Any]) -> bool:
        """Return True if the score is not in the better half of the scores of all runs at this step.

        This is asynchronous successive halving (https://arxiv.org/abs/1810.05934). It decides only at the first pruning
        step and at 2, 4, 8, ... times that step. At all other steps, return False.
        """
        times, remainder = divmod(step, self._first)
        if remainder or times & (times - 1):
            return False
        sign = 1 if self._study.direction.name == "MINIMIZE" else -1
        scores = sorted(sign * t.intermediate_values[step] for t in trials if step in t.intermediate_values)
        return not sign * score <= scores[max(len(scores) // 2, 1) - 1]


def _storage(path: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    os.close(open_for_writing(path))
    return JournalStorage(JournalFileBackend(str(path)))


@contextlib.contextmanager
def _guard_journal(path: Path) -> Iterator[None]:
    """If an error occurs in the `with` block while the journal is opened or read, raise UserError instead.

    The file may come from an untrusted source, so many kinds of errors can occur.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be used ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: is damaged: {printable(f'{type(error).__name__}: {error}', 200)}") from None


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raise UnpicklingError if a trial's attributes hold a pickled CMA-ES state with classes not in CMAES_CLASSES.

    Unpickling an unknown class could run any code.
    """
    parts = {key: str(value) for key, value in attributes.items() if "optimizer" in key}
    if parts:
        joined = "".join(parts[key] for key in sorted(parts, key=lambda key: int(key.rpartition(":")[2])))
        _SafeUnpickler(io.BytesIO(bytes.fromhex(joined))).load()


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in CMAES_CLASSES:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


def _round(value: Any, distribution: Any) -> Any:
    if not isinstance(value, float) or getattr(distribution, "step", None) is not None:
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), distribution.low), distribution.high)
