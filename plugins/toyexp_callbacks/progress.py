"""The progress display of a run: a bar in terminals and notebooks, else plain lines."""

from __future__ import annotations

import contextlib
import html
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Run, RunPreview, hookimpl
from toyexp.base import (
    drop_output,
    escape_controls,
    format_count,
    format_duration,
    format_loss,
    has_colour,
    is_notebook,
    is_silent,
    print_line,
    require_range,
)
from toyexp_callbacks.events import Listener

REDRAW_SECONDS = 0.1
MIN_BAR_WIDTH = 8  # columns; shorter bars are not drawn
# The green of the plots, and a grey track. Both are visible on light and on dark backgrounds.
BAR_COLOUR, TRACK_COLOUR = "#268960", "#A0A0A0"
PARTS = ("loss", "held_out", "speed", "left")  # the displayed numbers, in order
MAX_SILENCE = 60.0  # seconds without a plain line after which one is printed anyway
SPEED_SECONDS = 10.0  # averaging window of the displayed speed


@dataclass(eq=False)
class Progress(Listener):
    """Show loss, tokens/s and time left: a bar in terminals and notebooks, else plain lines."""

    name: ClassVar[str] = "progress"

    every: int = 0  # steps between two lines if there is no bar; 0: about ten lines per run, at least one per minute

    def __post_init__(self) -> None:
        self._bar: Any = None
        self._skipped = 0  # number of skipped steps in a row

    def check(self) -> None:
        """Raise UserError for a negative interval."""
        require_range("callbacks.progress", self, every="[0,inf)")

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if the interval is longer than the run."""
        return preview.interval_warnings(
            "callbacks.progress.every", self.every, "only its first and last step are printed"
        )

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Start the progress bar."""
        self._tokens = self._seconds = 0.0
        self._lines = self.every or -(-run.steps // 10)
        self._last_redraw, self._last_line = 0.0, time.monotonic()
        self._first = run.resumed_step + 1
        if is_silent():
            return
        if is_notebook():
            self._bar = Cell(run.steps, run.resumed_step)
        elif sys.stdout is not None and sys.stdout.isatty():
            with self._terminal():
                self._bar = Bar(run.steps, run.resumed_step)

    @hookimpl
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw the bar, at most ten times a second, or print a line if one is due."""
        now = time.monotonic()
        self._measure_speed(step, metrics, now)
        if self._skipped and math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            if self._skipped > 1:
                self._print(f"{_step_text(run, step - 1)}  skipped: {self._skipped} steps in a row")
            self._skipped = 0
        is_last, is_overdue = step == run.steps, not self.every and now - self._last_line >= MAX_SILENCE
        if self._bar is not None:
            if is_last or now - self._last_redraw >= REDRAW_SECONDS:
                self._last_redraw = now
                with self._terminal():
                    loss = f"loss {format_loss(metrics['loss'])}"
                    self._bar.draw(step, loss=loss, **self._speed_and_time(run, step, now))
        elif step == self._first or is_last or step % self._lines == 0 or is_overdue:
            self._last_line = now
            rate = f"lr {metrics['lr']:.2e}"
            numbers = "  ".join(filter(None, self._speed_and_time(run, step, now).values()))
            self._print(f"{_step_text(run, step)}  loss {format_loss(metrics['loss'])}  {rate}  {numbers}")

    def _measure_speed(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        if step <= self._first + 1:  # the first step includes compilation and allocation
            self._tokens = self._seconds = 0.0
        if step == self._first:
            self._start = now
        seconds = metrics["wall_us"] / 1e6
        weight = max(1 - seconds / SPEED_SECONDS, 0.0)
        self._tokens = self._tokens * weight + metrics["tokens"]
        self._seconds = self._seconds * weight + seconds

    def _speed_and_time(self, run: Run, step: int, now: float) -> dict[str, str]:
        """Return two texts: `speed` over the last seconds, and `left`, the remaining time ("" at the last step)."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        speed = f"{format_count(rate)} {run.plan.model.reads.units}/s"
        count = step - self._first
        pace = (now - self._start) / count if count else self._seconds
        time_left = f"{format_duration(max(round((run.steps - step) * pace), 1))} left" if step < run.steps else ""
        return {"speed": speed, "left": time_left}

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Show the held-out loss and metrics."""
        others = {name: value for name, value in metrics.items() if name not in ("loss", "ppl")}
        scores = format_loss(metrics["loss"]) + "".join(f"  {name} {format_loss(others[name])}" for name in others)
        if self._bar is not None:
            with self._terminal():
                self._bar.draw(step, held_out=f"held-out {scores}")
        else:
            self._print(f"{_step_text(run, step)}  held-out loss {scores}")

    @hookimpl
    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Show samples, notes and skipped steps above the bar."""
        if kind == "sample":
            text = "".join(f"\n    {line}" for line in f"{fields['prompt']}{fields['text']}".splitlines())
            self._print(f"{_step_text(run, fields['step'])}  sample{text}")
        elif kind == "note":
            self._print(str(fields["text"]))
        elif kind == "skipped":  # print the first of a series; on_step prints their number after it
            self._skipped += 1
            if self._skipped == 1:
                values = f"loss {fields['loss']:g}, gradient norm {fields['grad_norm']:g}"
                self._print(f"{_step_text(run, fields['step'])}  skipped: {values}")

    def _print(self, line: str) -> None:
        if self._bar is not None:
            with self._terminal():
                self._bar.print_above(escape_controls(line))
            return
        print_line(line)

    @hookimpl
    def on_end(self) -> None:
        """Stop the progress bar."""
        if self._bar is not None:
            with self._terminal():
                self._bar.stop()

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        """If output in the body fails because the terminal was closed, remove the bar and let the run continue."""
        try:
            yield
        except OSError:
            self._bar = None
            drop_output()


def _step_text(run: Run, step: int) -> str:
    return f"step {step:>{len(str(run.steps))}}/{run.steps}"


class Bar:
    """One terminal line that shows the step, the latest numbers and a progress bar, in this order."""

    def __init__(self, steps: int, completed: int):
        from rich.console import Console
        from rich.live import Live

        self._steps, self._parts = steps, dict.fromkeys(PARTS, "")
        self._console = Console(highlight=False, color_system="auto" if has_colour(sys.stdout) else None)
        # No automatic redraws, because their thread would slow down the steps.
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self.draw(completed)

    def draw(self, step: int, **parts: str) -> None:
        """Draw the bar at `step`.

        `parts` maps names in PARTS, such as loss, to new texts next to the bar. The texts of other names do not change.
        """
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        self._parts.update(parts)
        width = self._console.width - 3  # leave room for `^C`, which would wrap the line
        text = self._text(step, width)
        line, bar_width = Table.grid(), width - len(text)
        if bar_width >= MIN_BAR_WIDTH:
            line.add_row(text, ProgressBar(self._steps, step, bar_width, False, TRACK_COLOUR, BAR_COLOUR, BAR_COLOUR))
        else:
            line.add_row(text)
        self._live.update(line, refresh=True)

    def _text(self, step: int, width: int) -> str:
        """Return the step and the latest numbers as a line that fits into `width` columns.

        If the terminal is too narrow, omit the speed; then also the held-out loss; then also the remaining time.
        """
        count = f"{step:>{len(str(self._steps))}}/{self._steps}"
        for hidden in (set(), {"speed"}, {"speed", "held_out"}, {"speed", "held_out", "left"}):
            texts = (text for name, text in self._parts.items() if text and name not in hidden)
            line = "  ".join((count, *texts)) + "  "
            if len(line) + MIN_BAR_WIDTH * (not hidden) <= width:
                return line
        return line[:width]

    def print_above(self, text: str) -> None:
        """Print lines above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Stop the display; the last state stays visible."""
        self._live.stop()


class Cell:
    """A progress bar in a notebook: one cell output, which is updated in place."""

    def __init__(self, steps: int, completed: int):
        from IPython.display import display

        self._steps, self._parts = steps, dict.fromkeys(PARTS, "")
        self._handle = display(self._output(completed), raw=True, display_id=True)

    def draw(self, step: int, **parts: str) -> None:
        """Draw the bar at `step`.

        `parts` maps names in PARTS, such as loss, to new texts next to the bar. The texts of other names do not change.
        """
        self._parts.update(parts)
        self._handle.update(self._output(step), raw=True)

    def _output(self, step: int) -> dict[str, str]:
        text = "  ".join((f"{step}/{self._steps}", *filter(None, self._parts.values())))
        bar = f'<progress value="{step}" max="{self._steps}" style="accent-color:{BAR_COLOUR}"></progress>'
        return {"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"}

    def print_above(self, text: str) -> None:
        """Print lines. In a notebook they appear below the bar, in spite of the method's name."""
        print(text)

    def stop(self) -> None:
        """Do nothing: the last state stays visible."""
