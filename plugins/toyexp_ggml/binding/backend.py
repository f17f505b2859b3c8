"""A device of ggml that computes, and how many threads compute a graph.

ggml's threads wait for each other after every op. One that lost its core holds up all until it has it back: with one
other busy process on two cores, two threads take longer than one. The numbers are the same for any number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from toyexp.base import count_busy
from toyexp_ggml.binding import GraphError, found, ggml

try:
    import resource
except ImportError:  # Windows has no such thing
    resource = None  # type: ignore[assignment]

WINDOW, LEAST = 0.05, 3  # seconds, and computations, that are looked at together
CROWDED = 10.0  # cores lost a second: from here on fewer threads are tried
GAIN = 0.95  # of the time before, for a trial that counts as faster
REST = 20  # times as long as it took, until the next trial: each costs a few per cent; twice that after one in vain ..
MOST_IN_VAIN = 3  # .. and again, so many times


class Backend:
    """A device that computes; beside the CPU BLAS for the matrix products, if `blas`; beside another one the CPU.

    With `fewer` the CPU may take fewer threads than that while others need its cores.
    """

    def __init__(self, device: str, threads: int, blas: bool = False, fewer: bool = False):
        self.device = device
        self._cpu = cpu = ggml.ggml_backend_cpu_init()
        self.use(threads)
        self._crew = partial(Crew, threads, fixed=not fewer or device != "CPU")
        self.all = [cpu]  # what a scheduler may use; the first that can computes a node
        if device != "CPU":
            self.all.insert(0, _device(device))
        elif blas:
            self.all.insert(0, _device("BLAS"))
            ggml.ggml_backend_blas_set_n_threads(self.all[0], threads)
        if not all(self.all):
            self.close()
            raise GraphError(f"ggml could not open the device {device}")
        self.blas = blas
        self.buffer_bytes = 0  # of the tensors that outlive a graph
        self.ptr = self.all[-1 if device == "CPU" else 0]  # the device that holds the tensors
        self.memory = _memory(self.ptr)

    def crew(self) -> Crew:
        """The threads of one more graph."""
        return self._crew()

    def use(self, threads: int) -> None:
        """Makes the CPU compute with so many threads from now on."""
        ggml.ggml_backend_cpu_set_n_threads(self._cpu, threads)

    def refused(self, nodes: Iterable[Any]) -> list[Any]:
        """Return those of the nodes that the device itself does not compute."""
        return [node for node in nodes if not ggml.ggml_backend_supports_op(self.ptr, node)]

    def close(self) -> None:
        """Frees the devices."""
        for ptr in filter(None, self.all):
            ggml.ggml_backend_free(ptr)
        self.all = []


def _device(name: str) -> Any:
    device = found(name)
    return device and ggml.ggml_backend_dev_init(device, None)


def _memory(backend: Any) -> int:
    """Bytes of memory that the device has; 0 if it does not say."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    device = ggml.ggml_backend_get_device(backend)
    if device:
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return total.value


class Crew:
    """The threads of a graph that is computed again and again, up to `most`, by how long it takes; or just as many."""

    def __init__(
        self,
        most: int,
        fixed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        lost: Callable[[], int] | None = None,
        others: Callable[[], int] = count_busy,
    ):
        self._most, self._fixed, self.threads = most, fixed or most == 1, most
        self._clock, self._lost, self._others = clock, lost or cores_lost, others
        self._count, self._seconds, self._losses = 0, 0.0, 0  # of the window so far
        self._before: tuple[int, float] | None = None  # threads, and seconds a computation, while others are tried
        self._resting, self._in_vain = 0.0, 0  # until when; trials one after another

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around one computation with `threads`; afterwards there may be another number of them."""
        began, lost = self._clock(), self._lost()
        yield
        now = self._clock()
        self._count, self._seconds = self._count + 1, self._seconds + now - began
        self._losses += self._lost() - lost
        if not self._fixed and self._count >= LEAST and self._seconds >= WINDOW:
            self._judge(now, self._seconds / self._count, self._losses / self._seconds)
            self._count, self._seconds, self._losses = 0, 0.0, 0

    def _judge(self, now: float, seconds: float, lost: float) -> None:
        """What a window says: seconds a computation, and cores lost a second."""
        if self._before is not None:
            threads, before = self._before
            faster = seconds < GAIN * before
            self.threads = self.threads if faster else threads
            self._in_vain = 0 if faster else min(self._in_vain + 1, MOST_IN_VAIN)
            self._resting, self._before = now + REST * self._seconds * 2**self._in_vain, None
        elif now >= self._resting and (other := self._other(lost)) != self.threads:
            self._before, self.threads = (self.threads, seconds), other

    def _other(self, lost: float) -> int:
        """How many threads may be faster now."""
        if lost >= CROWDED and self.threads > 1:
            return max(1, min(self.threads - 1, self._most - self._others()))
        return self._most


def cores_lost() -> int:
    """How often a thread of this process had to leave its core to another process; 0 where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0
