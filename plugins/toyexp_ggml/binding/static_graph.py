"""Static graphs: nodes are added, memory is planned once, and the graph is computed repeatedly."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from typing import Any

from toyexp_ggml.binding import GraphError, find_device, ggml
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.tensors import Node, context, use_large_pages

VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
IN_PLACE = frozenset({"OPT_STEP_ADAMW", "CPY"})


def op_name(node: Any) -> str:
    """Return ggml's name of a node's op."""
    return ggml.ggml_op_name(node.contents.op).decode()


class StaticGraph:
    """A static graph: first add its nodes, then call `finish` once, then `compute` repeatedly."""

    def __init__(self, backend: Backend, capacity: int):
        self._backend = backend
        self._tuner = backend.make_tuner()
        self._tasks: list[tuple[Any, Node]] = []  # arguments of kernels.c, read during computation
        self.capacity = capacity
        size = ggml.ggml_tensor_overhead() * capacity + ggml.ggml_graph_overhead_custom(capacity, False)
        self._context = context(size)
        self._graph = ggml.ggml_new_graph_custom(self._context, capacity, False)
        self._allocator: Any = None  # for one backend
        self._scheduler: Any = None  # for two backends
        self._node_count = 0
        self.outputs: dict[str, Node] = {}  # nodes that stay readable

    def want(self, node: Node, keep: bool = False) -> None:
        """Add a node after all earlier nodes. If `keep` is True, its values can be read after a computation."""
        if keep:
            ggml.ggml_set_output(node.ptr)
        ggml.ggml_build_forward_expand(self._graph, node.ptr)

    def want_all(self, nodes: Iterable[Node]) -> list[Node]:
        """Add nodes that do not depend on each other to the graph, and return them.

        They are adjacent in the graph, so a device may compute them in parallel.
        """
        listed = list(nodes)
        for node in listed:
            self.want(node)
        return listed

    def finish(self) -> None:
        """Allocate memory for computing the graph. Raise GraphError if the device has too little memory.

        ggml's scheduler is used if the CPU must compute nodes that the device does not support, or if BLAS computes
        matrix products.
        """
        if self._backend.blas or self._backend.unsupported(self._nodes()):
            pair = (ctypes.c_void_p * 2)(*self._backend.all)
            backends = ctypes.cast(pair, ctypes.POINTER(ctypes.c_void_p))
            self._scheduler = ggml.ggml_backend_sched_new(backends, None, 2, self.capacity, False, False)
            # Reserve first: with too little memory, alloc_graph alone would dereference a null pointer.
            planned = ggml.ggml_backend_sched_reserve(self._scheduler, self._graph)
            planned = planned and ggml.ggml_backend_sched_alloc_graph(self._scheduler, self._graph)
        else:
            buffer_type = ggml.ggml_backend_get_default_buffer_type(self._backend.ptr)
            self._allocator = ggml.ggml_gallocr_new(buffer_type)
            planned = ggml.ggml_gallocr_alloc_graph(self._allocator, self._graph)
        if not planned:
            raise GraphError("the device has too little memory for the activations; use a smaller batch_size")
        for buffer in {node.contents.buffer for node in self._nodes()}:
            use_large_pages(buffer)
        for task, node in self._tasks:
            tensor = node.ptr.contents
            task.source[:] = [src.contents.data if src else None for src in tensor.src[: len(task.source)]]
            task.target = tensor.data

    def compute(self) -> None:
        """Compute all nodes, in order."""
        self._backend.set_threads(self._tuner.threads)
        with self._tuner.measure():
            if self._scheduler:
                status = ggml.ggml_backend_sched_graph_compute(self._scheduler, self._graph)
            else:
                status = ggml.ggml_backend_graph_compute(self._backend.ptr, self._graph)
        if status != ggml.GGML_STATUS_SUCCESS:
            raise GraphError(f"ggml stopped computing with status {status}")

    @property
    def compute_bytes(self) -> int:
        """Bytes of memory for activations and gradients."""
        if self._scheduler:
            return sum(int(ggml.ggml_backend_sched_get_buffer_size(self._scheduler, b)) for b in self._backend.all)
        return int(ggml.ggml_gallocr_get_buffer_size(self._allocator, 0))

    def _nodes(self) -> list[Any]:
        """Return the nodes that compute something: all nodes except views."""
        nodes = (ggml.ggml_graph_node(self._graph, i) for i in range(ggml.ggml_graph_n_nodes(self._graph)))
        return [n for n in nodes if op_name(n) not in VIEWS]

    def ops(self) -> Counter[str]:
        """Count the graph's nodes by op."""
        return Counter(map(op_name, self._nodes()))

    def unsupported_in_place(self) -> set[str]:
        """Return the unsupported ops that change a tensor in place. The scheduler cannot move these ops to the CPU."""
        return {*map(op_name, self._backend.unsupported(self._nodes()))} & IN_PLACE

    def unsupported_ops(self, device: str) -> set[str]:
        """Return the ops of this graph that the device named `device` does not support."""
        target = find_device(device)
        return {op_name(n) for n in self._nodes() if not ggml.ggml_backend_dev_supports_op(target, n)}

    def residency(self) -> dict[str, dict[str, int]]:
        """Return how many nodes of each op each backend computes: {backend: {op: count}}. Call `finish` first."""
        counts: dict[str, Counter[str]] = {}
        for node in self._nodes():
            ptr = self._scheduler and ggml.ggml_backend_sched_get_tensor_backend(self._scheduler, node)
            name = ggml.ggml_backend_name(ptr or self._backend.ptr).decode()
            counts.setdefault(name, Counter())[op_name(node)] += 1
        return {name: dict(sorted(ops.items())) for name, ops in sorted(counts.items())}

    def off_device(self, residency: dict[str, dict[str, int]]) -> int:
        """Count the nodes in `residency` that run on the CPU because the device does not support them."""
        backends = self._backend.all if self._backend.blas else [self._backend.ptr]
        names = {ggml.ggml_backend_name(p).decode() for p in backends}
        return sum(sum(ops.values()) for name, ops in residency.items() if name not in names)

    def close(self) -> None:
        """Free the graph and its memory."""
        if self._allocator:
            ggml.ggml_gallocr_free(self._allocator)
        if self._scheduler:
            ggml.ggml_backend_sched_free(self._scheduler)
        if self._context:
            ggml.ggml_free(self._context)
        self._allocator = self._scheduler = self._context = None
