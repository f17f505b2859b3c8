"""Vectors with float targets as batches of rows. Batch number k depends only on the seed and on k."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from toyexp.base.random import stream
from toyexp.interfaces.dataset import Batch, Batches, Dataset, InputSpec


class VectorDataset(Dataset):
    """Float32 `vectors` [N, n] with `targets` [N, m]; the rows where the mask `held_out` [N] is True are held out."""

    def __init__(self, vectors: np.ndarray, targets: np.ndarray, held_out: np.ndarray, facts: Mapping[str, Any]):
        self.vectors, self.targets, self._held_out, self.vocab = vectors, targets, held_out, targets.shape[1]
        digest = hashlib.sha256(np.ascontiguousarray(vectors).tobytes() + np.ascontiguousarray(targets).tobytes())
        self._facts = {
            **facts,
            "train_vectors": int((~held_out).sum()),
            "held_out_vectors": int(held_out.sum()),
            "vectors_sha256": digest.hexdigest(),
        }

    def describe(self) -> dict[str, Any]:
        """Return the numbers of vectors and a digest of all values."""
        return self._facts

    def batches(self, context: int, rows: int, seed: int) -> VectorBatches:
        """Return batches of `rows` vectors with their targets."""
        return VectorBatches(self, rows, seed, self._held_out)


class VectorBatches(Batches):
    """Batches that contain each training vector once per epoch, in an order that depends on the seed and the epoch."""

    def __init__(self, data: VectorDataset, rows: int, seed: int, held_out: np.ndarray):
        self._data, self._rows, self._seed = data, rows, seed
        self._train, self._held_out = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        self.rows_per_epoch = len(self._train)
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self.inputs = {
            "vectors": InputSpec(data.vectors.shape[1:], "float32"),
            "targets": InputSpec(data.targets.shape[1:], "float32"),
            "weights": InputSpec((), "float32"),
        }

    def _epoch_order(self, epoch: int) -> np.ndarray:
        return np.argsort(stream(self._seed, "data-order", epoch).random_raw(len(self._train)), kind="stable")

    def batch(self, k: int) -> Batch:
        """Return training batch `k`: vectors [rows, n], targets [rows, m] and weights [rows]."""
        places = (divmod(i, len(self._train)) for i in range(k * self._rows, (k + 1) * self._rows))
        return self._take(self._train[[self._order(epoch)[place] for epoch, place in places]])

    def held_out(self) -> Sequence[Batch]:
        """Return all held-out vectors. Rows that pad the last batch have weight 0."""
        batches = []
        for first in range(0, len(self._held_out), self._rows):
            part = self._held_out[first : first + self._rows]
            batch = self._take(np.resize(part, self._rows))
            batch["weights"][len(part) :] = 0
            batches.append(batch)
        return batches

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        weights = np.ones(len(rows), np.float32)
        return {"vectors": self._data.vectors[rows], "targets": self._data.targets[rows], "weights": weights}
