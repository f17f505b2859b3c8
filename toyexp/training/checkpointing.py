"""One run's checkpoints: when one is due, what is written beside the training, and which are kept."""

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
SETS = 2  # snapshots in memory at most: one that is being written, and one behind it


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that stands on the disk."""

    step: int
    path: Path
    bytes: int
    seconds: float  # that writing took, beside the training


class CheckpointKeeper:
    """Writes one run's checkpoints beside its training, and keeps the last few and the best.

    What cannot be written costs no step: training goes on, the last good checkpoint stays, the next one is tried.
    A snapshot's arrays are overwritten by a later one when its checkpoint is written, and not before.
    """

    def __init__(
        self, folder: Path, interval: Interval, keep: int, best: str | None = None, resumed: Checkpoint | None = None
    ):
        self._folder, self._interval, self._keep, self.metric = folder, interval, keep, best
        self._resumed = resumed.path if resumed else None  # not deleted before two others stand
        self.trouble: str | None = None  # what the person has to be told, once
        self.missing: str | None = None  # why the last one that was tried is not there
        self._thread: threading.Thread | None = None
        self._outcomes: list[WrittenCheckpoint | str] = []  # what became of each, until it was told
        # The arrays that may be overwritten, the last written first; None: so many may be made yet.
        self._spare: queue.LifoQueue[Arrays | None] = queue.LifoQueue()
        for _ in range(SETS):
            self._spare.put(None)
        self._bytes, self._overwrites = 0, True  # of a snapshot, and whether the engine takes one over another
        state = resumed.state if resumed else {}
        saved = state.get("scores", {}) if state.get("metric", best) == best else {}
        self.scores: dict[int, float] = {int(step): score for step, score in saved.items() if score is not None}
        evals = state.get("evals", {})
        self.evals: dict[int, Mapping[str, float]] = {int(step): found for step, found in evals.items()}
        self._last_step, self._last_time = resumed.step if resumed else -1, time.monotonic()
        for stale in (path for path in folder.glob(".tmp-*") if TEMPORARY_NAME.fullmatch(path.name)):
            shutil.rmtree(stale, ignore_errors=True)  # the run's lock is ours, so nobody writes there

    def check(self, scores: Mapping[str, float]) -> None:
        """Raises UserError when the score of the best is not among those of an eval."""
        if self.metric and scores and self.metric not in scores:
            raise UserError(f"checkpoint_best={printable(self.metric)}: {suggest(self.metric, scores)}")

    def is_due(self, step: int, scores: Mapping[str, float], last: bool, asked: bool = False) -> bool:
        """Whether the state after `step` should be saved; `scores` are those of an eval there."""
        if step == self._last_step:
            return False
        better = False
        if self.metric and scores:
            self.check(scores)
            if math.isfinite(scores[self.metric]):
                self.scores[step], self.evals[step] = scores[self.metric], scores
                better = self._best_step(self.scores) == step
        waited = time.monotonic() - self._last_time
        return asked or better or (last and bool(self._interval)) or self._interval.due(step, waited)

    def needs_call(self, step: int) -> bool:
        """Whether it is time after `step`, or something is to be told."""
        return bool(self._outcomes) or self._interval.due(step, time.monotonic() - self._last_time)

    def best(self, present: int, weights: bool = True) -> Best | None:
        """Return the best eval whose weights are on disk or of the `present` step; Damaged if unreadable."""
        self.wait()  # one that is being written is as good as there
        have = list_checkpoints(self._folder)
        scores = {step: score for step, score in self.scores.items() if step == present or step in have}
        if not scores:
            return None
        step = self._best_step(scores)
        arrays = read_checkpoint(have[step], with_state=False).arrays if weights and step != present else None
        return Best(step, str(self.metric), scores[step], arrays, self.evals.get(step, {}))

    def _best_step(self, scores: Mapping[int, float]) -> int:
        sign = 1 if lower_is_better(str(self.metric)) else -1
        return min(sorted(scores), key=lambda step: sign * scores[step])

    def save(
        self, step: int, snapshot: Callable[[Arrays | None], Arrays], state: Mapping[str, Any],
        sync: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Take a snapshot and begin to write it, after `sync`; wait if two are unwritten or memory is short."""
        spare = self._spare.get()
        if spare is None and self._bytes and (available_bytes() or 2 * self._bytes) < 2 * self._bytes:
            spare = self._spare.get()  # from now on there is one set
        arrays = snapshot(spare)
        self._bytes = sum(array.nbytes for array in arrays.values())
        self._overwrites = spare is None or arrays is spare
        self._last_step, self._last_time = step, time.monotonic()
        given = (step, arrays, state, sync, self._thread)
        self._thread = threading.Thread(target=self._write, args=given, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(
        self, step: int, arrays: Arrays, state: Mapping[str, Any], sync: Callable[[], None],
        before: threading.Thread | None,
    ) -> None:  # fmt: skip
        if before is not None:
            before.join()
        began = time.perf_counter()
        try:
            # Some of an optimiser's state may not be finite, and the run lives on.
            if bad := next((n for n, a in arrays.items() if SLOT not in n and not np.isfinite(a).all()), None):
                raise ValueError(f"{bad} is not finite; the one before it stays the newest")
            sync()
            if os.path.lexists(there := self._folder / f"step-{step}") and not is_own_checkpoint(there):
                log.warning("%s: is not a checkpoint of this run, or damaged; moved to %s", there, rename_aside(there))
            path = write_checkpoint(self._folder, step, arrays, state)
            self._outcomes.append(WrittenCheckpoint(step, path, total_bytes(path), time.perf_counter() - began))
            with contextlib.suppress(OSError):  # what is not deleted now is deleted next time
                self._prune(step)
        except Exception as error:
            self._outcomes.append(
                f"checkpoint of step {step}: not written ({system_message(error) or type(error).__name__})"
            )
        finally:
            self._spare.put(arrays if self._overwrites else None)

    def _prune(self, newest: int) -> None:
        """Delete this run's own whole checkpoints that are neither among the last, nor the best, nor resumed from."""
        have = {step: path for step, path in list_checkpoints(self._folder).items() if step <= newest}
        kept = set(list(have)[: self._keep if self._interval or not self.metric else 1])
        scored = {s: v for s, v in self.scores.items() if s in have}
        if scored:
            kept.add(self._best_step(scored))
        if len([p for p in have.values() if p != self._resumed]) < 2:
            kept.update(s for s, p in have.items() if p == self._resumed)
        for step, path in have.items():
            if step not in kept and is_own_checkpoint(path):
                shutil.rmtree(path, ignore_errors=True)

    def take_written(self) -> Sequence[WrittenCheckpoint]:
        """What came to stand on the disk since the last call; says once when something could not."""
        done = []
        while self._outcomes:
            outcome = self._outcomes.pop(0)
            if isinstance(outcome, WrittenCheckpoint):
                done.append(outcome)
                self.missing = None
            else:
                log.warning("%s", outcome)
                self.trouble = self.trouble if self.missing else outcome  # of several in a row the first is told
                self.missing = outcome
        return done

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
