"""The one file that touches ggml: memory, graphs, and one method per op with its shape rules checked first.

A failed GGML_ASSERT ends the whole process, so everything that ggml asserts is checked here and raises GraphError.
Shapes are written as numpy orders them, [B, T, d]; ggml's own `ne` is the reverse.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from toyexp import Rotary, ToyexpError
from toyexp_ggml import native
from toyexp_ggml.crew import Crew
from toyexp_ggml.limits import LIMIT

ABSENT = "ggml_backend_cuda_allreduce_tensor"


def _load() -> Any:
    """ggml-python, with two habits of its version 0.0.45 held back while it loads.

    It looks up a function that ggml's CUDA library declares and does not have, and its import fails. And it shows
    ggml's C++ symbols to every library that is loaded later, which broke PyTorch's compiler on a GPU.
    """
    lookup, visible = ctypes.CDLL.__getattr__, ctypes.RTLD_GLOBAL

    def lenient(library: ctypes.CDLL, name: str) -> Any:
        return ctypes.CFUNCTYPE(None)() if name == ABSENT else lookup(library, name)

    ctypes.CDLL.__getattr__ = lenient  # type: ignore[method-assign]
    ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL  # type: ignore[misc]
    try:
        return importlib.import_module("ggml")
    finally:
        ctypes.CDLL.__getattr__ = lookup  # type: ignore[method-assign]
        ctypes.RTLD_GLOBAL = visible  # type: ignore[misc]


ggml = _load()


@ggml.ggml_log_callback
def _log(level: int, text: bytes, user_data: Any) -> None:
    """ggml's warnings and errors go to toyexp's log, not to the terminal; its chatter nowhere."""
    if level in (ggml.GGML_LOG_LEVEL_WARN, ggml.GGML_LOG_LEVEL_ERROR) and text.strip():
        logging.getLogger("toyexp").warning("ggml: %s", text.decode(errors="replace").strip())


ggml.ggml_log_set(_log, None)
# ggml-python 0.0.45 leaves these pointers to be read as an int of 32 bits.
ggml.ggml_backend_sched_get_tensor_backend.restype = ctypes.c_void_p
ggml.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p

F32, I32 = ggml.GGML_TYPE_F32, ggml.GGML_TYPE_I32
TYPES: dict[np.dtype[Any], int] = {np.dtype(np.float32): F32, np.dtype(np.int32): I32}


class GraphError(ToyexpError):
    """A graph that cannot be built: which op, and which shapes it was given."""


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor of a graph: ggml's pointer and the shape, [.., d]."""

    ptr: Any
    shape: tuple[int, ...]

    @property
    def packed(self) -> bool:
        """Whether its numbers stand in another type than float32; only products and row lookups read those."""
        return bool(self.ptr.contents.type != F32)

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


SET_LIMIT = 2**30  # bytes that SET can count to
# The kernel of an op that only has memory: ggml_time_init does nothing but where a clock has to be prepared.
NOTHING = ggml.ggml_custom_op_t(ctypes.cast(ggml.lib.ggml_time_init, ctypes.c_void_p).value)

VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
IN_PLACE = frozenset({"OPT_STEP_ADAMW", "CPY"})


def _op(node: Any) -> str:
    return ggml.ggml_op_name(node.contents.op).decode()


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


def _found(name: str) -> Any:
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        if ggml.ggml_backend_dev_name(device).decode().startswith(name):
            return device
    return None


def _device(name: str) -> Any:
    found = _found(name)
    return found and ggml.ggml_backend_dev_init(found, None)


