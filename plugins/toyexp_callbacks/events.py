"""events.jsonl: the record of a run, one JSON object per line, schema toy/v1."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, ClassVar

from toyexp import Batch, Callback, Plan, Run, RunFailed, RunPreview, batch_digest, hookimpl
from toyexp.base import dump_json, open_file, open_for_writing, require_range, write_synced

log = logging.getLogger("toyexp")

FLUSH_SECONDS = 1.0
FLUSH_BYTES = 1 << 16
MAX_LINE = 1 << 20  # maximum length in bytes of a line that is read
MAX_TAIL = 64 << 20  # maximum number of bytes after a checkpoint in which foreign lines are counted
RUN_LINES = re.compile(rb'(?:{"kind": "(?!run_end")[^"]*", "t": .*\n)*+(?:{"kind": "run_end", .*\n)?')  # of one run
MAX_WAITING = 16 << 20  # maximum bytes of lines that wait while the disk is full


class Lines:
    """A file that is appended line by line. Lines that cannot be written wait in memory and are written later."""

    def __init__(self, path: Path, waiting: bytes = b""):
        self._file = open_for_writing(path, os.O_APPEND)
        self._waiting = bytearray(waiting)  # complete lines; the first `_done` bytes are already in the file
        self._done = 0
        self._flushed = time.monotonic()
        self.trouble: str | None = None  # why the last write failed
        self.lost = 0  # number of lines dropped because the memory limit was reached

    def add(self, line: str, now: float) -> None:
        """Append a line to the waiting lines. Write all of them if there are many, or once a second.

        `now` is the time in seconds (time.monotonic).
        """
        if len(self._waiting) >= MAX_WAITING:
            self.lost += 1
        else:
            self._waiting += line.encode() + b"\n"
        if now - self._flushed >= FLUSH_SECONDS or (len(self._waiting) >= FLUSH_BYTES and not self.trouble):
            self._flushed = now
            self.flush()

    def flush(self, to_disk: bool = False) -> None:
        """Write the waiting lines. With `to_disk`, also flush the file to disk.

        If this fails, store the reason in the attribute `trouble`.
        """
        try:
            while self._done < len(self._waiting):
                self._done += os.write(self._file, self._waiting[self._done :])
                complete = self._waiting.rfind(b"\n", 0, self._done) + 1
                del self._waiting[:complete]
                self._done -= complete
            if to_disk:
                os.fsync(self._file)
        except OSError as error:
            self.trouble = error.strerror
        else:
            self.trouble = None

    def position(self) -> dict[str, Any]:
        """Write the waiting lines if possible. Return the state to save in a checkpoint.

        The state is the size of the file in bytes up to its last complete line, and the lines that still wait.
        """
        self.flush()
        return {"bytes": os.fstat(self._file).st_size - self._done, "waiting": self._waiting.decode()}

    def sync(self) -> None:
        """Flush the file to disk. Raise OSError on failure."""
        os.fsync(self._file)

    def close(self) -> str | None:
        """Write the waiting lines, remove an incomplete last line and close the file.

        Return a message with the number of lines that are missing and the reason; None if the file is complete.
        """
        self.flush(to_disk=True)
        if self._done:
            os.truncate(self._file, os.fstat(self._file).st_size - self._done)
        os.close(self._file)
        if self.trouble:
            return f"{self._waiting.count(10) + self.lost} lines could not be written: {self.trouble}"
        return f"{self.lost} lines were lost while the disk was full" if self.lost else None


@dataclass(eq=False)
class Listener(Callback):
    """Base of callbacks that only receive numbers and events.

    The next step may start before these callbacks receive the numbers of the previous step.
    """

    def should_wait(self, step: int) -> bool:
        """Return False: the next step never waits for this callback."""
        return False


@dataclass(eq=False)
class Events(Listener):
    """Record the run in events.jsonl (schema toy/v1)."""

    name: ClassVar[str] = "events"
    closes_last: ClassVar[bool] = True

    every: int = 1  # steps from one recorded step to the next

    def __post_init__(self) -> None:
        self._lines: Lines | None = None
        self._last: dict[str, Any] = {}
        self._gate: dict[str, Any] | None = None
        self._position: tuple[int, bytes] | None = None
        self._seconds = 0.0  # duration before the run was resumed
        self._warned = False

    def check(self) -> None:
        """Raise UserError for an interval below 1."""
        require_range("callbacks.events", self, every="[1,inf)")

    def outputs(self, plan: Plan) -> Sequence[str]:
        """Return the names of the files that this callback writes."""
        return ["events.jsonl"]

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Warn if `every` is so large that no step is recorded."""
        return preview.interval_warnings("callbacks.events.every", self.every, "none of them is recorded")

    @hookimpl(tryfirst=True)  # to record events and errors of other callbacks' on_start
    def on_start(self, run: Run) -> None:
        """Write the event run_start as the first line, immediately.

        A resumed run continues at the file position that its checkpoint has saved.
        """
        self._run, self._path = run, run.dir / "events.jsonl"
        self._began = time.monotonic() - self._seconds
        if self._position is not None and self._path.is_file():
            waiting, trouble = truncate_events(self._path, *self._position)
            self._lines = Lines(self._path, waiting)
            if trouble:
                self._warn(trouble)
            return
        if run.resumed_step:
            self._path.unlink(missing_ok=True)  # left by an earlier attempt to resume
        facts = {"run_id": run.dir.name, "name": run.name, "phase": "train", **run.facts}
        first = dump_json({"kind": "run_start", "t": 0.0, "schema": "toy/v1", **facts})
        with run.output(self._path, grows=True) as path:
            write_synced(path, first.encode() + b"\n")
        self._lines = Lines(self._path)
        if self._position is not None:
            self._warn(f"events.jsonl is missing, and with it the events up to step {run.resumed_step}")

    def _write(self, kind: str, **fields: Any) -> None:
        self._add(dump_json({"kind": kind, "t": round(time.monotonic() - self._began, 6), **fields}))

    def _add(self, line: str) -> None:
        assert self._lines is not None
        self._lines.add(line, time.monotonic())
        if self._lines.trouble and not self._warned:
            self._warned = True
            self._warn(f"cannot be written ({self._lines.trouble}); lines wait in memory, training continues")

    def _warn(self, trouble: str) -> None:
        text = f"{self._path}: {trouble}"
        log.warning("%s", text)
        self._run.emit("note", text=f"toyexp: warning: {text}")

    def state(self) -> dict[str, Any]:
        """Return the position in the file, the run's duration so far, and the latest numbers for the event run_end."""
        if self._lines is None:
            return {}
        return {**self._lines.position(), "seconds": time.monotonic() - self._began, "last": {**self._last}}

    def sync(self) -> None:
        """Flush the file to disk."""
        if self._lines is not None:
            self._lines.sync()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the position in the file, the duration of the run, and the numbers for the event run_end."""
        if not 0 <= int(state["bytes"]) < 1 << 50:
            raise ValueError(f"bytes is {state['bytes']}")
        self._position = int(state["bytes"]), str(state["waiting"]).encode()
        self._seconds, self._last = float(state["seconds"]), dict(state["last"])

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_step(self, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """Record a step, with a digest of its batch, so that the data of two runs can be compared."""
        self._last["final_step"], self._last["final_loss"] = step, metrics["loss"]
        if step % self.every == 0:
            seconds, digest = round(time.monotonic() - self._began, 6), batch_digest(batch)
            head = {"kind": "step", "t": seconds, "phase": "train", "step": step}
            self._add(dump_json({**head, **metrics, "batch": digest}))

    @hookimpl(trylast=True)  # after callbacks that add metrics
    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation."""
        self._write("eval", phase="eval", name="held_out", step=step, **metrics)

    @hookimpl
    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record an event. Remember the quality gate's result and the number of skipped steps for the event run_end."""
        if kind == "quality_gate":
            self._gate = dict(fields)
        else:
            self._write(kind, **fields)
        if kind == "skipped":
            self._last = {**self._last, "skipped": fields["skipped"]}

    @hookimpl
    def on_end(self, reason: str, error: BaseException | None) -> None:
        """Write the event run_end as the last line. Raise RunFailed if some lines could not be written."""
        if self._lines is None:  # the file could not be opened, which ended the run
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
        incomplete = self._lines.close()
        if incomplete:
            raise RunFailed(f"{self._path}: {incomplete}")


