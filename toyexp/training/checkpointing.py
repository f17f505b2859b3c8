"""Checkpointing during a run: decide when a checkpoint is due, write it in a thread, delete old checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.files import system_message
from toyexp.base.memory import available_bytes
from toyexp.base.ownership import TEMPORARY_NAME, rename_aside
from toyexp.base.writing import total_bytes
from toyexp.interfaces.model import lower_is_better
from toyexp.interfaces.run import Best
from toyexp.interfaces.snapshot import SLOT
from toyexp.training.checkpoint import Checkpoint, list_checkpoints, read_checkpoint, write_checkpoint
from toyexp.training.provenance import is_own_checkpoint
from toyexp.training.settings import Interval

log = logging.getLogger("toyexp")

Arrays = Mapping[str, np.ndarray]
MAX_SNAPSHOTS = 2  # in memory: one is written while the next one waits


@dataclass(frozen=True)
class WrittenCheckpoint:
    """Checkpoint that was written to disk."""

    step: int
    path: Path
    bytes: int
    seconds: float  # duration of writing


class CheckpointKeeper:
    """Checkpoint writer of one run. It writes in a thread and keeps the last few checkpoints and the best.

    A failed write does not stop training: the last good checkpoint stays, and the next one is written when it is due.
    Memory is reused: the arrays of a snapshot serve for a later one, but only after the first was written to disk.
    """

    def __init__(
        self, folder: Path, interval: Interval, keep: int, best: str | None = None, resumed: Checkpoint | None = None
    ):
        self._folder, self._interval, self._keep, self.metric = folder, interval, keep, best
        self._resumed = resumed.path if resumed else None  # not deleted until two others exist
        self.trouble: str | None = None  # error to report once
        self.missing: str | None = None  # error of the last write; None if it succeeded
        self._thread: threading.Thread | None = None
        self._outcomes: list[WrittenCheckpoint | str] = []  # results of writes that were not yet reported
        # Arrays that may be reused, last written first; None: a further snapshot may be allocated.
        self._spare: queue.LifoQueue[Arrays | None] = queue.LifoQueue()
        for _ in range(MAX_SNAPSHOTS):
            self._spare.put(None)
        self._bytes, self._overwrites = 0, True  # size of a snapshot; True if the engine reuses its arrays
        state = resumed.state if resumed else {}
        saved = state.get("scores", {}) if state.get("metric", best) == best else {}
        self.scores: dict[int, float] = {int(step): score for step, score in saved.items() if score is not None}
        evals = state.get("evals", {})
        self.evals: dict[int, Mapping[str, float]] = {int(step): metrics for step, metrics in evals.items()}
        self._last_step, self._last_time = resumed.step if resumed else -1, time.monotonic()
        for stale in (path for path in folder.glob(".tmp-*") if TEMPORARY_NAME.fullmatch(path.name)):
            shutil.rmtree(stale, ignore_errors=True)  # this process holds the run's lock, so no other writes there

    def check(self, scores: Mapping[str, float]) -> None:
        """Raise UserError if an evaluation's metrics, `scores`, lack the metric of the setting `checkpoint_best`."""
        if self.metric and scores and self.metric not in scores:
            raise UserError(f"checkpoint_best={printable(self.metric)}: {suggest(self.metric, scores)}")

    def is_due(self, step: int, scores: Mapping[str, float], last: bool, is_requested: bool = False) -> bool:
        """Return True if the state after `step` should be saved as a checkpoint.

        `scores` are the metrics of an evaluation at this step ({} if there was none). `last` is True at the last step,
        and `is_requested` if the user requested a checkpoint.
        """
        if step == self._last_step:
            return False
        better = False
        if self.metric and scores:
            self.check(scores)
            if math.isfinite(scores[self.metric]):
                self.scores[step], self.evals[step] = scores[self.metric], scores
                better = self._best_step(self.scores) == step
        waited = time.monotonic() - self._last_time
        return is_requested or better or (last and bool(self._interval)) or self._interval.due(step, waited)

    def needs_attention(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step`, or if a finished or failed write is not yet reported."""
        return bool(self._outcomes) or self._interval.due(step, time.monotonic() - self._last_time)

    def best(self, present: int, weights: bool = True) -> Best | None:
        """Return the best evaluation whose weights still exist, in a checkpoint or in memory; None if there is none.

        `present` is the step of the weights in memory. If the best weights are only in a checkpoint and `weights` is
        True, read them. Raise DamagedCheckpoint if they cannot be read.
        """
        self.wait()  # count the checkpoint that is being written
        existing = list_checkpoints(self._folder)
        scores = {step: score for step, score in self.scores.items() if step == present or step in existing}
        if not scores:
            return None
        step = self._best_step(scores)
        arrays = read_checkpoint(existing[step], with_state=False).arrays if weights and step != present else None
        return Best(step, str(self.metric), scores[step], arrays, self.evals.get(step, {}))

    def _best_step(self, scores: Mapping[int, float]) -> int:
        sign = 1 if lower_is_better(str(self.metric)) else -1
        return min(sorted(scores), key=lambda step: sign * scores[step])

    def save(
        self, step: int, snapshot: Callable[[Arrays | None], Arrays], state: Mapping[str, Any],
        sync: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Take a snapshot of the session and start a thread that calls `sync` and writes the checkpoint.

        `snapshot` is called with the arrays of an earlier snapshot to reuse, or None. `save` waits while two earlier
        snapshots are not yet written (one, if memory is short).
        """
        spare = self._spare.get()
        if spare is None and self._bytes and (available_bytes() or 2 * self._bytes) < 2 * self._bytes:
            spare = self._spare.get()  # use one snapshot only from now on
        arrays = snapshot(spare)
        self._bytes = sum(array.nbytes for array in arrays.values())
        self._overwrites = spare is None or arrays is spare
        self._last_step, self._last_time = step, time.monotonic()
        arguments = (step, arrays, state, sync, self._thread)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self, step: int, arrays: Arrays, state: Mapping[str, Any], sync: Callable[[], None],
        before: threading.Thread | None,
    ) -> None:  # fmt: skip
        if before is not None:
            before.join()
        began = time.perf_counter()
        try:
            # Only weights are checked: a run may survive optimiser state that is not finite.
            if tensor := next((n for n, a in arrays.items() if SLOT not in n and not np.isfinite(a).all()), None):
                raise ValueError(f"weight {tensor} has NaN or infinity; the previous checkpoint stays the newest")
            sync()
            if os.path.lexists(target := self._folder / f"step-{step}") and not is_own_checkpoint(target):
                log.warning("%s: not a checkpoint of this run, or damaged; moved to %s", target, rename_aside(target))
            path = write_checkpoint(self._folder, step, arrays, state)
            self._outcomes.append(WrittenCheckpoint(step, path, total_bytes(path), time.perf_counter() - began))
            with contextlib.suppress(OSError):  # the next call deletes the rest
                self._prune(step)
        except Exception as error:
            self._outcomes.append(
                f"checkpoint of step {step}: not written ({system_message(error) or type(error).__name__})"
            )
        finally:
            self._spare.put(arrays if self._overwrites else None)

    def _prune(self, newest: int) -> None:
        """Delete old checkpoints up to step `newest` that this run wrote and that are valid.

        The latest `checkpoint_keep` checkpoints and the best stay. The checkpoint that the run was resumed from stays
        until two others exist.
        """
        existing = {step: path for step, path in list_checkpoints(self._folder).items() if step <= newest}
        kept_steps = set(list(existing)[: self._keep if self._interval or not self.metric else 1])
        scores = {s: v for s, v in self.scores.items() if s in existing}
        if scores:
            kept_steps.add(self._best_step(scores))
        if len([p for p in existing.values() if p != self._resumed]) < 2:
            kept_steps.update(s for s, p in existing.items() if p == self._resumed)
        for step, path in existing.items():
            if step not in kept_steps and is_own_checkpoint(path):
                shutil.rmtree(path, ignore_errors=True)

    def pop_written_checkpoints(self) -> Sequence[WrittenCheckpoint]:
        """Return the checkpoints that were written since the last call, and log the errors of failed writes.

        The first error after a successful write is also stored in `trouble`, for the caller to report.
        """
        written = []
        while self._outcomes:
            outcome = self._outcomes.pop(0)
            if isinstance(outcome, WrittenCheckpoint):
                written.append(outcome)
                self.missing = None
            else:
                log.warning("%s", outcome)
                self.trouble = self.trouble if self.missing else outcome  # report only the first of several in a row
                self.missing = outcome
        return written

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
