"""Activations computed twice, so that only one block's are held at a time.

After Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def computed_twice(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), which the backward pass computes again instead of keeping what it needs of it.

    As torch.utils.checkpoint does it with use_reentrant=False, but for functions that draw no random numbers and save
    the same tensors in the same order every time: with so much less to keep account of, half of its cost is gone.
    """
    if torch.compiler.is_compiling():  # the compiler knows its own
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    rounding = _autocast(x.device.type)
    shapes, found = list[torch.Size](), dict[int, Tensor]()

    def forget(tensor: Tensor) -> Any:
        shapes.append(tensor.shape)
        return len(shapes) - 1

    def note(tensor: Tensor) -> None:
        found[len(found)] = tensor.detach()

    def find(place: Any) -> Tensor:
        if place not in found:
            found.clear()
            with torch.enable_grad(), rounding(), saved_tensors_hooks(note, found.__getitem__):
                function(x.detach().requires_grad_(x.requires_grad))
            if [tensor.shape for tensor in found.values()] != shapes:
                raise RuntimeError("a block that is called again computes something else")
        return found.pop(place)

    with saved_tensors_hooks(forget, find):
        return function(x)


def _autocast(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What brings back the present rounding, which the backward pass is outside of."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), cache_enabled=False)
