"""A session's state on the host: what lies together on the device in one piece, whatever tensors lie in it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class HostCopy(dict[str, np.ndarray]):
    """A snapshot's arrays by name. They are views of vectors that stand as those of the device do."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        places = _places(tensors)
        self._twins = {stretch: _twin(stretch.of(tensors[name])) for name, stretch in places.items()}
        super().__init__({n: stretch.part(tensors[n], self._twins[stretch]).numpy() for n, stretch in places.items()})

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it was made for these very tensors' memory."""
        return self._twins.keys() == {*_places(tensors).values()}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies them here. From a GPU all copies are queued, and there is one wait at the end."""
        found = {stretch: stretch.of(tensors[name]) for name, stretch in _places(tensors).items()}
        for stretch, vector in found.items():
            self._twins[stretch].copy_(vector, non_blocking=vector.is_cuda)
        for device in {vector.device for vector in found.values()}:
            wait_for_copies(device)


def put_on_host(arrays: dict[str, np.ndarray], name: str, values: Tensor) -> None:
    """Copies values into the array of that name, which is made where there is none; see `wait_for_copies`."""
    if name not in arrays:
        arrays[name] = _twin(values).numpy()
    torch.from_numpy(arrays[name]).copy_(values.detach(), non_blocking=values.is_cuda)


def wait_for_copies(device: torch.device) -> None:
    """Until what was queued to be copied from a GPU is here."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class _Stretch(NamedTuple):
    """A part of a device's memory."""

    memory: int  # where the whole of it begins
    dtype: torch.dtype
    start: int  # numbers from there on
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch, in which the tensor lies, as one vector."""
        return tensor.detach().as_strided((self.length,), (1,), self.start)

    def part(self, tensor: Tensor, twin: Tensor) -> Tensor:
        """Where a twin of it has what the tensor has there."""
        return twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - self.start)


def _places(tensors: Mapping[str, Tensor]) -> dict[str, _Stretch]:
    """In which stretch each lies: those of one memory in one, but where more than half of that is another's."""
    together = defaultdict[tuple[int, torch.dtype], list[str]](list)
    for name, tensor in tensors.items():
        together[tensor.untyped_storage().data_ptr(), tensor.dtype].append(name)
    found: dict[str, _Stretch] = {}
    for (memory, dtype), names in together.items():
        ends = {name: _ends(tensors[name]) for name in names}
        start, end = min(first for first, _ in ends.values()), max(last for _, last in ends.values())
        if end - start <= 2 * sum(tensors[name].numel() for name in names):
            ends = dict.fromkeys(names, (start, end))
        found |= {name: _Stretch(memory, dtype, first, last - first) for name, (first, last) in ends.items()}
    return found


def _ends(tensor: Tensor) -> tuple[int, int]:
    """Its first number in its memory, and the one behind its last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first, first + (int(reach) + 1 if math.prod(tensor.shape) else 0)


def _twin(vector: Tensor) -> Tensor:
    """A vector of the host, of a GPU's one locked in memory: it copies there at its full speed, beside the host."""
    if vector.is_cuda:
        try:
            return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        except RuntimeError:  # there is a limit to what may be locked, and other memory will do
            pass
    return torch.empty(vector.shape, dtype=vector.dtype)
