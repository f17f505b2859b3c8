"""ggml tensors: their memory on a device or in a mapped file, and copies to and from numpy."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from toyexp_ggml.binding import F32, I32, GraphError, ggml
from toyexp_ggml.binding.backend import Backend
from toyexp_ggml.limits import LIMIT

TYPES: dict[np.dtype[Any], int] = {np.dtype(np.float32): F32, np.dtype(np.int32): I32}


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor of a graph: ggml's pointer to it, and its shape in numpy's order."""

    ptr: Any
    shape: tuple[int, ...]
    size: int  # how many numbers it holds
    packed: bool  # stored in a type other than float32, which only products and row lookups can read


def context(size: int) -> Any:
    """Allocate `size` bytes for ggml's descriptions of tensors and graphs, without their data."""
    return ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))


def use_large_pages(buffer: Any) -> None:
    """Let Linux use pages of 2 MB for a buffer in host memory: looking up pages of 4 KB takes 5 % of a long step."""
    if sys.platform == "linux" and ggml.ggml_backend_buffer_is_host(buffer):
        base, size = ggml.ggml_backend_buffer_get_base(buffer), ggml.ggml_backend_buffer_get_size(buffer)
        start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(base + size - start), mmap.MADV_HUGEPAGE)


class _Tensors:
    """Base class of a container for up to `count` tensors, which `close` frees together."""

    def __init__(self, backend: Backend, count: int):
        self._backend = backend
        self._context = context(ggml.ggml_tensor_overhead() * (count + 8))
        self._buffer: Any = None

    def _new(self, shape: tuple[int, ...], type_id: int) -> Any:
        return ggml.ggml_new_tensor(self._context, type_id, len(shape), (ctypes.c_int64 * len(shape))(*shape[::-1]))

    def close(self) -> None:
        """Free the tensors."""
        if self._buffer:
            ggml.ggml_backend_buffer_free(self._buffer)
        if self._context:
            ggml.ggml_free(self._context)
        self._buffer = self._context = None


class Memory(_Tensors):
    """Container for tensors in device memory: weights, moments, inputs."""

    _bytes = 0

    def tensor(self, shape: tuple[int, ...], dtype: Any = np.float32, trainable: bool = False) -> Node:
        """Return a new tensor, whose memory `allocate` provides. Raise GraphError for an impossible shape or dtype.

        An integer `dtype` is the number of one of ggml's types.
        """
        if not 1 <= len(shape) <= 4 or min(shape) < 1 or max(shape) > LIMIT or math.prod(shape) > 2**40:
            raise GraphError(f"expected a tensor of 1 to 4 axes, each from 1 to 2^31 - 1, got {list(shape)}")
        if (kind := dtype if isinstance(dtype, int) else TYPES.get(np.dtype(dtype))) is None:
            raise GraphError(f"expected a tensor of float32 or int32, got {np.dtype(dtype)}")
        ptr = self._new(shape, kind)
        if trainable:
            ggml.ggml_set_param(ptr)
        self._bytes += ggml.ggml_nbytes(ptr)
        return Node(ptr, shape, math.prod(shape), kind != F32)

    def allocate(self) -> None:
        """Allocate every tensor on the device, filled with zeros. Raise GraphError if the memory is too small."""
        if not self._bytes:  # all weights are mapped from a file
            return
        # The system may overcommit memory and kill the process at first use, so compare with the device's memory first.
        if not self._backend.memory or self._bytes <= self._backend.memory:
            self._buffer = ggml.ggml_backend_alloc_ctx_tensors(self._context, self._backend.ptr)
        if not self._buffer:
            raise GraphError(f"the device has too little memory: weights and inputs need {self._bytes / 2**30:.1f} GiB")
        use_large_pages(self._buffer)
        ggml.ggml_backend_buffer_clear(self._buffer, 0)
        self._backend.buffer_bytes += ggml.ggml_backend_buffer_get_size(self._buffer)


