"""What `toyexp bench` measured, as a picture to print."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from toyexp.base.drawing import BLUE, INK, LABEL, PALE, SMALL, Sheet, cut, plain
from toyexp.base.words import count, counted

ROW = 0.5  # inches


def sheet(engines: Sequence[Mapping[str, Any]], unit: str, title: str, below: Sequence[str]) -> Sheet:
    """A bar for each engine as long as it is fast, in `unit` a second; `engines` are those of the report.

    A bar ends at the median of the rounds; the line goes over their middle half, and each round has a mark.
    """
    rounds = len(engines[0]["rounds"])
    how = f"bars end at the median of {counted(rounds, 'round')}, lines span their middle half" if rounds > 1 else ""
    found = Sheet(1.3 + ROW * max(len(engines), 2), title, " · ".join(filter(None, [*below, how])))
    (axes,) = found.panels
    plain(axes, "x")
    for row, engine in enumerate(engines):
        units = engine[f"{unit}_per_second"] * engine["seconds_per_step"]  # of a step
        speed, (low, high) = units / engine["seconds_per_step"], (units / seconds for seconds in engine["quartiles"])
        own = engine["name"] == engine["engine"]  # and no baseline
        axes.barh(row, speed, height=0.5, color=BLUE if own else PALE, alpha=0.45 if own else 0.6)
        if rounds > 1:
            axes.plot([units / seconds for seconds in engine["rounds"]], [row] * rounds, color=INK, marker="|",
                      markersize=9, markeredgewidth=0.6, alpha=0.5, linestyle="none")  # fmt: skip
            axes.plot([low, high], [row, row], color=INK, linewidth=2, solid_capstyle="butt")
        told = f"{count(speed)} {unit}/s, {1e3 * engine['seconds_per_step']:.3g} ms a step"
        ratio = "" if row == 0 and len(engines) > 1 else f"{engine['ratio']:.2f} times {engines[0]['name']}"
        axes.text(1.01, row, f"{told}\n{cut(ratio, 34)}".strip() if len(engines) > 1 else told, va="center",
                  transform=axes.get_yaxis_transform(), fontsize=SMALL, color=INK)  # fmt: skip
    lines = [textwrap.wrap(engine["name"], 26, max_lines=2, placeholder="…") for engine in engines]
    names = ["\n".join(cut(line, 26) for line in some) for some in lines]
    axes.set_yticks(range(len(engines)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(engines) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: count(value))
    axes.set_xlabel(f"{unit} a second", color=INK, fontsize=LABEL)
    return found
