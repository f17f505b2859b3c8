"""Dropout masks beside the batches, the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from toyexp.base.random import stream
from toyexp.contract.batch import Batch
from toyexp.contract.dataset import Batches
from toyexp.contract.plan import Plan


class Dropout(Batches):
    """Batches with the masks of a plan's adapters: what x is to be multiplied by, less one.

    Inverted dropout (Srivastava et al. 2014): a number is hidden, x + x * -1, or scaled up so that the mean stays.
    Drawn on the host as a function of (seed, adapter, k), so every engine hides the same. Held-out batches have no
    masks, which means zeros: nothing is hidden.
    """

    def __init__(self, batches: Batches, plan: Plan):
        self._batches, self._plan = batches, plan
        self.inputs, self.facts, self.left_out = plan.inputs, batches.facts, batches.left_out

    def batch(self, k: int) -> Batch:
        """Training batch `k` and its masks, each [rows, *spec.shape]."""
        batch = self._batches.batch(k)
        rows = len(batch["targets"])
        masks = {a.mask: self._mask(a.mask, a.dropout, rows, k) for a in self._plan.drops}
        return {**batch, **masks}

    def _mask(self, name: str, share: float, rows: int, k: int) -> np.ndarray:
        shape = (rows, *self.inputs[name].shape)
        count, hidden = math.prod(shape), round(share * 65536)  # 16 random bits decide about a number
        bits = stream(self._plan.seed, name, k).random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        scaled_up = hidden / (65536 - hidden)
        return np.where(bits < hidden, np.float32(-1), np.float32(scaled_up)).reshape(shape)

    def held_out(self) -> Sequence[Batch]:
        """The held-out batches as they are."""
        return self._batches.held_out()