def _memory(backend: Any) -> int:
    """Bytes of memory that the device has; 0 if it does not say."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    device = ggml.ggml_backend_get_device(backend)
    if device:
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return total.value


def devices() -> dict[str, str]:
    """The devices this build of ggml finds here, by name, with a description."""
    found = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    return {
        ggml.ggml_backend_dev_name(d).decode(): ggml.ggml_backend_dev_description(d).decode().strip() for d in found
    }


def built_with(name: str) -> bool:
    """Whether this build of ggml knows that kind of device at all; its library may be there and find none."""
    kinds = (ggml.ggml_backend_reg_get(i) for i in range(ggml.ggml_backend_reg_count()))
    if any(ggml.ggml_backend_reg_name(kind).decode().startswith(name) for kind in kinds):
        return True
    return any(Path(ggml.__file__).parent.glob(f"lib/*ggml-{name.lower()}.*"))


def has_llamafile() -> bool:
    """Whether ggml's CPU code has llamafile's matrix products."""
    return bool(ggml.ggml_cpu_has_llamafile())


def version() -> str:
    """ggml's version."""
    return ggml.ggml_version().decode()


def _context(size: int) -> Any:
    """Room for so many bytes of what ggml notes of tensors and graphs, their numbers apart."""
    return ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))


class _Tensors:
    """Up to `count` tensors that live as long as the session."""

    def __init__(self, backend: Backend, count: int):
        self._backend = backend
        self._context = _context(ggml.ggml_tensor_overhead() * (count + 8))
        self._buffer: Any = None

    def _new(self, shape: tuple[int, ...], type_id: int) -> Any:
        return ggml.ggml_new_tensor(self._context, type_id, len(shape), (ctypes.c_int64 * len(shape))(*shape[::-1]))

    def close(self) -> None:
        """Frees the tensors."""
        if self._buffer:
            ggml.ggml_backend_buffer_free(self._buffer)
        if self._context:
            ggml.ggml_free(self._context)
        self._buffer = self._context = None


class Memory(_Tensors):
    """Weights, moments, inputs."""

    _bytes = 0

    def tensor(self, shape: tuple[int, ...], dtype: type = np.float32, trainable: bool = False) -> Node:
        """A new tensor; it has no memory until `allocate`."""
        if not 1 <= len(shape) <= 4 or min(shape) < 1 or max(shape) > LIMIT or math.prod(shape) > 2**40:
            raise GraphError(f"ggml holds tensors of 1 to 4 dimensions, each from 1 to 2^31 - 1, not {list(shape)}")
        if np.dtype(dtype) not in TYPES:
            raise GraphError(f"the graph holds float32 and int32 numbers, not {np.dtype(dtype)}")
        ptr = self._new(shape, TYPES[np.dtype(dtype)])
        if trainable:
            ggml.ggml_set_param(ptr)
        self._bytes += 4 * math.prod(shape)
        return Node(ptr, shape)

    def allocate(self) -> None:
        """Gives every tensor its memory on the device, zeroed."""
        if not self._bytes:  # all weights are read where they lie in a file
            return
        # The system may promise more than there is, and end the process when it is used; so this asks first.
        if not self._backend.memory or self._bytes <= self._backend.memory:
            self._buffer = ggml.ggml_backend_alloc_ctx_tensors(self._context, self._backend.ptr)
        if not self._buffer:
            raise GraphError(f"the device has too little memory: weights and inputs are {self._bytes / 2**30:.1f} GiB")
        ggml.ggml_backend_buffer_clear(self._buffer, 0)
        self._backend.buffer_bytes += ggml.ggml_backend_buffer_get_size(self._buffer)


class MappedFile(_Tensors):
    """Tensors that lie in a file, in the types they have there: mapped on the CPU, elsewhere copied byte by byte."""

    def __init__(self, backend: Backend, path: str, count: int):
        super().__init__(backend, count)
        self._bytes = np.memmap(path, mode="r")
        self._places: list[tuple[Any, int, int]] = []
        if backend.device == "CPU":
            self._buffer = ggml.ggml_backend_cpu_buffer_from_ptr(self._bytes.ctypes.data, self._bytes.size)

    def tensor(self, shape: tuple[int, ...], type_id: int, offset: int, nbytes: int) -> Node:
        """The tensor of a ggml type at a place of the file; the caller answers for both."""
        ptr = self._new(shape, type_id)
        if ggml.ggml_nbytes(ptr) != nbytes or offset + nbytes > self._bytes.size:
            raise GraphError(f"{nbytes} bytes at {offset} for a tensor of {list(shape)}")
        if self._buffer:
            ggml.ggml_backend_tensor_alloc(self._buffer, ptr, self._bytes.ctypes.data + offset)
        else:
            self._places.append((ptr, offset, nbytes))
        return Node(ptr, shape)

    def allocate(self) -> None:
        """Copies what was not mapped."""
        if not self._places:
            return
        self._buffer = ggml.ggml_backend_alloc_ctx_tensors(self._context, self._backend.ptr)
        if not self._buffer:
            raise GraphError("the device has too little memory for the frozen weights")
        self._backend.buffer_bytes += ggml.ggml_backend_buffer_get_size(self._buffer)
        for ptr, offset, nbytes in self._places:
            ggml.ggml_backend_tensor_set(ptr, self._bytes.ctypes.data + offset, 0, nbytes)

    def close(self) -> None:
        """Frees the tensors and lets go of the file."""
        super().close()
        del self._bytes


