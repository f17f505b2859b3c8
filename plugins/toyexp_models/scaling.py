"""Rope's scaling in the words of transformers, which computes frequencies from a few parameters."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from toyexp import Rotary, UserError

EXACT = 1e-5  # of a frequency: files have them from float32 arithmetic
ORIGINAL = 8192  # the context that Llama 3's factors go out from


def rope_scaling(rotary: Rotary, size: int, context: int) -> dict[str, Any] | None:
    """`rope_scaling` in config.json, for heads of `size` features; UserError for what these parameters cannot say."""
    factors = np.array(rotary.factors or [1.0])
    if np.ptp(factors) == 0:  # all pairs turn so much slower
        factor = rotary.scale * float(factors[0])
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if rotary.scale != 1:
        raise UserError("rope_factors together with rope_scale: transformers has the one or the other")
    turns = np.array([rotary.base ** (-2 * i / size) for i in range(size // 2)]) / (2 * math.pi)  # a position
    for low, high, original in [(1.0, 4.0, ORIGINAL), *_guesses(turns, factors, context)]:
        parameters = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        if 0 < low < high and np.allclose(llama3(turns, parameters), factors, rtol=EXACT, atol=0):
            return parameters
    raise UserError("rope_factors: no parameters of transformers' llama3 scaling give these factors")


def llama3(turns: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    """By how much slower each pair turns, from its turns a position: slow ones by `factor`, fast ones not at all."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = (parameters["original_max_position_embeddings"] * turns - low) / (high - low)
    share = share.clip(0, 1)
    return 1 / ((1 - share) / parameters["factor"] + share)


def _guesses(turns: np.ndarray, factors: np.ndarray, context: int) -> list[tuple[float, float, int]]:
    """Parameters low, high and original that may give these factors.

    Between the fast pairs and the slow ones 1 / factor lies on a line over the turns; `original` is its unit.
    """
    original = max(1, int(context / factors.max()))
    speed = 1 / factors
    between = (factors > 1) & (factors < factors.max())
    first, last = np.flatnonzero(factors > 1)[:1] - 1, np.flatnonzero(factors == factors.max())[:1]
    points = [i for i in (*first, *np.flatnonzero(between), *last) if i >= 0]
    pairs = [*itertools.combinations(points, 2)]
    lines = [np.polyfit(turns[list(pair)], speed[list(pair)], 1) for pair in (pairs[:3] if len(points) < 4 else [])]
    if between.sum() > 1:
        lines.insert(0, np.polyfit(turns[between], speed[between], 1))
    ends = [((speed.min() - offset) / slope, (1 - offset) / slope) for slope, offset in lines if slope > 0]
    return [(float(low * original), float(high * original), original) for low, high in ends]
