"""The ops of toyexp.Ops as ggml graph nodes, and for each op a rule that builds its gradient.

Calling an op builds its forward nodes and records (result, inputs, rule) on a tape. `backward` reads the tape from its
end. A rule takes dy, the gradient of the result, and returns one function per input, which builds the gradient of that
input. `backward` calls the function only if it needs this gradient. A rule uses a fused op if the device has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from toyexp import Rotary
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Node
from toyexp_ggml.inputs import Ids
from toyexp_ggml.products import Products

Block = tuple[int, int, Node, Node]  # start, stop, queries, weights [B, H, n, keys]

SHRINK = 2.0**32  # NORM with eps = SHRINK^2, which exceeds any variance, gives (x - mean) / SHRINK
TINY = 1e-30  # added to divisors that may be 0


class Heads(NamedTuple):
    """Sizes of grouped-query attention: the batch size `rows` (B), H query `heads`, and Hkv key/value heads (`shared`).

    Each key/value head serves G = H / Hkv query heads.
    """

    g: Graph
    rows: int
    heads: int
    shared: int

    def group(self, x: Node) -> Node:
        """Return x [B, H, n, ..] as [B, Hkv, G * n, ..], which joins the query heads of each key/value head."""
        return self.g.reshape(x, self.rows, self.shared, self.heads // self.shared * x.shape[2], x.shape[3])

    def split(self, x: Node) -> Node:
        """Return x [B, Hkv, G * n, ..] as [B, H, n, ..], where H = Hkv * G. It is the inverse of `group`."""
        return self.g.reshape(x, self.rows, self.heads, x.shape[2] * self.shared // self.heads, x.shape[3])


class GGMLOps(Products):
    """Implementation of toyexp.Ops on the nodes of one ggml graph."""

    # -- tables -------------------------------------------------------------------------------------------------

    def rows(self, table: Node, ids: Ids) -> Node:
        g, flat = self.g, self._inputs.flat_ids(ids, table.shape[0])
        y = g.get_rows(table, flat)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            dy = g.flat(dy)
            if self._profile.has("GET_ROWS_BACK"):
                return (lambda: g.get_rows_back(dy, flat, table),)
            return (lambda: self._scatter_add(dy, flat, table.shape),)

        return self._record(g.reshape(y, *ids.shape, table.shape[1]), (table,), rule)

    def _scatter_add(self, dy: Node, ids: Node, shape: tuple[int, ...]) -> Node:
        """Return a table of `shape` [V, d] whose row i is the sum of the rows of dy [n, d] with the id i.

        In each chunk of ids, a product with the chunk's membership matrix sums the rows of equal ids, so that each id
        is written once. Padding ids write to a spare row after the table.
        """
        g = self.g
        table = g.scale(self._inputs.zeros(shape[0] + 1, shape[1]), 0.0)
        for start, stop, member, distinct in self._inputs.memberships(ids, shape[0]):
            summed = g.mul_mat(self._transpose(g.part(dy, 0, start, stop)), member)
            table = g.set_rows(table, g.add(g.get_rows(table, distinct), summed), distinct)
            g.want(table)  # the next chunk reads rows that this one wrote
        return g.first_rows(table, shape[0])

    def first_rows(self, table: Node, n: int) -> Node:
        g = self.g
        rest = table.shape[0] - n

        def widened(dy: Node) -> Node:
            return self._concat([dy, self._inputs.zeros(rest, table.shape[1])], axis=0) if rest else dy

        first = g.get_rows(table, self._inputs.span(0, n)) if table.packed else g.first_rows(table, n)
        return self._record(first, (table,), lambda dy: (lambda: widened(dy),))

    # -- linear algebra -----------------------------------------------------------------------------------------

    def matmul(self, x: Node, w: Node, bias: Node | None = None) -> Node:
        g = self.g
        flat = g.flat(x)
        product = self._multiply_rows(w, flat)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            dy = g.flat(dy)
            return (lambda: g.reshape(self._multiply(dy, w), *x.shape), lambda: self._outer(dy, flat))

        y = self._record(g.reshape(product, *x.shape[:-1], w.shape[0]), (x, w), rule)
        return y if bias is None else self.add(y, bias)

    def add(self, a: Node, b: Node) -> Node:
        return self._record(self.g.add(a, b), (a, b), lambda dy: (lambda: dy, lambda: self._sum_to(dy, b.shape)))

    def mul(self, a: Node, b: Node) -> Node:
        g = self.g
        return self._record(
            g.mul(a, b), (a, b), lambda dy: (lambda: g.mul(dy, b), lambda: self._sum_to(g.mul(dy, a), b.shape))
        )

    def div(self, a: Node, b: Node) -> Node:
        g = self.g
        y = g.div(a, b)

        def db(dy: Node) -> Node:
            return g.scale(self._sum_to(g.div(g.mul(dy, y), b), b.shape), -1.0)

        return self._record(y, (a, b), lambda dy: (lambda: g.div(dy, b), lambda: db(dy)))

    def _sum_to(self, x: Node, shape: tuple[int, ...]) -> Node:
        """Return x summed to `shape`: over leading axes that `shape` lacks, and over axes with size 1 in `shape`."""
        if x.shape == shape:
            return x
        own = x.shape[len(x.shape) - len(shape) :]  # the axes of x that shape has too
        if len(own) < len(x.shape):
            x = self.g.reshape(self._sum_rows(self.g.reshape(x, x.size // math.prod(own), math.prod(own))), *own)
        for axis, size in enumerate(shape):
            x = self._sum_axis(x, axis) if size < own[axis] else x
        return x

    def scale(self, x: Node, factor: float, offset: float = 0.0) -> Node:
        return self._record(self.g.scale(x, factor, offset), (x,), lambda dy: (lambda: self.g.scale(dy, factor),))

    def permute(self, x: Node, axes: Sequence[int]) -> Node:
        back = [list(axes).index(i) for i in range(len(x.shape))]
        return self._record(self.g.permute(x, axes), (x,), lambda dy: (lambda: self.g.permute(dy, back),))

    def product(self, a: Node, b: Node, transposed: bool = False) -> Node:
        g, turn = self.g, self._transpose_once
        y = g.mul_mat(b if transposed else turn(b), a)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            if transposed:  # y = a b^T
                return (lambda: g.mul_mat(turn(b), dy), lambda: g.mul_mat(turn(a), turn(dy)))
            return (lambda: g.mul_mat(b, dy), lambda: g.mul_mat(turn(dy), turn(a)))

        return self._record(y, (a, b), rule)

    def sum(self, x: Node, axis: int | None = None, keep: bool = False) -> Node:
        g = self.g
        if axis is None:
            y = g.total(x, by_rows=self._profile.narrow_sum)
            return self._record(y, (x,), lambda dy: (lambda: self._repeat(dy, x.shape),))
        kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        y = g.reshape(self._sum_axis(x, axis), *(kept if keep or len(kept) == 1 else kept[:axis] + kept[axis + 1 :]))
        return self._record(y, (x,), lambda dy: (lambda: self._repeat(g.reshape(dy, *kept), x.shape),))

    def _repeat(self, x: Node, shape: tuple[int, ...]) -> Node:
        return x if x.shape == shape else self.g.add(self._inputs.zeros(*shape), x)

    def _sum_axis(self, x: Node, axis: int) -> Node:
        """Return x summed over one axis, which stays with size 1."""
        g, size, kept = self.g, x.shape[axis], (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        inner = math.prod(x.shape[axis + 1 :])
        if inner > 1:
            x = self._transpose(g.reshape(x, x.size // (size * inner), size, inner))
        return g.reshape(g.sum_last(g.reshape(x, x.size // size, size)), *kept)

    def cumsum(self, x: Node) -> Node:
        g, length = self.g, x.shape[-1]
        y = g.mul_mat(self._inputs.visible(length, length), g.flat(x))  # y[i] = sum over j <= i of x[j]

        def dx(dy: Node) -> Node:
            upper = self._transpose_once(self._inputs.visible(length, length))
            return g.reshape(g.mul_mat(upper, g.flat(dy)), *x.shape)

        return self._record(g.reshape(y, *x.shape), (x,), lambda dy: (lambda: dx(dy),))

    def softmax(self, x: Node) -> Node:
        p = self.g.softmax(x)
        return self._record(p, (x,), lambda dy: (lambda: self._softmax_back(dy, p, 1.0),))

    def log_softmax(self, x: Node) -> Node:
        g = self.g
        p = g.softmax(x)
        y = g.sub(x, self._log_sum(x, p))

        def dx(dy: Node) -> Node:
            return g.sub(dy, g.mul(p, g.sum_last(dy)))

        return self._record(y, (x,), lambda dy: (lambda: dx(dy),))

    def _log_sum(self, x: Node, p: Node) -> Node:
        """Return log(sum(exp(x))) over the last axis, [.., 1], given p = softmax(x).

        It is sum(p (x - log p)), because log p = x - log(sum(exp(x))) and p sums to 1.
        """
        g = self.g
        return g.sum_last(g.mul(p, g.sub(x, self._log(p))))

    def take(self, x: Node, ids: Ids) -> Node:
        g = self.g
        indices = self._inputs.target_indices(ids, x.size // x.shape[-1], x.shape[-1])
        y = g.get_rows(g.reshape(x, x.size, 1), indices)

        def dx(dy: Node) -> Node:
            zeros = g.scale(self._inputs.zeros(x.size, 1), 0.0)
            return g.reshape(g.set_rows(zeros, g.reshape(dy, ids.size, 1), indices), *x.shape)

        return self._record(g.reshape(y, *ids.shape), (x,), lambda dy: (lambda: dx(dy),))

    def causal(self, x: Node, window: int = 0, fill: float = -math.inf) -> Node:
        g = self.g
        mask, seen = (self._inputs.visible(x.shape[-2], x.shape[-1], window, value) for value in (fill, 0.0))
        y = g.mul(x, mask) if fill == 0 else g.add(x, mask)
        return self._record(y, (x,), lambda dy: (lambda: g.mul(dy, seen),))

    def split(self, x: Node, n: int) -> tuple[Node, ...]:
        g, axis, d = self.g, len(x.shape) - 1, x.shape[-1] // n
        parts = tuple(g.part(x, axis, i * d, (i + 1) * d) for i in range(n))

        def rule(*dys: Node | None) -> Sequence[Callable[[], Node]]:
            zeros = lambda: self._inputs.zeros(*parts[0].shape)  # noqa: E731
            return (lambda: self._concat([zeros() if dy is None else dy for dy in dys], axis),)

        if n > 1:
            self._tape.append((parts, (x,), rule))
        return parts

    def reshape(self, x: Node, shape: Sequence[int]) -> Node:
        return self._record(self.g.reshape(x, *shape), (x,), lambda dy: (lambda: self.g.reshape(dy, *x.shape),))

    def part(self, x: Node, axis: int, start: int, stop: int) -> Node:
        y = self.g.part(x, axis, start, stop)
        return y if y is x else self._record(y, (x,), lambda dy: (lambda: self._widen(dy, x, axis, start),))

    def _widen(self, dy: Node, x: Node, axis: int, start: int) -> Node:
        """Return dy, the gradient of a part of x (from `start` on along `axis`), padded with zeros to x's shape."""
        g, inner = self.g, math.prod(x.shape[axis + 1 :])
        width = dy.shape[axis] * inner
        flat = g.reshape(dy, dy.size // width, width)
        sides = (start * inner, (x.shape[axis] - start) * inner - width)
        left, right = (self._inputs.zeros(flat.shape[0], n) if n else None for n in sides)
        return g.reshape(self._concat([p for p in (left, flat, right) if p is not None], axis=1), *x.shape)

    def concat(self, parts: Sequence[Node], axis: int) -> Node:
        y = self._concat(parts, axis)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            bounds = pairwise(accumulate((p.shape[axis] for p in parts), initial=0))
            return [partial(self.g.part, dy, axis, start, stop) for start, stop in bounds]

        return y if y is parts[0] else self._record(y, tuple(parts), rule)

    def prepend(self, x: Node, token: Node) -> Node:
        n, _, d = x.shape
        first = self.add(self._inputs.zeros(n, d), token)
        return self.concat([self.reshape(first, (n, 1, d)), x], axis=1)

    # -- norms --------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Node, w: Node, eps: float) -> Node:
        g = self.g
        n = g.rms_norm(x, eps)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            return (lambda: self._rms_norm_back(g.mul(dy, w), x, n, eps), lambda: self._sum_rows(g.flat(g.mul(dy, n))))

        return self._record(g.mul(n, w), (x, w), rule)

    def _rms_norm_back(self, dn: Node, x: Node, n: Node, eps: float) -> Node:
        """Return the gradient of x in n = rms_norm(x), given dn: (dn - n mean(dn n)) / sqrt(mean(x^2) + eps)."""
        g, d = self.g, x.shape[-1]
        if self._profile.has("RMS_NORM_BACK"):
            return g.rms_norm_back(dn, x, eps)
        root = g.sqrt(g.scale(g.sum_last(g.sqr(x)), 1 / d, eps))
        projection = g.mul(n, g.scale(g.sum_last(g.mul(dn, n)), 1 / d))
        return g.div(g.sub(dn, projection), root)

    def centre(self, x: Node) -> Node:
        return self._record(self._centre(x), (x,), lambda dy: (lambda: self._centre(dy),))

    def _centre(self, x: Node) -> Node:
        if self._profile.has("NORM"):
            return self.g.scale(self._centre_shrunk(x), SHRINK)
        return self.g.sub(x, self.g.scale(self.g.sum_last(x), 1 / x.shape[-1]))

    def _centre_shrunk(self, x: Node) -> Node:
        """Return exactly (x - mean) / SHRINK.

        ggml's op NORM computes this, with an eps so large that adding the variance to eps does not change eps.
        """
        return self.g.norm(x, SHRINK**2)

    def layer_norm(self, x: Node, w: Node, b: Node, eps: float) -> Node:
        """Compute LayerNorm as RMSNorm of x - mean. The two are equal, because both add eps inside the root."""
        g = self.g
        # With x / SHRINK and eps / SHRINK^2 RMSNorm's result is the same. Its gradient is SHRINK times as large, and
        # `_centre_shrunk`, applied to this gradient, divides it by SHRINK.
        shrinks = self._profile.has("NORM")
        centre, eps = (self._centre_shrunk, eps / SHRINK**2) if shrinks else (self._centre, eps)
        centred = centre(x)
        n = g.rms_norm(centred, eps)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            return (
                lambda: self._rms_norm_back(centre(g.mul(dy, w)), centred, n, eps),
                lambda: self._sum_rows(g.flat(g.mul(dy, n))),
                lambda: self._sum_rows(g.flat(dy)),
            )

        return self._record(g.add(g.mul(n, w), b), (x, w, b), rule)

    # -- attention ----------------------------------------------------------------------------------------------

    def rope(self, x: Node, rotary: Rotary) -> Node:
        positions = self._inputs.span(0, x.shape[1])
        factors = self._inputs.vector(rotary.factors) if rotary.factors else None

        def turn(t: Node, back: bool) -> Node:
            return self.g.rope(t, positions, factors, rotary, back)

        return self._record(turn(x, back=False), (x,), lambda dy: (lambda: turn(dy, back=True),))

    def attention(
        self, q: Node, k: Node, v: Node, causal: bool = True, *, window: int = 0, scale: float | None = None,
        softcap: float = 0.0, sinks: Node | None = None, bias: Node | None = None,
    ) -> Node:  # fmt: skip
        """Compute attention in blocks of queries, so that causal attention skips most of the masked keys.

        The query heads that share a key/value head are adjacent, so reshaping [B, H, n, D] joins them without a copy.
        Attention with a window, softcap, sinks or a bias, or with values of another size than the keys, uses
        `compose_attention` instead.
        """
        g = self.g
        is_plain = sinks is None and bias is None and not softcap and v.shape[-1] == k.shape[-1]
        if not is_plain or (causal and 0 < window < q.shape[1]):
            rest = {"sinks": sinks, "bias": bias}
            return self.compose_attention(q, k, v, causal, window=window, scale=scale, softcap=softcap, **rest)
        rows, length, heads, size = q.shape
        layout, factor = Heads(g, rows, heads, k.shape[2]), 1 / math.sqrt(size) if scale is None else scale
        if self._profile.fast_products and factor > 0:

            def rule(dy: Node) -> Sequence[Callable[[], Node]]:
                dq, dk, dv = g.attention_back(q, k, v, dy, factor, causal)
                return (lambda: dq, lambda: dk, lambda: dv)

            return self._record(g.attention(q, k, v, factor, causal), (q, k, v), rule)
        n = self._profile.query_block if causal else length
        q4, k4, v4 = (g.swap_middle(t) for t in (q, k, v))  # [B, H, T, D]
        blocks: list[Block] = []
        outs = []
        for start in range(0, length, n):
            stop = min(start + n, length)
            key_count = stop if causal else length
            queries = layout.group(g.part(q4, 2, start, stop))
            scores = layout.split(g.mul_mat(g.part(k4, 2, 0, key_count), queries))  # [B, H, n, seen]
            mask = self._inputs.visible(stop - start, key_count, fill=-math.inf) if causal else None
            weights = g.softmax(scores, mask, factor)
            outs.append(layout.split(self._multiply(layout.group(weights), g.part(v4, 2, 0, key_count))))
            blocks.append((start, stop, queries, weights))
        y = g.reshape(g.join_heads(outs, self._profile.slow_concat), rows, length, heads * size)
        return self._record(y, (q, k, v), partial(self._attention_back, layout, factor, blocks, k4, v4))

    def _attention_back(
        self, layout: Heads, scale: float, blocks: Sequence[Block], k4: Node, v4: Node, dy: Node
    ) -> Sequence[Callable[[], Node]]:
        g = self.g
        rows, _, length, size = k4.shape
        dout = g.swap_middle(g.reshape(dy, rows, length, layout.heads, size))
        dqs: list[Node] = []
        dkv = None
        for start, stop, queries, p in reversed(blocks):
            key_count = p.shape[3]
            do = layout.group(g.part(dout, 2, start, stop))
            dp = layout.split(g.mul_mat(g.part(v4, 2, 0, key_count), do))
            ds = layout.group(self._softmax_back(dp, p, scale))
            dqs.insert(0, layout.split(self._multiply(ds, g.part(k4, 2, 0, key_count))))
            # dk = ds^T q and dv = p^T do as one product. Later blocks see more keys, so they are added first.
            slow = self._profile.slow_cont
            block_dkv = g.mul_mat(g.transpose_both(queries, do, slow), g.transpose_both(ds, layout.group(p), slow))
            dkv = block_dkv if dkv is None else g.add_to_rows(dkv, block_dkv)
        assert dkv is not None
        dk, dv = (g.swap_middle(half) for half in g.halves(dkv, k4.shape))
        dq = g.join_heads(dqs, self._profile.slow_concat)
        return (lambda: dq, lambda: dk, lambda: dv)

    def _softmax_back(self, dp: Node, p: Node, scale: float) -> Node:
        """Return the gradient of x in p = softmax(x * scale), given dp: scale p (dp - sum(p dp))."""
        g = self.g
        if self._profile.has("SOFT_MAX_BACK"):
            return g.softmax_back(dp, p, scale)
        return g.scale(g.mul(p, g.sub(dp, g.sum_last(g.mul(p, dp)))), scale)

    # -- activations --------------------------------------------------------------------------------------------

    def step(self, x: Node) -> Node:
        return self.g.step(x)

    def exp(self, x: Node) -> Node:
        y = self.g.exp(x)
        return self._record(y, (x,), lambda dy: (lambda: self.g.mul(dy, y),))

    def log(self, x: Node) -> Node:
        return self._record(self.g.log(x), (x,), lambda dy: (lambda: self.g.div(dy, x),))

    def relu(self, x: Node) -> Node:
        return self._record(self.g.relu(x), (x,), lambda dy: (lambda: self.g.mul(dy, self.g.step(x)),))

    def tanh(self, x: Node) -> Node:
        g = self.g
        y = g.tanh(x)
        return self._record(y, (x,), lambda dy: (lambda: g.mul(dy, g.scale(g.sqr(y), -1.0, 1.0)),))

    def sigmoid(self, x: Node) -> Node:
        g = self.g
        s = self._sigmoid(x)
        return self._record(s, (x,), lambda dy: (lambda: g.mul(dy, g.mul(s, g.scale(s, -1.0, 1.0))),))

    def gelu(self, x: Node, exact: bool = False) -> Node:
        """Return x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): GELU's tanh form, without ggml's float16 table.

        If `exact`, return x Phi(x), with the normal distribution Phi.
        """
        g = self.g
        if exact:
            x_or_tiny = g.scale(x, 1.0, TINY)  # changes only 0 and numbers close to it
            y = g.gelu_erf(x_or_tiny)

            def exact_dx(dy: Node) -> Node:
                density = g.scale(g.exp(g.scale(g.sqr(x_or_tiny), -0.5)), 1 / math.sqrt(2 * math.pi))
                return g.mul(dy, g.add(g.mul(x_or_tiny, density), g.div(y, x_or_tiny)))  # x Phi'(x) + Phi(x)

            return self._record(y, (x,), lambda dy: (lambda: exact_dx(dy),))
        if self._profile.fast_products:
            return self._record(g.gelu(x), (x,), lambda dy: (lambda: g.gelu(x, dy),))
        a = 2 * math.sqrt(2 / math.pi)
        b = a * 0.044715
        square = g.sqr(x)
        s = self._sigmoid(g.mul(x, g.scale(square, b, a)))
        y = g.mul(x, s)

        def dx(dy: Node) -> Node:
            inner = g.mul(g.mul(y, g.scale(square, 3 * b, a)), g.scale(s, -1.0, 1.0))
            return g.mul(dy, g.add(inner, s))  # s + y 2u' (1 - s)

        return self._record(y, (x,), lambda dy: (lambda: dx(dy),))

    def _sigmoid(self, x: Node) -> Node:
        g = self.g
        if not self._profile.slow_sigmoid:
            return g.sigmoid(x)
        x = g.scale(x, 1.0, TINY)  # changes only 0 and numbers close to it
        return g.div(g.silu(x), x)

    def silu(self, x: Node) -> Node:
        return self._record(self.g.silu(x), (x,), lambda dy: (lambda: self._silu_back(dy, x),))

    def _silu_back(self, dy: Node, x: Node) -> Node:
        g = self.g
        if self._profile.has("SILU_BACK"):
            return g.silu_back(dy, x)
        s = g.sigmoid(x)
        slope = g.mul(s, g.scale(g.mul(x, g.scale(s, -1.0, 1.0)), 1.0, 1.0))  # s (1 + x (1 - s))
        return g.mul(dy, slope)

    def swiglu(self, gate: Node, up: Node) -> Node:
        g = self.g

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            if self._profile.fast_products:
                dgate, dup = g.swiglu_back(gate, up, dy)
                return (lambda: dgate, lambda: dup)
            return (lambda: self._silu_back(g.mul(dy, up), gate), lambda: g.mul(dy, g.silu(gate)))

        return self._record(g.swiglu(gate, up), (gate, up), rule)

    # -- the loss -----------------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits: Node, targets: Ids, weights: Node, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Node:
        """Return the weighted cross-entropy [1]. Target probabilities are looked up by index, not in a one-hot matrix.

        With smoothing s and z-loss z, the gradient of a position's logits is its weight times
        p (1 + 2 z log_sum) - (1 - s) one_hot(target) - s / V, with log_sum = log(sum(exp(logits))).
        """
        g = self.g
        n, classes = logits.size // logits.shape[-1], logits.shape[-1]
        target_indices = self._inputs.target_indices(targets, n, classes)
        rows = g.reshape(logits, n, classes)
        p = g.softmax(rows)
        picked = g.get_rows(g.reshape(p, n * classes, 1), target_indices)  # [n, 1]
        column = g.reshape(weights, n, 1)
        is_input = weights is self._inputs.batch["weights"]
        repeated = self._inputs.weights(n, classes) if is_input and self._profile.slow_column else column
        losses = g.scale(self._log(picked), -1.0)
        log_sum: Any = None
        if smoothing or z_loss:
            log_sum = self._log_sum(rows, p)
        if smoothing:
            spread = g.sub(log_sum, g.scale(g.sum_last(rows), 1 / classes))
            losses = g.add(g.scale(losses, 1 - smoothing), g.scale(spread, smoothing))
        if z_loss:
            losses = g.add(losses, g.scale(g.sqr(log_sum), z_loss))
        loss = g.total(g.mul(losses, column))

        def gradient() -> Node:
            # The target's entry of p is lowered in place, after `picked` was read.
            q, at_target = p, picked
            if z_loss:
                factor = g.scale(log_sum, 2 * z_loss, 1.0)
                q, at_target = g.mul(p, factor), g.mul(picked, factor)
            lowered = g.set_rows(g.reshape(q, n * classes, 1), g.scale(at_target, 1.0, smoothing - 1.0), target_indices)
            dlogits = g.reshape(lowered, n, classes)
            if smoothing:
                dlogits = g.scale(dlogits, 1.0, -smoothing / classes)
            return g.reshape(g.mul(dlogits, repeated), *logits.shape)

        return self._record(loss, (logits,), lambda dy: (lambda: self._times_scalar(gradient(), dy),))

    def token_log_probs(self, logits: Node, targets: Ids) -> Node:
        """Return log softmax(logits) at the targets, whose gradient is one_hot(target) - p; see `cross_entropy`."""
        g = self.g
        n, classes = logits.size // logits.shape[-1], logits.shape[-1]
        target_indices = self._inputs.target_indices(targets, n, classes)
        p = g.reshape(g.softmax(logits), n * classes, 1)
        picked = g.get_rows(p, target_indices)  # [n, 1]

        def dx(dy: Node) -> Node:
            lowered = g.reshape(g.set_rows(p, g.scale(picked, 1.0, -1.0), target_indices), n, classes)
            return g.reshape(g.mul(lowered, g.scale(g.reshape(dy, n, 1), -1.0)), *logits.shape)

        return self._record(g.reshape(self._log(picked), *targets.shape), (logits,), lambda dy: (lambda: dx(dy),))

    def _log(self, p: Node) -> Node:
        """Return log(p) of probabilities.

        A probability that underflows to 0 counts as 1e-37, which gives a loss of 85. ggml's clamp turns NaN into a
        number. Adding 0 * p restores the NaN, so that logits with NaN give a NaN loss.
        """
        g = self.g
        return g.add(g.log(g.clamp(g.scale(p, 1.0), 1e-37, 1.0)), g.scale(p, 0.0))