def put(node: Node, array: np.ndarray) -> None:
    """Copies a contiguous array of the node's size into it."""
    if array.size != node.size or TYPES.get(array.dtype) != node.ptr.contents.type:
        raise GraphError(f"{array.size} numbers of type {array.dtype} for a tensor of {list(node.shape)}")
    ggml.ggml_backend_tensor_set(node.ptr, array.ctypes.data, 0, array.nbytes)


def get(node: Node) -> np.ndarray:
    """A float32 copy of a node's values."""
    out = np.empty(node.shape, np.float32)
    ggml.ggml_backend_tensor_get(node.ptr, out.ctypes.data, 0, out.nbytes)
    return out


def get_all(backend: Backend, wanted: Iterable[tuple[Node, np.ndarray]]) -> None:
    """Copies each node's values into the contiguous float32 array beside it, with one wait for all of them."""
    for node, out in wanted:
        if out.dtype != np.float32 or out.shape != node.shape or not out.flags.c_contiguous or not out.flags.writeable:
            raise GraphError(f"{list(out.shape)} of {out.dtype} for a tensor of {list(node.shape)}")
        ggml.ggml_backend_tensor_get_async(backend.ptr, node.ptr, out.ctypes.data, 0, out.nbytes)
    ggml.ggml_backend_synchronize(backend.ptr)


def host_arrays(backend: Backend, nodes: Mapping[str, Node]) -> dict[str, np.ndarray]:
    """An array of each node's shape. A GPU gets them locked in the host's memory, where it copies at its full speed."""
    kind = ggml.ggml_backend_dev_host_buffer_type(ggml.ggml_backend_get_device(backend.ptr))
    size = 4 * sum(node.size for node in nodes.values())
    buffer = ggml.ggml_backend_buft_alloc_buffer(kind, size) if kind and size else None
    if not buffer:
        return {name: np.empty(node.shape, np.float32) for name, node in nodes.items()}
    ends = list(itertools.accumulate(node.size for node in nodes.values()))
    parts = np.split(np.asarray(_Locked(buffer, size)), ends[:-1])
    return {name: part.reshape(node.shape) for (name, node), part in zip(nodes.items(), parts, strict=True)}


