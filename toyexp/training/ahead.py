"""A run's batches, of which small ones are made for several steps at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from toyexp.base.errors import BadBatch
from toyexp.contract.batch import Batch
from toyexp.contract.dataset import Batches
from toyexp.contract.micro_batches import readied
from toyexp.contract.plan import Plan

MOST, BYTES = 32, 1 << 19  # batches at once, and what they may take


class Ahead:
    """Gives batch k of a stream, which is a function of k alone, so that none depends on when it was made."""

    def __init__(self, batches: Batches, plan: Plan, steps: int):
        self._batches, self._plan, self._steps = batches, plan, steps
        row = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in plan.inputs.values())
        few = min(MOST, BYTES // max(row * plan.rows * plan.accumulate, 1))
        self._count = few if _blocks_are_batches(batches) else 1
        self._first, self._ready = 0, list[Batch]()

    def batch(self, k: int) -> Batch:
        """Batch `k`, counted from 0."""
        if not self._first <= k < self._first + len(self._ready):
            self._first, self._ready = k, [*self._made(k)]
        return self._ready[k - self._first]

    def _made(self, k: int) -> Sequence[Batch]:
        count = min(self._count, self._steps - k)
        block = self._batches.block(k, count) if count > 1 else None
        if block is not None:
            try:
                return readied(self._plan, block, count)
            except BadBatch:  # each is refused, or not, when its turn comes
                self._count = 1
        return [self._batches.batch(k)]


def _blocks_are_batches(batches: Batches) -> bool:
    """Whether what makes blocks knows what makes batches: another `batch`, put over it, is in no block."""
    for kind in type(batches).__mro__:
        if "block" in vars(kind):
            return kind is not Batches and "batch" not in vars(batches)
        if "batch" in vars(kind):
            break
    return False
