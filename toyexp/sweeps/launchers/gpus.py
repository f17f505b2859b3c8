"""Which NVIDIA GPUs a job has: jobs side by side each have their own, as far as there are enough."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"  # CUDA's own word for those that a process sees


def visible() -> list[str]:
    """The names by which CUDA knows the GPUs that this process may use; none where nobody can tell."""
    if (told := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in told.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


class Gpus:
    """Hands them out: first those that the fewest jobs have."""

    def __init__(self, names: Sequence[str]):
        self._taken = dict.fromkeys(names, 0)
        self._lock = threading.Lock()

    def at_once(self, most: int, each: int = 1) -> int:
        """How many jobs of `most` GPUs can run side by side, `each` on a GPU; 0: as many as one likes."""
        return max(len(self._taken) // most, 1) * each if most and self._taken else 0

    @contextlib.contextmanager
    def some(self, count: int) -> Iterator[list[str]]:
        """So many for a while; none where there are not so many, which is for the job to say."""
        with self._lock:
            found = sorted(self._taken, key=lambda name: self._taken[name])[:count]
            found = found if len(found) == count else []
            for name in found:
                self._taken[name] += 1
        try:
            yield found
        finally:
            with self._lock:
                for name in found:
                    self._taken[name] -= 1
