"""A stack's step on shapes alone, before there is one: whether it can be computed, and what memory a run takes."""

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
from toyexp_torch.session import places_of
from toyexp_torch.stacks.step import StackedStep, StackedUpdate

RUNS = 2  # that are tried
Frozen = Mapping[str, tuple[Tensor, bool]]  # see StackedStep


def preload() -> None:
    """Imports what PyTorch imports when it first computes on shapes alone, which takes as long as to load PyTorch."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


_known: dict[tuple[int, torch.dtype], tuple[str, int]] = {}  # of plans that are there


def try_step(plan: Plan, dtype: torch.dtype) -> tuple[str, int]:
    """Why the steps of several such runs are no one program, or nothing, and how many bytes a run takes of a stack.

    Those are its rows, and its share of what a step holds when it holds most. What does not train is not counted: runs
    have it in common, or each its own. A step on shapes takes the time of many that compute something, so each plan is
    tried once.
    """
    if not plan.trainable:  # it has no steps
        return "", 0
    key = id(plan), dtype
    if key not in _known:
        frozen, why = _frozen(plan, dtype), ""
        with Held() as held:
            try:
                _take(plan, dtype, frozen)
            except Exception as error:
                told = printable(str(error).strip().partition("\n")[0])
                why = f"model={plan.model.name}: several runs of it cannot be computed at once ({told})"
        _known[key] = why, held.most // RUNS
        weakref.finalize(plan, _known.pop, key, None)
    return _known[key]


def _take(plan: Plan, dtype: torch.dtype, frozen: Frozen) -> None:
    """A step, of tensors without numbers."""
    places, length = places_of(plan)
    flat, grad = (torch.zeros((RUNS, length), dtype=dtype, device="meta") for _ in range(2))
    micro = {
        name: torch.zeros((RUNS, plan.rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in plan.inputs.items()
    }
    micro = {name: x.to(dtype) if x.is_floating_point() else x for name, x in micro.items()}
    update = StackedUpdate(plan, flat, grad, places)
    numbers = [torch.zeros((RUNS, size), device="meta") for size in update.sizes()]
    StackedStep([plan] * RUNS, range(RUNS), flat, grad, places, update, frozen)([micro] * plan.accumulate, numbers)


def _frozen(plan: Plan, dtype: torch.dtype) -> Frozen:
    fixed = (t for t in plan.tensors if not t.trainable)
    return {t.name: (torch.empty(t.shape, dtype=dtype, device="meta"), False) for t in fixed}


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in it and still there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes as ever, and looks at what came of it."""
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return found

    def _note(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._now += size
            self.most = max(self.most, self._now)
            weakref.finalize(memory, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size
