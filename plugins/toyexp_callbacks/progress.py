"""What a person watches while a run trains."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Callback, Run, UserError, hookimpl


@dataclass(eq=False)
class Progress(Callback):
    """A bar with loss, tokens/s and time left; plain lines when the output is no terminal."""

    name: ClassVar[str] = "progress"

    every: int = 0  # steps between plain lines; 0: about ten lines a run

    def check(self) -> None:
        """Raises UserError for a negative interval."""
        if self.every < 0:
            raise UserError(f"callbacks.progress.every={self.every}: must be 0 (about ten lines) or above")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Opens the bar."""
        self._tokens, self._seconds, self._held_out = 0.0, 0.0, ""
        self._lines = self.every or max(run.steps // 10, 1)
        self._bar: Any = _bar(run.steps) if sys.stdout.isatty() else None
        self._redrawn = 0.0

    @hookimpl
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Moves the bar, at most ten times a second; the loss and speed shown are of the last steps."""
        self._tokens += metrics["tokens"]
        self._seconds += metrics["wall_us"] / 1e6
        if self._bar is not None:
            now = time.monotonic()
            if now - self._redrawn >= 0.1 or step == run.steps:
                self._redrawn = now
                self._bar.update(0, completed=step, loss=f"{metrics['loss']:.4f}", note=self._note())
                self._bar.refresh()
        elif step == 1 or step % self._lines == 0 or step == run.steps:
            left = (run.steps - step) * self._seconds / max(step, 1)
            width = len(str(run.steps))
            print(f"step {step:>{width}}/{run.steps}  loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  "
                  f"{self._note()}  {left:.0f} s left", flush=True)  # fmt: skip

    def _note(self) -> str:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        speed = f"{rate / 1e3:.1f}k" if rate >= 1e3 else f"{rate:.0f}"
        return f"{speed} tokens/s{self._held_out}"

    @hookimpl
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remembers the held-out loss for the bar."""
        self._held_out = f"  held-out {metrics['loss']:.4f}"

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows sampled text above the bar."""
        if kind == "sample":
            text = f"step {fields['step']} sample: {fields['prompt']!r} -> {fields['text']!r}"
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)

    @hookimpl
    def on_end(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.stop()


def _bar(steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[note]}"),
        TimeRemainingColumn(),
        auto_refresh=False,  # a redrawing thread would steal time from the steps
    )
    bar.start()
    bar.add_task("train", total=steps, loss="-", note="")
    return bar
