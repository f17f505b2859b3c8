"""Plots of a run's curves, updated while it trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Plan, Run, hookimpl, printable
from toyexp.base import FAILED, Curves, Points, draw_curves, make_directory, require_drawing
from toyexp_callbacks.events import Listener, recorded_events

log = logging.getLogger("toyexp")

SUFFIXES = (".png", ".svg")
TIME_SHARE = 0.02  # maximum fraction of the run's time for plots before its end
FIRST_DELAY = 30.0  # seconds before the first plot
NOT_PLOTTED = {"ppl", "tokens", "wall_us"}


@dataclass(eq=False)
class Plots(Listener):
    """Plot loss, accuracy, gradient norm and learning rate to plots/curves.png and .svg, also during training."""

    name: ClassVar[str] = "plots"

    def __post_init__(self) -> None:
        self._curves = Curves()
        self._thread: threading.Thread | None = None
        self._images: dict[str, bytes] | None = None  # drawn by the thread, not yet written to files
        self._warned = False
        self._next = 0.0

    def check(self) -> None:
        """Raise Unavailable without matplotlib."""
        require_drawing()

    def outputs(self, plan: Plan) -> Sequence[str]:
        """Return the paths of the images in the run's directory."""
        return [f"plots/curves{suffix}" for suffix in SUFFIXES]

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Set the plot's title. For a resumed run, load the curves of the earlier steps."""
        config = run.config
        recipe = str((config.get("recipe") or {}).get("name") or "")
        self._curves.describe(run.facts, run.name, recipe, run.engine, config.get("batch_size"), run.lr, run.seed)
        if run.resumed_step:
            self._load_curves(run)
        self._next = time.monotonic() + FIRST_DELAY

    def _load_curves(self, run: Run) -> None:
        """Load the earlier steps from events.jsonl. If this file is missing, the curves start at the checkpoint."""
        for kind, step, fields in recorded_events(run):
            if kind == "step":
                self._add(self._curves.steps, step, fields)
            elif kind == "eval":
                self._add(self._curves.held_out, step, fields)
            elif kind == "warning":
                self._curves.warnings[step] = str(fields.get("about"))

    def _add(self, curves: dict[str, Points], step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if name not in NOT_PLOTTED and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                if step not in steps[-1:]:  # a resumed run may record an evaluation twice
                    steps.append(step)
                    values.append(value)

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the step's metrics."""
        self._add(self._curves.steps, step, metrics)

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Record the held-out metrics. From time to time, start a thread that draws the plot while the run trains."""
        self._add(self._curves.held_out, step, metrics)
        if self._images is not None:
            images, self._images = self._images, None
            self._write(run, lambda: images)
        is_busy = self._thread is not None and self._thread.is_alive()
        if not is_busy and time.monotonic() >= self._next and self._curves.steps["loss"][0]:
            self._thread = threading.Thread(target=self._draw, args=(_copy(self._curves),), daemon=True)
            self._thread.start()

    def _draw(self, curves: Curves) -> None:
        start = time.monotonic()
        try:
            self._images = draw_curves(curves).pictures(*SUFFIXES)
        except Exception as error:  # log it only: if the final plot fails too, the run warns
            log.info("plots: failed: %s", printable(str(error), 200))
        self._next = time.monotonic() + max(FIRST_DELAY, (time.monotonic() - start) / TIME_SHARE)

    def _write(self, run: Run, draw: Callable[[], Mapping[str, bytes]]) -> bool:
        """Write the images. On failure warn once and return False, because a missing plot must not fail a run."""
        directory = run.dir / "plots"
        try:
            for suffix, image in draw().items():
                with run.output(make_directory(directory) / f"curves{suffix}") as path:
                    path.write_bytes(image)
        except Exception as error:
            if not self._warned:
                run.emit("warning", text=f"plots: failed, the run continues: {printable(str(error), 200)}")
            self._warned = True
            return False
        return True

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record the step of a warning, to mark it in the plot."""
        if kind == "warning" and "step" in fields:
            self._curves.warnings[fields["step"]] = str(fields.get("about"))

    @hookimpl
    def on_end(self, run: Run, reason: str) -> None:
        """Plot the final curves."""
        steps = self._curves.steps["loss"][0]
        if not steps:
            return
        if self._thread is not None:
            self._thread.join()
        if steps[-1] < run.steps:
            why = run.bus.stop_reason if run.bus is not None and reason == "aborted" else None
            self._curves.early_end = steps[-1], printable(why or reason.replace("errored", FAILED), 150)
        best = run.bus.best(False) if run.bus is not None else None
        self._curves.best = best.step if best is not None and best.step < steps[-1] else None
        for suffix in SUFFIXES if self._write(run, lambda: draw_curves(self._curves).pictures(*SUFFIXES)) else ():
            run.emit("export", path=str(run.dir / "plots" / f"curves{suffix}"), what="plot")


def _copy(curves: Curves) -> Curves:
    """Return a copy of the curves. The plotting thread reads the copy, while the run adds points to the original."""
    steps = {name: (list(x), list(y)) for name, (x, y) in curves.steps.items()}
    held_out = {name: (list(x), list(y)) for name, (x, y) in curves.held_out.items()}
    return Curves(curves.title, curves.subtitle, curves.unit, steps, held_out, dict(curves.warnings))
