"""The curves of a run as a picture, renewed while it trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Callback, Plan, Run, RunFailed, hookimpl, printable
from toyexp.base import require_drawing
from toyexp_callbacks.curves import Curves, drawn, points
from toyexp_callbacks.events import told_before

log = logging.getLogger("toyexp")

SUFFIXES = (".png", ".svg")
SHARE = 0.02  # of the time of a run that may go into pictures before its end
FIRST = 30.0  # seconds before the first one


@dataclass(eq=False)
class Plots(Callback):
    """Draws loss, accuracy, gradient norm and learning rate to plots/curves.png and .svg, while training too."""

    name: ClassVar[str] = "plots"

    def __post_init__(self) -> None:
        self._curves = Curves()
        self._drawing: threading.Thread | None = None
        self._drawn: dict[str, bytes] | None = None  # by that thread, not yet written
        self._warned = False
        self._next = 0.0

    def check(self) -> None:
        """Raises Unavailable without matplotlib."""
        require_drawing()

    def looks(self, step: int) -> bool:
        """Never: it goes by what it is told."""
        return False

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The pictures."""
        return [f"plots/curves{suffix}" for suffix in SUFFIXES]

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Says what is run; of a resumed run, takes back the curves up to there."""
        facts = run.facts
        data, model = (facts.get(part) or {} for part in ("data", "model"))
        parameters = model.get("parameters")
        told = [
            str(data.get("name") or ""), run.engine, str(model.get("arch") or ""),
            f"{parameters:,} parameters" if isinstance(parameters, int) else "",
            f"batch {run.config.get('batch_size')}", f"lr {run.lr:g}", f"seed {run.seed}",
        ]  # fmt: skip
        recipe = str((run.config.get("recipe") or {}).get("name") or "")
        self._curves.title = run.name if recipe in run.name else f"{run.name}, {recipe}"
        self._curves.below = " · ".join(filter(None, told))
        self._curves.per = "token" if "tokenizer" in data else "target"
        if run.resumed:
            self._take_back(run)
        self._next = time.monotonic() + FIRST

    def _take_back(self, run: Run) -> None:
        """What events.jsonl tells of the steps before; a run without it is drawn from here on."""
        for kind, step, fields in told_before(run):
            if kind in ("step", "eval", "warning"):
                {"step": self._step, "eval": self._eval, "warning": lambda at, _: self._warn(at)}[kind](step, fields)

    def _step(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, (steps, values) in self._curves.steps.items():
            if isinstance(value := metrics.get(name), int | float):
                steps.append(step)
                values.append(value)

    def _eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name in ("loss", "accuracy"):
            if isinstance(value := metrics.get(name), int | float):
                steps, values = self._curves.held_out.setdefault(name, points())
                if step not in steps[-1:]:  # an eval of a resumed run may be told twice
                    steps.append(step)
                    values.append(value)
                if name == "accuracy":
                    self._curves.per = "image"

    def _warn(self, step: int) -> None:
        self._curves.warned.append(step)

    @hookimpl
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a point."""
        self._step(step, metrics)

    @hookimpl
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a held-out point; now and then has a picture drawn, beside the training."""
        self._eval(step, metrics)
        if self._drawn is not None:
            pictures, self._drawn = self._drawn, None
            try:
                self._write(run, pictures)
            except (OSError, RunFailed) as error:  # one on the way is not worth the run, which fails without the last
                if not self._warned:
                    run.emit("warning", text=f"{error}; training goes on")
                self._warned = True
        busy = self._drawing is not None and self._drawing.is_alive()
        if not busy and time.monotonic() >= self._next and self._curves.steps["loss"][0]:
            self._drawing = threading.Thread(target=self._draw, args=(_copied(self._curves),), daemon=True)
            self._drawing.start()

    def _draw(self, curves: Curves) -> None:
        began = time.monotonic()
        try:
            self._drawn = drawn(curves)
        except Exception as error:  # the picture at the end tells the run of it
            log.info("plots: not drawn: %s", printable(str(error), 200))
        self._next = time.monotonic() + max(FIRST, (time.monotonic() - began) / SHARE)

    def _write(self, run: Run, pictures: Mapping[str, bytes]) -> None:
        folder = run.dir / "plots"
        folder.mkdir(exist_ok=True)
        for suffix, picture in pictures.items():
            with run.output(folder / f"curves{suffix}") as place:
                place.write_bytes(picture)

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Notes where something was warned of."""
        if kind == "warning" and "step" in fields:
            self._warn(fields["step"])

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Draws what there is."""
        steps = self._curves.steps["loss"][0]
        if not steps:
            return
        if self._drawing is not None:
            self._drawing.join()
        if steps[-1] < run.steps:
            why = run.bus.why if run.bus is not None and reason == "aborted" else None
            self._curves.ended = steps[-1], printable(why or reason, 150)
        best = run.bus.best(False) if run.bus is not None else None
        self._curves.best = best.step if best is not None and best.step < steps[-1] else None
        self._write(run, drawn(self._curves))
        for suffix in SUFFIXES:
            run.emit("export", path=str(run.dir / "plots" / f"curves{suffix}"), what="plot")


def _copied(curves: Curves) -> Curves:
    """What another thread may read while this one goes on."""
    of = {name: (list(x), list(y)) for name, (x, y) in curves.steps.items()}
    held_out = {name: (list(x), list(y)) for name, (x, y) in curves.held_out.items()}
    return Curves(curves.title, curves.below, curves.per, of, held_out, list(curves.warned))
