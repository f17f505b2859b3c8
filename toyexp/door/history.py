"""A run step by step, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toyexp.base.packages import needed
from toyexp.runs.events import events_in
from toyexp.runs.found import OF_AN_EVAL

if TYPE_CHECKING:
    import pandas

NAMES = ("loss", "lr", "grad_norm", "tokens", "seconds", "speed")  # of the arrays, beside `step`


@dataclass(frozen=True, eq=False)
class History(Mapping[str, np.ndarray]):
    """The numbers of a run, from its events.jsonl: arrays of float64 [N] by name, one entry a recorded step.

    A number that was not finite, or was not recorded, is NaN. `history["loss"]` and `history.loss` are the same.
    """

    step: np.ndarray  # [N] int64, from 1: the step after which the numbers were taken
    loss: np.ndarray  # [N] nats a target, of the step's batch before its update
    lr: np.ndarray  # [N] learning rate
    grad_norm: np.ndarray  # [N] of all gradients, before they are clipped
    tokens: np.ndarray  # [N] targets learned from in the recorded steps so far: tokens, or images
    seconds: np.ndarray  # [N] since the run began, evaluations and all; of a run that went on, without the time between
    speed: np.ndarray  # [N] tokens, or images, a second, in the step alone
    held_out: Mapping[str, np.ndarray] = field(default_factory=dict)  # `step` [M] int64, `loss` [M], and other scores

    @classmethod
    def of(cls, run: Path) -> History:
        """That of a run's directory; arrays of no entries where it recorded no events."""
        steps: list[int] = []
        rows: list[tuple[float, ...]] = []
        evals: list[tuple[int, dict[str, float]]] = []
        learned = 0.0
        for event in events_in(run / "events.jsonl"):
            step, kind = event.get("step"), event.get("kind")
            if kind not in ("step", "eval") or type(step) is not int or not 0 <= step < 1 << 53:
                continue
            if kind == "eval":
                known = {key: _number(value) for key, value in event.items() if key not in OF_AN_EVAL}
                evals.append((step, {"loss": _number(event.get("loss")), **known}))
                continue
            tokens, wall = _number(event.get("tokens")), _number(event.get("wall_us"))
            learned += tokens if tokens == tokens else 0.0
            speed = tokens * 1e6 / wall if wall > 0 else np.nan
            told = (_number(event.get(key)) for key in ("loss", "lr", "grad_norm"))
            steps.append(step)
            rows.append((*told, learned, _number(event.get("t")), speed))
        columns = np.array(rows, np.float64).reshape(len(rows), len(NAMES)).T
        names = dict.fromkeys(key for _, scores in evals for key in scores)
        held_out = {"step": np.array([step for step, _ in evals], np.int64)} | {
            name: np.array([scores.get(name, np.nan) for _, scores in evals]) for name in ("loss", *names)
        }
        arrays = {name: np.ascontiguousarray(column) for name, column in zip(NAMES, columns, strict=True)}
        return cls(step=np.array(steps, np.int64), **arrays, held_out=held_out)

    def frame(self) -> pandas.DataFrame:
        """A row a step that was recorded or evaluated, by `step`; what was held out in columns `held_out_loss`, ....

        Raises Unavailable without pandas.
        """
        with needed("pandas", "pip install pandas"):
            import pandas
        trained = pandas.DataFrame({name: self[name] for name in NAMES}, index=self.step)
        scores = {f"held_out_{name}": array for name, array in self.held_out.items() if name != "step"}
        held_out = pandas.DataFrame(scores, index=self.held_out.get("step", ()))
        both = trained[~trained.index.duplicated("last")].join(
            held_out[~held_out.index.duplicated("last")], how="outer"
        )
        both.index.name = "step"
        return both

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in ("step", *NAMES):
            held_out = "; history.held_out has the rest" if name in self.held_out else ""
            raise KeyError(f"{name}: there is {', '.join(self)}{held_out}")
        return np.asarray(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *NAMES))

    def __len__(self) -> int:
        return 1 + len(NAMES)

    def __repr__(self) -> str:
        held_out = ", ".join(name for name in self.held_out if name != "step")
        scored = f"held out {len(self.held_out['step'])} times: {held_out}"
        return f"History({len(self.step)} steps: {', '.join(NAMES)}; {scored})"


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known else np.nan
