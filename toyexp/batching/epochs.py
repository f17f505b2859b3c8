"""Batches that read each item of the training data once per epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from toyexp.base.random import stream
from toyexp.interfaces.dataset import Batch, Batches


class EpochBatches(Batches):
    """Batches with each of `count` items once per epoch, in an order that depends only on the seed and the epoch.

    A batch has `rows` rows, each of which is an item; an item may also be several rows, `rows_per_item`. Evaluations
    read at most `limit` of the `held_out_count` held-out items, evenly spread.
    """

    def __init__(
        self, count: int, held_out_count: int, rows: int, seed: int, limit: int | None = None, rows_per_item: int = 1
    ):
        self._count, self._seed, self._items, self._rows_per_item = count, seed, rows // rows_per_item, rows_per_item
        self._held_out_count, self._limit = held_out_count, held_out_count if limit is None else limit
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self.rows_per_epoch = count * rows_per_item

    @abstractmethod
    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        """Return a batch of training items, as `_epoch_order` names them, or of held-out items by their numbers."""

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the items of an epoch in the order in which they are read."""
        return np.argsort(stream(self._seed, "data-order", epoch).random_raw(self._count), kind="stable")

    def batch(self, k: int) -> Batch:
        """Return training batch `k`."""
        return self._take_next(k, 1)

    def block(self, first: int, count: int) -> Batch:
        """Return `count` batches, from batch `first` on, as one batch with all their rows."""
        return self._take_next(first, count)

    def _take_next(self, first: int, count: int) -> dict[str, np.ndarray]:
        number, end = first * self._items, (first + count) * self._items
        items: list[np.ndarray] = []
        while number < end:  # a batch may span two epochs, or more of little data
            epoch, position = divmod(number, self._count)
            items.append(self._order(epoch)[position : position + end - number])
            number += len(items[-1])
        return self._take(np.concatenate(items), False)

    def held_out(self) -> Sequence[Batch]:
        """Return the batches of held-out items. Rows that pad the last batch have weight 0."""
        count = min(self._held_out_count, self._limit)
        chosen = np.arange(count) * self._held_out_count // max(count, 1)
        batches = []
        for first in range(0, count, self._items):
            part = chosen[first : first + self._items]
            batch = self._take(np.resize(part, self._items), True)  # repeated items fill the batch
            batch["weights"][len(part) * self._rows_per_item :] = 0
            batches.append(batch)
        return batches
