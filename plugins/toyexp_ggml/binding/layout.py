"""A static graph, and its nodes that give numbers other shapes, orders and places: free views, and copies."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from toyexp_ggml import native
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.binding.library import F32, GraphError, found, ggml
from toyexp_ggml.binding.tensors import Node, context

VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
IN_PLACE = frozenset({"OPT_STEP_ADAMW", "CPY"})
SET_LIMIT = 2**30  # bytes that SET can count to
# The kernel of an op that only has memory: ggml_time_init does nothing but where a clock has to be prepared.
NOTHING = ggml.ggml_custom_op_t(ctypes.cast(ggml.lib.ggml_time_init, ctypes.c_void_p).value)


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
        if self._backend.blas or not all(map(self._backend.runs, self._nodes())):
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
        return {op_name(n) for n in self._nodes() if op_name(n) in IN_PLACE and not self._backend.runs(n)}

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


class Layout(StaticGraph):
    """How nodes are added to a graph, and those that compute no new number."""

    def _node(self, ptr: Any, shape: tuple[int, ...]) -> Node:
        self._made += 1
        if self._made > self.capacity - 8:
            raise GraphError(f"the graph has more than {self.capacity} nodes")
        return Node(ptr, shape, ptr.contents.type != F32)

    def _numbers(self, op: str, *nodes: Node) -> None:
        # Of other types ggml ends the process, or takes their bytes for float32.
        if any(node.packed for node in nodes):
            raise GraphError(f"{op}: takes float32 tensors")

    def _same(self, op: str, a: Node, b: Node) -> None:
        if a.shape != b.shape:
            raise GraphError(f"{op}: {list(a.shape)} and {list(b.shape)} differ")

    def _repeats(self, op: str, a: Node, b: Node) -> None:
        """b is repeated over a: each of its axes, counted from the last, divides a's."""
        padded = (1,) * (len(a.shape) - len(b.shape)) + b.shape
        if len(b.shape) > len(a.shape) or any(x % y for x, y in zip(a.shape, padded, strict=True)):
            raise GraphError(f"{op}: {list(b.shape)} does not repeat over {list(a.shape)}")

    def reshape(self, x: Node, *shape: int) -> Node:
        """The same numbers in another shape; costs nothing."""
        self._numbers("reshape", x)
        if math.prod(shape) != x.size or not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise GraphError(f"reshape: {list(x.shape)} to {list(shape)}")
        make = getattr(ggml, f"ggml_reshape_{len(shape)}d")
        return x if shape == x.shape else self._node(make(self._context, x.ptr, *reversed(shape)), shape)

    def flat(self, x: Node) -> Node:
        """[.., d] as [n, d]."""
        return self.reshape(x, x.size // x.shape[-1], x.shape[-1])

    def transpose(self, x: Node, slow_cont: bool = False) -> Node:
        """The last two axes exchanged, contiguous; on the CPU, whose CONT is slow, by our kernel or else by CONCAT."""
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        if slow_cont and (kernel := native.kernel("transpose")):
            return self.reshape(self._transposed(kernel, x), *shape)
        halves = self._halves(x) if slow_cont else ()
        if halves:
            joined = ggml.ggml_concat(self._context, *(self._turned(h) for h in halves), 2)
            a, n, d = halves[0].shape
            return self.reshape(self._node(joined, (2 * a, d, n)), *shape)
        return self._node(ggml.ggml_cont(self._context, self._turned(x)), shape)

    def _halves(self, x: Node) -> tuple[Node, ...]:
        """Views of x [.., n, d] that CONCAT joins along the third axis: half its matrices each, or half its columns."""
        n, d = x.shape[-2:]
        matrices = x.size // (n * d)
        if matrices % 2 == 0:
            step, shape, strides = matrices // 2 * n * d, (matrices // 2, n, d), (n * d, d)
        elif matrices == 1 and d % 2 == 0:
            step, shape, strides = d // 2, (1, n, d // 2), (n * d, d)
        else:
            return ()
        return tuple(self._view(x, shape, start, *strides) for start in (0, step))

    def _view(self, x: Node, shape: tuple[int, ...], start: int, *strides: int) -> Node:
        """Part of x from a number on, in another shape; `strides` of its axes but the last, in numbers."""
        make = getattr(ggml, f"ggml_view_{len(shape)}d")
        return self._node(make(self._context, x.ptr, *shape[::-1], *(4 * s for s in strides[::-1]), 4 * start), shape)

    def _turned(self, x: Node) -> Any:
        self._made += 1
        return ggml.ggml_transpose(self._context, x.ptr)

    def _transposed(self, kernel: int, *sources: Node) -> Node:
        """The transposes of one or two sources [.., n, d] of one shape, behind each other: [m, d, n]."""
        self._numbers("transpose", *sources)
        n, d = sources[0].shape[-2:]
        shape = (sum(source.size for source in sources) // (n * d), d, n)
        task = native.Transpose(matrices=shape[0], rows=n, columns=d)
        node = self._node(
            ggml.ggml_custom_4d(
                self._context, F32, *shape[::-1], 1,
                (type(sources[0].ptr) * len(sources))(*(source.ptr for source in sources)), len(sources),
                ggml.ggml_custom_op_t(kernel), ggml.GGML_N_TASKS_MAX, ctypes.addressof(task),
            ),
            shape,
        )  # fmt: skip
        self._tasks.append((task, node))
        return node

    def transpose_both(self, a: Node, b: Node, slow_cont: bool = False) -> Node:
        """The transposes of a and b, both [.., n, d], behind each other as [2 .., d, n], in one copy."""
        self._same("transpose_both", a, b)
        if slow_cont and (kernel := native.kernel("transpose")):
            return self._transposed(kernel, a, b)
        n, d = a.shape[-2:]
        flat = (self.reshape(x, x.size // (n * d), n, d) for x in (a, b))
        joined = ggml.ggml_concat(self._context, *(self._turned(x) for x in flat), 2)
        return self._node(joined, (2 * a.size // (n * d), d, n))

    def halves(self, x: Node, shape: tuple[int, ...]) -> tuple[Node, Node]:
        """x cut in two along its first axis; views of the given shape."""
        if x.size != 2 * math.prod(shape):
            raise GraphError(f"halves: {list(x.shape)} into {list(shape)}")
        first, second = (self._view(x, (x.size // 2,), start) for start in (0, x.size // 2))
        return self.reshape(first, *shape), self.reshape(second, *shape)

    def swap_middle(self, x: Node) -> Node:
        """[a, b, c, d] as [a, c, b, d], contiguous."""
        self._numbers("swap_middle", x)
        a, b, c, d = x.shape
        self._made += 1
        turned = ggml.ggml_permute(self._context, x.ptr, 0, 2, 1, 3)
        return self._node(ggml.ggml_cont(self._context, turned), (a, c, b, d))

    def join_heads(self, blocks: Sequence[Node], by_set: bool = False) -> Node:
        """Blocks [B, H, n, D] joined along n, with the middle axes exchanged: [B, T, H, D], contiguous."""
        rows, heads, _, size = blocks[0].shape
        length = sum(block.shape[2] for block in blocks)
        if not by_set or len(blocks) == 1 or 4 * rows * length * heads * size >= SET_LIMIT:
            return self.swap_middle(self.concat(blocks, 2, by_set))
        out, start = self._blank((rows, length, heads, size)), 0
        for block in blocks:
            self._numbers("join_heads", block)
            self._made += 1
            turned = ggml.ggml_permute(self._context, block.ptr, 0, 2, 1, 3)
            out = self._set(out, turned, start * heads * size, (length * heads * size, heads * size, size))
            start += block.shape[2]
        return out

    def part(self, x: Node, axis: int, start: int, stop: int) -> Node:
        """Places start to stop - 1 of one axis, contiguous; x itself when that is all of it."""
        self._numbers("part", x)
        if not 0 <= start < stop <= x.shape[axis]:
            raise GraphError(f"part {start}..{stop} of axis {axis} of {list(x.shape)}")
        if (start, stop) == (0, x.shape[axis]):
            return x
        inner = math.prod(x.shape[axis + 1 :])
        width, outer = x.shape[axis] * inner, x.size // (x.shape[axis] * inner)
        taken = (stop - start) * inner
        view = self._view(x, (outer, taken), start * inner, width)
        copy = self._node(ggml.ggml_cont(self._context, view.ptr), (outer, taken))
        return self.reshape(copy, *x.shape[:axis], stop - start, *x.shape[axis + 1 :])

    def number(self, x: Node, i: int) -> Node:
        """Number `i` of x [n], as [1]; a view."""
        if len(x.shape) != 1 or not 0 <= i < x.shape[0]:
            raise GraphError(f"number {i} of {list(x.shape)}")
        return self._view(x, (1,), i)

    def first_rows(self, x: Node, count: int) -> Node:
        """The first rows of x [n, d]; a view."""
        if len(x.shape) != 2 or not 1 <= count <= x.shape[0]:
            raise GraphError(f"the first {count} rows of {list(x.shape)}")
        return self._view(x, (count, x.shape[1]), 0, x.shape[1])

    def concat(self, parts: Sequence[Node], axis: int, by_set: bool = False) -> Node:
        """Parts joined along one axis; the others agree. `by_set` copies each to its place in memory made for all."""
        if not parts:
            raise GraphError("concat: of nothing")
        self._numbers("concat", *parts)
        first = parts[0].shape
        for shape in (part.shape for part in parts[1:]):
            if len(shape) != len(first) or first[:axis] + first[axis + 1 :] != shape[:axis] + shape[axis + 1 :]:
                raise GraphError(f"concat: {list(first)} and {list(shape)} along axis {axis}")
        whole = (*first[:axis], sum(part.shape[axis] for part in parts), *first[axis + 1 :])
        if by_set and len(parts) > 1 and 4 * math.prod(whole) < SET_LIMIT:
            return self._set_side_by_side(parts, axis, whole)
        out = parts[0]
        for part in parts[1:]:
            shape = (*first[:axis], out.shape[axis] + part.shape[axis], *first[axis + 1 :])
            joined = ggml.ggml_concat(self._context, out.ptr, part.ptr, len(shape) - 1 - axis)
            out = self._node(joined, shape)
        return out

    def _set_side_by_side(self, parts: Sequence[Node], axis: int, whole: tuple[int, ...]) -> Node:
        outer, inner = math.prod(whole[:axis]), math.prod(whole[axis + 1 :])
        by_row = outer == 1 and inner > 1  # SET copies row by row, some on each thread: one row is none to share
        out, start = self._blank(whole), 0
        for part in parts:
            n = part.shape[axis]
            rows = self.reshape(part, n, inner) if by_row else self.reshape(part, outer, n * inner)
            out = self._set(out, rows.ptr, start, (inner if by_row else whole[axis] * inner,))
            start += n * inner
        return out

    def _blank(self, shape: tuple[int, ...]) -> Node:
        """Memory for numbers that `_set` will put there; on the CPU."""
        sizes = (*(1,) * (4 - len(shape)), *shape)[::-1]
        made = ggml.ggml_custom_4d(self._context, F32, *sizes, None, 0, NOTHING, 1, None)
        return self._node(made, shape)

    def _set(self, x: Node, values: Any, start: int, strides: tuple[int, ...]) -> Node:
        """x, used up, with values copied into it from a number on; `strides` of their axes but the last, in numbers."""
        sizes = (*(4 * s for s in strides[::-1]), *(4 * x.size,) * (3 - len(strides)))
        return self._node(ggml.ggml_set_inplace(self._context, x.ptr, values, *sizes, 4 * start), x.shape)

    def get_rows(self, table: Node, ids: Node) -> Node:
        """Rows of table [n, d] at ids [m] -> [m, d]; the caller answers for the ids' range."""
        if len(table.shape) != 2 or len(ids.shape) != 1:
            raise GraphError(f"get_rows: {list(table.shape)} at {list(ids.shape)}")
        return self._node(ggml.ggml_get_rows(self._context, table.ptr, ids.ptr), (ids.shape[0], table.shape[1]))

    def set_rows(self, table: Node, rows: Node, ids: Node) -> Node:
        """`table` [n, d], used up, with `rows` [m, d] put at ids [m]."""
        if table.shape[1] != rows.shape[1] or rows.shape[0] != ids.shape[0]:
            raise GraphError(f"set_rows: {list(rows.shape)} into {list(table.shape)} at {list(ids.shape)}")
        return self._node(ggml.ggml_set_rows(self._context, table.ptr, rows.ptr, ids.ptr), table.shape)

    def copy_into(self, x: Node, target: Node) -> Node:
        """x written over `target`."""
        self._same("copy_into", x, target)
        return self._node(ggml.ggml_cpy(self._context, x.ptr, target.ptr), target.shape)
