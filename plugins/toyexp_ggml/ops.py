"""The op vocabulary as graph nodes, and beside each op the rule that adds its gradient.

Calling an op builds its forward nodes and notes (result, inputs, rule) on a tape. `backward` walks the tape from its
end: a rule takes dy, the gradient of the result, and returns one function per input that builds that input's
gradient; it is called only where something trainable lies behind. A rule has a fused form, where the device has the
op, and a plain form otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from toyexp import Rotary
from toyexp_ggml.binding import GraphError
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Node
from toyexp_ggml.inputs import Ids
from toyexp_ggml.products import Products

Block = tuple[int, int, Node, Node]  # queries from, to, as nodes, and the weights [B, H, n, seen] of what they see

SHRINK = 2.0**32  # by this NORM divides what it only has to centre; its square is far above any variance
TINY = 1e-30  # added to a divisor that may be 0


class Heads(NamedTuple):
    """The heads of an attention, of whose queries several share a key/value head."""

    g: Graph
    rows: int
    heads: int
    shared: int

    def grouped(self, x: Node) -> Node:
        """[B, H, n, ..] as [B, Hkv, G n, ..]."""
        return self.g.reshape(x, self.rows, self.shared, self.heads // self.shared * x.shape[2], x.shape[3])

    def split(self, x: Node) -> Node:
        """[B, Hkv, G n, ..] as [B, H, n, ..]."""
        return self.g.reshape(x, self.rows, self.heads, x.shape[2] * self.shared // self.heads, x.shape[3])


class GGMLOps(Products):
    """Every op on nodes of one graph."""

    # -- tables -------------------------------------------------------------------------------------------------

    def rows(self, table: Node, ids: Ids) -> Node:
        g, flat = self.g, self._inputs.flat_ids(ids, table.shape[0])
        y = g.get_rows(table, flat)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            dy = g.flat(dy)
            if self._profile.has("GET_ROWS_BACK"):
                return (lambda: g.get_rows_back(dy, flat, table),)
            return (lambda: self._scatter_add(dy, flat, table.shape),)

        return self._note(g.reshape(y, *ids.shape, table.shape[1]), (table,), rule)

    def _scatter_add(self, dy: Node, ids: Node, shape: tuple[int, ...]) -> Node:
        """Rows dy [n, d] summed into zeros [V, d] at their ids, a chunk at a time.

        In a chunk the rows of equal ids are summed by a product with the membership matrix, so that each id is written
        once; the table's one spare row takes what no id fills.
        """
        g = self.g
        table = g.scale(self._inputs.zeros(shape[0] + 1, shape[1]), 0.0)
        for start, stop, member, distinct in self._inputs.memberships(ids, shape[0]):
            summed = g.mul_mat(self._transpose(g.part(dy, 0, start, stop)), member)
            table = g.set_rows(table, g.add(g.get_rows(table, distinct), summed), distinct)
            g.want(table)  # the next chunk reads what this one wrote
        return g.first_rows(table, shape[0])

    def first_rows(self, table: Node, n: int) -> Node:
        g = self.g
        rest = table.shape[0] - n
        if rest < 0 or n < 1:  # ggml ends the process at a row that is out of range
            raise GraphError(f"first_rows: {n} rows of {list(table.shape)}")

        def widened(dy: Node) -> Node:
            return self._concat([dy, self._inputs.zeros(rest, table.shape[1])], axis=0) if rest else dy

        first = g.get_rows(table, self._inputs.span(0, n)) if table.packed else g.first_rows(table, n)
        return self._note(first, (table,), lambda dy: (lambda: widened(dy),))

    # -- linear algebra -----------------------------------------------------------------------------------------

    def matmul(self, x: Node, w: Node, bias: Node | None = None) -> Node:
        g = self.g
        flat = g.flat(x)
        product = self._by_rows(w, flat)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            dy = g.flat(dy)
            return (lambda: g.reshape(self._times(dy, w), *x.shape), lambda: self._outer(dy, flat))

        y = self._note(g.reshape(product, *x.shape[:-1], w.shape[0]), (x, w), rule)
        return y if bias is None else self.add(y, bias)

    def add(self, a: Node, b: Node) -> Node:
        g = self.g
        if a.shape[len(a.shape) - len(b.shape) :] != b.shape:
            raise GraphError(f"add: {list(b.shape)} is no ending of {list(a.shape)}")

        def db(dy: Node) -> Node:
            if a.shape == b.shape:
                return dy
            return g.reshape(self._sum_rows(g.reshape(dy, a.size // b.size, b.size)), *b.shape)

        return self._note(g.add(a, b), (a, b), lambda dy: (lambda: dy, lambda: db(dy)))

    def mul(self, a: Node, b: Node) -> Node:
        g = self.g
        if a.shape != b.shape:
            raise GraphError(f"mul: {list(a.shape)} and {list(b.shape)} differ")
        return self._note(g.mul(a, b), (a, b), lambda dy: (lambda: g.mul(dy, b), lambda: g.mul(dy, a)))

    def scale(self, x: Node, factor: float) -> Node:
        return self._note(self.g.scale(x, factor), (x,), lambda dy: (lambda: self.g.scale(dy, factor),))

    def heads(self, x: Node, n: int) -> Node:
        if len(x.shape) != 3 or n < 1 or x.shape[2] % n:
            raise GraphError(f"heads: {list(x.shape)} into {n}")
        return super().heads(x, n)

    def split(self, x: Node, n: int) -> tuple[Node, ...]:
        if n < 1 or x.shape[-1] % n:
            raise GraphError(f"split: {list(x.shape)} into {n}")
        g, axis, d = self.g, len(x.shape) - 1, x.shape[-1] // n
        parts = tuple(g.part(x, axis, i * d, (i + 1) * d) for i in range(n))

        def rule(*dys: Node | None) -> Sequence[Callable[[], Node]]:
            unused = lambda: self._inputs.zeros(*parts[0].shape)  # noqa: E731
            return (lambda: self._concat([unused() if dy is None else dy for dy in dys], axis),)

        return parts if n == 1 else self._note_several(parts, (x,), rule)

    def reshape(self, x: Node, shape: Sequence[int]) -> Node:
        return self._note(self.g.reshape(x, *shape), (x,), lambda dy: (lambda: self.g.reshape(dy, *x.shape),))

    def part(self, x: Node, axis: int, start: int, stop: int) -> Node:
        self._has_axis("part", axis, x)
        y = self.g.part(x, axis, start, stop)
        return y if y is x else self._note(y, (x,), lambda dy: (lambda: self._widen(dy, x, axis, start),))

    def _has_axis(self, op: str, axis: int, *nodes: Node) -> None:
        for node in nodes:
            if not 0 <= axis < len(node.shape):
                raise GraphError(f"{op}: axis {axis} of {list(node.shape)}")

    def _widen(self, dy: Node, x: Node, axis: int, start: int) -> Node:
        """dy of a part of x, with zeros where the rest of x stands."""
        g, inner = self.g, math.prod(x.shape[axis + 1 :])
        width = dy.shape[axis] * inner
        flat = g.reshape(dy, dy.size // width, width)
        sides = (start * inner, (x.shape[axis] - start) * inner - width)
        left, right = (self._inputs.zeros(flat.shape[0], n) if n else None for n in sides)
        return g.reshape(self._concat([p for p in (left, flat, right) if p is not None], axis=1), *x.shape)

    def concat(self, parts: Sequence[Node], axis: int) -> Node:
        self._has_axis("concat", axis, *parts)
        y = self._concat(parts, axis)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            places = pairwise(accumulate((p.shape[axis] for p in parts), initial=0))
            return [partial(self.g.part, dy, axis, start, stop) for start, stop in places]

        return y if y is parts[0] else self._note(y, tuple(parts), rule)

    def prepend(self, x: Node, token: Node) -> Node:
        self._one_a_feature("prepend", x, token)
        n, _, d = x.shape
        first = self.add(self._inputs.zeros(n, d), token)
        return self.concat([self.reshape(first, (n, 1, d)), x], axis=1)

    # -- norms --------------------------------------------------------------------------------------------------

    def _one_a_feature(self, op: str, x: Node, *vectors: Node) -> None:
        for vector in vectors:
            if vector.shape != x.shape[-1:]:  # a divisor of d would repeat, and go unnoticed
                raise GraphError(f"{op}: a vector {list(vector.shape)} for features {list(x.shape)}")

    def rms_norm(self, x: Node, w: Node, eps: float) -> Node:
        g = self.g
        self._one_a_feature("rms_norm", x, w)
        n = g.rms_norm(x, eps)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            return (
                lambda: self._rms_norm_back(g.mul(dy, w), x, n, eps),
                lambda: self._sum_rows(g.flat(g.mul(dy, n))),
            )

        return self._note(g.mul(n, w), (x, w), rule)

    def _rms_norm_back(self, dn: Node, x: Node, n: Node, eps: float) -> Node:
        """(dn - n mean(dn n)) / sqrt(mean(x^2) + eps), where n is the normed x."""
        g, d = self.g, x.shape[-1]
        if self._profile.has("RMS_NORM_BACK"):
            return g.rms_norm_back(dn, x, eps)
        root = g.sqrt(g.scale(g.sum_last(g.sqr(x)), 1 / d, eps))
        along = g.mul(n, g.scale(g.sum_last(g.mul(dn, n)), 1 / d))
        return g.div(g.sub(dn, along), root)

    def centre(self, x: Node) -> Node:
        return self._note(self._centred(x), (x,), lambda dy: (lambda: self._centred(dy),))

    def _centred(self, x: Node) -> Node:
        if self._profile.has("NORM"):
            return self.g.scale(self._shrunk(x), SHRINK)
        return self.g.sub(x, self.g.scale(self.g.sum_last(x), 1 / x.shape[-1]))

    def _shrunk(self, x: Node) -> Node:
        """(x - mean) / SHRINK, to the bit: beside its eps the variance vanishes, and the root is a power of two."""
        return self.g.norm(x, SHRINK**2)

    def layer_norm(self, x: Node, w: Node, b: Node, eps: float) -> Node:
        """LayerNorm is RMSNorm of the centred x, because its eps stands inside the root."""
        g = self.g
        self._one_a_feature("layer_norm", x, w, b)
        if not 0 <= eps < math.inf:
            raise GraphError(f"layer_norm: eps={eps} must be 0 or above")
        # Of a shrunk x, and with as much less an eps, RMSNorm is what it was; its gradient grows by what dn lost.
        shrinks = self._profile.has("NORM")
        centre, eps = (self._shrunk, eps / SHRINK**2) if shrinks else (self._centred, eps)
        centred = centre(x)
        n = g.rms_norm(centred, eps)

        def rule(dy: Node) -> Sequence[Callable[[], Node]]:
            return (
                lambda: self._rms_norm_back(centre(g.mul(dy, w)), centred, n, eps),
                lambda: self._sum_rows(g.flat(g.mul(dy, n))),
                lambda: self._sum_rows(g.flat(dy)),
            )

        return self._note(g.add(g.mul(n, w), b), (x, w, b), rule)

    # -- attention ----------------------------------------------------------------------------------------------

    def rope(self, x: Node, rotary: Rotary) -> Node:
        if len(x.shape) != 4:
            raise GraphError(f"rope: {list(x.shape)} is not [B, T, H, D]")
        positions = self._inputs.span(0, x.shape[1])
        factors = self._inputs.vector(rotary.factors) if rotary.factors else None

        def turn(t: Node, back: bool) -> Node:
            return self.g.rope(t, positions, factors, rotary, back)

        return self._note(turn(x, back=False), (x,), lambda dy: (lambda: turn(dy, back=True),))

    def attention(self, q: Node, k: Node, v: Node, causal: bool = True) -> Node:
        """Block by block of queries, so that a causal one never computes most of what it would hide.

        Query heads of one key/value head lie side by side, so [.., H, n, D] is also [.., Hkv, G n, D] for free.
        """
        g = self.g
        rows, length, heads, size = q.shape
        if k.shape != v.shape or k.shape != (rows, length, k.shape[2], size) or heads % k.shape[2]:
            raise GraphError(f"attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
        form = Heads(g, rows, heads, k.shape[2])
        n = self._profile.query_block if causal else length
        q4, k4, v4 = (g.swap_middle(t) for t in (q, k, v))  # [B, H, T, D]
        blocks: list[Block] = []
        outs = []
        for start in range(0, length, n):
            stop = min(start + n, length)
            seen = stop if causal else length
            queries = form.grouped(g.part(q4, 2, start, stop))
            scores = form.split(g.mul_mat(g.part(k4, 2, 0, seen), queries))  # [B, H, n, seen]
            mask = self._inputs.causal_mask(stop - start, seen) if causal else None
            weights = g.softmax(scores, mask, 1 / math.sqrt(size))
            outs.append(form.split(self._times(form.grouped(weights), g.part(v4, 2, 0, seen))))
            blocks.append((start, stop, queries, weights))
        y = g.reshape(g.join_heads(outs, self._profile.slow_concat), rows, length, heads * size)
        return self._note(y, (q, k, v), partial(self._attention_back, form, blocks, k4, v4))

    def _attention_back(
        self, form: Heads, blocks: Sequence[Block], k4: Node, v4: Node, dy: Node
    ) -> Sequence[Callable[[], Node]]:
        g = self.g
        rows, _, length, size = k4.shape
        dout = g.swap_middle(g.reshape(dy, rows, length, form.heads, size))
        dqs: list[Node] = []
        dkv = None
        for start, stop, queries, p in reversed(blocks):
            seen = p.shape[3]
            do = form.grouped(g.part(dout, 2, start, stop))
            dp = form.split(g.mul_mat(g.part(v4, 2, 0, seen), do))
            ds = form.grouped(self._softmax_back(dp, p, 1 / math.sqrt(size)))
            dqs.insert(0, form.split(self._times(ds, g.part(k4, 2, 0, seen))))
            # dk = ds^T q and dv = p^T do as one product; later blocks see more keys and come first here.
            slow = self._profile.slow_cont
            both = g.mul_mat(g.transpose_both(queries, do, slow), g.transpose_both(ds, form.grouped(p), slow))
            dkv = both if dkv is None else g.add_to_rows(dkv, both)
        assert dkv is not None
        dk, dv = (g.swap_middle(half) for half in g.halves(dkv, k4.shape))
        dq = g.join_heads(dqs, self._profile.slow_concat)
        return (lambda: dq, lambda: dk, lambda: dv)

    def _softmax_back(self, dp: Node, p: Node, scale: float) -> Node:
        """The gradient of softmax(x * scale): scale p (dp - sum(p dp))."""
        g = self.g
        if self._profile.has("SOFT_MAX_BACK"):
            return g.softmax_back(dp, p, scale)
        return g.scale(g.mul(p, g.sub(dp, g.sum_last(g.mul(p, dp)))), scale)

    # -- activations --------------------------------------------------------------------------------------------

    def sigmoid(self, x: Node) -> Node:
        g = self.g
        s = self._sigmoid(x)
        return self._note(s, (x,), lambda dy: (lambda: g.mul(dy, g.mul(s, g.scale(s, -1.0, 1.0))),))

    def gelu(self, x: Node) -> Node:
        """x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form, without ggml's float16 table."""
        g = self.g
        a = 2 * math.sqrt(2 / math.pi)
        b = a * 0.044715
        square = g.sqr(x)
        s = self._sigmoid(g.mul(x, g.scale(square, b, a)))
        y = g.mul(x, s)

        def dx(dy: Node) -> Node:
            inner = g.mul(g.mul(y, g.scale(square, 3 * b, a)), g.scale(s, -1.0, 1.0))
            return g.mul(dy, g.add(inner, s))  # s + y 2u' (1 - s)

        return self._note(y, (x,), lambda dy: (lambda: dx(dy),))

    def _sigmoid(self, x: Node) -> Node:
        g = self.g
        if not self._profile.slow_sigmoid:
            return g.sigmoid(x)
        x = g.scale(x, 1.0, TINY)  # which changes 0 alone, and what is nearly as small
        return g.div(g.silu(x), x)

    def silu(self, x: Node) -> Node:
        return self._note(self.g.silu(x), (x,), lambda dy: (lambda: self._silu_back(dy, x),))

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
            return (lambda: self._silu_back(g.mul(dy, up), gate), lambda: g.mul(dy, g.silu(gate)))

        return self._note(g.swiglu(gate, up), (gate, up), rule)

    # -- the loss -----------------------------------------------------------------------------------------------

    def cross_entropy(self, logits: Node, targets: Node, weights: Node) -> Node:
        """Picks each target's probability out of the flattened softmax by its place, so no label matrix is needed."""
        return self.loss_and_gradient(logits, weights)[0]

    def loss_and_gradient(self, logits: Node, weights: Node) -> tuple[Node, Callable[[], Node]]:
        """The weighted loss [1], and what builds its gradient by the logits."""
        g = self.g
        n, classes = logits.size // logits.shape[-1], logits.shape[-1]
        places = self._inputs.places(n, classes)
        p = g.softmax(g.reshape(logits, n, classes))
        picked = g.get_rows(g.reshape(p, n * classes, 1), places)  # [n, 1]
        column = g.reshape(weights, n, 1)
        repeated = self._inputs.weights(n, classes) if self._profile.slow_column else column
        # A probability that underflows to 0 counts as 1e-37: a loss of 85, where float32 ends anyway. ggml's clamp
        # makes a number of NaN, so 0 times what was clamped is added: a model that is no number has no loss either.
        log = g.add(g.log(g.clamp(g.scale(picked, 1.0), 1e-37, 1.0)), g.scale(picked, 0.0))
        loss = g.scale(g.total(g.mul(log, column)), -1.0)

        def gradient() -> Node:
            # (p - one_hot(target)) * weight: the target's entry is lowered by 1 in place, after it was read.
            lowered = g.set_rows(g.reshape(p, n * classes, 1), g.scale(picked, 1.0, -1.0), places)
            return g.reshape(g.mul(g.reshape(lowered, n, classes), repeated), *logits.shape)

        return loss, gradient
