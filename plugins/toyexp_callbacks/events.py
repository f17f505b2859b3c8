"""events.jsonl: what happened in a run, one JSON object a line, schema toy/v1."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TextIO

from toyexp import Batch, Callback, Run, UserError, hookimpl
from toyexp.data import batch_digest
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
        self._last: dict[str, Any] = {}
        self._gate: dict[str, Any] | None = None
        self._state: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raises UserError for an interval below 1."""
        if self.every < 1:
            raise UserError(f"callbacks.events.every={self.every}: must be at least 1")

    @hookimpl(tryfirst=True)  # whatever another callback says, or raises, as it starts is recorded
    def on_start(self, run: Run) -> None:
        """run_start, the first line, flushed at once; a resumed run goes on where its checkpoint was."""
        self._began = self._flushed = time.monotonic()
        path = run.dir / "events.jsonl"
        if self._state is not None and path.is_file():
            self._began -= self._state["seconds"]
            self._last = dict(self._state["last"])
            with open(path, "rb+") as file:  # the steps behind the checkpoint are taken again
                kept = file.read(self._state["bytes"])
                file.truncate(len(kept) if len(kept) == self._state["bytes"] else kept.rfind(b"\n") + 1)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in on_end
            return
        self._file = open(path, "x" if not run.resumed else "w", encoding="utf-8")  # noqa: SIM115 - closed in on_end
        self._write("run_start", schema="toy/v1", run_id=run.dir.name, name=run.name, phase="train", **run.facts)
        self._file.flush()

    def _write(self, kind: str, **fields: Any) -> None:
        assert self._file is not None
        elapsed = time.monotonic() - self._began
        self._file.write(dump_json({"kind": kind, "t": round(elapsed, 6), **fields}) + "\n")
        if elapsed + self._began - self._flushed >= FLUSH_SECONDS:
            self._flushed = elapsed + self._began
            self._file.flush()

    def state(self) -> dict[str, Any]:
        """How far the file reaches, which is then on the disk."""
        if self._file is None:
            return {}
        self._file.flush()
        os.fsync(self._file.fileno())
        seconds = time.monotonic() - self._began
        return {"bytes": os.fstat(self._file.fileno()).st_size, "seconds": seconds, "last": self._last}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Where to go on."""
        self._state = state

    @hookimpl
    def on_step(self, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """A step record, with a digest of the batch that shows whether two runs saw the same data."""
        self._last = {**self._last, "final_step": step, "final_loss": metrics["loss"]}
        if step % self.every == 0:
            self._write("step", phase="train", step=step, **metrics, batch=batch_digest(batch))

    @hookimpl
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """An eval record."""
        self._write("eval", phase="eval", name="held_out", step=step, **metrics)

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Whatever was said; the quality gate's verdict and the count of skipped steps are kept for run_end."""
        if kind == "quality_gate":
            self._gate = dict(fields)
        else:
            self._write(kind, **fields)
        if kind == "skipped":
            self._last = {**self._last, "skipped": fields["skipped"]}

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
