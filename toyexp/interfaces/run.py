"""The classes through which callbacks see a run, its metrics and its best evaluation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from toyexp.base.errors import RunFailed
from toyexp.base.lazy import numpy as np
from toyexp.base.ownership import Ledger
from toyexp.base.writing import convert_write_errors
from toyexp.interfaces.dataset import Dataset
from toyexp.interfaces.plan import Plan

if TYPE_CHECKING:
    from toyexp.interfaces.session import Session


# Keys that the run itself writes to the record of a step or evaluation; callbacks cannot log under these names.
RESERVED_NAMES = {"kind", "t", "phase", "name", "step", "batch", "loss", "ppl", "lr", "grad_norm", "tokens", "wall_us"}


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run."""

    step: int
    metric: str
    score: float
    weights: Mapping[str, np.ndarray] | None = field(default=None, repr=False)  # trainable tensors; None: the session's
    scores: Mapping[str, float] = field(default_factory=dict)  # all metrics of that evaluation


class Metrics(dict[str, float]):
    """Numbers of a step or evaluation. Callbacks cannot change them, but add their own with `run.log`."""

    def __init__(self, numbers: Mapping[str, float], finite: bool = False):
        super().__init__(numbers)
        self.logged: dict[str, float] = {}  # numbers added by callbacks
        self._finite = finite  # True for evaluations: NaN cannot be compared

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add numbers that a callback logged. Raise ValueError if the run itself records a number of that name."""
        for name, value in numbers.items():
            if name in self.keys() - self.logged.keys():
                raise ValueError(f"run.log({name}=...): the run itself records a number named so; choose another name")
            if self._finite and not math.isfinite(value):
                raise ValueError(f"run.log({name}={value}): a held-out metric must be a finite number")
            self.logged[name] = float(value)
        super().update(self.logged)

    def _reject(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("metrics are read-only; add your own numbers with run.log(name=value)")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _reject


class Listeners(Protocol):
    """Interface through which a run sends its events and numbers to callbacks."""

    best: Callable[[bool], Best | None]  # returns the best evaluation so far, with weights if True is passed
    stop_reason: str | None  # sentence of the callback that ended the run

    def emit(self, run: Run, kind: str, fields: dict[str, Any]) -> None:
        """Send an event to all callbacks."""

    def log_numbers(self, run: Run, numbers: Mapping[str, float]) -> None:
        """Add `numbers`, which a callback has logged, to the metrics of the hook that is running.

        If this hook has no metrics, add the numbers to those of the next step or evaluation.
        """


@dataclass(frozen=True)
class Run:
    """The run that a callback belongs to: its configuration, plan, session, data and directory."""

    name: str
    dir: Path
    seed: int
    steps: int
    lr: float  # the base learning rate
    config: Mapping[str, Any]  # the resolved configuration
    engine: str  # name of the engine, also with engine=auto
    plan: Plan
    session: Session
    dataset: Dataset
    facts: Mapping[str, Any] = field(default_factory=dict)  # fields of the event run_start in events.jsonl
    bus: Listeners | None = field(default=None, repr=False)
    resumed_step: int = 0  # step that a resumed run continues from; 0: new run
    ledger: Ledger | None = field(default=None, repr=False)  # files it has written
    stop_signals: Callable[[], int] = lambda: 0  # number of signals to end that were received; from 2 on, end fast

    def best(self) -> Best | None:
        """Return the best evaluation so far, with its weights; None if the run does not keep the best weights."""
        return self.bus.best(True) if self.bus is not None else None

    @contextlib.contextmanager
    def output(self, path: Path, grows: bool = False) -> Iterator[Path]:
        """Yield a temporary path to write a file or directory to; it is renamed to `path` when the context ends.

        `path` must be below the run's directory. Set `grows` if the callback appends to the file later. A callback must
        list its files in `outputs`. Raise RunFailed if writing fails, or if `path` exists and was not written by this
        run.
        """
        with convert_write_errors(path), (self.ledger or Ledger(self.dir)).output(path, grows) as temporary:
            try:
                yield temporary
            except RunFailed as error:
                raise RunFailed(str(error).replace(str(temporary.parent), str(path.parent))) from error

    @property
    def remedy(self) -> str:
        """Advice for a diverging loss: the settings to lower, as text.

        Settings of `optim` that may be too high, such as the `lr` of a group, come first; the run's `lr` comes last.
        """
        optim = self.config.get("optim", {})
        base_values = {"lr": self.lr, "weight_decay": optim.get("weight_decay", 0.0)}
        groups = optim.get("groups", {}).items()
        values = [(p, name, v) for p, settings in groups for name, v in settings.items() if name in base_values]
        higher = [f"{name} of optim.groups: {p} (it was {v:g})" for p, name, v in values if v > base_values[name]]
        rates = {key: v for key, v in optim.items() if key.endswith("_lr") and isinstance(v, int | float)}
        if (decay := base_values["weight_decay"]) * self.lr >= 1:  # a step would subtract more than the weight itself
            rates["weight_decay"] = decay
        higher += [f"optim.{key} (it was {v:g})" for key, v in rates.items() if v > self.lr]
        return f"try a lower {', '.join([*higher, f'lr (it was {self.lr:g})'])}"

    def log(self, **numbers: float) -> None:
        """Record numbers that a callback computed, such as its own metrics.

        Numbers logged in `on_step` belong to the step, and those logged in `on_eval` to the held-out metrics.

        The numbers are added to the hook's `metrics`, and thus to records, plots and dashboards; held-out metrics are
        also available to early stopping, `checkpoint_best` and searches. Numbers logged in another hook are added to
        the next step or evaluation; those logged in `on_end` become an event. Raise ValueError for values that are not
        numbers, and for names that the run itself records.
        """
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"run.log({name}={value!r}): the value must be a number")
            if name in RESERVED_NAMES:
                raise ValueError(f"run.log({name}=...): the run itself records a number named so; choose another name")
        if self.bus is not None:
            self.bus.log_numbers(self, numbers)

    def emit(self, kind: str, **fields: Any) -> None:
        """Send an event to all callbacks, including the writer of events.jsonl."""
        if self.bus is not None:
            self.bus.emit(self, kind, fields)
