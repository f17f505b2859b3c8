"""What callbacks know about the run they are in."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from toyexp.base.errors import RunFailed
from toyexp.base.ownership import Ledger
from toyexp.base.writing import convert_write_errors

if TYPE_CHECKING:
    import numpy as np

    from toyexp.interfaces.dataset import Dataset
    from toyexp.interfaces.plan import Plan
    from toyexp.interfaces.session import Session


# Names in a record of a step or an eval.
RESERVED = {"kind", "t", "phase", "name", "step", "batch", "loss", "ppl", "lr", "grad_norm", "tokens", "wall_us"}


@dataclass(frozen=True)
class Best:
    """The best eval of a run."""

    step: int
    metric: str
    score: float
    weights: Mapping[str, np.ndarray] | None = field(default=None, repr=False)  # that train; None: the present ones
    scores: Mapping[str, float] = field(default_factory=dict)  # all scores of that eval


class Metrics(dict[str, float]):
    """Numbers of a step or of an eval, which callbacks read and `run.log` adds to."""

    def __init__(self, numbers: Mapping[str, float], finite: bool = False):
        super().__init__(numbers)
        self.logged: dict[str, float] = {}  # by callbacks
        self._finite = finite  # of an eval, whose scores are compared

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add what a callback logged; raise ValueError for a name of the run's own."""
        for name, value in numbers.items():
            if name in self.keys() - self.logged.keys():
                raise ValueError(f"run.log({name}=...): the run records a number of that name; choose another")
            if self._finite and not math.isfinite(value):
                raise ValueError(f"run.log({name}={value}): a held-out score must be a finite number")
            self.logged[name] = float(value)
        super().update(self.logged)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("metrics are read-only; report a number of your own with run.log(name=value)")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class Listeners(Protocol):
    """Who is told what happens in a run: its bus."""

    best: Callable[[bool], Best | None]  # the best eval so far; with its weights, or without
    why: str | None  # the sentence of the callback that ended the run

    def emit(self, run: Run, kind: str, fields: dict[str, Any]) -> None:
        """Delivers an event."""

    def log_numbers(self, run: Run, numbers: Mapping[str, float]) -> None:
        """Add numbers to the metrics that are told of now, or next."""


@dataclass(frozen=True)
class Run:
    """What callbacks know about the run they are in."""

    name: str
    dir: Path
    seed: int
    steps: int
    lr: float  # the base learning rate
    config: Mapping[str, Any]  # the resolved configuration
    engine: str  # the engine's name; with engine=auto the one that was picked
    plan: Plan
    session: Session
    dataset: Dataset
    facts: Mapping[str, Any] = field(default_factory=dict)  # what run_start records
    bus: Listeners | None = field(default=None, repr=False)
    resumed_step: int = 0  # the step it continues from, of a run that was resumed
    ledger: Ledger | None = field(default=None, repr=False)  # what it wrote into its directory
    stop_signals: Callable[[], int] = lambda: 0  # how many signals have asked it to end: at the second everyone hurries

    def best(self) -> Best | None:
        """The best eval so far, with its weights; None of a run that keeps no best."""
        return self.bus.best(True) if self.bus is not None else None

    @contextlib.contextmanager
    def output(self, path: Path, grows: bool = False) -> Iterator[Path]:
        """A place to write a file or directory to, which becomes `path`, below the run's directory, in one piece.

        A file that `grows` is appended to afterwards. Raises RunFailed where it cannot be written, and where something
        stands that this run did not write: that is never replaced. A callback names what it leaves in `outputs`.
        """
        with convert_write_errors(path), (self.ledger or Ledger(self.dir)).output(path, grows) as place:
            try:
                yield place
            except RunFailed as error:
                raise RunFailed(str(error).replace(str(place.parent), str(path.parent))) from error

    @property
    def remedy(self) -> str:
        """What to try where the loss blows up: a lower lr, after what `optim` has higher for some of the tensors."""
        optim = self.config.get("optim", {})
        usual = {"lr": self.lr, "weight_decay": optim.get("weight_decay", 0.0)}
        own = [(p, name, v) for p, mine in optim.get("groups", {}).items() for name, v in mine.items() if name in usual]
        higher = [f"{name} of optim.groups: {p} (it was {v:g})" for p, name, v in own if v > usual[name]]
        rates = {key: v for key, v in optim.items() if key.endswith("_lr") and isinstance(v, int | float)}
        rates |= {"weight_decay": decay} if (decay := usual["weight_decay"]) * self.lr >= 1 else {}  # of a whole weight
        higher += [f"optim.{key} (it was {v:g})" for key, v in rates.items() if v > self.lr]
        return f"try a lower {', '.join([*higher, f'lr (it was {self.lr:g})'])}"

    def log(self, **numbers: float) -> None:
        """Report numbers of a callback's own: in `on_step` as the step's, in `on_eval` as scores of the held-out data.

        They join that hook's metrics: for the record, pictures and dashboards, and scores for early stopping,
        `checkpoint_best` and searches too. From another hook they join the next step or eval; from `on_end` an event.
        """
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"run.log({name}={value!r}): takes numbers")
            if name in RESERVED:
                raise ValueError(f"run.log({name}=...): the run records a number of that name; choose another")
        if self.bus is not None:
            self.bus.log_numbers(self, numbers)

    def emit(self, kind: str, **fields: Any) -> None:
        """Tells every callback (events.jsonl among them) that something happened."""
        if self.bus is not None:
            self.bus.emit(self, kind, fields)