class MappedFile(_Tensors):
    """Container for tensors of a file in their stored types: memory-mapped on the CPU, copied to other devices."""

    def __init__(self, backend: Backend, path: str, count: int):
        super().__init__(backend, count)
        self._bytes = np.memmap(path, mode="r")
        self._copies: list[tuple[Any, int, int]] = []
        if backend.device == "CPU":
            self._buffer = ggml.ggml_backend_cpu_buffer_from_ptr(self._bytes.ctypes.data, self._bytes.size)

    def tensor(self, shape: tuple[int, ...], type_id: int, offset: int, nbytes: int) -> Node:
        """Return the tensor of ggml's type `type_id` that is stored at byte `offset` of the file.

        The caller must have validated `type_id` and `offset`. Raise GraphError if a tensor of this type and shape does
        not have `nbytes` bytes, or if the file ends before the tensor does.
        """
        ptr = self._new(shape, type_id)
        if ggml.ggml_nbytes(ptr) != nbytes or offset + nbytes > self._bytes.size:
            raise GraphError(f"a tensor of {list(shape)} does not fit {nbytes} bytes at offset {offset} of its file")
        if self._buffer:
            ggml.ggml_backend_tensor_alloc(self._buffer, ptr, self._bytes.ctypes.data + offset)
        else:
            self._copies.append((ptr, offset, nbytes))
        return Node(ptr, shape, math.prod(shape), type_id != F32)

    def allocate(self) -> None:
        """Copy the tensors to the device; on the CPU, where they are memory-mapped, do nothing."""
        if not self._copies:
            return
        self._buffer = ggml.ggml_backend_alloc_ctx_tensors(self._context, self._backend.ptr)
        if not self._buffer:
            raise GraphError("the device has too little memory for the frozen weights")
        self._backend.buffer_bytes += ggml.ggml_backend_buffer_get_size(self._buffer)
        for ptr, offset, nbytes in self._copies:
            ggml.ggml_backend_tensor_set(ptr, self._bytes.ctypes.data + offset, 0, nbytes)

    def close(self) -> None:
        """Free the tensors and unmap the file."""
        super().close()
        del self._bytes


def put(node: Node, array: np.ndarray) -> None:
    """Copy a contiguous array of the node's size and type, or its bytes as uint8, into the node."""
    is_raw = array.dtype == np.uint8 and array.nbytes == ggml.ggml_nbytes(node.ptr)
    if not is_raw and (array.size != node.size or TYPES.get(array.dtype) != node.ptr.contents.type):
        raise GraphError(f"a tensor of {list(node.shape)} cannot take {array.size} numbers of type {array.dtype}")
    ggml.ggml_backend_tensor_set(node.ptr, array.ctypes.data, 0, array.nbytes)


def get(node: Node) -> np.ndarray:
    """Return a float32 copy of a node's values."""
    out = np.empty(node.shape, np.float32)
    ggml.ggml_backend_tensor_get(node.ptr, out.ctypes.data, 0, out.nbytes)
    return out


def get_all(backend: Backend, pairs: Iterable[tuple[Node, np.ndarray]]) -> None:
    """Copy the values of several nodes into contiguous float32 arrays, with a single wait for all copies."""
    for node, out in pairs:
        if out.dtype != np.float32 or out.shape != node.shape or not out.flags.c_contiguous or not out.flags.writeable:
            raise GraphError(f"expected a float32 array of {list(node.shape)}, got {list(out.shape)} of {out.dtype}")
        ggml.ggml_backend_tensor_get_async(backend.ptr, node.ptr, out.ctypes.data, 0, out.nbytes)
    ggml.ggml_backend_synchronize(backend.ptr)


def host_arrays(backend: Backend, nodes: Mapping[str, Node]) -> dict[str, np.ndarray]:
    """Return an uninitialised float32 array for each node, by name. For a GPU, use pinned memory for fast copies."""
    kind = ggml.ggml_backend_dev_host_buffer_type(ggml.ggml_backend_get_device(backend.ptr))
    size = 4 * sum(node.size for node in nodes.values())
    buffer = ggml.ggml_backend_buft_alloc_buffer(kind, size) if kind and size else None
    if not buffer:
        return {name: np.empty(node.shape, np.float32) for name, node in nodes.items()}
    ends = list(itertools.accumulate(node.size for node in nodes.values()))
    parts = np.split(np.asarray(_PinnedBuffer(buffer, size)), ends[:-1])
    return {name: part.reshape(node.shape) for (name, node), part in zip(nodes.items(), parts, strict=True)}


class _PinnedBuffer:
    """Pinned float32 buffer of ggml, which is freed with the last array that views it."""

    def __init__(self, buffer: Any, size: int):
        start = ggml.ggml_backend_buffer_get_base(buffer)
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "shape": (size // 4,), "data": (start, False)}
        free = weakref.finalize(self, ggml.ggml_backend_buffer_free, buffer)
        free.atexit = False  # the system frees the buffer when the process ends


def clear(node: Node) -> None:
    """Set a node's values to zero."""
    ggml.ggml_backend_tensor_memset(node.ptr, 0, 0, node.size * 4)
