"""What callbacks know about the run they are in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toyexp.base.errors import RunFailed
from toyexp.base.ownership import Ledger
from toyexp.base.writing import required

if TYPE_CHECKING:
    import numpy as np

    from toyexp.contract.dataset import Dataset
    from toyexp.contract.plan import Plan
    from toyexp.contract.session import Session


@dataclass(frozen=True)
class Best:
    """The best eval of a run."""

    step: int
    metric: str
    score: float
    weights: Mapping[str, np.ndarray] | None = field(default=None, repr=False)  # that train; None: the present ones


class Listeners(Protocol):
    """Who is told what happens in a run: its bus."""

    best: Callable[[bool], Best | None]  # the best eval so far; with its weights, or without
    why: str | None  # the sentence of the callback that ended the run

    def say(self, run: Run, kind: str, fields: dict[str, Any]) -> None:
        """Delivers an event."""


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
    resumed: int = 0  # the step it continues from, of a run that was resumed
    ledger: Ledger | None = field(default=None, repr=False)  # what it wrote into its directory
    stops: Callable[[], int] = lambda: 0  # how many signals have asked it to end: at the second everyone hurries

    def best(self) -> Best | None:
        """The best eval so far, with its weights; None of a run that keeps no best."""
        return self.bus.best(True) if self.bus is not None else None

    @contextlib.contextmanager
    def output(self, path: Path, grows: bool = False) -> Iterator[Path]:
        """A place to write a file or directory to, which becomes `path`, below the run's directory, in one piece.

        A file that `grows` is appended to afterwards. Raises RunFailed where it cannot be written, and where something
        stands that this run did not write: that is never replaced. A callback names what it leaves in `outputs`.
        """
        with required(path), (self.ledger or Ledger(self.dir)).output(path, grows) as place:
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
        higher += [f"optim.{key} (it was {v:g})" for key, v in rates.items() if v > self.lr]
        return f"try a lower {', '.join([*higher, f'lr (it was {self.lr:g})'])}"

    def emit(self, kind: str, **fields: Any) -> None:
        """Tells every callback (events.jsonl among them) that something happened."""
        if self.bus is not None:
            self.bus.say(self, kind, fields)
