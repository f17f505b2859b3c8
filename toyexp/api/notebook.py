"""Runs and tables of runs as a notebook shows them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from toyexp.results.events import History, means

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 420, 130, 34, 8, 8, 20  # of the picture and its margins, in pixels
POINTS = 300  # of a curve; of more the means of so many stretches are drawn


def of_run(lines: Sequence[tuple[str, str]], history: History) -> str:
    """A run: what is worth a look, and its losses."""
    rows = "".join(
        f'<tr><td style="text-align:left">{escape(word)}</td><td style="text-align:left">{escape(text)}</td></tr>'
        for word, text in lines
    )
    return f"<table>{rows}</table>{losses(history)}"


def of_table(heads: Sequence[str], rows: Sequence[Sequence[str]], below: str) -> str:
    """A table, whose first row is the best one, with a line below it."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(below)}</p>"


def losses(history: History) -> str:
    """The training loss as a line and the held-out loss as points over the steps, in SVG; nothing of fewer than two."""
    trained, held_out = means(history.curve("loss"), POINTS), history.held_out_curve("loss")
    steps, values = map(np.concatenate, zip(trained, held_out, strict=True))
    if len(values) < 2:
        return ""
    last, low, high = int(steps.max()), values.min(), values.max()
    across = LEFT + (WIDTH - LEFT - RIGHT) * steps / (last or 1)
    down = TOP + (HEIGHT - TOP - BELOW) * (high - values) / (high - low or 1.0)
    places = [*zip(across.round(1), down.round(1), strict=True)]
    line = " ".join(f"{x},{y}" for x, y in places[: len(trained[0])])
    points = "".join(
        f'<circle cx="{x}" cy="{y}" r="3"><title>step {step}: {value:.4f}</title></circle>'
        for (x, y), step, value in zip(places[len(trained[0]) :], *held_out, strict=True)
    )
    words = f"loss; held-out as points; {last} steps"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{words}" font-size="10" fill="currentColor">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-opacity="0.55" stroke-width="1.5"/>'
        f'{points}<text y="14">{high:.2f}</text><text y="{HEIGHT - 18}">{low:.2f}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{words}</text></svg>'
    )
