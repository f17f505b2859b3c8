"""The events of a run: its first line, and its curves, thinned so that what stands out still does."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.files import open_file
from toyexp.runs.found import OF_AN_EVAL

LINE = 1 << 20  # bytes of a line that is read
SAMPLES, WARNINGS = 3, 20  # of a run that are kept: the last, and the first
TEXT = 2000  # characters of either


def start_of(run: Path) -> dict[str, Any]:
    """The first event: machine, engine, model, data; nothing where it cannot be read."""
    try:
        with open_file(run / "events.jsonl") as file:
            found = json.loads(file.readline(LINE))
    except (UserError, OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value if isinstance(value, dict) else {} for key, value in found.items() if key != "kind"}


@dataclass
class Curve:
    """One number of a run, step by step."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: Any) -> None:
        """One more; what is no finite number is left out."""
        if isinstance(value, int | float) and -1e300 < value < 1e300:
            self.steps.append(step)
            self.values.append(value)


@dataclass
class History:
    """All that a report shows of a run's events."""

    loss: Curve = field(default_factory=Curve)
    lr: Curve = field(default_factory=Curve)
    grad_norm: Curve = field(default_factory=Curve)
    speed: Curve = field(default_factory=Curve)  # tokens, or images, a second, in steps alone
    seconds: Curve = field(default_factory=Curve)  # since the run began
    tokens: Curve = field(default_factory=Curve)  # learned from so far
    held_out: dict[str, Curve] = field(default_factory=dict)  # loss, and the model's scores
    samples: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    warned: int = 0

    @classmethod
    def of(cls, run: Path) -> History:
        """Reads them; a line that is none is passed over."""
        found, learned = cls(), 0
        for event in _events(run / "events.jsonl"):
            step, kind = event.get("step"), event.get("kind")
            step = step if isinstance(step, int) and 0 <= step < 1 << 53 else None
            if kind == "step" and step is not None:
                tokens, wall = event.get("tokens"), event.get("wall_us")
                learned += tokens if isinstance(tokens, int) else 0
                for name in ("loss", "lr", "grad_norm"):
                    getattr(found, name).add(step, event.get(name))
                if isinstance(tokens, int) and isinstance(wall, int | float) and wall > 0:
                    found.speed.add(step, tokens * 1e6 / wall)
                found.seconds.add(step, event.get("t"))
                found.tokens.add(step, learned)
            elif kind == "eval" and step is not None:
                scores = {k: v for k, v in event.items() if k not in OF_AN_EVAL}
                for name, value in {"loss": event.get("loss"), **scores}.items():
                    found.held_out.setdefault(name, Curve()).add(step, value)
            elif kind == "sample":
                said = {key: str(event.get(key, ""))[:TEXT] for key in ("prompt", "text")}
                found.samples = [*found.samples, {"step": step, **said}][-SAMPLES:]
            elif kind in ("warning", "skipped"):
                found.warned += 1
                text = str(event.get("text") or "the step was skipped: its numbers were not finite")[:TEXT]
                if len(found.warnings) < WARNINGS:
                    found.warnings.append({"step": step, "text": text})
        return found


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_file(path) as file:
            while line := file.readline(LINE):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event
    except (UserError, OSError):
        return


def thinned(curve: Curve, most: int) -> tuple[list[int], list[float]]:
    """At most so many points of a curve: of each of `most`/2 stretches of equal length its lowest and its highest."""
    n = len(curve.steps)
    if n <= most:
        return curve.steps.tolist(), curve.values.tolist()
    import numpy as np

    values = np.frombuffer(curve.values)
    kept: list[int] = []
    for begin, end in _stretches(n, most // 2):
        low, high = begin + int(values[begin:end].argmin()), begin + int(values[begin:end].argmax())
        kept += sorted({low, high})
    return [curve.steps[i] for i in kept], [curve.values[i] for i in kept]


def means(curve: Curve, most: int) -> tuple[list[float], list[float]]:
    """The mean of each of so many stretches of equal length, at the mean of its steps: what smoothing begins from."""
    n = len(curve.steps)
    if n <= most:
        return list(map(float, curve.steps)), curve.values.tolist()
    import numpy as np

    begins = np.array([begin for begin, _ in _stretches(n, most)])
    counts = np.diff([*begins, n])
    arrays: Iterable[Any] = (np.frombuffer(curve.steps, np.int64), np.frombuffer(curve.values))
    steps, values = (np.add.reduceat(a.astype(np.float64), begins) / counts for a in arrays)
    return steps.tolist(), values.tolist()


def _stretches(n: int, count: int) -> list[tuple[int, int]]:
    places = [n * i // count for i in range(count + 1)]
    return list(itertools.pairwise(places))
