"""Ops from which a model's forward pass is written. Each engine must implement fourteen of them.

The other ops are composed of these fourteen, but an engine may implement them, too. Shapes use B sequences, T
positions, d features, H heads of size D, Hkv key/value heads, V classes or tokens. A `Tensor` is an object of the
engine, such as a torch.Tensor. A leading `...` stands for any number of axes. Weights follow GGUF: the weight of a
linear layer is [out, in].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from toyexp.base.errors import UserError

Tensor = Any


@dataclass(frozen=True)
class Rotary:
    """Settings of a rotary position embedding: the angles of rotation, and which two features form a pair.

    Raises UserError unless base, scale and factors are finite numbers above 0.
    """

    base: float  # pair i of D features rotates by base^(-2i/D) radians per position
    scale: float = 1.0  # all positions are divided by it (linear scaling, Chen et al. 2023)
    factors: tuple[float, ...] = ()  # divisors of each pair's frequency (GGUF's rope_freqs); empty: all 1
    halves: bool = False  # True: pairs (x[i], x[i + D/2]), GGUF's "NeoX"; False: (x[2i], x[2i+1]), its "NORM"

    def __post_init__(self) -> None:
        for name, values in (("base", [self.base]), ("scale", [self.scale]), ("factors", self.factors)):
            for value in values:
                if not 0 < value < math.inf:
                    raise UserError(f"rope: {name} {value}: must be a finite number above 0")

    def frequencies(self, size: int) -> tuple[float, ...]:
        """Return the rotation in radians per position of each of the `size`/2 pairs.

        Raise UserError if `size` is odd, or if the number of `factors` is neither 0 nor `size`/2.
        """
        if size % 2 or len(self.factors) not in (0, size // 2):
            problem = "the size must be even" if size % 2 else f"expected {size // 2} factors, got {len(self.factors)}"
            raise UserError(f"rope for heads of size {size}: {problem}")
        factors = self.factors or (1.0,) * (size // 2)
        return tuple(self.base ** (-2 * i / size) / f / self.scale for i, f in enumerate(factors))


@dataclass(frozen=True)
class LowRank:
    """LoRA pair: the matrices a [r, in] and b [out, r] (Hu et al. 2021).

    The pair adds scale * (x a^T) b^T to the output of a linear layer with the input x. If `dropout` [..., in] is given,
    the pair reads x + x * dropout instead of x: -1 drops an element, and a positive number scales it up. The linear
    layer itself still reads x.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: Tensor | None = None


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight with an adapter that the recipe added.

    The adapter is a low-rank update or, if the weight is an embedding table, a lens: a matrix that maps each row of the
    table to the model's width.
    """

    base: Tensor
    low_rank: LowRank | None = None
    lens: Tensor | None = None


class Params(Mapping[str, Tensor]):
    """A model's tensors by GGUF name. `block(i)` is a view of the tensors whose names start with `blk.i.`."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = ""):
        self._tensors = tensors
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor `name`, or `default` if the model does not have it.

        This is faster than `Mapping.get`, which catches an exception for each missing tensor, such as an absent bias.
        """
        return self._tensors.get(self._prefix + name, default)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def block(self, i: int) -> Params:
        """Return the tensors of block `i`, keyed by their names without the prefix `blk.<i>.`."""
        return Params(self._tensors, f"{self._prefix}blk.{i}.")


class Ops(ABC):
    """Base class of an engine's ops. A subclass implements the primitive ops.

    For speed, it may override the other ops, which are composed of primitive ones.
    """

    plugin_kind: ClassVar[str] = "engine"  # kind of plugin that error messages name

    # Ops whose result at a position of x [B, T, ..] depends only on x there, and not on the position's index.
    # A decoder computes new positions only, so it rejects every other op that it does not implement itself.
    positionwise: ClassVar[frozenset[str]] = frozenset({
        "embed", "linear", "logits", "block", "rows", "matmul", "add", "mul", "scale", "sigmoid", "centre", "rms_norm",
        "layer_norm", "heads", "split", "silu", "gelu", "swiglu",
    })  # fmt: skip

    # -- called by models, the same for every engine ------------------------------------------------------------

    @final
    def embed(self, table: Tensor | AdaptedWeight, ids: Tensor) -> Tensor:
        """Return the rows of `table` [V, d] at the integers `ids` [...] -> [..., d].

        If the table has a lens L [d', d], each row is multiplied by L^T -> [..., d'].
        """
        if not isinstance(table, AdaptedWeight):
            return self.rows(table, ids)
        x = self.rows(table.base, ids)
        return x if table.lens is None else self.matmul(x, table.lens)

    @final
    def linear(self, x: Tensor, w: Tensor | AdaptedWeight, bias: Tensor | None = None) -> Tensor:
        """Return x w^T + bias for x [..., in], w [out, in] and bias [out] -> [..., out].

        If w has a low-rank update, its output is added.
        """
        if not isinstance(w, AdaptedWeight):
            return self.matmul(x, w, bias)
        y = self.matmul(x, w.base, bias)
        if w.low_rank is None:
            return y
        if w.low_rank.dropout is not None:
            x = self.add(x, self.mul(x, w.low_rank.dropout))
        update = self.matmul(self.matmul(x, w.low_rank.a), w.low_rank.b)
        return self.add(y, self.scale(update, w.low_rank.scale))

    def logits(self, x: Tensor, w: Tensor | AdaptedWeight) -> Tensor:
        """Return the logits, the last matrix product of a model: x [..., d] times w [V, d] transposed -> [..., V].

        The result equals that of `linear`, but `forward` must return it unchanged. Therefore an engine may fuse this
        product with the loss, so that the logits of all positions are never in memory at once.
        """
        return self.linear(x, w)

    def block(self, function: Callable[..., Tensor], x: Tensor, p: Params, *rest: Any) -> Tensor:
        """Compute one block of the model: return `function(ops, x, p, *rest)` for its input `x` and its tensors `p`.

        An engine may call `function` again in the backward pass instead of storing activations (Chen et al. 2016,
        "Training Deep Nets with Sublinear Memory Cost"), so `function` must have no side effects.
        """
        return function(self, x, p, *rest)

    # -- primitives, implemented by each engine -----------------------------------------------------------------

    @abstractmethod
    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return the rows of table [V, d] at ids [...], integers in 0..V-1 -> [..., d]."""

    @abstractmethod
    def matmul(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the matrix product x w^T, plus bias: x [..., in], w [out, in], bias [out] -> [..., out]."""

    @abstractmethod
    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a [..., d] plus b. The shape of b is that of a, or that of a without some leading axes."""

    @abstractmethod
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the elementwise product of a and b, which have the same shape."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return x times `factor`, a constant."""

    @abstractmethod
    def sigmoid(self, x: Tensor) -> Tensor:
        """Return 1 / (1 + exp(-x))."""

    @abstractmethod
    def centre(self, x: Tensor) -> Tensor:
        """Return x minus its mean over the last axis."""

    @abstractmethod
    def rms_norm(self, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * w [d], with the mean over the last axis (Zhang and Sennrich 2019)."""

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Return x in the shape `shape`, which has up to four axes. The order of the elements stays the same."""

    @abstractmethod
    def part(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """Return the slice start:stop of x along `axis`."""

    @abstractmethod
    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Return the tensors joined along `axis`. All other axes must have equal sizes."""

    @abstractmethod
    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate pairs of x [B, T, H, D] by position * base^(-2i/D) / factors[i] / scale (Su et al. 2021).

        `rotary` has base, factors, scale and halves. Pair i is (x[2i], x[2i+1]) or, if halves, (x[i], x[i + D/2]).
        Positions count from 0 along T.
        """

    @abstractmethod
    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        """Return softmax(q k^T / sqrt(D)) v for q [B, T, H, D] and k, v [B, T, Hkv, D] -> [B, T, H*D].

        Query head h reads key/value head h // (H / Hkv). If `causal`, a position reads no later positions.
        """

    @abstractmethod
    def cross_entropy(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the scalar sum of weight * -log softmax(logits)[target] over all positions.

        Logits are [..., V], integer targets [...], weights [...]. If the weights sum to 1, the result is a weighted
        mean.
        """

    # -- composed of primitives; an engine may override them ---------------------------------------------------

    def first_rows(self, table: Tensor, n: int) -> Tensor:
        """Return the first `n` rows of table [N, d] -> [n, d]. The table may hold learned position embeddings."""
        return self.part(table, 0, 0, n)

    def heads(self, x: Tensor, n: int) -> Tensor:
        """Reshape x [B, T, n*D] to [B, T, n, D], the shape that rope and attention read."""
        return self.reshape(x, (*x.shape[:-1], n, x.shape[-1] // n))

    def split(self, x: Tensor, n: int) -> tuple[Tensor, ...]:
        """Split x [..., n*d] along the last axis into n tensors [..., d], in order."""
        axis, d = len(x.shape) - 1, x.shape[-1] // n
        return tuple(self.part(x, axis, i * d, (i + 1) * d) for i in range(n))

    def prepend(self, x: Tensor, token: Tensor) -> Tensor:
        """Return x [B, T, d] with the vector `token` [d] inserted before each sequence -> [B, T+1, d]."""
        zeros = self.scale(self.part(x, 1, 0, 1), 0.0)
        return self.concat([self.add(zeros, token), x], 1)

    def select(self, x: Tensor, i: int) -> Tensor:
        """Return position `i` of each sequence of x [B, T, d] -> [B, d]."""
        return self.reshape(self.part(x, 1, i, i + 1), (x.shape[0], x.shape[2]))

    def layer_norm(self, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        """Return (x - mean) / sqrt(variance + eps) * w + b (Ba et al. 2016).

        Mean and variance are computed over the last axis; the variance is the biased one.
        """
        return self.add(self.rms_norm(self.centre(x), w, eps), b)

    def silu(self, x: Tensor) -> Tensor:
        """Return x * sigmoid(x) (Elfwing et al. 2017)."""
        return self.mul(x, self.sigmoid(x))

    def gelu(self, x: Tensor) -> Tensor:
        """Return GELU in its tanh form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
        cubed = self.scale(self.mul(x, self.mul(x, x)), 0.044715)
        return self.mul(x, self.sigmoid(self.scale(self.add(x, cubed), 2 * math.sqrt(2 / math.pi))))

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up (Shazeer 2020)."""
        return self.mul(self.silu(gate), up)
