"""Backends of ggml, and the number of threads that compute a graph.

ggml's threads wait for each other after every op. If a thread loses its core, all others wait until it runs again. With
one other busy process on two cores, two threads are therefore slower than one. Results do not depend on the number of
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from toyexp.base import count_busy
from toyexp_ggml.binding import GraphError, find_device, ggml

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

WINDOW, MIN_COUNT = 0.05, 3  # least seconds, and least computations, of one measurement
SWITCHES = 10.0  # involuntary context switches per second from which fewer threads are tried
GAIN = 0.95  # a trial counts as faster if it takes less than this share of the previous time
PAUSE = 20  # pause between trials, in multiples of a trial's time; it doubles with each failed trial
MAX_DOUBLINGS = 3  # most doublings of the pause


class Backend:
    """A ggml device, and the CPU for the ops that the device does not support.

    If the device is the CPU, `blas` lets BLAS compute matrix products, and `adaptive` lets a graph use fewer than
    `threads` threads while other processes need the cores.
    """

    def __init__(self, device: str, threads: int, blas: bool = False, adaptive: bool = False):
        self.device = device
        self._cpu = cpu = ggml.ggml_backend_cpu_init()
        self.set_threads(threads)
        self.make_tuner = partial(ThreadTuner, threads, fixed=not adaptive or device != "CPU")  # for each graph
        self.all = [cpu]  # backends for ggml's scheduler, which gives a node to the first that supports it
        if device != "CPU":
            self.all.insert(0, _device(device))
        elif blas:
            self.all.insert(0, _device("BLAS"))
            ggml.ggml_backend_blas_set_n_threads(self.all[0], threads)
        if not all(self.all):
            self.close()
            raise GraphError(f"ggml could not open the device {device}")
        self.blas = blas
        self.buffer_bytes = 0  # bytes of the tensors that outlive a graph
        self.ptr = self.all[-1 if device == "CPU" else 0]  # the backend that holds the tensors
        self.memory = _memory(self.ptr)

    def set_threads(self, threads: int) -> None:
        """Set the number of CPU threads."""
        ggml.ggml_backend_cpu_set_n_threads(self._cpu, threads)

    def unsupported(self, nodes: Iterable[Any]) -> list[Any]:
        """Return the nodes that the device does not support, so that the CPU has to compute them."""
        return [node for node in nodes if not ggml.ggml_backend_supports_op(self.ptr, node)]

    def close(self) -> None:
        """Free the backends."""
        for ptr in filter(None, self.all):
            ggml.ggml_backend_free(ptr)
        self.all = []


def _device(name: str) -> Any:
    device = find_device(name)
    return device and ggml.ggml_backend_dev_init(device, None)


def _memory(backend: Any) -> int:
    """Return the total memory of the device in bytes, or 0 if ggml does not report it."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    device = ggml.ggml_backend_get_device(backend)
    if device:
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return total.value


class ThreadTuner:
    """Tuner of the number of threads (`threads`) for one graph that is computed repeatedly.

    It begins with `most` threads. While other processes take the cores, it tries a smaller number, and keeps the number
    that is faster. If `fixed` is True, it always uses `most`. The function `lost` counts this process's involuntary
    context switches, and `others` counts the running threads of other processes.
    """

    def __init__(
        self,
        most: int,
        fixed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        lost: Callable[[], int] | None = None,
        others: Callable[[], int] = count_busy,
    ):
        self._most, self._fixed, self.threads = most, fixed or most == 1, most
        self._clock, self._cores_lost, self._others = clock, lost or cores_lost, others
        self._count, self._seconds, self._losses = 0, 0.0, 0  # of the current measurement
        self._before: tuple[int, float] | None = None  # in a trial: previous threads, and seconds per computation
        self._next_trial, self._failed_trials = 0.0, 0  # time of the next trial; failed trials in a row

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Time the computation in the `with` block, which uses `threads` threads; on exit, `threads` may change."""
        start, lost = self._clock(), self._cores_lost()
        yield
        now = self._clock()
        self._count, self._seconds = self._count + 1, self._seconds + now - start
        self._losses += self._cores_lost() - lost
        if not self._fixed and self._count >= MIN_COUNT and self._seconds >= WINDOW:
            self._evaluate(now, self._seconds / self._count, self._losses / self._seconds)
            self._count, self._seconds, self._losses = 0, 0.0, 0

    def _evaluate(self, now: float, seconds: float, lost: float) -> None:
        """Start or end a trial of another number of threads.

        `now` is the clock's time, `seconds` the time per computation, `lost` the number of involuntary context
        switches per second.
        """
        if self._before is not None:
            threads, before = self._before
            faster = seconds < GAIN * before
            self.threads = self.threads if faster else threads
            self._failed_trials = 0 if faster else min(self._failed_trials + 1, MAX_DOUBLINGS)
            self._next_trial, self._before = now + PAUSE * self._seconds * 2**self._failed_trials, None
        elif now >= self._next_trial and (other := self._choose_threads(lost)) != self.threads:
            self._before, self.threads = (self.threads, seconds), other

    def _choose_threads(self, lost: float) -> int:
        """Return the number of threads to try next, given the involuntary context switches per second (`lost`)."""
        if lost >= SWITCHES and self.threads > 1:
            return max(1, min(self.threads - 1, self._most - self._others()))
        return self._most


def cores_lost() -> int:
    """Return how many involuntary context switches this process has had, or 0 if the system does not report them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0
