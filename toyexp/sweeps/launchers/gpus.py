"""Assign NVIDIA GPUs to parallel jobs: each gets its own as long as there are enough."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"  # CUDA's variable for the GPUs that a process may use


def visible_gpus() -> list[str]:
    """Return CUDA's names of the GPUs that this process may use; empty if there are none."""
    if (value := os.environ.get(VISIBLE_DEVICES)) is not None:
        return [name.strip() for name in value.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


class Gpus:
    """Pool of GPUs; it hands out the least used ones first."""

    def __init__(self, names: Sequence[str]):
        self._use_counts = dict.fromkeys(names, 0)
        self._lock = threading.Lock()

    def capacity(self, most: int, each: int = 1) -> int:
        """Return how many jobs of `most` GPUs run at once, with `each` jobs on a GPU; 0: no limit."""
        return max(len(self._use_counts) // most, 1) * each if most and self._use_counts else 0

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[list[str]]:
        """Reserve `count` GPUs and yield their names; yield none if there are not enough (the job reports that)."""
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
