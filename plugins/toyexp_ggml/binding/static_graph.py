"""The life of a static graph: nodes are wanted, memory is planned, the graph is computed again and again."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from typing import Any

from toyexp_ggml import native
from toyexp_ggml.binding import GraphError, found, ggml
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.tensors import Node, context

VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
IN_PLACE = frozenset({"OPT_STEP_ADAMW", "CPY"})


def op_name(node: Any) -> str:
    """What a node computes, as ggml calls it."""
    return ggml.ggml_op_name(node.contents.op).decode()


class StaticGraph:
    """A static graph under construction and, once `finish`ed, ready to compute again and again."""

    def __init__(self, backend: Backend, capacity: int):
        self._backend = backend
        self._crew = backend.crew()
        self._tasks: list[tuple[native.Transpose, Node]] = []  # of our kernels, which read them when they compute
        self.capacity = capacity
        size = ggml.ggml_tensor_overhead() * capacity + ggml.ggml_graph_overhead_custom(capacity, False)
        self._context = context(size)
        self._graph = ggml.ggml_new_graph_custom(self._context, capacity, False)
        self._allocator: Any = None  # with one device
        self._scheduler: Any = None  # with BLAS beside the CPU
        self._made = 0
        self.outputs: dict[str, Node] = {}  # what stays readable

    def want(self, node: Node, keep: bool = False) -> None:
        """Makes the graph compute a node, after all that was wanted before; `keep` leaves it readable afterwards."""
        if keep:
            ggml.ggml_set_output(node.ptr)
        ggml.ggml_build_forward_expand(self._graph, node.ptr)

    def in_turn(self, nodes: Iterable[Node]) -> list[Node]:
        """Wants one node after another, so that none waits for what reads the one before."""
        listed = list(nodes)
        for node in listed:
            self.want(node)
        return listed

    def finish(self) -> None:
        """Plans the memory; the graph can then be computed.

        What the device refuses goes to the CPU through the scheduler, as the products do that BLAS takes.
        """
        if self._backend.blas or self._backend.refused(self._nodes()):
            pair = (ctypes.c_void_p * 2)(*self._backend.all)
            backends = ctypes.cast(pair, ctypes.POINTER(ctypes.c_void_p))
            self._scheduler = ggml.ggml_backend_sched_new(backends, None, 2, self.capacity, False, False)
            # Reserved first: where there is too little memory, alloc_graph alone would follow a null pointer.
            planned = ggml.ggml_backend_sched_reserve(self._scheduler, self._graph)
            planned = planned and ggml.ggml_backend_sched_alloc_graph(self._scheduler, self._graph)
        else:
            buffer_type = ggml.ggml_backend_get_default_buffer_type(self._backend.ptr)
            self._allocator = ggml.ggml_gallocr_new(buffer_type)
            planned = ggml.ggml_gallocr_alloc_graph(self._allocator, self._graph)
        if not planned:
            raise GraphError("the device has too little memory for the activations; use a smaller batch_size")
        for task, node in self._tasks:
            tensor = node.ptr.contents
            task.source[:] = [tensor.src[i].contents.data if tensor.src[i] else None for i in range(2)]
            task.target = tensor.data

    def compute(self) -> None:
        """Computes every wanted node, in order."""
        self._backend.use(self._crew.threads)
        with self._crew.watched():
            if self._scheduler:
                status = ggml.ggml_backend_sched_graph_compute(self._scheduler, self._graph)
            else:
                status = ggml.ggml_backend_graph_compute(self._backend.ptr, self._graph)
        if status != ggml.GGML_STATUS_SUCCESS:
            raise GraphError(f"ggml stopped computing with status {status}")

    @property
    def compute_bytes(self) -> int:
        """Memory of the activations and gradients."""
        if self._scheduler:
            return sum(int(ggml.ggml_backend_sched_get_buffer_size(self._scheduler, b)) for b in self._backend.all)
        return int(ggml.ggml_gallocr_get_buffer_size(self._allocator, 0))

    def _nodes(self) -> list[Any]:
        """The nodes that compute something: views cost nothing and run nowhere."""
        nodes = (ggml.ggml_graph_node(self._graph, i) for i in range(ggml.ggml_graph_n_nodes(self._graph)))
        return [n for n in nodes if op_name(n) not in VIEWS]

    def ops(self) -> Counter[str]:
        """How many nodes of each op the graph has."""
        return Counter(map(op_name, self._nodes()))

    def stuck(self) -> set[str]:
        """Ops that change a tensor in place where it lies and that its device refuses: no scheduler can help."""
        return {*map(op_name, self._backend.refused(self._nodes()))} & IN_PLACE

    def refused_by(self, device: str) -> set[str]:
        """The ops that a device does not compute, whichever device the graph is for."""
        other = found(device)
        return {op_name(n) for n in self._nodes() if not ggml.ggml_backend_dev_supports_op(other, n)}

    def residency(self) -> dict[str, dict[str, int]]:
        """How many nodes of which ops run on which device, of the finished graph."""
        where: dict[str, Counter[str]] = {}
        for node in self._nodes():
            ptr = self._scheduler and ggml.ggml_backend_sched_get_tensor_backend(self._scheduler, node)
            name = ggml.ggml_backend_name(ptr or self._backend.ptr).decode()
            where.setdefault(name, Counter())[op_name(node)] += 1
        return {name: dict(sorted(ops.items())) for name, ops in sorted(where.items())}

    def off_device(self, residency: dict[str, dict[str, int]]) -> int:
        """How many nodes of a residency the scheduler took from the device because it cannot compute them."""
        own = self._backend.all if self._backend.blas else [self._backend.ptr]
        names = {ggml.ggml_backend_name(p).decode() for p in own}
        return sum(sum(ops.values()) for name, ops in residency.items() if name not in names)

    def close(self) -> None:
        """Frees the graph and its memory."""
        if self._allocator:
            ggml.ggml_gallocr_free(self._allocator)
        if self._scheduler:
            ggml.ggml_backend_sched_free(self._scheduler)
        if self._context:
            ggml.ggml_free(self._context)
        self._allocator = self._scheduler = self._context = None
