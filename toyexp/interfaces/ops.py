"""Ops from which forward passes and objectives are written. Each engine must implement those that are abstract.

The other ops are composed of the abstract ones, but an engine may implement them, too. Shapes use B sequences, T
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
    """LoRA pair: the matrices a [r, in] and b [out, r] (Hu et al. 2021); of an embedding a [V, r] and b [d, r].

    The pair adds scale * (x a^T) b^T to the output of a linear layer with the input x. If `dropout` [..., in] is given,
    the pair reads x + x * dropout instead of x: -1 drops an element, and a positive number scales it up. The linear
    layer itself still reads x. With `magnitude` [out], each row of W + scale * B A is scaled to this norm (DoRA, Liu et
    al. 2024); `norm` [out] holds the norms of the rows of W. The pair of an embedding adds scale * a[id] b^T to the row
    of the token `id`.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: Tensor | None = None
    magnitude: Tensor | None = None
    norm: Tensor | None = None


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight with an adapter that the recipe added.

    The adapter is a low-rank update or, if the weight is an embedding table, a lens: a matrix that maps each row of the
    table to the model's width. A table may also have noise [B, T, d], which is added to the embeddings of the tokens.
    """

    base: Tensor
    low_rank: LowRank | None = None
    lens: Tensor | None = None
    noise: Tensor | None = None


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return True if a tensor of this shape broadcasts to the shape `to`: it may lack leading axes and have sizes 1."""
    own = to[max(len(to) - len(shape), 0) :]
    return len(own) == len(shape) and all(n in (1, size) for n, size in zip(shape, own, strict=True))


class Params(Mapping[str, Tensor]):
    """A model's tensors by GGUF name. `block(i)` is a view of the tensors whose names start with `blk.i.`.

    If `auxiliary` is not None, the model's `forward` appends scalars to it, which are added to the training loss.
    """

    auxiliary: list[Tensor] | None = None

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

    def below(self, prefix: str) -> Params:
        """Return the tensors whose names start with `prefix`, keyed by the rest of their names."""
        return Params(self._tensors, self._prefix + prefix)

    def block(self, i: int) -> Params:
        """Return the tensors of block `i`, keyed by their names without the prefix `blk.<i>.`."""
        return self.below(f"blk.{i}.")


