"""What an optimiser's update is written in: arithmetic on whole tensors, which each engine implements once.

A tensor is whatever the engine works with, and has a `shape`. Where two shapes differ, the second one's axes are
missing in front or 1, and it is repeated over the first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from toyexp.contract.ops import Tensor

Number = Tensor | float  # one of the step's numbers, or a constant of the formula


class Arithmetic(ABC):
    """One engine's implementation."""

    @abstractmethod
    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""

    @abstractmethod
    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b."""

    @abstractmethod
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b, number by number."""

    @abstractmethod
    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b, number by number."""

    @abstractmethod
    def scale(self, x: Tensor, factor: Number) -> Tensor:
        """x * factor."""

    @abstractmethod
    def shift(self, x: Tensor, amount: Number) -> Tensor:
        """x + amount."""

    @abstractmethod
    def sqrt(self, x: Tensor) -> Tensor:
        """The square root."""

    @abstractmethod
    def sign(self, x: Tensor) -> Tensor:
        """-1, 0 or 1."""

    @abstractmethod
    def at_least(self, x: Tensor, low: float) -> Tensor:
        """x, and `low` where it is less."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """The sum of all numbers, [1]."""

    @abstractmethod
    def sum_last(self, x: Tensor) -> Tensor:
        """x [..., n] summed over its last axis -> [..., 1]."""

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a [n, k] times b [m, k] transposed -> [n, m]."""

    @abstractmethod
    def transpose(self, x: Tensor) -> Tensor:
        """x [n, m] -> [m, n]."""

    # -- composed of those ---------------------------------------------------------------------------------------

    def square(self, x: Tensor) -> Tensor:
        """x * x."""
        return self.mul(x, x)

    def mean(self, x: Tensor) -> Tensor:
        """The mean of all numbers, [1]."""
        return self.scale(self.sum(x), 1 / math.prod(x.shape))

    def mean_last(self, x: Tensor) -> Tensor:
        """The mean over the last axis, [..., 1]."""
        return self.scale(self.sum_last(x), 1 / x.shape[-1])

    def blend(self, new: Tensor, old: Tensor, share: Number) -> Tensor:
        """share * old + (1 - share) * new: a running mean's next value."""
        return self.add(new, self.scale(self.sub(old, new), share))
