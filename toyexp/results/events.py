"""Read the events of a run: the facts in the first event, and the numbers that were recorded at each step."""

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
from toyexp.results.run_dirs import EVAL_KEYS
from toyexp.training.checkpoint import matches_type
from toyexp.training.provenance import read_first_event

if TYPE_CHECKING:
    import pandas

LINE = 1 << 20  # maximum bytes of a line
LINES = 1000  # lines that are parsed at once, which is several times faster
SAMPLES, WARNINGS = 3, 20  # a History keeps this many: the last samples, the first warnings
TEXT = 2000  # maximum characters of a sample or warning
NAMES = ("loss", "lr", "grad_norm", "tokens", "seconds", "speed")  # arrays other than `step`
RECORDED = ("loss", "lr", "grad_norm", "tokens", "t", "wall_us")  # keys of a step event that give these arrays
STEP_KEYS = {"kind", "phase", "step", "batch", *RECORDED}

Curve = tuple[np.ndarray, np.ndarray]  # steps, values


def read_run_facts(run: Path) -> dict[str, Any]:
    """Return the facts in the first event of a run, such as host, model and data; {} if it cannot be read.

    All values are dicts ({} if damaged), except `cwd`, which is a string, and `typed`, which is a list of strings.
    """
    first_event, others = read_first_event(run), {"cwd": str, "typed": list[str]}
    plain = {key: first_event[key] for key, hint in others.items() if matches_type(first_event.get(key), hint)}
    dicts = {key: value if isinstance(value, dict) else {} for key, value in first_event.items() if key != "kind"}
    return {**dicts, **plain}


