"""A session's state on the host: each of the device's vectors in one piece, whatever tensors lie in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor


class HostCopy(dict[str, np.ndarray]):
    """A snapshot's arrays by name. They are views of vectors that stand as those of the device do."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._twins = {key: _twin(vector) for key, vector in _vectors(tensors.values()).items()}
        super().__init__({name: _like(t, self._twins[_key(t)]).numpy() for name, t in tensors.items()})

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it was made for these very tensors' vectors."""
        return self._twins.keys() == _vectors(tensors.values()).keys()

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies them here. From a GPU all copies are queued, and there is one wait at the end."""
        vectors = _vectors(tensors.values())
        for key, vector in vectors.items():
            self._twins[key].copy_(vector, non_blocking=vector.is_cuda)
        for device in {vector.device for vector in vectors.values()}:
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


Key = tuple[int, int, torch.dtype]


def _key(tensor: Tensor) -> Key:
    """Which of the device's vectors it lies in."""
    memory = tensor.untyped_storage()
    return memory.data_ptr(), memory.nbytes(), tensor.dtype


def _vectors(tensors: Iterable[Tensor]) -> dict[Key, Tensor]:
    """What they lie in, each as one vector of all its numbers."""
    found = {_key(t): t.detach() for t in tensors}
    return {key: t.as_strided((key[1] // t.element_size(),), (1,), 0) for key, t in found.items()}


def _like(tensor: Tensor, twin: Tensor) -> Tensor:
    """The part of a twin that stands where the tensor stands in its vector."""
    return twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _twin(vector: Tensor) -> Tensor:
    """A vector of the host, of a GPU's one locked in memory: it copies there at its full speed, beside the host."""
    if vector.is_cuda:
        try:
            return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        except RuntimeError:  # there is a limit to what may be locked, and other memory will do
            pass
    return torch.empty(vector.shape, dtype=vector.dtype)