def recorded_events(run: Run) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Read events.jsonl, and yield the kind, step and fields of each event up to a resumed run's checkpoint.

    Stop at the first line that cannot be read; yield nothing if there is no file.
    """
    with contextlib.suppress(Exception), open_file(run.dir / "events.jsonl") as file:
        while line := file.readline(MAX_LINE):
            event = json.loads(line)
            kind, step = event.pop("kind", None), event.pop("step", None)
            event.pop("t", None)
            if isinstance(step, int) and step <= run.resumed_step:
                yield str(kind), step, event


def truncate_events(path: Path, size: int, waiting: bytes) -> tuple[bytes, str | None]:
    """Truncate the file to `size` bytes, because a resumed run repeats the steps after its checkpoint.

    `waiting` holds the lines that were not written yet when the checkpoint was saved. Return the lines to write next,
    and a note, or None if there is nothing to report. The note says what was repaired, and how many lines of other
    programs were removed. If the file is shorter than `size`, or no line ends at byte `size`, keep only the complete
    lines before it, and drop `waiting`.
    """
    with open(open_for_writing(path), "rb+") as file:
        length = os.fstat(file.fileno()).st_size
        is_torn = _byte_before(file, length) != b"\n"
        if length >= size and _byte_before(file, size) == b"\n":
            file.seek(size)
            foreign = RUN_LINES.sub(b"", file.read(MAX_TAIL), 1).count(b"\n")
            file.truncate(size)
            notes = ["its last line was incomplete and is written again"] * is_torn
            notes += [f"removed lines that this run did not write: {foreign}"] * bool(foreign)
            return waiting, "; ".join(notes) or None
        file.seek(0)
        end = file.read(min(size, length)).rfind(b"\n") + 1
        file.truncate(end)
        note = f"{size - end} bytes written before the checkpoint are lost"
        return b"", note + "; an incomplete line is removed" * is_torn


def _byte_before(file: IO[bytes], offset: int) -> bytes:
    """Return the byte before an offset of the file. At offset 0, return a line end."""
    if offset == 0:
        return b"\n"
    file.seek(offset - 1)
    return file.read(1)
