"""How much each setting of a sweep or search matters for its score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS = 2  # that a coefficient of the model needs at least
PREDICTED = 0.2  # share of the variance that the model must predict of points it was not fitted to
COLUMNS = 200  # of a model with products, at most
Array = NDArray[np.float64]


def importance(settings: Mapping[str, Sequence[Any]], scores: Sequence[float]) -> tuple[dict[str, float], str]:
    """Return the share of each setting in the order of the points, or no shares and the reason.

    `settings` has a value for each point. A linear model predicts the rank of a point's score, so neither outliers nor
    the scale count: from a number's rank and its square, from each name, and from products of two settings if that
    predicts better. A setting's share is the variance that is unexplained without it.
    """
    count = len(scores)
    columns = {key: _columns(values) for key, values in settings.items() if len(set(map(str, values))) > 1}
    if not columns:
        return {}, "no setting has several values"
    if not (target := _ranks(scores)).any():
        return {}, "all points have the same score"
    terms = {frozenset([key]): some for key, (some, _) in columns.items()}
    joint = _matrix(terms.values(), count)
    if count < (least := POINTS * joint.shape[1]):
        return {}, f"{count} points are too few, at least {least} are needed"
    if np.linalg.matrix_rank(joint) < joint.shape[1]:
        return {}, f"some of {', '.join(columns)} change together and cannot be told apart"
    error, unexplained = _fit(joint, target)
    products = {
        frozenset([a, b]): np.einsum("na,nb->nab", columns[a][1], columns[b][1]).reshape(count, -1)
        for a, b in combinations(columns, 2)
    }
    larger = _matrix([joint, *products.values()], count)[:, 1:]
    if POINTS * larger.shape[1] <= count and larger.shape[1] <= COLUMNS and (fit := _fit(larger, target))[0] < error:
        (error, unexplained), terms = fit, {**terms, **products}
    if error > 1 - PREDICTED:
        return {}, f"the settings of {count} points do not predict the score: noise, or too few points"
    gains = {}
    for key in columns:
        without = _matrix((some for keys, some in terms.items() if key not in keys), count)
        gains[key] = max(_fit(without, target)[1] - unexplained, 0.0)
    total = sum(gains.values()) or 1.0
    return {key: gain / total for key, gain in sorted(gains.items(), key=lambda pair: -pair[1])}, ""


def _ranks(values: Sequence[float]) -> Array:
    """Return the ranks of numbers, of equal ones their mean, with mean 0 and variance 1."""
    _, places, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return np.asarray((ranks - ranks.mean()) / (ranks.std() or 1.0))


def _columns(values: Sequence[Any]) -> tuple[Array, Array]:
    """Return a setting's columns of the model, and those of them that its products with other settings have."""
    try:
        ranks = _ranks([float(value) for value in values])
    except (TypeError, ValueError):
        words = np.array(list(map(str, values)))
        each = (words[:, None] == np.unique(words)[1:]).astype(float)
        return each, each - each.mean(0)
    found = np.stack([ranks, ranks**2], 1)[:, : len(np.unique(ranks)) - 1]
    return found, found[:, :1]


def _matrix(columns: Iterable[Array], count: int) -> Array:
    return np.hstack([np.ones((count, 1)), *columns])


def _fit(matrix: Array, target: Array) -> tuple[float, float]:
    """Return the mean squared error of points that are left out one at a time, and the variance of the residuals."""
    u, sizes, _ = np.linalg.svd(matrix, full_matrices=False)
    u = u[:, sizes > 1e-9 * sizes[0]]
    residuals = target - u @ (u.T @ target)
    left_out = residuals / np.maximum(1 - (u**2).sum(1), 1e-3)
    return float((left_out**2).mean()), float((residuals**2).sum() / (len(target) - u.shape[1]))
