"""A dashboard as a listener that can never hurt a run.

Everything goes through a queue to a thread of its own; whatever the dashboard's library raises there ends the listening
with one warning. events.jsonl stays the record.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from toyexp import Planned, Run, hookimpl, printable
from toyexp.base import require_within
from toyexp_callbacks.events import Listener

log = logging.getLogger("toyexp")

FINISH_SECONDS = 30.0
UPLOAD_BYTES = 1e6  # a second that are waited for at the end: 8 Mbit/s
QUEUE_LIMIT = 10_000  # records; beyond it new ones are dropped, never waited for


class Record(Protocol):
    """What a dashboard has of one run."""

    def log(self, fields: dict[str, Any], step: int) -> Any:
        """Takes numbers by name."""

    def finish(self) -> Any:
        """Takes no more, and is complete when this returns."""


@dataclass(eq=False)
class Dashboard(Listener):
    """Base of the callbacks that send a run's numbers to a dashboard."""

    every: int = 1  # steps between points

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._bytes = 0  # of files that were passed on
        self._trouble: str | None = None  # what the thread gave up on, until the run has been told

    @abstractmethod
    def opened(self, run: Run) -> Record:
        """The dashboard's record of the run; called in the thread."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        require_within(f"callbacks.{self.name}", self, every="[1,inf)")

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That no step is sent."""
        return planned.beyond(f"callbacks.{self.name}.every", self.every, "none of them is sent")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Starts the listening thread; the library itself is started there."""
        self._queue: queue.Queue[Callable[[Any], Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._listen, args=(run,), name=self.name, daemon=True)
        self._thread.start()

    def _listen(self, run: Run) -> None:
        ended = False
        try:
            # A library may fall back to a temporary directory in silence when this one cannot be written.
            if not os.access(run.dir, os.W_OK):
                raise OSError(f"{run.dir} cannot be written")
            record = self.opened(run)
            while (send := self._queue.get()) is not None:
                send(record)
            ended = True
            record.finish()
        except BaseException as error:  # wandb is known to raise even KeyboardInterrupt; none of it is the run's
            why = printable(f"{type(error).__name__}: {error}", 200)
            self._trouble = f"{self.name} gave up, the run goes on: {why}"
            while not ended and self._queue.get() is not None:
                pass

    def _put(self, run: Run, send: Callable[[Any], Any], size: int = 0) -> None:
        """Has the thread call `send` with its record; `size` is that of a file in bytes."""
        with contextlib.suppress(queue.Full):  # too slow: it is dropped, not waited for
            self._queue.put_nowait(send)
            self._bytes += size
        self._tell(run)

    def _tell(self, run: Run) -> None:
        """Passes the thread's trouble on from the run's own thread, once: callbacks expect to be called from it."""
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            log.warning(trouble)
            run.emit("note", text=trouble)

    @hookimpl(trylast=True)  # behind who logs
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a point."""
        if step % self.every == 0:
            fields = {f"train/{k}": v for k, v in metrics.items()}
            self._put(run, lambda record: record.log(fields, step=step))

    @hookimpl(trylast=True)  # behind who logs
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a held-out point."""
        fields = {f"held_out/{k}": v for k, v in metrics.items()}
        self._put(run, lambda record: record.log(fields, step=step))

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Waits for the dashboard to finish, but not for ever."""
        if self._thread is None:
            return
        seconds = FINISH_SECONDS + round(self._bytes / UPLOAD_BYTES)
        with contextlib.suppress(queue.Full):  # what it could not take in that time, it will not finish either
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)
        if self._thread.is_alive():
            waited = f"{seconds:g} s"
            self._trouble = f"{self.name} did not finish within {waited}; its record of this run is incomplete"
        self._tell(run)
        self.ended(run)

    def ended(self, run: Run) -> None:
        """Says what it has left."""


@dataclass(eq=False)
class Tracker(Dashboard):
    """Base of those that keep runs by project: a run that is resumed goes on as the run it was."""

    project: str = "toyexp"  # where the run appears
    group: str | None = None  # runs that belong together; null: of a job, its sweep

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id = secrets.token_hex(4)  # tells the run from others of its name, and stays when it is resumed
        self.resumed = False

    def state(self) -> dict[str, Any]:
        """The run's id."""
        return {"id": self.id}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on in the same run."""
        self.id, self.resumed = str(state["id"]), True

    def group_of(self, run: Run) -> str | None:
        """The group that was asked for, or the sweep that the run is a job of."""
        sweep = run.dir.parent
        return self.group or (sweep.name if (sweep / "sweep.json").is_file() else None)
