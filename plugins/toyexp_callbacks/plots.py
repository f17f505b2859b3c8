"""The curves of a run as a picture, renewed while it trains; the style is in `toyexp/base/drawing.py`."""

from __future__ import annotations

import logging
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toyexp import Plan, Run, hookimpl, printable
from toyexp.base import (
    BLUE,
    GREY,
    INK,
    RED,
    SMALL,
    VERMILLION,
    Sheet,
    describe_parameters,
    label_line_ends,
    make_directory,
    require_drawing,
    set_log_scale,
    set_step_axis,
    smooth_loss,
    thin_curve,
    use_plot_style,
)
from toyexp_callbacks.events import Listener, told_before

log = logging.getLogger("toyexp")

SUFFIXES = (".png", ".svg")
SHARE = 0.02  # of the time of a run that may go into pictures before its end
FIRST = 30.0  # seconds before the first one
MOST = 4000  # points of a curve that are drawn: more than a print resolves
MOST_OWN = 6  # panels of numbers that callbacks log
NOTE = 44  # characters of a line of what is written beside a mark
UNDRAWN = {"ppl", "tokens", "wall_us"}

Points = tuple[list[int], list[float]]  # steps, and a value for each


@dataclass
class Curves:
    """What there is to draw of one run."""

    title: str = ""
    below: str = ""  # the second line of the title
    per: str = "token"  # what a loss is the mean over
    steps: dict[str, Points] = field(default_factory=lambda: {name: ([], []) for name in ("loss", "grad_norm", "lr")})
    held_out: dict[str, Points] = field(default_factory=dict)  # loss, and accuracy of images
    warned: list[int] = field(default_factory=list)
    best: int | None = None  # the step whose weights were kept
    ended: tuple[int, str] | None = None  # before its last step: where, and why


