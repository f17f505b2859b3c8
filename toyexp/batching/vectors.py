"""Vectors with float targets as batches of rows. Batch number k depends only on the seed and on k."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from toyexp.batching.epochs import EpochBatches
from toyexp.interfaces.dataset import Dataset, InputSpec


class VectorDataset(Dataset):
    """Float32 `vectors` [N, n] with `targets` [N, m]; the rows where the mask `held_out` [N] is True are held out."""

    def __init__(self, vectors: np.ndarray, targets: np.ndarray, held_out: np.ndarray, facts: Mapping[str, Any]):
        self.vectors, self.targets, self._held_out, self.vocab = vectors, targets, held_out, targets.shape[1]
        digest = hashlib.sha256(np.ascontiguousarray(vectors).tobytes() + np.ascontiguousarray(targets).tobytes())
        sizes = {"train_vectors": int((~held_out).sum()), "held_out_vectors": int(held_out.sum())}
        self._facts = {**facts, **sizes, "vectors_sha256": digest.hexdigest()}

    def batches(self, context: int, rows: int, seed: int) -> VectorBatches:
        """Return batches of `rows` vectors with their targets."""
        return VectorBatches(self, rows, seed, self._held_out)


class VectorBatches(EpochBatches):
    """Batches of vectors [rows, n], targets [rows, m] and weights [rows]."""

    def __init__(self, data: VectorDataset, rows: int, seed: int, held_out: np.ndarray):
        self._data, self._train, self._held_out = data, np.flatnonzero(~held_out), np.flatnonzero(held_out)
        super().__init__(len(self._train), len(self._held_out), rows, seed)
        self.inputs = {
            "vectors": InputSpec(data.vectors.shape[1:], "float32"),
            "targets": InputSpec(data.targets.shape[1:], "float32"),
            "weights": InputSpec((), "float32"),
        }

    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        rows = (self._held_out if is_held_out else self._train)[items]
        weights = np.ones(len(rows), np.float32)
        return {"vectors": self._data.vectors[rows], "targets": self._data.targets[rows], "weights": weights}
