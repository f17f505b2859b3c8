"""CUDA graphs, which launch the many kernels of a training step with one call.

A step of a small model consists of hundreds of kernels of a few microseconds each, and Python launches them more slowly
than the GPU runs them. A graph records the kernels with the memory addresses that they read. Therefore `Inputs` keeps
the arrays that change from step to step at fixed addresses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toyexp.base import pause_collection

ALIGNMENT = 64  # bytes
log = logging.getLogger("toyexp")

ArraySpec = tuple[tuple[int, ...], np.dtype]  # shape and dtype


class Inputs:
    """Arrays that a CUDA graph reads, side by side in GPU memory, so that one copy uploads all of them.

    `specs` has the shape and dtype of each array, and `tensors` has the arrays on the GPU, with the same keys. The host
    has `sets` buffers: it fills one while the others may still be copied to the GPU.
    """

    def __init__(self, specs: Mapping[Hashable, ArraySpec], sets: int = 2):
        sizes = {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in specs.items()}
        total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())
        self._device = torch.zeros(total, dtype=torch.uint8, device="cuda")
        self._hosts = [_HostBuffer({}, torch.zeros(total, dtype=torch.uint8, pin_memory=True)) for _ in range(sets)]
        self.tensors: dict[Hashable, Tensor] = {}
        start = 0
        for key, (shape, dtype) in specs.items():
            part = slice(start, start + sizes[key])
            for host in self._hosts:
                host.arrays[key] = host.memory[part].numpy().view(dtype).reshape(shape)
            torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            self.tensors[key] = self._device[part].view(torch_dtype).view(shape)
            start += -(-sizes[key] // ALIGNMENT) * ALIGNMENT

    def put(self, parts: Mapping[Hashable, Sequence[np.ndarray]]) -> None:
        """Queue the upload of new values for all arrays; the GPU runs it after the kernels that are queued so far.

        `parts` maps the key of each array to a list of its parts, which this method joins along the first axis. Each
        call uses the next of the `sets` host buffers, and first waits until the buffer's previous contents have been
        copied.
        """
        host = self._hosts.pop(0)
        self._hosts.append(host)
        host.sent.synchronize()
        for key, arrays in parts.items():
            np.concatenate(arrays, out=host.arrays[key], casting="same_kind")
        self._device.copy_(host.memory, non_blocking=True)
        host.sent.record()


@dataclass
class _HostBuffer:
    """Arrays in pinned host memory. The GPU copies them while the host works; the event `sent` marks the copy's end."""

    arrays: dict[Hashable, np.ndarray]
    memory: Tensor
    sent: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Results:
    """Pinned host buffers for the results of the last `steps` steps, with `size` numbers for each step."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32, steps: int = 2):
        self._hosts = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(steps)]

    def fetch(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Start to copy `numbers` to the host; return a function that waits for the copy and returns the list.

        The `steps`-th further call of `fetch` overwrites the buffer, so call the returned function before it.
        """
        host, arrived = self._hosts.pop(0), torch.cuda.Event()
        self._hosts.append(host)
        host.copy_(numbers, non_blocking=True)
        arrived.record()

        def wait() -> list[float]:
            arrived.synchronize()
            return host.tolist()

        return wait


class CapturedCall:
    """Call of the function `work` as a CUDA graph, or as separate kernel launches if it cannot be captured.

    `rehearse` is called before the capture. It must launch the same kernels as `work` without changing weights or
    optimiser state. `title` names the work in log messages. Graphs with the same memory `pool` never run at the same
    time. If `uncaptured_reason` is given, no graph is captured.
    """

    def __init__(
        self, title: str, work: Callable[[], Tensor], rehearse: Callable[[], object], pool: Any,
        uncaptured_reason: str = "",
    ):  # fmt: skip
        self._title, self._run_work, self._rehearse, self._pool = title, work, rehearse, pool
        self.uncaptured_reason = uncaptured_reason  # why `work` cannot be captured; empty if it can, or is untried
        self._graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def __call__(self) -> Tensor:
        """Run the work, capturing it first if necessary; return its result, which the next call overwrites."""
        self.prepare()
        if self._graph is None:
            return self._run_work()
        graph, result = self._graph
        graph.replay()
        return result

    def prepare(self) -> None:
        """Capture the graph if it does not exist yet. If that fails, store the reason in `uncaptured_reason`."""
        if self.uncaptured_reason or self._graph:
            return
        try:
            self._warm_up()
            graph = torch.cuda.CUDAGraph()
            # Freeing another graph during the capture would break this one.
            with pause_collection(), torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):
                result = self._run_work()
            self._graph = graph, result
        except (RuntimeError, NotImplementedError) as error:
            torch.cuda.synchronize()
            self.uncaptured_reason = str(error).strip().partition("\n")[0]
            log.info("%s is launched kernel by kernel: %s", self._title, self.uncaptured_reason)

    def close(self) -> None:
        """Free the CUDA graph."""
        self._graph = None

    def _warm_up(self) -> None:
        """Rehearse the work twice on another stream, as a capture requires.

        In their first calls, libraries allocate memory and choose kernels, which cannot be captured.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._rehearse()
        torch.cuda.current_stream().wait_stream(stream)
