"""Work on a GPU as one CUDA graph: launched with one call, however many kernels it is.

A step of a small model is hundreds of kernels of a few microseconds each, which Python launches more slowly than the
GPU runs them. A graph keeps them with the addresses that they read; what changes from step to step comes in `Inputs`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes
log = logging.getLogger("toyexp")

Kind = tuple[tuple[int, ...], np.dtype]  # an array's shape and type


class Inputs:
    """Arrays that a graph reads, side by side in the GPU's memory, so that one copy brings all of them.

    The host has them several times: one set is filled while the others may still be on their way.
    """

    def __init__(self, kinds: Mapping[Hashable, Kind], sets: int = 2):
        sizes = {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in kinds.items()}
        room = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())
        self._device = torch.zeros(room, dtype=torch.uint8, device="cuda")
        self._hosts = [_Host({}, torch.zeros(room, dtype=torch.uint8, pin_memory=True)) for _ in range(sets)]
        self.tensors: dict[Hashable, Tensor] = {}
        start = 0
        for key, (shape, dtype) in kinds.items():
            here = slice(start, start + sizes[key])
            for host in self._hosts:
                host.arrays[key] = host.memory[here].numpy().view(dtype).reshape(shape)
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            self.tensors[key] = self._device[here].view(kind).view(shape)
            start += -(-sizes[key] // ALIGNMENT) * ALIGNMENT

    def put(self, parts: Mapping[Hashable, Sequence[np.ndarray]]) -> None:
        """Sends arrays, each joined from its parts along the first axis, once what was queued has read the last ones.

        The host's memory that was sent first is filled again.
        """
        host = self._hosts.pop(0)
        self._hosts.append(host)
        host.sent.synchronize()
        for key, arrays in parts.items():
            np.concatenate(arrays, out=host.arrays[key], casting="same_kind")
        self._device.copy_(host.memory, non_blocking=True)
        host.sent.record()


@dataclass
class _Host:
    """Arrays in memory that the GPU copies from beside the host's work."""

    arrays: dict[Hashable, np.ndarray]
    memory: Tensor
    sent: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Results:
    """A few numbers of each step, on their way from the GPU; of so many steps at a time at most."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32, steps: int = 2):
        self._hosts = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(steps)]

    def fetch(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Begins to copy them; what it returns waits until they are there."""
        host, there = self._hosts.pop(0), torch.cuda.Event()
        self._hosts.append(host)
        host.copy_(numbers, non_blocking=True)
        there.record()

        def wait() -> list[float]:
            there.synchronize()
            return host.tolist()

        return wait


class Captured:
    """`work()` as a graph; called itself where it cannot be one.

    `rehearse()` is called before: the same kernels, but nothing that lasts is changed by them.
    """

    def __init__(
        self, title: str, work: Callable[[], Tensor], rehearse: Callable[[], object], pool: Any, refused: str = ""
    ):
        self._title, self._work, self._rehearse, self._pool = title, work, rehearse, pool
        self.refused = refused  # why it is called and not captured
        self._graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def __call__(self) -> Tensor:
        """What `work()` gives; its tensor is overwritten by the next call."""
        self.prepare()
        if self._graph is None:
            return self._work()
        graph, result = self._graph
        graph.replay()
        return result

    def prepare(self) -> None:
        """Captures it, unless that is done, or says in `refused` why that cannot be."""
        if self.refused or self._graph:
            return
        try:
            self._warm_up()
            graph = torch.cuda.CUDAGraph()
            with _without_collection(), torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                result = self._work()
            self._graph = graph, result
        except (RuntimeError, NotImplementedError) as error:
            torch.cuda.synchronize()
            self.refused = str(error).strip().partition("\n")[0]
            log.info("%s is launched kernel by kernel: %s", self._title, self.refused)

    def close(self) -> None:
        """Frees the graph."""
        self._graph = None

    def _warm_up(self) -> None:
        """Lets kernels and libraries allocate and choose what they keep, on a stream of their own as graphs want it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._rehearse()
        torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing is collected meanwhile: another graph that is freed spoils the one that is being captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
