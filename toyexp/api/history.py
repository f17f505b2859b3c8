"""A run step by step, as arrays and as a notebook shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toyexp.base.packages import needed
from toyexp.results.events import Curve, events_in, means
from toyexp.results.found import OF_AN_EVAL

if TYPE_CHECKING:
    import pandas

NAMES = ("loss", "lr", "grad_norm", "tokens", "seconds", "speed")  # of the arrays, beside `step`

OF_A_STEP = {"kind", "t", "phase", "step", "batch", "loss", "lr", "grad_norm", "tokens", "wall_us"}


@dataclass(frozen=True, eq=False)
class History(Mapping[str, np.ndarray]):
    """The numbers of a run, from its events.jsonl: arrays of float64 [N] by name, one entry a recorded step.

    A number that was not finite, or was not recorded, is NaN. `history["loss"]` and `history.loss` are the same.
    """

    step: np.ndarray  # [N] int64, from 1: the step after which the numbers were taken
    loss: np.ndarray  # [N] nats a target, of the step's batch before its update
    lr: np.ndarray  # [N] learning rate
    grad_norm: np.ndarray  # [N] of all gradients, before they are clipped
    tokens: np.ndarray  # [N] targets learned from in the recorded steps so far: tokens, or images
    seconds: np.ndarray  # [N] since the run began, evaluations and all; of a run that went on, without the time between
    speed: np.ndarray  # [N] tokens, or images, a second, in the step alone
    held_out: Mapping[str, np.ndarray] = field(default_factory=dict)  # `step` [M] int64, `loss` [M], and other scores
    logged: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # [N] what schedules and `run.log` of callbacks added

    @classmethod
    def of(cls, run: Path) -> History:
        """That of a run's directory; arrays of no entries where it recorded no events."""
        steps: list[int] = []
        rows: list[tuple[float, ...]] = []
        own: list[dict[str, float]] = []
        evals: list[tuple[int, dict[str, float]]] = []
        learned = 0.0
        for event in events_in(run / "events.jsonl"):
            step, kind = event.get("step"), event.get("kind")
            if kind not in ("step", "eval") or type(step) is not int or not 0 <= step < 1 << 53:
                continue
            if kind == "eval":
                known = {key: _number(value) for key, value in event.items() if key not in OF_AN_EVAL}
                evals.append((step, {"loss": _number(event.get("loss")), **known}))
                continue
            tokens, wall = _number(event.get("tokens")), _number(event.get("wall_us"))
            learned += tokens if tokens == tokens else 0.0
            speed = tokens * 1e6 / wall if wall > 0 else np.nan
            told = (_number(event.get(key)) for key in ("loss", "lr", "grad_norm"))
            steps.append(step)
            rows.append((*told, learned, _number(event.get("t")), speed))
            own.append({name: _number(value) for name, value in event.items() if name not in OF_A_STEP})
        columns = np.array(rows, np.float64).reshape(len(rows), len(NAMES)).T
        names = dict.fromkeys(key for _, scores in evals for key in scores)
        held_out = {"step": np.array([step for step, _ in evals], np.int64)} | {
            name: np.array([scores.get(name, np.nan) for _, scores in evals]) for name in ("loss", *names)
        }
        arrays = {name: np.ascontiguousarray(column) for name, column in zip(NAMES, columns, strict=True)}
        logged = {
            n: np.array([numbers.get(n, np.nan) for numbers in own]) for n in dict.fromkeys(n for o in own for n in o)
        }
        return cls(step=np.array(steps, np.int64), **arrays, held_out=held_out, logged=logged)

    def frame(self) -> pandas.DataFrame:
        """A row a step that was recorded or evaluated, by `step`; what was held out in columns `held_out_loss`, ....

        Raises Unavailable without pandas.
        """
        with needed("pandas", "pip install pandas"):
            import pandas
        trained = pandas.DataFrame({name: self[name] for name in (*NAMES, *self.logged)}, index=self.step)
        scores = {f"held_out_{name}": array for name, array in self.held_out.items() if name != "step"}
        held_out = pandas.DataFrame(scores, index=self.held_out.get("step", ()))
        both = trained[~trained.index.duplicated("last")].join(
            held_out[~held_out.index.duplicated("last")], how="outer"
        )
        both.index.name = "step"
        return both

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.logged:
            return self.logged[name]
        if name not in ("step", *NAMES):
            held_out = "; history.held_out has the rest" if name in self.held_out else ""
            raise KeyError(f"{name}: there is {', '.join(self)}{held_out}")
        return np.asarray(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(("step", *NAMES, *self.logged))

    def __len__(self) -> int:
        return 1 + len(NAMES) + len(self.logged)

    def __repr__(self) -> str:
        held_out = ", ".join(name for name in self.held_out if name != "step")
        scored = f"held out {len(self.held_out['step'])} times: {held_out}"
        return f"History({len(self.step)} steps: {', '.join((*NAMES, *self.logged))}; {scored})"


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known else np.nan


# -- in a notebook ----------------------------------------------------------------------------------------------------


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
    trained, held_out = Curve(), Curve()
    trained.extend(history.step.tolist(), history.loss.tolist())
    held_out.extend(history.held_out["step"].tolist(), history.held_out["loss"].tolist())
    curves = [means(trained, POINTS), means(held_out, len(held_out.steps))]
    every = [value for _, values in curves for value in values]
    if len(every) < 2:
        return ""
    last, low, high = max(steps[-1] for steps, _ in curves if len(steps)), min(every), max(every)
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
