"""Tensor operations for the update formulas of optimisers; each engine implements them for its own tensors.

A tensor is an object of the engine, such as a torch.Tensor, with a `shape`. In an operation on two tensors the second
broadcasts to the shape of the first: the second may lack leading axes, and its other axes may have size 1. The default
methods use Python's operators; an engine whose tensors lack these operators overrides all methods.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NoReturn

from toyexp.base.errors import UserError
from toyexp.interfaces.ops import Tensor, broadcasts

Number = Tensor | float  # a scalar of the step, such as lr, or a constant of the formula


class Arithmetic(ABC):
    """Base class of the tensor operations that an engine provides to update formulas."""

    plugin_kind: ClassVar[str] = "engine"  # kind of plugin that error messages name

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a + b."""
        return a + b

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a - b."""
        return a - b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a * b, elementwise."""
        return a * b

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a / b, elementwise."""
        return a / b

    def scale(self, x: Tensor, factor: Number) -> Tensor:
        """Return x * factor."""
        return x * factor

    def shift(self, x: Tensor, amount: Number) -> Tensor:
        """Return x + amount."""
        return x + amount

    @abstractmethod
    def sqrt(self, x: Tensor) -> Tensor:
        """Return the square root, elementwise."""

    @abstractmethod
    def sign(self, x: Tensor) -> Tensor:
        """Return -1, 0 or 1, elementwise."""

    @abstractmethod
    def at_least(self, x: Tensor, low: float) -> Tensor:
        """Return max(x, low), elementwise."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all elements as a tensor of shape [1]."""

    @abstractmethod
    def sum_last(self, x: Tensor) -> Tensor:
        """Return the sum over the last axis: x [..., n] -> [..., 1]."""

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of a [n, k] and the transpose of b [m, k] -> [n, m]."""
        return a @ b.T

    def transpose(self, x: Tensor) -> Tensor:
        """Return x [n, m] transposed -> [m, n]."""
        return x.T

    # -- composed operations -------------------------------------------------------------------------------------

    def square(self, x: Tensor) -> Tensor:
        """Return x * x."""
        return self.mul(x, x)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of all elements as a tensor of shape [1]."""
        return self.scale(self.sum(x), 1 / math.prod(x.shape))

    def mean_last(self, x: Tensor) -> Tensor:
        """Return the mean over the last axis: x [..., n] -> [..., 1]."""
        return self.scale(self.sum_last(x), 1 / x.shape[-1])

    def blend(self, new: Tensor, old: Tensor, share: Number) -> Tensor:
        """Return share * old + (1 - share) * new, the next value of an exponential moving average."""
        return self.add(new, self.scale(self.sub(old, new), share))


def is_shape(sizes: Any) -> bool:
    """Return True for a tuple or list of one or more positive integers."""
    is_list = isinstance(sizes, tuple | list) and len(sizes) > 0
    return is_list and all(isinstance(n, Integral) and int(n) > 0 for n in sizes)


@dataclass(frozen=True, eq=False)
class Shaped:
    """A placeholder tensor that has a shape and no values."""

    shape: tuple[int, ...]

    def _operator(self, *_: object) -> NoReturn:
        raise UserError("an operator was used on a tensor; use ops instead, such as ops.add(a, ops.scale(b, 0.1))")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __neg__ = __pow__ = __matmul__ = __getitem__ = __float__ = __int__ = __bool__ = __len__ = __iter__ = _operator


class Shapes(Arithmetic):
    """Arithmetic on shapes without values, to check the formula of an update rule.

    A method raises UserError if some engine cannot run its operation. If `elementwise` is True, a method whose
    operation reads a whole tensor, such as a sum or a transpose, raises UserError, too.
    """

    def __init__(self, elementwise: bool = False):
        self._elementwise = elementwise

    def _broadcast_result(self, a: Shaped, b: Shaped) -> Shaped:
        if not isinstance(a, Shaped) or not isinstance(b, Shaped):
            raise UserError("update() passes a number to an op that takes tensors; use ops.shift or ops.scale")
        if not broadcasts(b.shape, a.shape):
            raise UserError(f"update() cannot broadcast a tensor of shape {list(b.shape)} to {list(a.shape)}")
        return Shaped(a.shape)

    def _elementwise_result(self, x: Shaped, number: Tensor = 1.0) -> Shaped:
        return self._broadcast_result(x, Shaped((1,)) if isinstance(number, Real) else number)

    def _whole_tensor_result(self, x: Shaped, *shape: int) -> Shaped:
        if self._elementwise:
            raise UserError("update() reads a whole tensor, such as its sum; remove elementwise = True from the class")
        return Shaped(shape)

    add = sub = mul = div = _broadcast_result
    scale = shift = sqrt = sign = at_least = _elementwise_result  # type: ignore[assignment] # parameter names differ

    def sum(self, x: Shaped) -> Shaped:
        """Return a placeholder of shape [1]."""
        return self._whole_tensor_result(x, 1)

    def sum_last(self, x: Shaped) -> Shaped:
        """Return a placeholder of shape [..., 1] for x [..., n]."""
        return self._whole_tensor_result(x, *x.shape[:-1], 1)

    def matmul(self, a: Shaped, b: Shaped) -> Shaped:
        """Return a placeholder of shape [n, m] for a [n, k] and b [m, k]."""
        if (len(a.shape), len(b.shape), a.shape[1:]) != (2, 2, b.shape[1:]):
            raise UserError(f"update(): matmul cannot multiply {list(a.shape)} by the transpose of {list(b.shape)}")
        return self._whole_tensor_result(a, a.shape[0], b.shape[0])

    def transpose(self, x: Shaped) -> Shaped:
        """Return a placeholder of shape [m, n] for x [n, m]."""
        if len(x.shape) != 2:
            raise UserError(f"update(): transpose takes a matrix, got the shape {list(x.shape)}")
        return self._whole_tensor_result(x, *x.shape[::-1])
