"""How the curves of a run are drawn; the style is that of all pictures, `toyexp/base/drawing.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toyexp.base import (
    BLUE,
    GREY,
    INK,
    LABEL,
    RED,
    SMALL,
    VERMILLION,
    Sheet,
    logarithmic,
    whole_steps,
    write_ends,
)

MOST = 2000  # stretches a curve is drawn in, each by its lowest and its highest: more than a print resolves
NOTE = 44  # characters of a line of what is written beside a mark

Points = tuple[list[int], list[float]]


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
    large = ["loss", "accuracy"] if "accuracy" in curves.held_out else ["loss"]
    heights = [*[3, 2.5][: len(large)], 1, 1]
    sheet = Sheet(8.2 if len(large) > 1 else 6, curves.title, curves.below, heights)
    panels = dict(zip([*large, "grad_norm", "lr"], sheet.panels, strict=True))
    _loss(panels["loss"], curves)
    if "accuracy" in panels:
        _accuracy(panels["accuracy"], curves)
    _small(panels["grad_norm"], curves.steps["grad_norm"], "gradient norm")
    _small(panels["lr"], curves.steps["lr"], "learning rate")
    whole_steps(panels["lr"])
    _marks(panels, curves)
    return sheet.pictures(".png", ".svg")


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
            axes.plot(*thinned(steps, values), color=BLUE, linewidth=0.6, alpha=0.35)
        axes.plot(*thinned(steps, smooth), color=BLUE, linewidth=1.6)
        ends.append((smooth[-1], f"training {smooth[-1]:.4g}", BLUE))
    at, held_out = curves.held_out.get("loss", points())
    if at:
        _held_out(axes, at, held_out)
        ends.append((held_out[-1], f"held-out {held_out[-1]:.4g}", VERMILLION))
    logarithmic(axes, "y", [*values, *held_out])
    axes.set_ylabel(f"loss (nats per {curves.per})", color=INK, fontsize=LABEL)
    write_ends(axes, ends)


def _accuracy(axes: Any, curves: Curves) -> None:
    at, values = curves.held_out["accuracy"]
    percent = [100 * value for value in values]
    _held_out(axes, at, percent)
    axes.set_ylabel("held-out accuracy (%)", color=INK, fontsize=LABEL)
    write_ends(axes, [(percent[-1], f"held-out {percent[-1]:.1f} %", VERMILLION)])


def _held_out(axes: Any, at: Sequence[int], values: Sequence[float]) -> None:
    axes.plot(at, values, color=VERMILLION, linewidth=0.8, marker="o", markersize=3.5 if len(at) < 60 else 1.5)


def _small(axes: Any, of: Points, name: str) -> None:
    axes.plot(*thinned(*of), color=GREY, linewidth=0.8)
    axes.set_ylabel(name, color=INK, fontsize=SMALL)
    wide = name != "learning rate" and logarithmic(axes, "y", of[1])  # that is 0 at an end of most schedules
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