@dataclass(eq=False)
class Plots(Listener):
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

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The pictures."""
        return [f"plots/curves{suffix}" for suffix in SUFFIXES]

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Says what is run; of a resumed run, takes back the curves up to there."""
        facts = run.facts
        data, model = (facts.get(part) or {} for part in ("data", "model"))
        told = [
            str(data.get("name") or ""), run.engine, str(model.get("arch") or ""),
            describe_parameters(model),
            f"batch {run.config.get('batch_size')}", f"lr {run.lr:g}", f"seed {run.seed}",
        ]  # fmt: skip
        recipe = str((run.config.get("recipe") or {}).get("name") or "")
        self._curves.title = run.name if recipe in run.name else f"{run.name}, {recipe}"
        self._curves.below = " · ".join(filter(None, told))
        self._curves.per = "token" if "tokenizer" in data else "target"
        if run.resumed_step:
            self._take_back(run)
        self._next = time.monotonic() + FIRST

    def _take_back(self, run: Run) -> None:
        """What events.jsonl tells of the steps before; a run without it is drawn from here on."""
        for kind, step, fields in told_before(run):
            if kind == "step":
                self._step(step, fields)
            elif kind == "eval":
                self._eval(step, fields)
            elif kind == "warning":
                self._curves.warned.append(step)

    def _step(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if not name.endswith("_factor") and f"{name}_factor" not in metrics:  # which schedules add
                self._add(self._curves.steps, name, step, value)

    def _eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._add(self._curves.held_out, name, step, value)
        if "accuracy" in self._curves.held_out:
            self._curves.per = "image"

    def _add(self, curves: dict[str, Points], name: str, step: int, value: Any) -> None:
        if name not in UNDRAWN and isinstance(value, int | float):
            steps, values = curves.setdefault(name, ([], []))
            if step not in steps[-1:]:  # an eval of a resumed run may be told twice
                steps.append(step)
                values.append(value)

    @hookimpl(trylast=True)  # behind who logs
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a point."""
        self._step(step, metrics)

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Notes a held-out point; now and then has a picture drawn, beside the training."""
        self._eval(step, metrics)
        if self._drawn is not None:
            pictures, self._drawn = self._drawn, None
            self._write(run, lambda: pictures)
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

    def _write(self, run: Run, draw: Callable[[], Mapping[str, bytes]]) -> bool:
        """Write the pictures; return False, and warn once, if that fails: no run fails for want of a picture."""
        folder = run.dir / "plots"
        try:
            for suffix, picture in draw().items():
                with run.output(make_directory(folder) / f"curves{suffix}") as place:
                    place.write_bytes(picture)
        except Exception as error:
            if not self._warned:
                run.emit("warning", text=f"plots: no picture, the run goes on: {printable(str(error), 200)}")
            self._warned = True
            return False
        return True

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Notes where something was warned of."""
        if kind == "warning" and "step" in fields:
            self._curves.warned.append(fields["step"])

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
        for suffix in SUFFIXES if self._write(run, lambda: drawn(self._curves)) else ():
            run.emit("export", path=str(run.dir / "plots" / f"curves{suffix}"), what="plot")


def _copied(curves: Curves) -> Curves:
    """What another thread may read while this one goes on."""
    of = {name: (list(x), list(y)) for name, (x, y) in curves.steps.items()}
    held_out = {name: (list(x), list(y)) for name, (x, y) in curves.held_out.items()}
    return Curves(curves.title, curves.below, curves.per, of, held_out, list(curves.warned))


@use_plot_style()
def drawn(curves: Curves) -> dict[str, bytes]:
    """The picture as a PNG and as an SVG, by suffix; the same curves make the same bytes."""
    large = ["loss", "accuracy"] if "accuracy" in curves.held_out else ["loss"]
    own = {f"held-out {name}": of for name, of in curves.held_out.items() if name not in large}
    own |= {name: of for name, of in curves.steps.items() if name not in ("loss", "grad_norm", "lr")}
    own = dict([*own.items()][:MOST_OWN])
    heights = [*[3, 2.5][: len(large)], *[1] * len(own), 1, 1]
    sheet = Sheet((8.2 if len(large) > 1 else 6) + len(own), curves.title, curves.below, heights)
    panels = dict(zip([*large, *own, "grad_norm", "lr"], sheet.panels, strict=True))
    for name, of in own.items():
        _small(panels[name], of, name)
    _loss(panels["loss"], curves)
    if "accuracy" in panels:
        _accuracy(panels["accuracy"], curves)
    _small(panels["grad_norm"], curves.steps["grad_norm"], "gradient norm")
    _small(panels["lr"], curves.steps["lr"], "learning rate")
    set_step_axis(panels["lr"])
    _marks(panels, curves)
    return sheet.pictures(".png", ".svg")


def smoothed(values: Sequence[float]) -> tuple[Any, int]:
    """The mean over a centred window of a fifteenth of the steps, cut off at both ends; and that window's width.

    What is not finite is left out of the means. The last value is that of half a window, not of one noisy batch.
    """
    import numpy as np

    y = np.asarray(values, np.float64)
    known = np.isfinite(y)
    half = len(y) // 30
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    here = np.arange(len(y))
    low, high = np.maximum(here - half, 0), np.minimum(here + half + 1, len(y))
    number = counts[high] - counts[low]
    return np.where(number > 0, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan), 2 * half + 1


def _loss(axes: Any, curves: Curves) -> None:
    steps, values = curves.steps["loss"]
    ends = []
    if steps:
        smooth, width = smoothed(values)
        if width > 1:
            axes.plot(*thin_curve(steps, values, MOST), color=BLUE, linewidth=0.6, alpha=0.35)
        axes.plot(*thin_curve(steps, smooth, MOST), color=BLUE, linewidth=1.6)
        last: float | None = None  # as result.json and all tables have it
        for step, value in zip(steps, values, strict=True):
            last = smooth_loss(last, value, step)
        ends.append((smooth[-1], "training" if last is None else f"training {last:.4g}", BLUE))
    at, held_out = curves.held_out.get("loss", ([], []))
    if at:
        _held_out(axes, at, held_out)
        ends.append((held_out[-1], f"held-out {held_out[-1]:.4g}", VERMILLION))
    set_log_scale(axes, "y", [*values, *held_out])
    axes.set_ylabel(f"loss (nats per {curves.per})")
    label_line_ends(axes, ends)


def _accuracy(axes: Any, curves: Curves) -> None:
    at, values = curves.held_out["accuracy"]
    percent = [100 * value for value in values]
    _held_out(axes, at, percent)
    axes.set_ylabel("held-out accuracy (%)")
    label_line_ends(axes, [(percent[-1], f"held-out {percent[-1]:.1f} %", VERMILLION)])


def _held_out(axes: Any, at: Sequence[int], values: Sequence[float]) -> None:
    axes.plot(at, values, color=VERMILLION, linewidth=0.8, marker="o", markersize=3.5 if len(at) < 60 else 1.5)


def _small(axes: Any, of: Points, name: str) -> None:
    axes.plot(*thin_curve(*of, MOST), color=GREY, linewidth=0.8)
    axes.set_ylabel(textwrap.fill(name, 14), fontsize=SMALL)  # a panel is an inch high
    wide = name != "learning rate" and set_log_scale(axes, "y", of[1])  # that is 0 at an end of most schedules
    if not wide:
        axes.locator_params(axis="y", nbins=4)


def _marks(panels: Mapping[str, Any], curves: Curves) -> None:
    """Where the best weights are of, where it was stopped, and where something was warned of."""
    loss = panels["loss"]
    for axes in panels.values():
        for step in curves.warned:
            axes.axvline(step, color=RED, linewidth=0.6, linestyle=":")
        if curves.best is not None:
            axes.axvline(curves.best, color=INK, linewidth=0.8, linestyle="--")
        if curves.ended:
            axes.axvline(curves.ended[0], color=RED, linewidth=1.0)
    named = [(curves.best, "best", INK)] if curves.best is not None else []
    named += [(*curves.ended, RED)] if curves.ended else []
    if curves.warned:
        named.append((curves.warned[0], "warning" if len(curves.warned) == 1 else "warnings", RED))
    low, high = loss.get_xlim()
    line = 0
    for step, text, colour in named:
        right, lines = step < (low + high) / 2, textwrap.wrap(f"{text}, step {step}", NOTE)
        words = "\n".join(lines).replace("$", r"\$")  # or matplotlib reads formulas
        loss.annotate(words, (step, 0.97 - 0.06 * line), xycoords=("data", "axes fraction"),
                      xytext=(4 if right else -4, 0), textcoords="offset points", ha="left" if right else "right",
                      va="top", fontsize=SMALL, color=colour,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})  # fmt: skip
        line += len(lines)
