"""Assign NVIDIA GPUs to parallel jobs. Jobs share a GPU only if there are not enough GPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"  # CUDA's variable for the GPUs that a process may use


def visible_gpus() -> list[str]:
    """Return the ids (as in CUDA_VISIBLE_DEVICES) of the GPUs that this process may use; empty if there are none."""
    if (value := os.environ.get(VISIBLE_DEVICES)) is not None:
        return [name.strip() for name in value.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


class Gpus:
    """Pool of GPUs for parallel jobs. A job gets the GPUs that the fewest other jobs use."""

    def __init__(self, names: Sequence[str]):
        self._use_counts = dict.fromkeys(names, 0)
        self._lock = threading.Lock()

    def capacity(self, most: int, per_gpu: int = 1) -> int:
        """Return how many jobs can run at once if each needs `most` GPUs and each GPU is shared by `per_gpu` jobs.

        Return 0 if jobs need no GPU or the pool is empty: then the number of GPUs sets no limit.
        """
        return max(len(self._use_counts) // most, 1) * per_gpu if most and self._use_counts else 0

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[list[str]]:
        """Reserve `count` GPUs while the context is open, and yield their ids.

        If the pool has fewer GPUs, yield an empty list; the job then reports the error.
        """
        with self._lock:
            names = sorted(self._use_counts, key=lambda name: self._use_counts[name])[:count]
            names = names if len(names) == count else []
            for name in names:
                self._use_counts[name] += 1
        try:
            yield names
        finally:
            with self._lock:
                for name in names:
                    self._use_counts[name] -= 1
