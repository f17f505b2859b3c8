"""A device of ggml that computes, with what computes beside it."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

from toyexp_ggml.binding.library import GraphError, found, ggml
from toyexp_ggml.crew import Crew


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
        self.memory = _memory(self.ptr)

    @property
    def ptr(self) -> Any:
        """The device that holds the tensors."""
        return self.all[-1 if self.device == "CPU" else 0]

    def crew(self) -> Crew:
        """The threads of one more graph."""
        return self._crew()

    def use(self, threads: int) -> None:
        """Makes the CPU compute with so many threads from now on."""
        ggml.ggml_backend_cpu_set_n_threads(self._cpu, threads)

    def runs(self, node: Any) -> bool:
        """Whether the device itself computes a node."""
        return bool(ggml.ggml_backend_supports_op(self.ptr, node))

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