class _Locked:
    """Float32 numbers in a buffer of ggml's, which is freed with the last array that shows them."""

    def __init__(self, buffer: Any, size: int):
        start = ggml.ggml_backend_buffer_get_base(buffer)
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "shape": (size // 4,), "data": (start, False)}
        free = weakref.finalize(self, ggml.ggml_backend_buffer_free, buffer)
        free.atexit = False  # the process gives it back


def clear(node: Node) -> None:
    """Sets a node's values to zero."""
    ggml.ggml_backend_tensor_memset(node.ptr, 0, 0, node.size * 4)


def _unary(name: str) -> Callable[[Graph, Node], Node]:
    def make(graph: Graph, x: Node) -> Node:
        graph._numbers(name, x)
        return graph._node(getattr(ggml, f"ggml_{name}")(graph._context, x.ptr), x.shape)

    return make


def _binary(name: str) -> Callable[[Graph, Node, Node], Node]:
    def make(graph: Graph, a: Node, b: Node) -> Node:
        graph._numbers(name, a, b)
        graph._repeats(name, a, b)
        return graph._node(getattr(ggml, f"ggml_{name}")(graph._context, a.ptr, b.ptr), a.shape)

    return make


class Graph:
    """A static graph under construction and, once `finish`ed, ready to compute again and again."""

    def __init__(self, backend: Backend, capacity: int):
        self._backend = backend
        self._crew = backend.crew()
        self._tasks: list[tuple[native.Transpose, Node]] = []  # of our kernels, which read them when they compute
        self.capacity = capacity
        size = ggml.ggml_tensor_overhead() * capacity + ggml.ggml_graph_overhead_custom(capacity, False)
        self._context = _context(size)
        self._graph = ggml.ggml_new_graph_custom(self._context, capacity, False)
        self._allocator: Any = None  # with one device
        self._scheduler: Any = None  # with BLAS beside the CPU
        self._made = 0

    # -- building -----------------------------------------------------------------------------------------------

    def _node(self, ptr: Any, shape: tuple[int, ...]) -> Node:
        self._made += 1
        if self._made > self.capacity - 8:
            raise GraphError(f"the graph has more than {self.capacity} nodes")
        return Node(ptr, shape)

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

    add, sub, mul, div = map(_binary, ("add", "sub", "mul", "div"))  # of a and b, which is repeated over a
    sqr, sqrt, sgn, log, sigmoid, silu = map(_unary, ("sqr", "sqrt", "sgn", "log", "sigmoid", "silu"))

    def scale(self, x: Node, factor: float, shift: float = 0.0) -> Node:
        """x * factor + shift."""
        self._numbers("scale", x)
        return self._node(ggml.ggml_scale_bias(self._context, x.ptr, factor, shift), x.shape)

    def clamp(self, x: Node, low: float, high: float) -> Node:
        """x held between two numbers, in place: x is used up."""
        return self._node(ggml.ggml_clamp(self._context, x.ptr, low, high), x.shape)

    def total(self, x: Node, by_rows: bool = False) -> Node:
        """The sum of everything, [1]; `by_rows` cuts it into rows and sums those first."""
        x = self.row_sums(x) if by_rows else x
        return self._node(ggml.ggml_sum(self._context, x.ptr), (1,))

    def row_sums(self, x: Node) -> Node:
        """x cut into rows, about as many as they are long, and each of them summed, [n, 1]."""
        count = next(n for n in range(math.isqrt(x.size), 0, -1) if x.size % n == 0)
        return self.sum_last(self.reshape(x, count, x.size // count))

    def sum_of_squares(self, x: Node, by_dot: bool = False) -> Node:
        """The sum of x^2, [1]; `by_dot` takes it as the dot product of each row with itself."""
        if not by_dot or len(x.shape) != 2:
            return self.total(self.sqr(x))
        rows = self.reshape(x, x.shape[0], 1, x.shape[1])
        return self.total(self.mul_mat(rows, rows))

    def sum_last(self, x: Node) -> Node:
        """The sum over the last axis, [.., 1]."""
        return self._node(ggml.ggml_sum_rows(self._context, x.ptr), (*x.shape[:-1], 1))

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

    def add_to_rows(self, x: Node, rows: Node) -> Node:
        """x [a, n, d], used up, with `rows` [a, m, d] added to the first m of n."""
        if x.shape[::2] != rows.shape[::2] or rows.shape[1] > x.shape[1]:
            raise GraphError(f"add_to_rows: {list(rows.shape)} to {list(x.shape)}")
        _, n, d = x.shape
        size = x.size * 4
        return self._node(ggml.ggml_acc_inplace(self._context, x.ptr, rows.ptr, d * 4, n * d * 4, size, 0), x.shape)

    def mul_mat(self, w: Node, x: Node) -> Node:
        """x [.., n, in] times w [.., out, in] transposed -> [.., n, out]; w's leading axes repeat over x's."""
        fits = w.shape[-1] == x.shape[-1] and 2 <= len(w.shape) <= len(x.shape)
        if not fits or (len(w.shape) > 2 and w.shape[:-2] != x.shape[:-2]):
            raise GraphError(f"mul_mat: {list(x.shape)} by {list(w.shape)}")
        return self._node(ggml.ggml_mul_mat(self._context, w.ptr, x.ptr), (*x.shape[:-1], w.shape[-2]))

    def out_prod(self, a: Node, b: Node, turned: bool = False) -> Node:
        """b^T a: a [.., k, m], b [.., k, n] -> [.., n, m]; `turned` takes b as [.., n, k] without copying it."""
        k, n = reversed(b.shape[-2:]) if turned else b.shape[-2:]
        if a.shape[:-1] != (*b.shape[:-2], k):
            raise GraphError(f"out_prod: {list(a.shape)} by {list(b.shape)}")
        other = self._turned(b) if turned else b.ptr
        return self._node(ggml.ggml_out_prod(self._context, a.ptr, other), (*b.shape[:-2], n, a.shape[-1]))

    def get_rows(self, table: Node, ids: Node) -> Node:
        """Rows of table [n, d] at ids [m] -> [m, d]; the caller answers for the ids' range."""
        if len(table.shape) != 2 or len(ids.shape) != 1:
            raise GraphError(f"get_rows: {list(table.shape)} at {list(ids.shape)}")
        return self._node(ggml.ggml_get_rows(self._context, table.ptr, ids.ptr), (ids.shape[0], table.shape[1]))

    def get_rows_back(self, dy: Node, ids: Node, table: Node) -> Node:
        """The gradient of get_rows: rows dy [m, d] summed into [n, d] at their ids."""
        return self._node(ggml.ggml_get_rows_back(self._context, dy.ptr, ids.ptr, table.ptr), table.shape)

    def set_rows(self, table: Node, rows: Node, ids: Node) -> Node:
        """`table` [n, d], used up, with `rows` [m, d] put at ids [m]."""
        if table.shape[1] != rows.shape[1] or rows.shape[0] != ids.shape[0]:
            raise GraphError(f"set_rows: {list(rows.shape)} into {list(table.shape)} at {list(ids.shape)}")
        return self._node(ggml.ggml_set_rows(self._context, table.ptr, rows.ptr, ids.ptr), table.shape)

    def repeat_back(self, x: Node, like: Node) -> Node:
        """x summed over what `like` would be repeated along."""
        self._repeats("repeat_back", x, like)
        return self._node(ggml.ggml_repeat_back(self._context, x.ptr, like.ptr), like.shape)

    def rms_norm(self, x: Node, eps: float) -> Node:
        """x / sqrt(mean(x^2) + eps) over the last axis."""
        return self._normed("rms_norm", x, eps)

    def norm(self, x: Node, eps: float) -> Node:
        """(x - mean) / sqrt(variance + eps) over the last axis."""
        return self._normed("norm", x, eps)

    def _normed(self, op: str, x: Node, eps: float) -> Node:
        self._numbers(op, x)
        if not 0 <= eps < math.inf:
            raise GraphError(f"{op}: eps={eps} must be 0 or above")
        return self._node(getattr(ggml, f"ggml_{op}")(self._context, x.ptr, eps), x.shape)

    def rms_norm_back(self, dy: Node, x: Node, eps: float) -> Node:
        """The gradient of rms_norm."""
        self._same("rms_norm_back", dy, x)
        return self._node(ggml.ggml_rms_norm_back(self._context, dy.ptr, x.ptr, eps), x.shape)

    def silu_back(self, dy: Node, x: Node) -> Node:
        """The gradient of silu."""
        self._same("silu_back", dy, x)
        return self._node(ggml.ggml_silu_back(self._context, dy.ptr, x.ptr), x.shape)

    def swiglu(self, gate: Node, up: Node) -> Node:
        """silu(gate) * up."""
        self._numbers("swiglu", gate, up)
        self._same("swiglu", gate, up)
        return self._node(ggml.ggml_swiglu_split(self._context, gate.ptr, up.ptr), gate.shape)

    def softmax(self, x: Node, mask: Node | None = None, scale: float = 1.0) -> Node:
        """The softmax of x * scale + mask over the last axis; mask [T, T] repeats over the leading axes."""
        ptr = ggml.ggml_soft_max_ext(self._context, x.ptr, mask.ptr if mask else None, scale, 0.0)
        return self._node(ptr, x.shape)

    def softmax_back(self, dp: Node, p: Node, scale: float) -> Node:
        """scale p (dp - sum(p dp)): the gradient of softmax(x * scale), p being its result.

        The allocator may put a result over a source that nothing reads later, and ggml's kernel reads p after it began
        to write: so p is read once more, afterwards.
        """
        self._same("softmax_back", dp, p)
        result = self._node(ggml.ggml_soft_max_ext_back(self._context, dp.ptr, p.ptr, scale, 0.0), p.shape)
        self.want(result)
        self.want(self.total(self._view(p, (1,), 0)))
        return result

    def rope(self, x: Node, positions: Node, factors: Node | None, rotary: Rotary, back: bool) -> Node:
        """Rotates pairs of x [B, T, H, D] by their position; `factors` [D/2] are rotary's; `back` turns the other way.

        ggml raises the base to its powers, and divides by the factors and the scale, in float32 on the device.
        """
        self._numbers("rope", x)
        size = x.shape[-1]
        if len(x.shape) != 4 or size % 2 or positions.shape != (x.shape[1],):
            raise GraphError(f"rope: {list(x.shape)} at positions {list(positions.shape)}; D must be even")
        if factors and factors.shape != (size // 2,):
            raise GraphError(f"rope: {factors.shape[0]} factors for heads of {size}: it takes one for each pair")
        make = ggml.ggml_rope_ext_back if back else ggml.ggml_rope_ext
        mode = ggml.GGML_ROPE_TYPE_NEOX if rotary.halves else ggml.GGML_ROPE_TYPE_NORMAL
        rest = (size, mode, 0, rotary.base, 1 / rotary.scale, 0.0, 1.0, 32.0, 1.0)  # no YaRN
        return self._node(make(self._context, x.ptr, positions.ptr, factors and factors.ptr, *rest), x.shape)

    def adamw(self, w: Node, g: Node, m: Node, v: Node, hp: Node) -> Node:
        """Updates w, m and v in place by the seven numbers of hp."""
        for other in (g, m, v):
            self._same("adamw", w, other)
        return self._node(ggml.ggml_opt_step_adamw(self._context, w.ptr, g.ptr, m.ptr, v.ptr, hp.ptr), w.shape)

    def copy_into(self, x: Node, target: Node) -> Node:
        """x written over `target`."""
        self._same("copy_into", x, target)
        return self._node(ggml.ggml_cpy(self._context, x.ptr, target.ptr), target.shape)

    # -- running ------------------------------------------------------------------------------------------------

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
        return [n for n in nodes if _op(n) not in VIEWS]

    def ops(self) -> Counter[str]:
        """How many nodes of each op the graph has."""
        return Counter(map(_op, self._nodes()))

    def stuck(self) -> set[str]:
        """Ops that change a tensor in place where it lies and that its device refuses: no scheduler can help."""
        return {_op(n) for n in self._nodes() if _op(n) in IN_PLACE and not self._backend.runs(n)}

    def residency(self) -> dict[str, dict[str, int]]:
        """How many nodes of which ops run on which device, of the finished graph."""
        where: dict[str, Counter[str]] = {}
        for node in self._nodes():
            ptr = self._scheduler and ggml.ggml_backend_sched_get_tensor_backend(self._scheduler, node)
            name = ggml.ggml_backend_name(ptr or self._backend.ptr).decode()
            where.setdefault(name, Counter())[_op(node)] += 1
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


def refused_by(device: str, graph: Graph) -> set[str]:
    """The ops of a graph that a device does not compute, whichever device the graph is for."""
    found = _found(device)
    return {_op(n) for n in graph._nodes() if not ggml.ggml_backend_dev_supports_op(found, n)}
