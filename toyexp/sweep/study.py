"""The thinking of a search, by Optuna: which point is next, which run is stopped, which key matters.

What it knows stands in a journal, which optuna-dashboard opens and which several processes may write.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.packages import needed, told_by
from toyexp.contract.model import lower_is_better
from toyexp.sweep.space import Key, grid_point

JOURNAL = "study.log"  # in the sweep's directory
NAME = "sweep"  # of the only study in it
DIGITS = 4  # of a number from an interval, which a person may have to type
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
    with told_by(f"sweep.search={search}"):
        with needed("optuna", HOW):
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
        if search == "cmaes":
            with needed("cmaes", HOW):
                import cmaes  # noqa: F401 - Optuna imports it where it is used
    return optuna


class Study:
    """The points of a search, and what came of them."""

    def __init__(self, folder: Path, search: str, metric: str, keys: Sequence[Key], seed: int):
        self._optuna = require(search)
        self._search, self._keys, self._seed = search, keys, seed
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
        self._study.sampler = self._sampler(number)
        begun = self._trials()[number:]
        trial = self._optuna.trial.Trial(self._study, begun[0]._trial_id) if begun else self._study.ask()
        return [key.chosen(trial) for key in self._keys]

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

    def importances(self) -> dict[str, float]:
        """The share of each key in what sets the best points apart; empty where too few points tell."""
        with contextlib.suppress(ValueError, RuntimeError, ArithmeticError, UserWarning), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # that there are too few, and all are given the same share
            found = self._optuna.importance.get_param_importances(self._study)
            if all(math.isfinite(value) for value in found.values()):
                return {str(key): float(value) for key, value in found.items()}
        return {}

    def outcomes(self) -> Iterator[dict[str, Any]]:
        """Each point, for a file."""
        for t in self._trials():
            yield {"trial": t.number, "values": dict(t.params), "state": t.state.name.lower(), "score": t.value}

    def _trials(self) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False))

    def _sampler(self, number: int) -> Any:
        """One for each point, so that a search that goes on draws what it would have drawn."""
        samplers, seed = self._optuna.samplers, (self._seed * 1_000_003 + number) % 2**32
        if self._search == "grid":
            return _fixed(samplers.RandomSampler, grid_point(self._keys, number))
        if self._search == "cmaes":
            return _rounding(samplers.CmaEsSampler)(seed=seed, warn_independent_sampling=False)
        return _rounding(samplers.TPESampler if self._search == "tpe" else samplers.RandomSampler)(seed=seed)


class Judge:
    """Says in the process of a run whether it goes on."""

    def __init__(self, journal: Path, number: int, prune: str, least: int):
        optuna = require("tpe")
        pruners = {
            "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=least),
            "median": lambda: optuna.pruners.MedianPruner(),
        }
        with _whole(journal):
            sampler = optuna.samplers.RandomSampler()  # of which nothing is asked
            study = optuna.load_study(
                study_name=NAME, storage=_storage(journal), sampler=sampler, pruner=pruners[prune]()
            )
            trials = study.get_trials(deepcopy=False)
            self._trial = optuna.trial.Trial(study, trials[number]._trial_id)
            self._known = dict(trials[number].intermediate_values)

    def stops(self, step: int, score: float) -> bool:
        """Notes the score of an eval; whether the run is to end there."""
        if step not in self._known:  # a run that goes on from its checkpoint may have told it before it was killed
            self._known[step] = score
            self._trial.report(score, step)
        return bool(self._trial.should_prune())


def _storage(path: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

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


def _fixed(base: Any, point: Mapping[str, Any]) -> Any:
    """A sampler of one point."""

    class Fixed(base):
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            return point[name]

    return Fixed()


def _rounding(base: Any) -> Any:
    """A sampler whose numbers have a few digits, in the journal and in the settings alike."""

    class Rounding(base):
        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            found = super().sample_relative(study, trial, search_space)
            return {name: _rounded(value, search_space[name]) for name, value in found.items()}

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            return _rounded(super().sample_independent(study, trial, name, distribution), distribution)

    return Rounding


def _rounded(value: Any, distribution: Any) -> Any:
    if not isinstance(value, float) or getattr(distribution, "step", None) is not None:
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), distribution.low), distribution.high)
