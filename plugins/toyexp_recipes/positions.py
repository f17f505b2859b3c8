"""Position embeddings of a ViT for another image size, interpolated from those of a base."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from toyexp import FromGGUF


@dataclass(frozen=True)
class InterpolatedPositions(FromGGUF):
    """Position embeddings [1 + patches, d], interpolated from those in a model file; the class token's are kept."""

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return the embeddings in float32. The patches of the file and those of the result form squares."""
        stored = super().draw(shape, seed, name)
        old, new = (math.isqrt(rows - 1) for rows in (len(stored), shape[0]))
        weights = bicubic_weights(old, new)
        grid = stored[1:].reshape(old, old, -1).astype(np.float64)
        patches = np.einsum("ia,jb,abd->ijd", weights, weights, grid, optimize=True).reshape(new * new, -1)
        return np.concatenate((stored[:1], patches.astype(np.float32)))


def bicubic_weights(old: int, new: int) -> np.ndarray:
    """Return the weights [new, old] by which bicubic interpolation computes `new` points of `old` ones.

    The kernel is that of Keys (1981) with a = -0.75. Both rows of points cover the same interval, with each point in
    the centre of its cell; points outside have the value of the nearest one.
    """
    weights, rows = np.zeros((new, old)), np.arange(new)
    centres = (rows + 0.5) * old / new - 0.5
    for offset in (-1, 0, 1, 2):
        points = np.floor(centres).astype(int) + offset
        t = np.abs(centres - points)
        values = np.where(t <= 1, (1.25 * t - 2.25) * t * t + 1, ((-0.75 * t + 3.75) * t - 6) * t + 3)
        weights[rows, points.clip(0, old - 1)] += values
    return weights
