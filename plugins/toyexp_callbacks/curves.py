"""How the curves of a run are drawn: all that is style stands here.

The colours are three of those that Okabe and Ito chose to be told apart by everyone ("Color Universal Design", 2008);
their greys differ too, so that a print without colour can be read.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TRAINING, HELD_OUT, OTHER, WARNED, INK = "#0072B2", "#D55E00", "#555555", "#CC3311", "#222222"
MOST = 2000  # stretches a curve is drawn in, each by its lowest and its highest: more than a print resolves
LOG_FROM = 20.0  # the ratio of the highest to the lowest from which an axis is logarithmic
APART = 0.055  # of the height of the axes: between two values written at the line's end

Points = tuple[list[int], list[float]]
_salting = threading.Lock()


def points() -> Points:
    """No points yet: steps, and a value for each."""
    return [], []


@dataclass
class Curves:
    """What there is to draw of one run."""

    title: str = ""
    below: str = ""  # the second line of the title
    per: str = "token"  # what a loss is the mean over
    steps: dict[str, Points] = field(default_factory=lambda: {name: points() for name in ("loss", "grad_norm", "lr")})
    held_out: dict[str, Points] = field(default_factory=dict)  # loss, and accuracy of images
    warned: list[int] = field(default_factory=list)
    best: int | None = None  # the step whose weights were kept
    ended: tuple[int, str] | None = None  # before its last step: where, and why


def drawn(curves: Curves) -> dict[str, bytes]:
    """The picture as a PNG and as an SVG, by suffix; the same curves make the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and no global state
    from matplotlib.figure import Figure

    accuracy = "accuracy" in curves.held_out
    large = ["loss", "accuracy"] if accuracy else ["loss"]
    figure = Figure(figsize=(8, 7.6 if accuracy else 6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    heights = [3] * len(large) + [1, 1]
    panels = dict(zip([*large, "grad_norm", "lr"], figure.subplots(len(heights), sharex=True, height_ratios=heights),
                      strict=True))  # fmt: skip
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(colors=INK, labelsize=8, width=0.6)
        axes.tick_params(which="minor", width=0.4)
        axes.grid(axis="y", color="#dddddd", linewidth=0.5)
        axes.set_axisbelow(True)
    _loss(panels["loss"], curves)
    if accuracy:
        _accuracy(panels["accuracy"], curves)
    _small(panels["grad_norm"], curves.steps["grad_norm"], "gradient norm")
    _small(panels["lr"], curves.steps["lr"], "learning rate")
    panels["lr"].set_xlabel("step", color=INK, fontsize=9)
    panels["lr"].xaxis.get_major_locator().set_params(integer=True)
    _marks(panels, curves)
    # Both lines are text of the figure, so that neither is cut off where the axes are narrow.
    figure.suptitle(_cut(curves.title, 80), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    panels["loss"].set_title(_cut(curves.below, 115), loc="left", fontsize=8.5, color=OTHER)
    pictures = {}
    # Without the salt its ids are others each time; the runs of a stack draw in one process, and share the setting.
    with _salting, matplotlib.rc_context({"svg.hashsalt": "toyexp"}):
        for suffix, options in ((".png", {"dpi": 150}), (".svg", {"metadata": {"Date": None}})):
            file = io.BytesIO()
            figure.savefig(file, format=suffix[1:], **options)
            pictures[suffix] = file.getvalue()
    return pictures


def thinned(steps: Sequence[int], values: Sequence[float], most: int = MOST) -> tuple[Any, Any]:
    """Of each of `most` stretches of equal length the lowest and the highest; all where there are not so many."""
    import numpy as np

    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    if len(x) <= 2 * most:
        return x, y
    kept: set[int] = set()
    finite = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    for begin, end in zip(*(np.arange(most + 1)[i:][:most] * len(x) // most for i in (0, 1)), strict=True):
        kept |= {begin + int(finite[0][begin:end].argmin()), begin + int(finite[1][begin:end].argmax())}
    places = sorted(kept)
    return x[places], y[places]


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
            axes.plot(*thinned(steps, values), color=TRAINING, linewidth=0.6, alpha=0.35)
        axes.plot(*thinned(steps, smooth), color=TRAINING, linewidth=1.6)
        ends.append((smooth[-1], f"training {smooth[-1]:.4g}", TRAINING))
    at, held_out = curves.held_out.get("loss", points())
    if at:
        _held_out(axes, at, held_out)
        ends.append((held_out[-1], f"held-out {held_out[-1]:.4g}", HELD_OUT))
    _logarithmic(axes, [*values, *held_out])
    axes.set_ylabel(f"loss (nats per {curves.per})", color=INK, fontsize=9)
    _write_ends(axes, ends)


def _accuracy(axes: Any, curves: Curves) -> None:
    at, values = curves.held_out["accuracy"]
    percent = [100 * value for value in values]
    _held_out(axes, at, percent)
    axes.set_ylabel("held-out accuracy (%)", color=INK, fontsize=9)
    _write_ends(axes, [(percent[-1], f"held-out {percent[-1]:.1f} %", HELD_OUT)])


def _held_out(axes: Any, at: Sequence[int], values: Sequence[float]) -> None:
    axes.plot(at, values, color=HELD_OUT, linewidth=0.8, marker="o", markersize=3.5 if len(at) < 60 else 1.5)


def _small(axes: Any, of: Points, name: str) -> None:
    axes.plot(*thinned(*of), color=OTHER, linewidth=0.8)
    axes.set_ylabel(name, color=INK, fontsize=8)
    if name != "learning rate":  # which is 0 at an end of most schedules
        _logarithmic(axes, of[1])


def _logarithmic(axes: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    known = [value for value in values if math.isfinite(value)]
    if known and min(known) > 0 and max(known) > LOG_FROM * min(known):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(known) < 1e3 * min(known) else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _write_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Final values behind the ends of their lines, moved apart where they would lie over one another."""
    axes.get_ylim()  # its limits are worked out when they are asked for, and places go by them
    known = sorted((end for end in ends if math.isfinite(end[0])), key=lambda end: end[0])
    places = [axes.transAxes.inverted().transform(axes.transData.transform((0, value)))[1] for value, _, _ in known]
    for i in range(1, len(places)):
        missing = APART - (places[i] - places[i - 1])
        if missing > 0:
            places[i - 1], places[i] = places[i - 1] - missing / 2, places[i] + missing / 2
    for place, (_, text, colour) in zip(places, known, strict=True):
        axes.text(1.01, place, text, transform=axes.transAxes, color=colour, fontsize=9, va="center")


def _marks(panels: Mapping[str, Any], curves: Curves) -> None:
    """Where the best weights are of, where it was stopped, and where something was warned of."""
    loss = panels["loss"]
    for axes in panels.values():
        for step in curves.warned:
            axes.axvline(step, color=WARNED, linewidth=0.6, linestyle=":")
        if curves.best is not None:
            axes.axvline(curves.best, color=INK, linewidth=0.8, linestyle="--")
        if curves.ended:
            axes.axvline(curves.ended[0], color=WARNED, linewidth=1.0)
    named = [(curves.best, "best", INK)] if curves.best is not None else []
    named += [(*curves.ended, WARNED)] if curves.ended else []
    if curves.warned:
        named.append((curves.warned[0], "warning" if len(curves.warned) == 1 else "warnings", WARNED))
    low, high = loss.get_xlim()
    for line, (step, text, colour) in enumerate(named):
        right = step < (low + high) / 2
        loss.annotate(f"{text}, step {step}", (step, 0.97 - 0.06 * line), xycoords=("data", "axes fraction"),
                      xytext=(4 if right else -4, 0), textcoords="offset points", ha="left" if right else "right",
                      va="top", fontsize=8, color=colour,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})  # fmt: skip


def _cut(text: str, most: int) -> str:
    text = text.replace("$", r"\$")  # or matplotlib reads formulas
    return text if len(text) <= most else text[: most - 1] + "…"
