"""events.jsonl: what happened in a run, one JSON object a line, schema toy/v1."""

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
LINE = 1 << 20  # bytes of a line that is read again
TAIL = 64 << 20  # bytes behind a checkpoint that are looked at
OWN = re.compile(rb'(?:{"kind": "(?!run_end")[^"]*", "t": .*\n)*+(?:{"kind": "run_end", .*\n)?')  # lines of a run
WAITING_BYTES = 16 << 20  # of lines that wait for room on the disk


class Lines:
    """A file that grows by lines. What cannot be written waits in memory and is written later, in its order."""

    def __init__(self, path: Path, waiting: bytes = b""):
        self._file = open_for_writing(path, os.O_APPEND)
        self._waiting = bytearray(waiting)  # whole lines; of the first of them `_done` bytes are in the file
        self._done = 0
        self._flushed = time.monotonic()
        self.trouble: str | None = None  # why the file does not hold everything
        self.lost = 0  # lines for which there was no room in memory either

    def add(self, line: str, now: float) -> None:
        """One more line, written at the latest a second later by whichever comes then."""
        if len(self._waiting) >= WAITING_BYTES:
            self.lost += 1
        else:
            self._waiting += line.encode() + b"\n"
        if now - self._flushed >= FLUSH_SECONDS or (len(self._waiting) >= FLUSH_BYTES and not self.trouble):
            self._flushed = now
            self.flush()

    def flush(self, to_disk: bool = False) -> None:
        """Writes what it can."""
        try:
            while self._done < len(self._waiting):
                self._done += os.write(self._file, self._waiting[self._done :])
                whole = self._waiting.rfind(b"\n", 0, self._done) + 1
                del self._waiting[:whole]
                self._done -= whole
            if to_disk:
                os.fsync(self._file)
        except OSError as error:
            self.trouble = error.strerror
        else:
            self.trouble = None

    def place(self) -> dict[str, Any]:
        """How far the file's whole lines reach, and those that are still to come."""
        self.flush()
        return {"bytes": os.fstat(self._file).st_size - self._done, "waiting": self._waiting.decode()}

    def sync(self) -> None:
        """Brings to the disk what was written; raises OSError."""
        os.fsync(self._file)

    def close(self) -> str | None:
        """Closes the file after its last whole line, and returns why it is not complete, if so."""
        self.flush(to_disk=True)
        if self._done:
            os.truncate(self._file, os.fstat(self._file).st_size - self._done)
        os.close(self._file)
        if self.trouble:
            return f"{self._waiting.count(10) + self.lost} lines could not be written: {self.trouble}"
        return f"{self.lost} lines were lost while the disk was full" if self.lost else None


@dataclass(eq=False)
class Listener(Callback):
    """Base of the callbacks that go by what they are told: the next step may begin before they hear of one."""

    def should_wait(self, step: int) -> bool:
        """Return False."""
        return False


