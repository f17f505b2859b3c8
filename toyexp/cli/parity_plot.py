"""The plot of `toyexp parity`: losses of each engine, their differences, and errors of gradients and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toyexp.base.drawing import COLOURS, INK, MARKS, SMALL, Sheet, caption, fit_text, set_step_axis, use_plot_style

ROWS = 30  # maximum number of tensors shown
ROW = 0.2  # inches


@use_plot_style()
def sheet(report: Mapping[str, Any], title: str, below: Sequence[str]) -> Sheet:
    """Return the plot of a report of `toyexp parity`, as given by `Report.plain`.

    `below` are the parts of the subtitle.
    """
    engines = report["engines"]
    tensors = _worst_tensors(engines)
    rows = (4.4, 0.9 + ROW * max(len(tensors), 3))
    every = len(engines[0]["tensors"])
    left_out = f"the {len(tensors)} of {every} tensors that differ most" if len(tensors) < every else ""
    figure = Sheet(0.5 + sum(rows), title, " · ".join(filter(None, [*below, left_out])), rows, columns=(-2, 2))
    losses, differences, gradients, weights = figure.panels
    _losses(losses, report)
    _differences(differences, report)
    for axes, quantity, about in (
        (gradients, "gradient", "gradient of the first batch,\nrelative error"),
        (weights, "weights", "weights after training,\nrelative to their change"),
    ):
        _errors(axes, engines, tensors, quantity, about)
    gradients.set_yticks(range(len(tensors)), [fit_text(name, 34) for name in tensors], fontsize=SMALL - 1)
    weights.set_yticks(range(len(tensors)), [""] * len(tensors))
    return figure


def _worst_tensors(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the ROWS tensors with the largest errors, worst first.

    A tensor has two errors on each engine: that of its gradient and that of its weights. Each error is divided by its
    tolerance, and the largest of these ratios counts.
    """
    errors: dict[str, float] = {}
    for engine in engines:
        limits = engine["tolerances"]
        for tensor in engine["tensors"]:
            error = max(tensor[name] / limits[name] if limits[name] else math.inf for name in ("gradient", "weights"))
            errors[tensor["name"]] = max(errors.get(tensor["name"], 0.0), error)
    return sorted(errors, key=lambda name: -errors[name])[:ROWS]


def _losses(axes: Any, report: Mapping[str, Any]) -> None:
    steps = range(1, len(report["losses"]) + 1)
    axes.plot(steps, report["losses"], color=INK, linewidth=3, alpha=0.35, label=_legend(report["reference"], report))
    for number, engine in enumerate(report["engines"]):
        _line(axes, number, engine["losses"], label=_legend(engine["engine"], engine))
    axes.set_ylabel("loss (nats per target)")
    axes.legend(frameon=False, fontsize=SMALL, labelcolor="linecolor")


def _legend(engine: str, results: Mapping[str, Any]) -> str:
    return f"{fit_text(engine, 40)}, at the end {results['losses'][-1]:.5g}"


def _differences(axes: Any, report: Mapping[str, Any]) -> None:
    """Plot how far the losses of each engine are from those of the reference engine at each step, and the tolerance."""
    differences = [
        [abs(loss - expected) for loss, expected in zip(engine["losses"], report["losses"], strict=True)]
        for engine in report["engines"]
    ]
    tolerances = {engine["rounds_to"]: engine["tolerances"]["loss"] for engine in report["engines"]}
    floor = _logarithmic(axes, "y", [value for values in differences for value in values], tolerances.values())
    for number, values in enumerate(differences):
        _line(axes, number, [max(value, floor) for value in values], clip_on=False)
    for tolerance in tolerances.values():
        axes.axhline(max(tolerance, floor), color=INK, linewidth=1, linestyle="--")
    texts = [f"tolerance of {name}, {tolerance:g}" for name, tolerance in tolerances.items()]
    caption(axes, "; ".join(texts), INK)
    if any(value == 0 for values in differences for value in values):
        caption(axes, "at the bottom: bit-identical", side="left")
    axes.set_ylabel(f"difference from {fit_text(report['reference'], 16)}")
    set_step_axis(axes)


def _errors(
    axes: Any, engines: Sequence[Mapping[str, Any]], tensors: Sequence[str], quantity: str, about: str
) -> None:  # fmt: skip
    """Plot an error of each tensor, with a mark for each engine and a line for the tolerance.

    `quantity` is "gradient" or "weights": the key under which the report has this error of a tensor. `about` is the
    label of the axis.
    """
    axes.grid(visible=False)
    axes.grid(axis="x")
    errors = [{tensor["name"]: tensor[quantity] for tensor in engine["tensors"]} for engine in engines]
    tolerances = {engine["rounds_to"]: engine["tolerances"][quantity] for engine in engines}
    floor = _logarithmic(axes, "x", [by_tensor[name] for by_tensor in errors for name in tensors], tolerances.values())
    highest = axes.get_xlim()[1]
    for number, by_tensor in enumerate(errors):
        positions = [min(max(by_tensor[name], floor), highest) for name in tensors]
        look = {"markersize": 4, "linestyle": "none", "alpha": 0.85, **_line_style(number)}
        axes.plot(positions, range(len(tensors)), clip_on=False, **look)
    for tolerance in set(tolerances.values()):
        axes.axvline(max(tolerance, floor), color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(len(tensors) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(about, fontsize=SMALL)


def _logarithmic(axes: Any, which: str, values: Iterable[float], tolerances: Iterable[float]) -> float:
    """Make the axis `which` (x or y) logarithmic, with limits that include all errors and tolerances above 0.

    Return the axis's lower limit, where errors of 0 are drawn.
    """
    positive = [value for value in (*values, *tolerances) if 0 < value < math.inf] or [1.0]
    low, high = min(positive) / 4, max(positive) * 4
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    return low


def _line(axes: Any, number: int, values: Sequence[float], **how: Any) -> None:
    """Plot one value per step, from step 1, as a line in the colour of engine `number`."""
    every = max(len(values) // 12, 1)
    axes.plot(range(1, len(values) + 1), values, linewidth=1, markersize=3.5, markevery=(number % 3, every),
              **_line_style(number), **how)  # fmt: skip


def _line_style(number: int) -> dict[str, str]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}
