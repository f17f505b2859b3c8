"""The events of a run: its first line, and its numbers step by step."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.files import open_file
from toyexp.base.packages import require_package
from toyexp.results.found import OF_AN_EVAL
from toyexp.training.provenance import read_first_event

if TYPE_CHECKING:
    import pandas

LINE = 1 << 20  # bytes of a line that is read
LINES = 1000  # that are parsed at once, a step takes a fraction of the time then
SAMPLES, WARNINGS = 3, 20  # of a run that are kept: the last, and the first
TEXT = 2000  # characters of either
NAMES = ("loss", "lr", "grad_norm", "tokens", "seconds", "speed")  # of the arrays, beside `step`
RECORDED = ("loss", "lr", "grad_norm", "tokens", "t", "wall_us")  # the fields that they are made from
OF_A_STEP = {"kind", "phase", "step", "batch", *RECORDED}

Curve = tuple[np.ndarray, np.ndarray]  # steps and values


def start_of(run: Path) -> dict[str, Any]:
    """The first event: machine, engine, model, data; nothing where it cannot be read."""
    found = read_first_event(run)
    told = {key: value for key, value in found.items() if key == "cwd" and isinstance(value, str)}
    return {key: value if isinstance(value, dict) else {} for key, value in found.items() if key != "kind"} | told


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
    logged: Mapping[str, np.ndarray] = field(default_factory=dict)  # [N] from schedules and `run.log` of callbacks
    samples: list[dict[str, Any]] = field(default_factory=list)  # the last texts: step, prompt, text
    warnings: list[dict[str, Any]] = field(default_factory=list)  # the first ones: step, text
    warned: int = 0  # how many warnings there were

    @classmethod
    def of(cls, run: Path) -> History:
        """Read that of a run's directory; arrays of no entries if it recorded no events."""
        steps, rows, evals = array("q"), array("d"), array("q")
        logged: dict[str, dict[int, float]] = {}
        scores: dict[str, dict[int, float]] = {"loss": {}}
        samples: list[dict[str, Any]] = []
        warnings: list[dict[str, Any]] = []
        for event in events_in(run / "events.jsonl"):
            kind, step = event.get("kind"), event.get("step")
            step = step if type(step) is int and 0 <= step < 1 << 53 else None
            if kind == "step" and step is not None:
                rows.extend(map(_number, map(event.get, RECORDED)))
                for name in itertools.filterfalse(OF_A_STEP.__contains__, event):
                    logged.setdefault(name, {})[len(steps)] = _number(event[name])
                steps.append(step)
            elif kind == "eval" and step is not None:
                for name in ("loss", *(name for name in event if name not in OF_AN_EVAL)):
                    scores.setdefault(name, {})[len(evals)] = _number(event.get(name))
                evals.append(step)
            elif kind == "sample":
                samples.append({"step": step, **{key: str(event.get(key, ""))[:TEXT] for key in ("prompt", "text")}})
            elif kind in ("warning", "skipped"):
                text = event.get("text") or "the step was skipped: its numbers were not finite"
                warnings.append({"step": step, "text": str(text)[:TEXT]})
        loss, lr, grad_norm, tokens, seconds, wall = np.array(rows).reshape(-1, len(RECORDED)).T.copy()
        tokens[tokens < 0] = np.nan
        speed = np.divide(tokens * 1e6, wall, out=np.full(len(steps), np.nan), where=wall > 0)
        return cls(
            np.array(steps, np.int64), loss, lr, grad_norm, np.nancumsum(tokens), seconds, speed,
            {"step": np.array(evals, np.int64), **_arrays(scores, len(evals))}, _arrays(logged, len(steps)),
            samples[-SAMPLES:], warnings[:WARNINGS], len(warnings),
        )  # fmt: skip

    def curve(self, name: str) -> Curve:
        """Return the steps that have a number of this name, and these numbers."""
        return _known(self.step, self[name])

    def held_out_curve(self, name: str) -> Curve:
        """Return the steps whose evaluation has a score of this name, and these scores."""
        return (
            _known(self.held_out["step"], self.held_out[name]) if name in self.held_out else (np.empty(0), np.empty(0))
        )

    def frame(self) -> pandas.DataFrame:
        """A row a step that was recorded or evaluated, by `step`; what was held out in columns `held_out_loss`, ....

        Raises Unavailable without pandas.
        """
        with require_package("pandas", "pip install pandas"):
            import pandas
        trained = pandas.DataFrame({name: self[name] for name in (*NAMES, *self.logged)}, index=self.step)
        scores = {f"held_out_{name}": array for name, array in self.held_out.items() if name != "step"}
        held_out = pandas.DataFrame(scores, index=self.held_out.get("step", ()))
        both = trained[~trained.index.duplicated("last")].join(
            held_out[~held_out.index.duplicated("last")], how="outer"
        )
        both.index.name = "step"
        return both

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.logged:
            return self.logged[name]
        if name not in ("step", *NAMES):
            held_out = "; history.held_out has the rest" if name in self.held_out else ""
            raise KeyError(f"{name}: there is {', '.join(self)}{held_out}")
        return np.asarray(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *NAMES, *self.logged))

    def __len__(self) -> int:
        return 1 + len(NAMES) + len(self.logged)

    def __repr__(self) -> str:
        held_out = ", ".join(name for name in self.held_out if name != "step")
        scored = f"held out {len(self.held_out['step'])} times: {held_out}"
        return f"History({len(self.step)} steps: {', '.join((*NAMES, *self.logged))}; {scored})"


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known else np.nan


def _arrays(found: Mapping[str, Mapping[int, float]], count: int) -> dict[str, np.ndarray]:
    return {name: np.array([values.get(n, np.nan) for n in range(count)]) for name, values in found.items()}


def _known(steps: np.ndarray, values: np.ndarray) -> Curve:
    known = np.isfinite(values)
    return steps[known], values[known]


def events_in(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a file, one after another; what is none is passed over, and a file that cannot be read has none."""
    try:
        with open_file(path) as file:
            while lines := [*itertools.islice(iter(partial(file.readline, LINE), b""), LINES)]:
                try:
                    found = json.loads(b"[" + b",".join(lines) + b"]")
                    whole = len(found) == len(lines)
                except (ValueError, RecursionError):
                    whole = False
                events = found if whole else map(_parsed, lines)  # of a line that is none, and may spoil the others
                yield from (event for event in events if isinstance(event, dict))
    except (UserError, OSError):
        return


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def means(curve: Curve, most: int) -> Curve:
    """Return the mean of each of so many stretches of equal length, at the mean of its steps."""
    steps, values = curve
    n = len(steps)
    if n <= most:
        return steps.astype(np.float64), values
    begins = np.array([n * i // most for i in range(most)])
    counts = np.diff([*begins, n])
    steps, values = (np.add.reduceat(of.astype(np.float64), begins) / counts for of in curve)
    return steps, values
