"""events.jsonl: what happened in a run, one JSON object a line, schema toy/v1."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TextIO

from toyexp import Callback, Run, UserError, hookimpl
from toyexp.run import dump_json

FLUSH_SECONDS = 1.0


@dataclass(eq=False)
class Events(Callback):
    """Records the run in events.jsonl (schema toy/v1)."""

    name: ClassVar[str] = "events"
    closes_last: ClassVar[bool] = True

    every: int = 1  # steps between step records

    def __post_init__(self) -> None:
        self._file: TextIO | None = None

    def check(self) -> None:
        """Raises UserError for an interval below 1."""
        if self.every < 1:
            raise UserError(f"callbacks.events.every={self.every}: must be at least 1")

    @hookimpl(tryfirst=True)  # whatever another callback says, or raises, as it starts is recorded
    def on_start(self, run: Run) -> None:
        """run_start, the first line, flushed at once."""
        self._began = self._flushed = time.monotonic()
        self._file = open(run.dir / "events.jsonl", "x", encoding="utf-8")  # noqa: SIM115 - closed in on_end
        self._last: dict[str, Any] = {}
        self._gate: dict[str, Any] | None = None
        self._write("run_start", schema="toy/v1", run_id=run.dir.name, name=run.name, phase="train", **run.facts)
        self._file.flush()

    def _write(self, kind: str, **fields: Any) -> None:
        assert self._file is not None
        elapsed = time.monotonic() - self._began
        self._file.write(dump_json({"kind": kind, "t": round(elapsed, 6), **fields}) + "\n")
        if elapsed + self._began - self._flushed >= FLUSH_SECONDS:
            self._flushed = elapsed + self._began
            self._file.flush()

    @hookimpl
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step record."""
        self._last = {"final_step": step, "final_loss": metrics["loss"]}
        if step % self.every == 0:
            self._write("step", phase="train", step=step, **metrics)

    @hookimpl
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """An eval record."""
        self._write("eval", phase="eval", name="held_out", step=step, **metrics)

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Whatever another callback said; the quality gate's verdict is kept for run_end."""
        if kind == "quality_gate":
            self._gate = dict(fields)
        else:
            self._write(kind, **fields)

    @hookimpl
    def on_end(self, reason: str, error: BaseException | None) -> None:
        """run_end, the last line."""
        if self._file is None:  # it could not be opened, which is the error the run ends with
            return
        fields: dict[str, Any] = {"ended_at": datetime.now(UTC).isoformat(timespec="milliseconds"), "reason": reason}
        fields.update(self._last)
        if self._gate is not None:
            fields["quality_gate"] = self._gate
        code = 0
        if error is not None:
            fields["error"] = f"{type(error).__name__}: {error}"
            code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
        self._write("run_end", **fields, exit_code=code)
        self._file.close()