class Ops(ABC):
    """Base class of an engine's ops. A subclass implements the primitive ops.

    For speed, it may override the other ops, which are composed of primitive ones.
    """

    plugin_kind: ClassVar[str] = "engine"  # kind of plugin that error messages name

    # Ops whose result at a position of x [B, T, ..] depends only on x there, and not on the position's index.
    # A decoder computes new positions only, so it rejects every other op that it does not implement itself.
    positionwise: ClassVar[frozenset[str]] = frozenset({
        "embed", "linear", "logits", "block", "rows", "matmul", "add", "mul", "div", "scale", "sigmoid", "step", "exp",
        "log", "centre", "rms_norm", "layer_norm", "softmax", "log_softmax", "heads", "split", "relu", "tanh",
        "softplus", "softcap", "silu", "gelu", "swiglu", "top_k", "route", "experts", "dropout",
    })  # fmt: skip

    # -- called by models, the same for every engine ------------------------------------------------------------

    @final
    def embed(self, table: Tensor | AdaptedWeight, ids: Tensor) -> Tensor:
        """Return the rows of `table` [V, d] at the integers `ids` [...] -> [..., d].

        If the table has a lens L [d', d], each row is multiplied by L^T -> [..., d']. If the table has a low-rank
        update or noise, they are added.
        """
        if not isinstance(table, AdaptedWeight):
            return self.rows(table, ids)
        x, pair = self.rows(table.base, ids), table.low_rank
        if pair is not None:
            x = self.add(x, self.scale(self.matmul(self.rows(pair.a, ids), pair.b), pair.scale))
        x = x if table.noise is None else self.add(x, table.noise)
        return x if table.lens is None else self.matmul(x, table.lens)

    @final
    def linear(self, x: Tensor, w: Tensor | AdaptedWeight, bias: Tensor | None = None) -> Tensor:
        """Return x w^T + bias for x [..., in], w [out, in] and bias [out] -> [..., out].

        If w has a low-rank update, its output is added.
        """
        if not isinstance(w, AdaptedWeight):
            return self.matmul(x, w, bias)
        pair = w.low_rank
        if pair is None:
            return self.matmul(x, w.base, bias)
        y = self.matmul(x, w.base, bias if pair.magnitude is None else None)
        if pair.dropout is not None:
            x = self.add(x, self.mul(x, pair.dropout))
        y = self.add(y, self.scale(self.matmul(self.matmul(x, pair.a), pair.b), pair.scale))
        if pair.magnitude is None:
            return y
        # |W + s B A|^2 = |W|^2 + row sums of B * (2 s W A^T + s^2 B A A^T), without the matrix W + s B A
        cross = self.scale(self.permute(self.matmul(pair.a, w.base), (1, 0)), 2 * pair.scale)
        inner = self.product(pair.b, self.product(pair.a, pair.a, transposed=True))
        change = self.sum(self.mul(pair.b, self.add(cross, self.scale(inner, pair.scale**2))), 1)
        square = self.add(self.mul(pair.norm, pair.norm), change)
        y = self.mul(y, self.div(pair.magnitude, self.exp(self.scale(self.log(square), 0.5))))
        return y if bias is None else self.add(y, bias)

    def logits(self, x: Tensor, w: Tensor | AdaptedWeight) -> Tensor:
        """Return the logits, the last matrix product of a model: x [..., d] times w [V, d] transposed -> [..., V].

        The result equals that of `linear`, but the model's `forward` must return it unchanged. An engine may then fuse
        this product with the loss, so that the logits of all positions are never in memory at once.
        """
        return self.linear(x, w)

    def block(self, function: Callable[..., Any], x: Tensor, p: Params, *rest: Any) -> Any:
        """Compute one block of the model: return `function(ops, x, p, *rest)` for its input `x` and its tensors `p`.

        The result is a tensor or a tuple of tensors. An engine may call `function` again in the backward pass instead
        of storing activations (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"), so `function` must
        have no side effects.
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
        """Return a [..., d] plus b.

        b is repeated to a's shape: it may lack some of a's leading axes, and have size 1 on others.
        """

    @abstractmethod
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the elementwise product of a and b; b is repeated to a's shape, as in `add`."""

    @abstractmethod
    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a divided by b, element by element; b is repeated to a's shape, as in `add`."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float, offset: float = 0.0) -> Tensor:
        """Return x times a constant, plus another constant."""

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Return 1 where x is above 0, and 0 elsewhere. Its gradient is 0."""

    @abstractmethod
    def exp(self, x: Tensor) -> Tensor:
        """Return e^x, element by element."""

    @abstractmethod
    def log(self, x: Tensor) -> Tensor:
        """Return the natural logarithm of x, whose elements must be above 0."""

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
    def permute(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Return x with its axes, up to four, in another order: axis i of the result is axis `axes[i]` of x."""

    @abstractmethod
    def product(self, a: Tensor, b: Tensor, transposed: bool = False) -> Tensor:
        """Return the matrix product a b for a [..., n, k] and b [..., k, m] with the same leading axes -> [..., n, m].

        With `transposed`, b is [..., m, k] and the result is a b^T. Both factors may be activations.
        """

    @abstractmethod
    def sum(self, x: Tensor, axis: int | None = None, keep: bool = False) -> Tensor:
        """Return the sum over one axis, or over all elements, a scalar. With `keep`, the axis stays with size 1."""

    @abstractmethod
    def cumsum(self, x: Tensor) -> Tensor:
        """Return the cumulative sum over the last axis."""

    @abstractmethod
    def softmax(self, x: Tensor) -> Tensor:
        """Return exp(x) / sum(exp(x)) over the last axis."""

    @abstractmethod
    def log_softmax(self, x: Tensor) -> Tensor:
        """Return x - log(sum(exp(x))) over the last axis. Values below -85 may be less exact."""

    @abstractmethod
    def take(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return elements of each row of x [..., V]: those at the integers of `ids`, an array of the batch.

        `ids` are [...] for one element per row, or [..., k] for k elements, whose integers must differ within a row.
        """

    @abstractmethod
    def causal(self, x: Tensor, window: int = 0, fill: float = -math.inf) -> Tensor:
        """Return x [..., T, T] with `fill` (0 or -inf) in place of the elements [i, j] that position i must not see.

        Position i does not see later positions j > i. If `window` is not 0, it sees only the last `window` positions up
        to i, so positions j <= i - window are hidden, too.
        """

    @abstractmethod
    def rope(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate pairs of x [B, T, H, D] by position * base^(-2i/D) / factors[i] / scale (Su et al. 2021).

        `rotary` has base, factors, scale and halves. Pair i is (x[2i], x[2i+1]) or, if halves, (x[i], x[i + D/2]).
        Positions count from 0 along T.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return softmax(q k^T * scale) v for q [B, T, H, D], k [B, T, Hkv, D] and v [B, T, Hkv, Dv] -> [B, T, H*Dv].

        Query head h reads key/value head h // (H / Hkv). With `causal`, a position sees no later positions. If also
        `window` is above 0, it sees only the last `window` positions up to its own (Beltagy et al. 2020). `scale` is
        1/sqrt(D) if None. `softcap` c replaces a score s by c tanh(s / c) (Gemma 2). `sinks` [H] are scores of one more
        position per head, whose value is 0 (gpt-oss). `bias` [H, T, T] (or [1, T, T], [T, T], and [B, H, T, T] or
        [B, 1, T, T] for each row) is added to the scores after the softcap; see `distance_bias`. An engine may call
        `compose_attention` for arguments that its fast kernel does not support.
        """

    @abstractmethod
    def cross_entropy(
        self, logits: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Tensor:
        """Return the sum over positions of weight * -log softmax(logits)[target]: a scalar.

        logits [..., V], targets [...] integers, weights [...]; weights that sum to 1 make it a mean. With label
        `smoothing` s, a position counts (1 - s) * -log p[target] + s * mean over V of -log p (Szegedy et al. 2016).
        `z_loss` z adds z * log(sum(exp(logits)))^2 (Chowdhery et al. 2022).
        """

    # -- composed of primitives; an engine may override them ---------------------------------------------------

    def compose_attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Tensor | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the result of `attention`, composed of other ops. All scores are in memory at once.

        There may be fewer queries than keys if `self.causal` supports it. The queries are then the last positions.
        """
        rows, length, heads, size = q.shape
        _, seen, shared, value_size = v.shape
        # Query heads that share a key/value head are adjacent, so that reshape joins them.
        queries = self.reshape(self.permute(q, (0, 2, 1, 3)), (rows, shared, heads // shared * length, size))
        keys, values = self.permute(k, (0, 2, 1, 3)), self.permute(v, (0, 2, 1, 3))
        scores = self.scale(self.product(queries, keys, transposed=True), size**-0.5 if scale is None else scale)
        scores = self.reshape(scores, (rows, heads, length, seen))
        scores = self.softcap(scores, softcap) if softcap else scores
        scores = scores if bias is None else self.add(scores, bias)
        zeros = None if sinks is None else self.scale(self.part(scores, 3, 0, 1), 0.0)
        scores = self.causal(scores, window) if causal else scores
        if sinks is None:
            weights = self.softmax(scores)
        else:
            column = self.add(zeros, self.reshape(sinks, (heads, 1, 1)))
            weights = self.part(self.softmax(self.concat([scores, column], 3)), 3, 0, seen)
        out = self.product(self.reshape(weights, (rows, shared, heads // shared * length, seen)), values)
        out = self.reshape(out, (rows, heads, length, value_size))
        return self.reshape(self.permute(out, (0, 2, 1, 3)), (rows, length, heads * value_size))

    def distance_bias(self, table: Tensor, length: int) -> Tensor:
        """Return a bias for `attention` [H, T, T], T = `length`: element [h, i, j] is table[h, i - j], or 0 if j > i.

        `table` [H, N] has a number per head and distance, with N of at least T. It may be learned (T5, Raffel et al.
        2020) or a frozen tensor with the values -slope[h] * distance (ALiBi, Press et al. 2022).
        """
        heads = table.shape[0]
        near = self.part(table, 1, 0, length)
        row = self.reshape(self.concat([near, self.scale(near, 0.0)], 1), (heads, 1, 2 * length))
        ones = self.reshape(self.scale(near, 0.0, 1.0), (heads, length, 1))
        # Rows of 2 T - 1 elements, cut from copies of `row` that follow each other, each begin one element earlier.
        copies = self.reshape(self.product(ones, row), (heads, 2 * length * length))
        cut = self.part(copies, 1, 0, length * (2 * length - 1))
        by_key = self.part(self.reshape(cut, (heads, length, 2 * length - 1)), 2, 0, length)
        return self.permute(by_key, (0, 2, 1))

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        """Return o[i] = sum over j <= i of exp(c[i] - c[j]) (q[i] . k[j]) v[j], with c = cumsum(log_decay) over T.

        q, k [B, T, G, D], v [B, T, H, Dv], log_decay [B, T, H], at most 0 -> [B, T, H*Dv]. Head h of v reads head
        h // (H / G) of q and k. This is the masked product form of Mamba-2 (Dao and Gu 2024) and of gated linear
        attention with one decay per head.
        """
        (rows, length, heads, value_size), groups = v.shape, q.shape[2]
        queries, keys, values = (self.permute(x, (0, 2, 1, 3)) for x in (q, k, v))
        total = self.cumsum(self.permute(log_decay, (0, 2, 1)))  # [B, H, T]
        by_group = (rows * groups, heads // groups)
        at_query, at_key = (self.reshape(total, (*by_group, *shape)) for shape in ((length, 1), (1, length)))
        zeros = self.scale(self.product(self.step(at_query), self.step(at_key)), 0.0)  # step has no gradient
        spread = self.add(self.add(zeros, at_query), self.scale(at_key, -1.0))  # [B*G, H/G, T, T]
        scores = self.reshape(self.product(queries, keys, transposed=True), (rows * groups, 1, length, length))
        weights = self.mul(self.exp(self.causal(spread)), scores)
        out = self.product(self.reshape(weights, (rows, heads, length, length)), values)
        out = self.permute(out, (0, 2, 1, 3))
        return self.reshape(out, (rows, length, heads * value_size))

    def shift(self, x: Tensor, n: int = 1) -> Tensor:
        """Shift x [B, T, ...] by `n` positions along T: result[:, i] is x[:, i - n], and 0 for i < n."""
        length = x.shape[1]
        if n == 0:
            return x
        zeros = self.scale(self.part(x, 1, 0, min(n, length)), 0.0)
        return zeros if n >= length else self.concat([zeros, self.part(x, 1, 0, length - n)], 1)

    def mean(self, x: Tensor, axis: int | None = None, keep: bool = False) -> Tensor:
        """Return the mean over one axis, or over all elements; see `sum`."""
        return self.scale(self.sum(x, axis, keep), 1 / (math.prod(x.shape) if axis is None else x.shape[axis]))

    def token_log_probs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return log softmax(logits)[target] for logits [..., V] and integer targets [...] -> [...].

        Engines may fuse it with `logits`, as `cross_entropy`. Values below -85 may be less exact.
        """
        return self.take(self.log_softmax(logits), targets)

    def top_k(self, x: Tensor, k: int) -> Tensor:
        """Return 1 at the k largest elements of the last axis and 0 elsewhere; of equal elements, prefer the first.

        The op compares all pairs of elements, so it is meant for short axes such as experts. Its gradient is 0.
        """
        count = x.shape[-1]
        flat = self.reshape(x, (math.prod(x.shape) // count, 1, count))
        others = self.reshape(x, (math.prod(x.shape) // count, count, 1))
        zeros = self.scale(self.product(others, flat), 0.0)
        gaps = self.add(self.add(zeros, others), self.scale(flat, -1.0))  # [n, i, j]: x[i] - x[j]
        larger = self.step(gaps)
        equal = self.scale(self.add(larger, self.step(self.scale(gaps, -1.0))), -1.0, 1.0)
        rank = self.add(self.sum(larger, 1), self.sum(self.causal(equal, fill=0.0), 2))  # 1 for the largest
        return self.reshape(self.step(self.scale(rank, -1.0, k + 0.5)), x.shape)

    def route(self, scores: Tensor, k: int, normalise: bool = True) -> Tensor:
        """Return the weights of experts [..., E]: the softmax of `scores` [..., E] at its k largest, 0 elsewhere.

        With `normalise`, the weights of a position sum to 1 (Shazeer et al. 2017).
        """
        kept = self.mul(self.softmax(scores), self.top_k(scores, k))
        return self.div(kept, self.sum(kept, len(kept.shape) - 1, keep=True)) if normalise else kept

    def experts(self, x: Tensor, w: Tensor) -> Tensor:
        """Return one matrix product per expert: x [B, T, in] or [B, T, E, in], w [E, out, in] -> [B, T, E, out].

        Without the axis E, all experts read the same x.
        """
        count, outputs, inputs = w.shape
        positions = tuple(x.shape[:2])
        if len(x.shape) == 3:
            y = self.matmul(x, self.reshape(w, (count * outputs, inputs)))
            return self.reshape(y, (*positions, count, outputs))
        by_expert = self.permute(self.reshape(x, (math.prod(positions), count, inputs)), (1, 0, 2))
        y = self.permute(self.product(by_expert, w, transposed=True), (1, 0, 2))
        return self.reshape(y, (*positions, count, outputs))

    def dropout(self, x: Tensor, batch: Mapping[str, Tensor], name: str) -> Tensor:
        """Return x + x * mask for the dropout mask `name` of the batch, or x if the batch has no such mask.

        The mask is -1 for dropped elements and p / (1 - p) for others (Srivastava et al. 2014, inverted).
        """
        mask = batch.get(name)
        return x if mask is None else self.add(x, self.mul(x, mask))

    def relu(self, x: Tensor) -> Tensor:
        """Return max(x, 0)."""
        return self.mul(x, self.step(x))

    def tanh(self, x: Tensor) -> Tensor:
        """Return (exp(2x) - 1) / (exp(2x) + 1)."""
        return self.scale(self.sigmoid(self.scale(x, 2.0)), 2.0, -1.0)

    def softplus(self, x: Tensor) -> Tensor:
        """Return log(1 + exp(x))."""
        positive = self.relu(x)
        size = self.add(self.scale(x, -1.0), self.scale(positive, 2.0))  # |x|
        return self.add(positive, self.log(self.scale(self.exp(self.scale(size, -1.0)), 1.0, 1.0)))

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(x / cap), which lies between -cap and cap (Gemma 2)."""
        return self.scale(self.tanh(self.scale(x, 1 / cap)), cap)

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

    def gelu(self, x: Tensor, exact: bool = False) -> Tensor:
        """Return GELU (Hendrycks and Gimpel 2016) in its tanh form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

        If `exact`, return 0.5 x (1 + erf(x / sqrt(2))). An engine without an own gelu then computes erf with an error
        of up to 1.5e-7 (Abramowitz and Stegun 1964, formula 7.1.26).
        """
        if exact:
            positive = self.relu(x)
            size = self.add(positive, self.relu(self.scale(x, -1.0)))  # |x|
            t = self.div(self.scale(x, 0.0, 1.0), self.scale(size, 0.3275911 / math.sqrt(2), 1.0))
            y = self.scale(t, 1.061405429, -1.453152027)
            for coefficient in (1.421413741, -0.284496736, 0.254829592):
                y = self.scale(self.mul(y, t), 1.0, coefficient)
            rest = self.mul(self.mul(y, t), self.exp(self.scale(self.mul(x, x), -0.5)))  # 1 - erf(|x| / sqrt(2))
            return self.add(positive, self.scale(self.mul(size, rest), -0.5))
        cubed = self.scale(self.mul(x, self.mul(x, x)), 0.044715)
        return self.mul(x, self.sigmoid(self.scale(self.add(x, cubed), 2 * math.sqrt(2 / math.pi))))

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up (Shazeer 2020)."""
        return self.mul(self.silu(gate), up)
