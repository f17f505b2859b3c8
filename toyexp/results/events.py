"""The events of a run: its first line, and its curves, thinned so that what stands out still does."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.files import open_file
from toyexp.results.found import OF_AN_EVAL
from toyexp.training.provenance import first_event

LINE = 1 << 20  # bytes of a line that is read
LINES = 1000  # that are parsed at once, a step takes a fraction of the time then
SAMPLES, WARNINGS = 3, 20  # of a run that are kept: the last, and the first
TEXT = 2000  # characters of either


def start_of(run: Path) -> dict[str, Any]:
    """The first event: machine, engine, model, data; nothing where it cannot be read."""
    found = first_event(run)
    told = {key: value for key, value in found.items() if key == "cwd" and isinstance(value, str)}
    return {key: value if isinstance(value, dict) else {} for key, value in found.items() if key != "kind"} | told


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

    def extend(self, steps: Sequence[int], values: Sequence[Any]) -> None:
        """Several more, likewise."""
        numbers = {*map(type, values)} <= {int, float}
        if numbers and max(map(abs, values), default=0.0) < 1e300 and not math.isnan(sum(values)):
            self.steps.extend(steps)
            self.values.extend(values)
            return
        for step, value in zip(steps, values, strict=True):
            self.add(step, value)


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
        found = cls()
        for events in _events(run / "events.jsonl"):
            steps = [event for event in events if event.get("kind") == "step" and _step_of(event) is not None]
            found._add_steps(steps)
            for event in events:
                found._add(event.get("kind"), _step_of(event), event)
        return found

    def _add_steps(self, events: Sequence[dict[str, Any]]) -> None:
        steps = [event["step"] for event in events]
        for name, curve in (
            ("loss", self.loss), ("lr", self.lr), ("grad_norm", self.grad_norm), ("t", self.seconds),
        ):  # fmt: skip
            curve.extend(steps, [event.get(name) for event in events])
        before = int(self.tokens.values[-1]) if self.tokens.values else 0
        counts = [_whole(event.get("tokens")) or 0 for event in events]
        self.tokens.extend(steps, [*itertools.accumulate(counts, initial=before)][1:])
        walls = [event.get("wall_us") for event in events]
        self.speed.extend(
            steps, [n * 1e6 / w if n and isinstance(w, int | float) and 0 < w < 1e300 else None
                    for n, w in zip(counts, walls, strict=True)],
        )  # fmt: skip

    def _add(self, kind: Any, step: int | None, event: dict[str, Any]) -> None:
        """What is no step."""
        if kind == "eval" and step is not None:
            scores = {k: v for k, v in event.items() if k not in OF_AN_EVAL}
            for name, value in {"loss": event.get("loss"), **scores}.items():
                self.held_out.setdefault(name, Curve()).add(step, value)
        elif kind == "sample":
            said = {key: str(event.get(key, ""))[:TEXT] for key in ("prompt", "text")}
            self.samples = [*self.samples, {"step": step, **said}][-SAMPLES:]
        elif kind in ("warning", "skipped"):
            self.warned += 1
            text = str(event.get("text") or "the step was skipped: its numbers were not finite")[:TEXT]
            if len(self.warnings) < WARNINGS:
                self.warnings.append({"step": step, "text": text})


def _step_of(event: Mapping[str, Any]) -> int | None:
    return _whole(event.get("step"))


def _whole(count: Any) -> int | None:
    """A count as a number can have it without rounding."""
    return count if isinstance(count, int) and 0 <= count < 1 << 53 else None


def events_in(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a file, one after another; what is none is passed over, and a file that cannot be read has none."""
    for events in _events(path):
        yield from events


def _events(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Some at a time."""
    try:
        with open_file(path) as file:
            while lines := [*itertools.islice(iter(partial(file.readline, LINE), b""), LINES)]:
                try:
                    found = json.loads(b"[" + b",".join(lines) + b"]")
                    whole = len(found) == len(lines)
                except (ValueError, RecursionError):
                    whole = False
                events = found if whole else map(_parsed, lines)  # of a line that is none, and may spoil the others
                yield [event for event in events if isinstance(event, dict)]
    except (UserError, OSError):
        return


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


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
