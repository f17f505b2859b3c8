"""What a person watches while a run trains."""

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
    is_notebook,
    is_silent,
    print_line,
    require_range,
)
from toyexp_callbacks.events import Listener

REDRAW_SECONDS = 0.1
SHORTEST_BAR = 8  # columns; a shorter one is not drawn
PARTS = ("loss", "held_out", "speed", "left")  # of what is shown, in their order
SILENT_SECONDS = 60.0  # after which a step has a plain line, though its turn is not yet
SPEED_SECONDS = 10.0  # the speed shown is that of about this much training


@dataclass(eq=False)
class Progress(Listener):
    """A bar with loss, tokens/s and time left, also in notebooks; plain lines when the output is no terminal."""

    name: ClassVar[str] = "progress"

    every: int = 0  # steps between plain lines; 0: about ten lines a run, and one a minute

    def __post_init__(self) -> None:
        self._bar: Any = None
        self._skipped = 0  # steps in a row up to now

    def check(self) -> None:
        """Raises UserError for a negative interval."""
        require_range("callbacks.progress", self, every="[0,inf)")

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That the plain lines are of the first step and the last alone."""
        return preview.interval_warnings("callbacks.progress.every", self.every, "the first and the last have a line")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Opens the bar."""
        self._tokens = self._seconds = 0.0
        self._lines = self.every or -(-run.steps // 10)
        self._redrawn, self._told = 0.0, time.monotonic()
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
        """Moves the bar, at most ten times a second, or prints a line when it is time."""
        now = time.monotonic()
        self._note_speed(step, metrics, now)
        if self._skipped and math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            if self._skipped > 1:
                self._print(f"{_place(run, step - 1)}  skipped: {self._skipped} steps in a row")
            self._skipped = 0
        last, silent = step == run.steps, not self.every and now - self._told >= SILENT_SECONDS
        if self._bar is not None:
            if last or now - self._redrawn >= REDRAW_SECONDS:
                self._redrawn = now
                with self._terminal():
                    self._bar.draw(step, loss=f"loss {metrics['loss']:.4f}", **self._note(run, step, now))
        elif step == self._first or last or step % self._lines == 0 or silent:
            self._told = now
            rate = f"lr {metrics['lr']:.2e}"
            note = "  ".join(filter(None, self._note(run, step, now).values()))
            self._print(f"{_place(run, step)}  loss {metrics['loss']:.4f}  {rate}  {note}")

    def _note_speed(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        if step <= self._first + 1:  # the first also prepares kernels and buffers: it is forgotten
            self._tokens = self._seconds = 0.0
        if step == self._first:
            self._began = now
        seconds = metrics["wall_us"] / 1e6
        kept = max(1 - seconds / SPEED_SECONDS, 0.0)
        self._tokens = self._tokens * kept + metrics["tokens"]
        self._seconds = self._seconds * kept + seconds

    def _note(self, run: Run, step: int, now: float) -> dict[str, str]:
        """Speed of the last steps, and the time left at the pace since the first, evaluations and all."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        speed = f"{format_count(rate)} {run.plan.model.reads.units}/s"
        taken = step - self._first
        pace = (now - self._began) / taken if taken else self._seconds
        left = f"{format_duration(max(round((run.steps - step) * pace), 1))} left" if step < run.steps else ""
        return {"speed": speed, "left": left}

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the held-out loss and scores."""
        scores = "".join(f"  {name} {value:.4f}" for name, value in metrics.items() if name not in ("loss", "ppl"))
        if self._bar is not None:
            with self._terminal():
                self._bar.draw(step, held_out=f"held-out {metrics['loss']:.4f}{scores}")
        else:
            self._print(f"{_place(run, step)}  held-out loss {metrics['loss']:.4f}{scores}")

    @hookimpl
    def on_event(self, run: Run, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows sampled text, notes and skipped steps, above the bar."""
        if kind == "sample":
            text = "".join(f"\n    {line}" for line in f"{fields['prompt']}{fields['text']}".splitlines())
            self._print(f"{_place(run, fields['step'])}  sample{text}")
        elif kind == "note":
            self._print(str(fields["text"]))
        elif kind == "skipped":  # the first of a row; how many there were is told when it is over
            self._skipped += 1
            if self._skipped == 1:
                what = f"loss {fields['loss']:g}, gradient norm {fields['grad_norm']:g}"
                self._print(f"{_place(run, fields['step'])}  skipped: {what}")

    def _print(self, line: str) -> None:
        if self._bar is not None:
            with self._terminal():
                self._bar.above(escape_controls(line))
            return
        print_line(line)

    @hookimpl
    def on_end(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            with self._terminal():
                self._bar.stop()

    @contextlib.contextmanager
    def _terminal(self) -> Iterator[None]:
        """A terminal that was closed ends the bar, not the run."""
        try:
            yield
        except OSError:
            self._bar = None
            drop_output()


def _place(run: Run, step: int) -> str:
    return f"step {step:>{len(str(run.steps))}}/{run.steps}"


class Bar:
    """One line of a terminal: the count, what was measured last, and a bar that takes what room is left."""

    def __init__(self, steps: int, completed: int):
        from rich.console import Console
        from rich.live import Live

        self._steps, self._parts = steps, dict.fromkeys(PARTS, "")
        self._console = Console(highlight=False)
        # Drawn when told: a thread that redraws would steal time from the steps.
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self.draw(completed)

    def draw(self, step: int, **parts: str) -> None:
        """Shows the step, and the `parts` in place of what they were."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        self._parts.update(parts)
        room = self._console.width - 3  # of which `^C` takes two: in the last column it would break the line in two
        text = self._text(step, room)
        line, left = Table.grid(), room - len(text)
        line.add_row(text, *([ProgressBar(self._steps, step, left)] if left >= SHORTEST_BAR else []))
        self._live.update(line, refresh=True)

    def _text(self, step: int, room: int) -> str:
        """The numbers that fit; the narrower, the fewer: the speed goes first, then the held-out loss and the time."""
        count = f"{step:>{len(str(self._steps))}}/{self._steps}"
        for dropped in (set(), {"speed"}, {"speed", "held_out"}, {"speed", "held_out", "left"}):
            shown = (text for name, text in self._parts.items() if text and name not in dropped)
            line = "  ".join((count, *shown)) + "  "
            if len(line) + SHORTEST_BAR * (not dropped) <= room:
                return line
        return line[:room]

    def above(self, text: str) -> None:
        """Prints lines above the bar, which stays the last one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leaves the last state in its line."""
        self._live.stop()


class Cell:
    """The same in a notebook: one output of the cell, in place of which the next one comes."""

    def __init__(self, steps: int, completed: int):
        from IPython.display import display

        self._steps, self._parts = steps, dict.fromkeys(PARTS, "")
        self._shown = display(self._output(completed), raw=True, display_id=True)

    def draw(self, step: int, **parts: str) -> None:
        """Shows the step, and the `parts` in place of what they were."""
        self._parts.update(parts)
        self._shown.update(self._output(step), raw=True)

    def _output(self, step: int) -> dict[str, str]:
        text = "  ".join((f"{step}/{self._steps}", *filter(None, self._parts.values())))
        bar = f'<progress value="{step}" max="{self._steps}"></progress>'
        return {"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"}

    def above(self, text: str) -> None:
        """Prints lines, which stand below it."""
        print(text)

    def stop(self) -> None:
        """Leaves the last state as it is."""
