"""Try a stack's training step on meta tensors, to find out whether it works and how much memory a run needs."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toyexp import Plan, printable
from toyexp_torch.session import flat_layout
from toyexp_torch.stacks.step import StackedStep, StackedUpdate

RUNS = 2  # number of runs in the trial step
Frozen = Mapping[str, tuple[Tensor, bool]]  # the argument `frozen` of StackedStep


def preload() -> None:
    """Import the modules that PyTorch needs for its first step on meta tensors.

    Importing them takes as long as importing PyTorch itself.
    """
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


_results: dict[tuple[int, torch.dtype], tuple[str, int]] = {}  # results of `try_step`, by id of the plan and dtype


def try_step(plan: Plan, dtype: torch.dtype) -> tuple[str, int]:
    """Return why runs of this plan cannot be stacked (empty if they can), and the bytes of memory that each run needs.

    The bytes include weights, gradients, optimiser state, and the run's share of a step's peak memory. They exclude
    frozen tensors, since runs may share them. This trial takes as long as many real steps, so its result is cached.
    """
    if not plan.trainable:  # such a run takes no steps
        return "", 0
    key = id(plan), dtype
    if key not in _results:
        fixed, why = (t for t in plan.tensors if not t.trainable), ""
        frozen = {t.name: (torch.empty(t.shape, dtype=dtype, device="meta"), False) for t in fixed}
        with MemoryCounter() as memory:
            try:
                _run_step(plan, dtype, frozen)
            except Exception as error:
                cause = printable(str(error).strip().partition("\n")[0])
                why = f"model={plan.model.name}: cannot be trained in a stack ({cause})"
        _results[key] = why, memory.peak // RUNS
        weakref.finalize(plan, _results.pop, key, None)
    return _results[key]


def _run_step(plan: Plan, dtype: torch.dtype, frozen: Frozen) -> None:
    slices, length = flat_layout(plan)
    flat, grad = (torch.zeros((RUNS, length), dtype=dtype, device="meta") for _ in range(2))
    micro = {
        name: torch.zeros((RUNS, plan.rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in plan.inputs.items()
    }
    micro = {name: x.to(dtype) if x.is_floating_point() else x for name, x in micro.items()}
    update = StackedUpdate(plan, flat, grad, slices)
    numbers = [torch.zeros((RUNS, size), device="meta") for size in update.sizes()]
    StackedStep([plan] * RUNS, range(RUNS), flat, grad, slices, update, frozen)([micro] * plan.accumulate, numbers)


class MemoryCounter(TorchDispatchMode):
    """Context manager that counts the bytes of all tensors which were created inside it and still exist.

    `peak` is the largest number so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._current = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch operation, count the memory of its results, and return them."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self._current += size
            self.peak = max(self.peak, self._current)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._current -= size
