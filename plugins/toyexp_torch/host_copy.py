"""A session's state on the host: what lies together on the device in one piece, whatever tensors lie in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class HostCopy(dict[str, np.ndarray]):
    """A snapshot's arrays by name. They are views of vectors that are laid out as those of the device."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._twins: dict[int, Tensor] = {}  # by where the device's vector begins
        for names, vector in _vectors(tensors):
            self._twins[vector.data_ptr()] = twin = _twin(vector)
            for name in names:
                first, shape = tensors[name].storage_offset() - vector.storage_offset(), tensors[name].shape
                self[name] = twin[first : first + shape.numel()].view(shape).numpy()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it was made for these very tensors' memory."""
        return self._twins.keys() == {vector.data_ptr() for _, vector in _vectors(tensors)}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies them here; see `wait_for_copies`."""
        for _, vector in _vectors(tensors):
            self._twins[vector.data_ptr()].copy_(vector, non_blocking=vector.is_cuda)


def put_on_host(arrays: dict[str, np.ndarray], name: str, values: Tensor) -> None:
    """Copies values into the array of that name, which is made where there is none; see `wait_for_copies`."""
    if name not in arrays:
        arrays[name] = _twin(values).numpy()
    torch.from_numpy(arrays[name]).copy_(values.detach(), non_blocking=values.is_cuda)


def wait_for_copies(device: torch.device) -> None:
    """Until what was queued to be copied from a GPU is here."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _vectors(tensors: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """What lies together on the device, as one vector, and the names of the contiguous tensors in it."""
    together = defaultdict[int, list[str]](list)
    for name, tensor in tensors.items():
        together[tensor.untyped_storage().data_ptr()].append(name)
    vectors = []
    for names in together.values():
        start = min(tensors[name].storage_offset() for name in names)
        stop = max(tensors[name].storage_offset() + tensors[name].numel() for name in names)
        vectors.append((names, tensors[names[0]].detach().as_strided((stop - start,), (1,), start)))
    return vectors


def _twin(vector: Tensor) -> Tensor:
    """A vector of the host, of a GPU's one locked in memory: it copies there at its full speed, beside the host."""
    if vector.is_cuda:
        try:
            return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        except RuntimeError:  # there is a limit to what may be locked, and other memory will do
            pass
    return torch.empty(vector.shape, dtype=vector.dtype)
