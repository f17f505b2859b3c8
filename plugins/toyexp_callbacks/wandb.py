"""Weights & Biases as a listener that can never hurt a run.

Everything goes through a queue to a thread of its own; whatever wandb raises there ends the listening with one
warning. events.jsonl stays the record.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Callback, Planned, Run, hookimpl, needed, printable
from toyexp.base import require_within, require_words

log = logging.getLogger("toyexp")

MODES = ("offline", "online")
FINISH_SECONDS = 30.0
QUEUE_LIMIT = 10_000  # records; beyond it new ones are dropped, never waited for


@dataclass(eq=False)
class Wandb(Callback):
    """Logs the run to Weights & Biases, offline unless told otherwise."""

    name: ClassVar[str] = "wandb"

    mode: str = "offline"  # offline | online
    project: str = "toyexp"  # where the run appears
    group: str | None = None  # runs that belong together
    every: int = 1  # steps between points

    def __post_init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._trouble: str | None = None  # what the thread gave up on, until the run has been told
        self._id = secrets.token_hex(4)  # W&B's name of the run, which stays when the run is resumed
        self._resumed = False

    def state(self) -> dict[str, Any]:
        """The run's id."""
        return {"id": self._id}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on in the same W&B run."""
        self._id, self._resumed = str(state["id"]), True

    def check(self) -> None:
        """Raises UserError for values that cannot work, Unavailable without wandb."""
        require_words("callbacks.wandb", self, mode=MODES)
        require_within("callbacks.wandb", self, every="[1,inf)")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        with needed("wandb", "pip install 'toyexp[wandb]'"):
            import wandb

            _ = wandb.init, wandb.Settings  # what is left of a package that was removed has none

    def looks(self, step: int) -> bool:
        """Never: it goes by what it is told."""
        return False

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That no step is sent."""
        return planned.beyond("callbacks.wandb.every", self.every, "none of them is sent")

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Starts the listening thread; wandb itself is started there."""
        self._queue: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._listen, args=(run,), name="wandb", daemon=True)
        self._thread.start()

    def _listen(self, run: Run) -> None:
        ended = False
        try:
            # wandb falls back to a temporary directory in silence when this one cannot be written.
            if not os.access(run.dir, os.W_OK):
                raise OSError(f"{run.dir} cannot be written")
            import wandb

            record = wandb.init(
                project=self.project,
                group=self.group,
                id=self._id,
                resume="allow" if self._resumed and self.mode == "online" else None,  # offline, the id says enough
                name=f"{run.name}-{run.seed}",
                dir=str(run.dir),
                mode="online" if self.mode == "online" else "offline",
                config=dict(run.config),
                reinit="create_new",  # each job of a sweep is its own run
                settings=wandb.Settings(init_timeout=20, console="off", save_code=False, disable_git=True),
            )
            while (item := self._queue.get()) is not None:
                record.log(item[0], step=item[1])
            ended = True
            record.finish()
        except BaseException as error:  # wandb is known to raise even KeyboardInterrupt; none of it is the run's
            self._trouble = f"wandb gave up, the run goes on: {printable(f'{type(error).__name__}: {error}', 200)}"
            while not ended and self._queue.get() is not None:
                pass

    def _put(self, run: Run, fields: Mapping[str, Any], step: int) -> None:
        with contextlib.suppress(queue.Full):  # too slow: the record is dropped, not waited for
            self._queue.put_nowait((dict(fields), step))
        self._tell(run)

    def _tell(self, run: Run) -> None:
        """Passes the thread's trouble on from the run's own thread, once: callbacks expect to be called from it."""
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            log.warning(trouble)
            run.emit("note", text=trouble)

    @hookimpl
    def on_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a point."""
        if step % self.every == 0:
            self._put(run, {f"train/{k}": v for k, v in metrics.items()}, step)

    @hookimpl
    def on_eval(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a held-out point."""
        self._put(run, {f"held_out/{k}": v for k, v in metrics.items()}, step)

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Waits for wandb to finish, but not for ever."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):  # what it could not take in that time, it will not finish either
            self._queue.put(None, timeout=FINISH_SECONDS)
            self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._trouble = f"wandb did not finish within {FINISH_SECONDS:g} s; its record of this run is incomplete"
        self._tell(run)
