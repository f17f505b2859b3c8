"""What an optimiser's update is written in: arithmetic on whole tensors, which each engine implements once.

A tensor is whatever the engine works with, and has a `shape`. Where two shapes differ, the second one's axes are
missing in front or 1, and it is repeated over the first. What Python's operators compute is here; an engine
whose tensors have none implements all of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NoReturn

from toyexp.base.errors import UserError
from toyexp.interfaces.ops import Tensor

Number = Tensor | float  # one of the step's numbers, or a constant of the formula


class Arithmetic(ABC):
    """One engine's implementation."""

    plugin_kind: ClassVar[str] = "engine"  # by which its errors are told

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        return a + b

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """a - b."""
        return a - b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b, number by number."""
        return a * b

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b, number by number."""
        return a / b

    def scale(self, x: Tensor, factor: Number) -> Tensor:
        """x * factor."""
        return x * factor

    def shift(self, x: Tensor, amount: Number) -> Tensor:
        """x + amount."""
        return x + amount

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

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a [n, k] times b [m, k] transposed -> [n, m]."""
        return a @ b.T

    def transpose(self, x: Tensor) -> Tensor:
        """x [n, m] -> [m, n]."""
        return x.T

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


def is_shape(sizes: Any) -> bool:
    """Whether these are whole numbers from 1, one at least."""
    listed = isinstance(sizes, tuple | list) and len(sizes) > 0
    return listed and all(isinstance(n, Integral) and int(n) > 0 for n in sizes)


@dataclass(frozen=True, eq=False)
class Shaped:
    """A tensor of which nothing is known but its shape."""

    shape: tuple[int, ...]

    def _operator(self, *_: object) -> NoReturn:
        raise UserError("there is an operator on a tensor, which takes ops, such as ops.add(a, ops.scale(b, 0.1))")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __neg__ = __pow__ = __matmul__ = __getitem__ = __float__ = __int__ = __bool__ = __len__ = __iter__ = _operator


class Shapes(Arithmetic):
    """On shapes: refuses, in the words of a UserError, whatever not every engine computes."""

    def __init__(self, elementwise: bool = False):
        self._elementwise = elementwise

    def _pair(self, a: Shaped, b: Shaped) -> Shaped:
        if not isinstance(a, Shaped) or not isinstance(b, Shaped):
            raise UserError("its update adds or multiplies a number, which ops.shift and ops.scale take")
        front = len(a.shape) - len(b.shape)
        if front < 0 or any(y not in (1, x) for x, y in zip(a.shape[front:], b.shape, strict=True)):
            raise UserError(f"its update repeats {list(b.shape)} over {list(a.shape)}, which does not fit")
        return Shaped(a.shape)

    def _each(self, x: Shaped, number: Tensor = 1.0) -> Shaped:
        return self._pair(x, Shaped((1,)) if isinstance(number, Real) else number)

    def _whole(self, x: Shaped, *shape: int) -> Shaped:
        if self._elementwise:
            raise UserError("its update looks at a whole tensor, and it says that it is elementwise")
        return Shaped(shape)

    add = sub = mul = div = _pair
    scale = shift = sqrt = sign = at_least = _each  # type: ignore[assignment] # it has one name for all that they take

    def sum(self, x: Shaped) -> Shaped:
        """[1]."""
        return self._whole(x, 1)

    def sum_last(self, x: Shaped) -> Shaped:
        """[..., 1]."""
        return self._whole(x, *x.shape[:-1], 1)

    def matmul(self, a: Shaped, b: Shaped) -> Shaped:
        """[n, m]."""
        if (len(a.shape), len(b.shape), a.shape[1:]) != (2, 2, b.shape[1:]):
            raise UserError(f"its update multiplies {list(a.shape)} by {list(b.shape)} transposed, which does not fit")
        return self._whole(a, a.shape[0], b.shape[0])

    def transpose(self, x: Shaped) -> Shaped:
        """[m, n]."""
        if len(x.shape) != 2:
            raise UserError(f"its update transposes {list(x.shape)}, which is no matrix")
        return self._whole(x, *x.shape[::-1])
