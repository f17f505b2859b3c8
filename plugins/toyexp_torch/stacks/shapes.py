"""Try a stack's training step, to find out whether it works and how much memory a run needs.

Small models take the step on the CPU. Others take it on meta tensors, which have shapes but no values: for these,
PyTorch first imports torch._dynamo, which takes as long as importing PyTorch itself.
"""

from __future__ import annotations

import math
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
SMALL = 1e11  # floating-point operations of a trial step that the CPU takes in less time than the import
Frozen = Mapping[str, tuple[Tensor, bool]]  # the argument `frozen` of StackedStep


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
        frozen = {t.name: (torch.empty(t.shape, dtype=dtype, device=_trial_device(plan)), False) for t in fixed}
        with MemoryCounter() as memory:
            try:
                _run_step(plan, dtype, frozen)
            except Exception as error:
                cause = printable(str(error).strip().partition("\n")[0])
                why = f"model={plan.model.name}: cannot be trained in a stack ({cause})"
        _results[key] = why, memory.peak // RUNS
        weakref.finalize(plan, _results.pop, key, None)
    return _results[key]


def _trial_device(plan: Plan) -> str:
    """Return the device of the trial step. Each parameter is assumed to take 6 operations per number of the inputs."""
    numbers = plan.rows * max((math.prod(spec.shape) for spec in plan.inputs.values()), default=1)
    return "cpu" if 6 * RUNS * numbers * plan.model.parameters() < SMALL else "meta"


def _run_step(plan: Plan, dtype: torch.dtype, frozen: Frozen) -> None:
    slices, length = flat_layout(plan)
    device = _trial_device(plan)
    flat, grad = (torch.zeros((RUNS, length), dtype=dtype, device=device) for _ in range(2))
    micro = {
        name: torch.zeros((RUNS, plan.rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=device)
        for name, spec in plan.inputs.items()
    }
    micro = {name: x.to(dtype) if x.is_floating_point() else x for name, x in micro.items()}
    update = StackedUpdate(plan, flat, grad, slices)
    numbers = [torch.full((RUNS, size), 0.5, device=device) for size in update.sizes()]  # rules divide by some of them
    StackedStep([plan] * RUNS, range(RUNS), flat, grad, slices, update, frozen)([micro] * plan.accumulate, numbers)


class MemoryCounter(TorchDispatchMode):
    """Context manager that counts the bytes of all tensors which were created inside it and still exist.

    `peak` is the largest number so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._current = 0
        self._alive: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, which takes a second, to keep it out of this class."""
        return False

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
