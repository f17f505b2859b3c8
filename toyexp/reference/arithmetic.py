"""The arithmetic of optimisers in numpy, in whatever precision the arrays have: the ruler, and any numpy engine's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from toyexp.contract.arithmetic import Arithmetic
from toyexp.contract.optimiser import Group

Array = np.ndarray


class NumpyArithmetic(Arithmetic):
    """On arrays; a number is a Python float."""

    def sqrt(self, x: Array) -> Array:
        return np.sqrt(x)

    def sign(self, x: Array) -> Array:
        return np.sign(x)

    def at_least(self, x: Array, low: float) -> Array:
        return np.maximum(x, low)

    def sum(self, x: Array) -> Array:
        return x.sum().reshape(1)

    def sum_last(self, x: Array) -> Array:
        return x.sum(-1, keepdims=True)


def updated(
    group: Group, numbers: Array, w: Array, g: Array, state: Mapping[str, Array]
) -> tuple[Array, Mapping[str, Array]]:
    """One tensor of `group` and its state after a step, by the rule's own formula."""
    n = dict(zip(group.rule.names(), map(float, numbers), strict=True))
    return group.rule.update(NumpyArithmetic(), w, g, state, n)
