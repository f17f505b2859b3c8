"""Draw the curves of one run: loss, accuracy, gradient norm, learning rate, and what callbacks log."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toyexp.base.drawing import (
    BAND,
    BLUE,
    GREEN,
    GREY,
    INK,
    SMALL,
    VERMILLION,
    Sheet,
    caption,
    find_divergence,
    fit_y_axis,
    format_number,
    format_tick,
    mark_above,
    set_log_scale,
    set_step_axis,
    thin_curve,
    use_plot_style,
)
from toyexp.base.formatting import describe_parameters, pluralise

MAX_POINTS = 4000  # points per curve, more than a printer resolves
MAX_EXTRA = 6  # panels for numbers that callbacks log
HALF = 45**2 / 60000  # fraction of the steps over which a smoothing weight halves, as on the report page
LABEL_WIDTH = 70  # characters per line of the label at a marked step
ROW_LENGTH = 95  # characters that fit above a panel
MOST_ABOVE = 0.2  # fraction of the steps; if the losses of more are above the shown range, it includes all
FEW_STEPS = 10  # if a run diverges before this step, the shown range includes all losses
FEW_VALUES = 4  # with at most so many losses, the axis extends a fifth of their size beyond them
LEAST_RATIO = 3.0  # the axis of gradient norms is logarithmic if the largest is this many times the smallest
SPIKE = 10  # a loss is a spike if its distance from the other losses is this many times their range
FAILED = "failed"  # reason of an early end
WARNINGS = {"divergence": "loss rose", "loss_spike": "loss spike"}  # labels by the field `about`

Points = tuple[list[int], list[float]]  # steps, and a value for each
Format = Callable[[float], str]


@dataclass
class Curves:
    """The data of the plot of one run."""

    title: str = ""
    subtitle: str = ""
    unit: str = "token"  # unit of the targets that a loss is averaged over
    steps: dict[str, Points] = field(default_factory=lambda: {name: ([], []) for name in ("loss", "grad_norm", "lr")})
    held_out: dict[str, Points] = field(default_factory=dict)  # loss, and the model's own metrics
    warnings: dict[int, str] = field(default_factory=dict)  # steps with a warning, and its field `about`
    best: int | None = None  # step of the best weights
    early_end: tuple[int, str] | None = None  # step and reason, if the run ended before its last step

    def describe(
        self,
        facts: Mapping[str, Any],
        name: str,
        recipe: str,
        engine: str,
        batch_size: Any,
        lr: float | None,
        seed: Any,
    ) -> None:
        """Set title, subtitle and unit. `facts` has what the run recorded about its data and model.

        Settings that are None are unknown and left out.
        """
        data, model = (facts.get(part) or {} for part in ("data", "model"))
        settings = [
            str(data.get("name") or ""), engine, str(model.get("arch") or ""), describe_parameters(model),
            *("" if value is None else f"{key} {value:{form}}"
              for key, value, form in (("batch", batch_size, ""), ("lr", lr, "g"), ("seed", seed, ""))),
        ]  # fmt: skip
        self.title = name if recipe in name else f"{name}, {recipe}"
        self.subtitle = " · ".join(filter(None, settings))
        self.unit = loss_unit(data)


def loss_unit(data: Mapping[str, Any]) -> str:
    """Return what a loss is averaged over, by the facts about the data: image, token or target."""
    return "image" if "classes" in data else "token" if "tokenizer" in data else "target"


@use_plot_style()
def draw_curves(curves: Curves) -> Sheet:
    """Draw the curves of one run. Equal curves give equal files."""
    large = ["loss", "accuracy"] if "accuracy" in curves.held_out else ["loss"]
    extra = {f"held-out {name}": points for name, points in curves.held_out.items() if name not in large}
    logged = {name: points for name, points in curves.steps.items() if name not in ("loss", "grad_norm", "lr")}
    scheduled = {name for name in logged if name.endswith("_factor") or f"{name}_factor" in logged}
    extra |= {name: points for name, points in logged.items() if name not in scheduled}
    extra = dict([*extra.items()][:MAX_EXTRA])
    heights = [*[3, 2.5][: len(large)], *[1] * len(extra), 1, 1]
    title = f"{curves.title}: {describe_result(curves)}"
    sheet = Sheet((8.2 if len(large) > 1 else 6) + len(extra), title, curves.subtitle, heights)
    panels = dict(zip([*large, *extra, "grad_norm", "lr"], sheet.panels, strict=True))
    set_step_axis(panels["lr"])
    for name, points in extra.items():
        _small(panels[name], points, name)
    _loss(panels["loss"], curves)
    if "accuracy" in panels:
        _accuracy(panels["accuracy"], curves)
    _gradient_norm(panels["grad_norm"], curves.steps["grad_norm"], find_divergence(*curves.steps["loss"]))
    _small(panels["lr"], curves.steps["lr"], "learning rate")
    if (peak := max(curves.steps["lr"][1], default=0.0)) > 0:  # as it was typed, in most schedules
        panels["lr"].set_yticks([0, peak / 2, peak])
        panels["lr"].yaxis.set_major_formatter(format_tick)
    _marks(panels, curves)
    return sheet


def find_tail(points: Points, test: Callable[[float], bool]) -> int | None:
    """Return the first of the last steps whose values all pass a test; None if the last value does not pass it."""
    steps, values = points
    count = sum(1 for _ in itertools.takewhile(test, reversed(values)))
    return steps[-count] if count else None


def _is_not_finite(value: float) -> bool:
    return not math.isfinite(value)


def describe_result(curves: Curves) -> str:
    """Return the result for the title: the held-out score, or the step at which the run failed or diverged."""
    if (step := find_tail(curves.steps["loss"], _is_not_finite)) is not None:
        return f"loss not finite from step {step}"
    if (step := find_divergence(*curves.steps["loss"])) is not None:
        return f"diverged at step {step}"
    if curves.early_end is not None and curves.early_end[1] == FAILED:
        norms = curves.steps["grad_norm"][1]
        cause = ": the gradient is not finite" if norms and _is_not_finite(norms[-1]) else ""
        return f"{FAILED} at step {curves.early_end[0]}{cause}"
    for name, form, unit in ("accuracy", "{:.1f} %".format, 100), ("loss", format_number, 1):
        if values := curves.held_out.get(name, ([], []))[1]:
            return f"held-out {name} {form(unit * values[-1])}"
    return f"{curves.steps['loss'][0][-1]} steps"


def smooth_parts(values: Sequence[float], split: int, log: bool) -> list[float]:
    """Return `smooth` of the values before and from the index `split`, so that the average jumps where the loss does.

    If `log` is True, average the logarithms of the values, and leave out values that have none.
    """
    if log:
        values = [math.log(value) if 0 < value < math.inf else math.nan for value in values]
    parts = [values[:split], values[split:]] if split else [values]
    means = [mean for part in parts for mean in smooth(part if log else remove_spikes(part))]
    return [math.exp(mean) for mean in means] if log else means


def smooth(values: Sequence[float]) -> list[float]:
    """Return a centred moving average of the values.

    Weights halve over the fraction HALF of the steps, to both sides. The report page uses the same average. Before
    averaging, the curve is extended to the left by its point reflection about the first point, so that the average
    begins at the first value. NaN and infinite values do not count in the averages; at their own steps the average is
    NaN.
    """
    half = HALF * (len(values) - 1)
    if not half:
        return list(values)
    # Complex numbers sum values (real part) and weights (imaginary part) at once.
    points = [complex(value, 1) if math.isfinite(value) else 0j for value in values]
    before = [complex(2 * values[0] * point.imag - point.real, point.imag) for point in points[:0:-1] if points[0]]

    def decay(total: complex, point: complex) -> complex:
        return total * 2 ** (-1 / half) + point

    left = [*itertools.accumulate(before + points, decay)][-len(points) :]
    right = [*itertools.accumulate(points[::-1], decay)][::-1]
    sums = zip(points, [a + b - point for a, b, point in zip(left, right, points, strict=True)], strict=True)
    return [total.real / total.imag if point else math.nan for point, total in sums]


def remove_spikes(values: Sequence[float]) -> list[float]:
    """Return the values with NaN in place of spikes, so that a few huge values do not displace the smoothed curve.

    If more than the share MOST_ABOVE of the values would be spikes, none is.
    """
    finite = sorted(filter(math.isfinite, values)) or [math.nan]
    top = max([finite[len(finite) // 2], *filter(math.isfinite, values[:1])])
    limit = top + SPIKE * (top - finite[0])
    is_rare = sum(value > limit for value in finite) <= MOST_ABOVE * len(finite)
    return [math.nan if is_rare and value > limit else value for value in values]


def _loss(axes: Any, curves: Curves) -> None:
    steps, values = curves.steps["loss"]
    eval_steps, held_out = curves.held_out.get("loss", ([], []))
    finite = sorted(filter(math.isfinite, values))
    diverged = find_divergence(steps, values)
    split = steps.index(diverged) if diverged is not None else 0
    is_late = split > max(MOST_ABOVE * len(steps), FEW_STEPS)  # the axis then fits the losses before the divergence
    means, is_smoothed = smooth_parts(values, split, False), HALF * (len(values) - 1) > 1
    usual = [finite[int(share * (len(finite) - 1))] for share in (0.01, 0.98)] if finite else []
    if shown := [*filter(math.isfinite, (*means, *held_out)), *usual]:
        ends = [[*filter(math.isfinite, some)][-1:] for some in (means, held_out)]
        # As on the report page, the axis does not extend to values far above the first and the last ones.
        edges = (*values[:1], *held_out[:1], *([] if is_late else itertools.chain(*ends)))
        low, start = min(shown), max(filter(math.isfinite, edges), default=math.inf)
        high = max(value for value in shown if value <= start + (start - low) / 4)
        if not is_late and finite and finite[-1] <= 2 * high - low:
            low, high = min(low, finite[0]), max(high, finite[-1])
        above, largest = sum(value > high for value in finite), max(finite, default=high)
        if len(finite) + len(held_out) <= FEW_VALUES:
            low, high = low - abs(low) / 5, high + abs(high) / 5  # a narrow axis would show noise as a difference
        is_complete = not is_late and above > MOST_ABOVE * len(finite)  # and logarithmic
        high = max(largest, *shown) if is_complete else high
        fit_y_axis(axes, low, high, pluralise(above, "step"), largest, is_complete)
        if axes.get_yscale() == "log":
            means = smooth_parts(values, split, True)
    if finite:
        if is_smoothed:
            axes.plot(*thin_curve(steps, values, MAX_POINTS), color=BLUE, linewidth=0.6, alpha=0.35,
                      label="training, each step")  # fmt: skip
        label = _label("training, smoothed" if is_smoothed else "training", means, format_number)
        axes.plot(*thin_curve(steps, means, MAX_POINTS), ".-" if len(finite) < 3 else "-", color=BLUE, linewidth=1.6,
                  label=label)  # fmt: skip
        if _is_not_finite(values[-1]):
            stop, end = [pair for pair in zip(steps, means, strict=True) if math.isfinite(pair[1])][-1]
            axes.plot(stop, end, marker="X", markersize=7, color=BLUE, markeredgecolor="white", zorder=5)
        mark_above(axes, steps, values, BLUE)
    if eval_steps:
        _held_out(axes, eval_steps, held_out, format_number, steps)
        mark_above(axes, eval_steps, held_out, VERMILLION)
    axes.set_ylabel(f"loss (nats per {curves.unit})")
    if shown:
        axes.legend(fontsize=SMALL, edgecolor="none", frameon=math.isfinite(values[-1]))  # no box on a grey ground


def _label(name: str, values: Sequence[float], form: Format, when: str = "at the end") -> str:
    """Return the text of a curve in the legend, with its last value, or its last finite one."""
    if math.isfinite(values[-1]):
        return f"{name}, {when} {form(values[-1])}"
    last = [*filter(math.isfinite, values)][-1:]
    return f"{name}, last {form(last[0])}" if last else f"{name}, never finite"


def _accuracy(axes: Any, curves: Curves) -> None:
    steps, values = curves.held_out["accuracy"]
    _held_out(axes, steps, [100 * value for value in values], "{:.1f} %".format, steps)
    axes.set_ylabel("held-out accuracy (%)")
    axes.legend(fontsize=SMALL, edgecolor="none")


def _held_out(axes: Any, steps: Sequence[int], values: Sequence[float], form: Format, trained: Sequence[int]) -> None:
    when = "at the end" if not trained or steps[-1] >= trained[-1] else f"at step {steps[-1]}:"
    axes.plot(steps, values, color=VERMILLION, linewidth=0.8, marker="o", markersize=3.5 if len(steps) < 60 else 1.5,
              label=_label("held-out", values, form, when))  # fmt: skip


def _small(axes: Any, points: Points, name: str) -> None:
    is_short = sum(map(math.isfinite, points[1])) < 3
    axes.plot(*thin_curve(*points, MAX_POINTS), ".-" if is_short else "-", color=GREY, linewidth=0.8)
    axes.set_ylabel(textwrap.fill(name, 14), fontsize=SMALL)  # panels are one inch high
    is_log = name != "learning rate" and set_log_scale(axes, "y", points[1])  # most schedules end near 0
    if not is_log:
        axes.locator_params(axis="y", nbins=4)


def _gradient_norm(axes: Any, points: Points, diverged: int | None) -> None:
    """Plot the gradient norm of each step, and its smoothed logarithm. The axis fits all but a few outliers."""
    steps, values = points
    _small(axes, points, "gradient norm")
    finite = sorted(value for value in values if 0 < value < math.inf)
    if HALF * (len(values) - 1) > 1 and finite:
        means = smooth_parts(values, steps.index(diverged) if diverged in steps else 0, True)
        axes.lines[0].set(alpha=0.45, linewidth=0.6)
        axes.plot(*thin_curve(steps, means, MAX_POINTS), color=GREY, linewidth=1.4)
    if finite:
        low, high = finite[len(finite) // 100], finite[-1 - len(finite) // 50]
        reach = max(high / low, 2.0) ** 2
        low, high = max(finite[0], low / reach), min(finite[-1], high * reach)
        above = sum(value > high for value in finite)
        fit_y_axis(axes, low, high, pluralise(above, "step"), finite[-1], high > LEAST_RATIO * low)
        mark_above(axes, steps, values, GREY)
    for what, test in ("0", lambda value: value == 0), ("not finite", _is_not_finite):
        if (step := find_tail(points, test)) is not None:
            caption(axes, f"{what} from step {step:,}", INK, "left")


def _marks(panels: Mapping[str, Any], curves: Curves) -> None:
    """Mark the steps of the best weights, of divergence, of an early end, and of warnings."""
    (steps, losses), loss = curves.steps["loss"], panels["loss"]
    marks = [([curves.best], f"best, step {curves.best}", GREEN, "--", 1.0)] if curves.best is not None else []
    if (diverged := find_divergence(steps, losses)) is not None:
        before, after = format_number(losses[0]), format_number(losses[steps.index(diverged)])
        text = f"diverged at step {diverged}: loss from {before} to {after}"
        marks.append(([diverged], text, INK, "-", 1.2))
    if (lost := find_tail(curves.steps["loss"], _is_not_finite)) is not None:
        marks.append(([lost], f"the loss is {losses[steps.index(lost)]} from step {lost}", INK, "-", 1.2))
        for axes in panels.values():
            axes.axvspan(lost, steps[-1], color=BAND, linewidth=0, zorder=0)
    if curves.early_end is not None and curves.early_end[0] != lost:
        step, why = curves.early_end
        marks.append(([step], f"{why}, step {step}", INK, "-", 1.2))
    if warned := sorted(curves.warnings):
        what = "warnings, steps" if len(warned) > 1 else f"{WARNINGS.get(curves.warnings[warned[0]], 'warning')}, step"
        text = f"{what} {', '.join(map(str, warned))}"
        marks.append((warned, textwrap.shorten(text, LABEL_WIDTH, placeholder=" ..."), GREY, ":", 1.0))
    for axes, (positions, _, colour, style, width) in itertools.product(panels.values(), marks):
        for step in positions:
            axes.axvline(step, color=colour, linestyle=style, linewidth=width)
    low, high = loss.get_xlim()
    note = loss.get_title(loc="right")  # by fit_y_axis
    taken = [(0, 1 - len(note) / ROW_LENGTH, 1.0)] if note else []  # row above the panel, left and right end
    for (step, *_), text, colour, *_ in marks:
        place, lines = (step - low) / (high - low), textwrap.wrap(text, LABEL_WIDTH)
        length, is_right = max(map(len, lines)) / ROW_LENGTH, place < 0.5
        left, right = (place, place + length) if is_right else (place - length, place)
        rows = {row for row, start, end in taken if start < right and left < end}
        row = next(n for n in itertools.count() if not rows & {*range(n, n + len(lines))})
        taken += [(row + n, left, right) for n in range(len(lines))]
        label = "\n".join(lines).replace("$", r"\$")  # matplotlib would parse text between $ as a formula
        loss.annotate(label, (step, 1), xycoords=("data", "axes fraction"), xytext=(0, 4 + 12 * row),
                      textcoords="offset points", ha="left" if is_right else "right", va="bottom", fontsize=SMALL,
                      color=colour)  # fmt: skip
