"""Copies of a session's state on the host, with one transfer for each contiguous vector on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class HostCopy(dict[str, np.ndarray]):
    """Arrays of a snapshot by name: views of host vectors with the same layout as the device's vectors."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._host_vectors: dict[int, Tensor] = {}  # by the address of the device's vector
        for names, vector in _device_vectors(tensors):
            self._host_vectors[vector.data_ptr()] = host = _host_vector(vector)
            for name in names:
                first, shape = tensors[name].storage_offset() - vector.storage_offset(), tensors[name].shape
                self[name] = host[first : first + shape.numel()].view(shape).numpy()

    def matches(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if this copy was allocated for these tensors' memory."""
        return self._host_vectors.keys() == {vector.data_ptr() for _, vector in _device_vectors(tensors)}

    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy the tensors into this object; `wait_for_copies` waits for the end."""
        for _, vector in _device_vectors(tensors):
            self._host_vectors[vector.data_ptr()].copy_(vector, non_blocking=vector.is_cuda)


def put_on_host(arrays: dict[str, np.ndarray], name: str, values: Tensor) -> None:
    """Begin to copy values into the array of that name, which is allocated if missing; see `wait_for_copies`."""
    if name not in arrays:
        arrays[name] = _host_vector(values).numpy()
    torch.from_numpy(arrays[name]).copy_(values.detach(), non_blocking=values.is_cuda)


def wait_for_copies(device: torch.device) -> None:
    """Wait until all copies queued on a GPU have arrived on the host."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _device_vectors(tensors: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Return each contiguous stretch of device memory as one vector, with the names of the tensors in it."""
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
    """Allocate a host vector like `vector`, in pinned memory for a GPU: copies are then fast and asynchronous."""
    if vector.is_cuda:
        try:
            return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        except RuntimeError:  # the system limits pinned memory; pageable memory also works
            pass
    return torch.empty(vector.shape, dtype=vector.dtype)
