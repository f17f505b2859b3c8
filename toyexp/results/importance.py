"""Compute how much each setting of a sweep or search matters for its metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS_PER_COLUMN = 2  # points that are needed for each column of the model
MIN_PREDICTED = 0.2  # share of the variance of held-out points that the model must explain
MAX_COLUMNS = 200  # limit of columns of a model with products
Array = NDArray[np.float64]


def compute_shares(settings: Mapping[str, Sequence[Any]], scores: Sequence[float]) -> tuple[dict[str, float], str]:
    """Return a dict with the share of each setting in the differences between the scores, and an empty text.

    The shares have the sum 1. If they cannot be computed, the dict is empty and the text says why. `settings` maps each
    key to its values, one for each point (runs that differ only in their seed, or a trial). `scores` has one number for
    each point.

    A linear model predicts the rank of a point's score. Its inputs are the ranks and squared ranks of numeric settings,
    and 0/1 indicators of the values of other settings. Products of two settings are inputs too if they improve the
    prediction. If a setting is left out, the unexplained variance increases. The setting's share is proportional to
    this increase.
    """
    count = len(scores)
    columns = {key: _columns(values) for key, values in settings.items() if len(set(map(str, values))) > 1}
    if not columns:
        return {}, "no setting has several values"
    if not (target := _ranks(scores)).any():
        return {}, "all points have the same score"
    terms = {frozenset([key]): matrix for key, (matrix, _) in columns.items()}
    joint = _matrix(terms.values(), count)
    if count < (least := POINTS_PER_COLUMN * joint.shape[1]):
        return {}, f"{count} points are too few, at least {least} are needed"
    if np.linalg.matrix_rank(joint) < joint.shape[1]:
        return {}, f"some of {', '.join(columns)} change together and cannot be told apart"
    error, unexplained = _fit(joint, target)
    products = {
        frozenset([a, b]): np.einsum("na,nb->nab", columns[a][1], columns[b][1]).reshape(count, -1)
        for a, b in combinations(columns, 2)
    }
    larger = _matrix([joint, *products.values()], count)[:, 1:]
    if (
        POINTS_PER_COLUMN * larger.shape[1] <= count
        and larger.shape[1] <= MAX_COLUMNS
        and (fit := _fit(larger, target))[0] < error
    ):
        (error, unexplained), terms = fit, {**terms, **products}
    if error > 1 - MIN_PREDICTED:
        return {}, f"the settings of {count} points do not predict the score: noise, or too few points"
    gains = {}
    for key in columns:
        reduced = _matrix((matrix for keys, matrix in terms.items() if key not in keys), count)
        gains[key] = max(_fit(reduced, target)[1] - unexplained, 0.0)
    total = sum(gains.values()) or 1.0
    return {key: gain / total for key, gain in sorted(gains.items(), key=lambda pair: -pair[1])}, ""


def _ranks(values: Sequence[float]) -> Array:
    """Return ranks with mean 0 and variance 1; equal numbers get their mean rank."""
    _, positions, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[positions]
    return np.asarray((ranks - ranks.mean()) / (ranks.std() or 1.0))


def _columns(values: Sequence[Any]) -> tuple[Array, Array]:
    """Encode one setting's values as two arrays [points, columns] of inputs for the linear model of the metric.

    The first array is for the setting's own effect. The second, smaller one is for its interactions: the caller
    multiplies its columns with those of another setting's second array.
    """
    try:
        ranks = _ranks([float(value) for value in values])
    except (TypeError, ValueError):
        names = np.array(list(map(str, values)))
        indicators = (names[:, None] == np.unique(names)[1:]).astype(float)
        return indicators, indicators - indicators.mean(0)
    columns = np.stack([ranks, ranks**2], 1)[:, : len(np.unique(ranks)) - 1]
    return columns, columns[:, :1]


def _matrix(columns: Iterable[Array], count: int) -> Array:
    return np.hstack([np.ones((count, 1)), *columns])


def _fit(matrix: Array, target: Array) -> tuple[float, float]:
    """Fit `target` by least squares; return the mean squared leave-one-out error and the residuals' variance."""
    u, sizes, _ = np.linalg.svd(matrix, full_matrices=False)
    u = u[:, sizes > 1e-9 * sizes[0]]
    residuals = target - u @ (u.T @ target)
    left_out = residuals / np.maximum(1 - (u**2).sum(1), 1e-3)
    return float((left_out**2).mean()), float((residuals**2).sum() / (len(target) - u.shape[1]))
