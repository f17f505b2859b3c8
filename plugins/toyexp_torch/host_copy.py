"""Copy a session's tensors to host memory. Tensors that are views of one device vector need only one transfer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class HostCopy(dict[str, np.ndarray]):
    """Snapshot of a session's tensors in host memory: a dict of arrays, keyed by tensor name.

    On the device, many tensors are views of one vector. The arrays are views of host vectors with the same layout, so
    that each vector is copied in one transfer.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._host_vectors: dict[int, Tensor] = {}  # keyed by the address of the device vector
        for names, vector in _device_vectors(tensors):
            self._host_vectors[vector.data_ptr()] = host = _host_vector(vector)
            for name in names:
                first, shape = tensors[name].storage_offset() - vector.storage_offset(), tensors[name].shape
                self[name] = host[first : first + shape.numel()].view(shape).numpy()

    def matches(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if this object was made for the device memory of `tensors`, so that it can be reused for them."""
        return self._host_vectors.keys() == {vector.data_ptr() for _, vector in _device_vectors(tensors)}

    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to copy the tensors' values into the arrays; `wait_for_copies` waits for the end of the copy."""
        for _, vector in _device_vectors(tensors):
            self._host_vectors[vector.data_ptr()].copy_(vector, non_blocking=vector.is_cuda)


def put_on_host(arrays: dict[str, np.ndarray], name: str, values: Tensor) -> None:
    """Start to copy `values` into `arrays[name]`, which is allocated if it is missing.

    `wait_for_copies` waits until the values have arrived.
    """
    if name not in arrays:
        arrays[name] = _host_vector(values).numpy()
    torch.from_numpy(arrays[name]).copy_(values.detach(), non_blocking=values.is_cuda)


def wait_for_copies(device: torch.device) -> None:
    """Wait until all copies that were queued on an NVIDIA GPU have arrived. Other devices copy synchronously."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _device_vectors(tensors: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Return, for each device storage, the names of the tensors in it, and one vector that covers all these tensors."""
    by_storage = defaultdict[int, list[str]](list)
    for name, tensor in tensors.items():
        by_storage[tensor.untyped_storage().data_ptr()].append(name)
    vectors = []
    for names in by_storage.values():
        start = min(tensors[name].storage_offset() for name in names)
        stop = max(tensors[name].storage_offset() + tensors[name].numel() for name in names)
        vectors.append((names, tensors[names[0]].detach().as_strided((stop - start,), (1,), start)))
    return vectors


def _host_vector(vector: Tensor) -> Tensor:
    """Return a new host vector of the same length and dtype as `vector`.

    If `vector` is on a GPU, pinned memory is used if possible, so that copies are fast and asynchronous.
    """
    if vector.is_cuda:
        try:
            return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        except RuntimeError:  # the system limits pinned memory; pageable memory also works
            pass
    return torch.empty(vector.shape, dtype=vector.dtype)