@dataclass(frozen=True, eq=False)
class History(Mapping[str, np.ndarray]):
    """Training history of a run, from its events.jsonl: a mapping from names to arrays [N], with N recorded steps.

    Numbers are float64; NaN means not recorded or not finite. `history["loss"]` and `history.loss` are the same.
    """

    step: np.ndarray  # [N] int64, from 1: number of steps trained
    loss: np.ndarray  # [N] nats per target, of the step's batch before its update
    lr: np.ndarray  # [N] learning rate
    grad_norm: np.ndarray  # [N] norm of all gradients before clipping
    tokens: np.ndarray  # [N] targets trained on in the recorded steps so far: tokens or images
    seconds: np.ndarray  # [N] since the start, with evaluations, without the time between interruption and resumption
    speed: np.ndarray  # [N] tokens or images per second, of the step alone
    held_out: Mapping[str, np.ndarray] = field(default_factory=dict)  # `step` [M] int64, `loss` [M], other metrics [M]
    logged: Mapping[str, np.ndarray] = field(default_factory=dict)  # [N] from schedules and `run.log` of callbacks
    samples: list[dict[str, Any]] = field(default_factory=list)  # the last samples: step, prompt, text
    warnings: list[dict[str, Any]] = field(default_factory=list)  # the first warnings: step, text, about
    warning_count: int = 0  # number of all warnings

    @classmethod
    def read(cls, run: Path) -> History:
        """Read the history of a run directory; arrays are empty if it recorded no events."""
        steps, rows, evals = array("q"), array("d"), array("q")
        logged: dict[str, dict[int, float]] = {}
        scores: dict[str, dict[int, float]] = {"loss": {}}
        samples: list[dict[str, Any]] = []
        warnings: list[dict[str, Any]] = []
        for event in read_events(run / "events.jsonl"):
            kind, step = event.get("kind"), event.get("step")
            step = step if type(step) is int and 0 <= step < 1 << 53 else None
            if kind == "step" and step is not None:
                rows.extend(map(_number, map(event.get, RECORDED)))
                for name in itertools.filterfalse(STEP_KEYS.__contains__, event):
                    logged.setdefault(name, {})[len(steps)] = _number(event[name])
                steps.append(step)
            elif kind == "eval" and step is not None:
                for name in ("loss", *(name for name in event if name not in EVAL_KEYS)):
                    scores.setdefault(name, {})[len(evals)] = _number(event.get(name))
                evals.append(step)
            elif kind == "sample":
                samples.append({"step": step, **{key: str(event.get(key, ""))[:TEXT] for key in ("prompt", "text")}})
            elif kind in ("warning", "skipped"):
                text = event.get("text") or "the step was skipped: its numbers were not finite"
                warnings.append({"step": step, "text": str(text)[:TEXT], "about": str(event.get("about"))[:TEXT]})
        loss, lr, grad_norm, tokens, seconds, wall = np.array(rows).reshape(-1, len(RECORDED)).T.copy()
        tokens[tokens < 0] = np.nan
        speed = np.divide(tokens * 1e6, wall, out=np.full(len(steps), np.nan), where=wall > 0)
        return cls(
            np.array(steps, np.int64), loss, lr, grad_norm, np.nancumsum(tokens), seconds, speed,
            {"step": np.array(evals, np.int64), **_arrays(scores, len(evals))}, _arrays(logged, len(steps)),
            samples[-SAMPLES:], warnings[:WARNINGS], len(warnings),
        )  # fmt: skip

    def curve(self, name: str) -> Curve:
        """Return the steps at which the training number `name` is finite, and its values there."""
        return _finite_points(self.step, self[name])

    def held_out_curve(self, name: str) -> Curve:
        """Return the steps at which a held-out metric is finite, and its values; empty arrays if it is not recorded."""
        if name not in self.held_out:
            return np.empty(0), np.empty(0)
        return _finite_points(self.held_out["step"], self.held_out[name])

    def frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with a row for each recorded or evaluated step.

        Columns of held-out metrics are called `held_out_loss` and so on.

        Raise Unavailable without pandas.
        """
        with require_package("pandas", "pip install pandas"):
            import pandas
        trained = pandas.DataFrame({name: self[name] for name in (*NAMES, *self.logged)}, index=self.step)
        scores = {f"held_out_{name}": array for name, array in self.held_out.items() if name != "step"}
        held_out = pandas.DataFrame(scores, index=self.held_out.get("step", ()))
        joined = trained[~trained.index.duplicated("last")].join(
            held_out[~held_out.index.duplicated("last")], how="outer"
        )
        joined.index.name = "step"
        return joined

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.logged:
            return self.logged[name]
        if name not in ("step", *NAMES):
            held_out = f"; for held-out values use history.held_out['{name}']" if name in self.held_out else ""
            raise KeyError(f"{name}: no such array; choose {', '.join(self)}{held_out}")
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
    return float(value) if type(value) in (float, int) and -1e300 < value < 1e300 else np.nan


def _arrays(series: Mapping[str, Mapping[int, float]], count: int) -> dict[str, np.ndarray]:
    return {name: np.array([values.get(n, np.nan) for n in range(count)]) for name, values in series.items()}


def _finite_points(steps: np.ndarray, values: np.ndarray) -> Curve:
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file. Skip lines that are not JSON; yield nothing if the file cannot be read."""
    try:
        with open_file(path) as file:
            while lines := [*itertools.islice(iter(partial(file.readline, LINE), b""), LINES)]:
                try:
                    parsed = json.loads(b"[" + b",".join(lines) + b"]")
                    is_complete = len(parsed) == len(lines)
                except (ValueError, RecursionError):
                    is_complete = False
                events = parsed if is_complete else map(_parse_line, lines)  # one by one if a line is invalid
                yield from (event for event in events if isinstance(event, dict))
    except (UserError, OSError):
        return


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def average_bins(curve: Curve, most: int) -> Curve:
    """Average a curve over bins of consecutive points, so that at most `most` points are left.

    A point of the result is the mean step and the mean value of a bin.
    """
    steps, values = curve
    n = len(steps)
    if n <= most:
        return steps.astype(np.float64), values
    begins = np.array([n * i // most for i in range(most)])
    counts = np.diff([*begins, n])
    steps, values = (np.add.reduceat(numbers.astype(np.float64), begins) / counts for numbers in curve)
    return steps, values