@dataclass(eq=False)
class Events(Listener):
    """Records the run in events.jsonl (schema toy/v1)."""

    name: ClassVar[str] = "events"
    closes_last: ClassVar[bool] = True

    every: int = 1  # steps between step records

    def __post_init__(self) -> None:
        self._lines: Lines | None = None
        self._last: dict[str, Any] = {}
        self._gate: dict[str, Any] | None = None
        self._place: tuple[int, bytes] | None = None
        self._seconds = 0.0  # of the run before it was resumed
        self._told = False

    def check(self) -> None:
        """Raises UserError for an interval below 1."""
        require_range("callbacks.events", self, every="[1,inf)")

    def outputs(self, plan: Plan) -> Sequence[str]:
        """The record."""
        return ["events.jsonl"]

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That no step is recorded."""
        return preview.interval_warnings("callbacks.events.every", self.every, "none of them is recorded")

    @hookimpl(tryfirst=True)  # whatever another callback says, or raises, as it starts is recorded
    def on_start(self, run: Run) -> None:
        """run_start, the first line, flushed at once; a resumed run goes on where its checkpoint was."""
        self._run, self._path = run, run.dir / "events.jsonl"
        self._began = time.monotonic() - self._seconds
        if self._place is not None and self._path.is_file():
            waiting, trouble = go_back(self._path, *self._place)
            self._lines = Lines(self._path, waiting)
            if trouble:
                self._warn(trouble)
            return
        if run.resumed_step:
            self._path.unlink(missing_ok=True)  # of an earlier process that went on from here, and did not come far
        facts = {"run_id": run.dir.name, "name": run.name, "phase": "train", **run.facts}
        first = dump_json({"kind": "run_start", "t": 0.0, "schema": "toy/v1", **facts})
        with run.output(self._path, grows=True) as place:
            write_synced(place, first.encode() + b"\n")
        self._lines = Lines(self._path)
        if self._place is not None:
            self._warn(f"events.jsonl is gone, and with it what it said of the steps up to {run.resumed_step}")

    def _write(self, kind: str, **fields: Any) -> None:
        self._add(dump_json({"kind": kind, "t": round(time.monotonic() - self._began, 6), **fields}))

    def _add(self, line: str) -> None:
        assert self._lines is not None
        self._lines.add(line, time.monotonic())
        if self._lines.trouble and not self._told:
            self._told = True
            self._warn(f"not written ({self._lines.trouble}); its lines wait in memory, training goes on")

    def _warn(self, trouble: str) -> None:
        text = f"{self._path}: {trouble}"
        log.warning("%s", text)
        self._run.emit("note", text=f"toyexp: warning: {text}")

    def state(self) -> dict[str, Any]:
        """How far the file reaches."""
        if self._lines is None:
            return {}
        return {**self._lines.place(), "seconds": time.monotonic() - self._began, "last": {**self._last}}

    def sync(self) -> None:
        """So far it is on the disk."""
        if self._lines is not None:
            self._lines.sync()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Where to go on."""
        if not 0 <= int(state["bytes"]) < 1 << 50:
            raise ValueError(f"bytes is {state['bytes']}")
        self._place = int(state["bytes"]), str(state["waiting"]).encode()
        self._seconds, self._last = float(state["seconds"]), dict(state["last"])

    @hookimpl(trylast=True)  # behind who logs
    def on_step(self, step: int, metrics: Mapping[str, float], batch: Batch) -> None:
        """A step record, with a digest of the batch that shows whether two runs saw the same data."""
        self._last["final_step"], self._last["final_loss"] = step, metrics["loss"]
        if step % self.every == 0:
            seconds, digest = round(time.monotonic() - self._began, 6), batch_digest(batch)
            head = {"kind": "step", "t": seconds, "phase": "train", "step": step}
            self._add(dump_json({**head, **metrics, "batch": digest}))

    @hookimpl(trylast=True)  # behind who logs
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
        """run_end, the last line; raises RunFailed when not all of them are in the file."""
        if self._lines is None:  # it could not be opened, which is the error the run ends with
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


def told_before(run: Run) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Kind, step and fields of what events.jsonl has of the steps up to a resumed run's checkpoint.

    As far as the file can be read, and nothing where there is none.
    """
    with contextlib.suppress(Exception), open_file(run.dir / "events.jsonl") as file:
        while line := file.readline(LINE):
            event = json.loads(line)
            kind, step = event.pop("kind", None), event.pop("step", None)
            event.pop("t", None)
            if isinstance(step, int) and step <= run.resumed_step:
                yield str(kind), step, event


def go_back(path: Path, size: int, waiting: bytes) -> tuple[bytes, str | None]:
    """Cuts the file to `size` bytes: the steps behind a checkpoint are taken again.

    Return what is to follow, and what had to be repaired, or is no line of the run's. A file that is shorter, or has no
    end of a line there, keeps its whole lines.
    """
    with open(open_for_writing(path), "rb+") as file:
        length = os.fstat(file.fileno()).st_size
        torn = _byte_before(file, length) != b"\n"
        if length >= size and _byte_before(file, size) == b"\n":
            file.seek(size)
            others = OWN.sub(b"", file.read(TAIL), 1).count(b"\n")
            file.truncate(size)
            told = ["its last line was torn; it is written again"] * torn
            told += [f"lines that this run did not write are removed: {others}"] * bool(others)
            return waiting, "; ".join(told) or None
        file.seek(0)
        kept = file.read(min(size, length)).rfind(b"\n") + 1
        file.truncate(kept)
        return b"", f"{size - kept} bytes that its checkpoint knows of are lost" + ("; a torn line is cut" * torn)


def _byte_before(file: IO[bytes], place: int) -> bytes:
    """The byte before a place in the file; an end of a line at its beginning."""
    if place == 0:
        return b"\n"
    file.seek(place - 1)
    return file.read(1)
