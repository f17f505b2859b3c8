"""Results as a notebook shows them: a few lines of HTML, and the losses as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from toyexp.door.history import History

WIDTH, HEIGHT, MARGIN = 420, 130, 34  # of the picture, in pixels
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
    held_out = history.held_out["step"], history.held_out["loss"]
    curves = [_finite(*_thinned(history.step, history.loss)), _finite(*held_out)]
    every = np.concatenate([values for _, values in curves])
    if len(every) < 2:
        return ""
    last = max(float(steps[-1]) for steps, _ in curves if len(steps))
    low, high = float(every.min()), float(every.max())
    spread = high - low or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - MARGIN - 8) * step / (last or 1.0)
        return round(x, 1), round(8 + (HEIGHT - 28) * (high - value) / spread, 1)

    line = " ".join(f"{x},{y}" for x, y in (place(*pair) for pair in zip(*curves[0], strict=True)))
    points = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="currentColor"><title>step {int(step)}: {value:.4f}</title></circle>'
        for (x, y), step, value in ((place(s, v), s, v) for s, v in zip(*curves[1], strict=True))
    )
    text = 'font-size="10" fill="currentColor"'
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="training loss, and held-out loss as points, over {int(last)} steps">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-opacity="0.55" stroke-width="1.5"/>'
        f"{points}"
        f'<text x="0" y="14" {text}>{high:.2f}</text><text x="0" y="{HEIGHT - 18}" {text}>{low:.2f}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 4}" {text}>loss; held-out as points; {int(last)} steps</text></svg>'
    )


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As it is, or the means of POINTS stretches of equal length."""
    if len(steps) <= POINTS:
        return steps, values
    parts = [np.array_split(array, POINTS) for array in (steps, values)]
    return np.array([p.mean() for p in parts[0]]), np.array([p.mean() for p in parts[1]])


def _finite(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = np.isfinite(values)
    return steps[known], values[known]
