"""One method per op of ggml that computes, with its shape rules checked first."""

from __future__ import annotations

import math
from collections.abc import Callable

from toyexp import Rotary
from toyexp_ggml.binding.layout import Layout
from toyexp_ggml.binding.library import GraphError, ggml
from toyexp_ggml.binding.tensors import Node


def _unary(name: str) -> Callable[[Graph, Node], Node]:
    def make(graph: Graph, x: Node) -> Node:
        graph._numbers(name, x)
        return graph._node(getattr(ggml, f"ggml_{name}")(graph._context, x.ptr), x.shape)

    return make


def _binary(name: str) -> Callable[[Graph, Node, Node], Node]:
    def make(graph: Graph, a: Node, b: Node) -> Node:
        graph._numbers(name, a, b)
        graph._repeats(name, a, b)
        return graph._node(getattr(ggml, f"ggml_{name}")(graph._context, a.ptr, b.ptr), a.shape)

    return make


class Graph(Layout):
    """A static graph of what is added, multiplied, summed and normed; see StaticGraph for its life."""

    add, sub, mul, div = map(_binary, ("add", "sub", "mul", "div"))  # of a and b, which is repeated over a
    sqr, sqrt, sgn, log, sigmoid, silu = map(_unary, ("sqr", "sqrt", "sgn", "log", "sigmoid", "silu"))

    def scale(self, x: Node, factor: float, shift: float = 0.0) -> Node:
        """x * factor + shift."""
        self._numbers("scale", x)
        return self._node(ggml.ggml_scale_bias(self._context, x.ptr, factor, shift), x.shape)

    def clamp(self, x: Node, low: float, high: float) -> Node:
        """x held between two numbers, in place: x is used up."""
        return self._node(ggml.ggml_clamp(self._context, x.ptr, low, high), x.shape)

    def total(self, x: Node, by_rows: bool = False) -> Node:
        """The sum of everything, [1]; `by_rows` cuts it into rows and sums those first."""
        x = self.row_sums(x) if by_rows else x
        return self._node(ggml.ggml_sum(self._context, x.ptr), (1,))

    def row_sums(self, x: Node) -> Node:
        """x cut into rows, about as many as they are long, and each of them summed, [n, 1]."""
        count = next(n for n in range(math.isqrt(x.size), 0, -1) if x.size % n == 0)
        return self.sum_last(self.reshape(x, count, x.size // count))

    def sum_of_squares(self, x: Node, by_dot: bool = False) -> Node:
        """The sum of x^2, [1]; `by_dot` takes it as the dot product of each row with itself."""
        if not by_dot or len(x.shape) != 2:
            return self.total(self.sqr(x))
        rows = self.reshape(x, x.shape[0], 1, x.shape[1])
        return self.total(self.mul_mat(rows, rows))

    def sum_last(self, x: Node) -> Node:
        """The sum over the last axis, [.., 1]."""
        return self._node(ggml.ggml_sum_rows(self._context, x.ptr), (*x.shape[:-1], 1))

    def add_to_rows(self, x: Node, rows: Node) -> Node:
        """x [a, n, d], used up, with `rows` [a, m, d] added to the first m of n."""
        if x.shape[::2] != rows.shape[::2] or rows.shape[1] > x.shape[1]:
            raise GraphError(f"add_to_rows: {list(rows.shape)} to {list(x.shape)}")
        _, n, d = x.shape
        size = x.size * 4
        return self._node(ggml.ggml_acc_inplace(self._context, x.ptr, rows.ptr, d * 4, n * d * 4, size, 0), x.shape)

    def mul_mat(self, w: Node, x: Node) -> Node:
        """x [.., n, in] times w [.., out, in] transposed, [.., n, out]; w's leading axes are x's, none, or end in 1."""
        fits = w.shape[-1] == x.shape[-1] and 2 <= len(w.shape) <= len(x.shape)
        if not fits or (len(w.shape) > 2 and w.shape[:-2] not in (x.shape[:-2], (*x.shape[:-3], 1))):
            raise GraphError(f"mul_mat: {list(x.shape)} by {list(w.shape)}")
        return self._node(ggml.ggml_mul_mat(self._context, w.ptr, x.ptr), (*x.shape[:-1], w.shape[-2]))

    def out_prod(self, a: Node, b: Node, turned: bool = False) -> Node:
        """b^T a: a [.., k, m], b [.., k, n] -> [.., n, m]; `turned` takes b as [.., n, k] without copying it."""
        k, n = reversed(b.shape[-2:]) if turned else b.shape[-2:]
        if a.shape[:-1] != (*b.shape[:-2], k):
            raise GraphError(f"out_prod: {list(a.shape)} by {list(b.shape)}")
        other = self._turned(b) if turned else b.ptr
        return self._node(ggml.ggml_out_prod(self._context, a.ptr, other), (*b.shape[:-2], n, a.shape[-1]))

    def get_rows_back(self, dy: Node, ids: Node, table: Node) -> Node:
        """The gradient of get_rows: rows dy [m, d] summed into [n, d] at their ids."""
        return self._node(ggml.ggml_get_rows_back(self._context, dy.ptr, ids.ptr, table.ptr), table.shape)

    def repeat_back(self, x: Node, like: Node) -> Node:
        """x summed over what `like` would be repeated along."""
        self._repeats("repeat_back", x, like)
        return self._node(ggml.ggml_repeat_back(self._context, x.ptr, like.ptr), like.shape)

    def sum_first(self, x: Node) -> Node:
        """x [c, ..] summed over its first axis -> [..]."""
        rest = math.prod(x.shape[1:])
        first = self._view(x, (rest,), 0)
        return self.reshape(self.repeat_back(self.reshape(x, x.shape[0], rest), first), *x.shape[1:])

    def rms_norm(self, x: Node, eps: float) -> Node:
        """x / sqrt(mean(x^2) + eps) over the last axis."""
        return self._normed("rms_norm", x, eps)

    def norm(self, x: Node, eps: float) -> Node:
        """(x - mean) / sqrt(variance + eps) over the last axis."""
        return self._normed("norm", x, eps)

    def _normed(self, op: str, x: Node, eps: float) -> Node:
        self._numbers(op, x)
        if not 0 <= eps < math.inf:
            raise GraphError(f"{op}: eps={eps} must be 0 or above")
        return self._node(getattr(ggml, f"ggml_{op}")(self._context, x.ptr, eps), x.shape)

    def rms_norm_back(self, dy: Node, x: Node, eps: float) -> Node:
        """The gradient of rms_norm."""
        self._same("rms_norm_back", dy, x)
        return self._node(ggml.ggml_rms_norm_back(self._context, dy.ptr, x.ptr, eps), x.shape)

    def silu_back(self, dy: Node, x: Node) -> Node:
        """The gradient of silu."""
        self._same("silu_back", dy, x)
        return self._node(ggml.ggml_silu_back(self._context, dy.ptr, x.ptr), x.shape)

    def swiglu(self, gate: Node, up: Node) -> Node:
        """silu(gate) * up."""
        self._numbers("swiglu", gate, up)
        self._same("swiglu", gate, up)
        return self._node(ggml.ggml_swiglu_split(self._context, gate.ptr, up.ptr), gate.shape)

    def softmax(self, x: Node, mask: Node | None = None, scale: float = 1.0) -> Node:
        """The softmax of x * scale + mask over the last axis; mask [T, T] repeats over the leading axes."""
        ptr = ggml.ggml_soft_max_ext(self._context, x.ptr, mask.ptr if mask else None, scale, 0.0)
        return self._node(ptr, x.shape)

    def softmax_back(self, dp: Node, p: Node, scale: float) -> Node:
        """scale p (dp - sum(p dp)): the gradient of softmax(x * scale), p being its result.

        The allocator may put a result over a source that nothing reads later, and ggml's kernel reads p after it began
        to write: so p is read once more, afterwards.
        """
        self._same("softmax_back", dp, p)
        result = self._node(ggml.ggml_soft_max_ext_back(self._context, dp.ptr, p.ptr, scale, 0.0), p.shape)
        self.want(result)
        self.want(self.total(self._view(p, (1,), 0)))
        return result

    def rope(self, x: Node, positions: Node, factors: Node | None, rotary: Rotary, back: bool) -> Node:
        """Rotates pairs of x [B, T, H, D] by their position; `factors` [D/2] are rotary's; `back` turns the other way.

        ggml raises the base to its powers, and divides by the factors and the scale, in float32 on the device.
        """
        self._numbers("rope", x)
        size = x.shape[-1]
        if len(x.shape) != 4 or size % 2 or positions.shape != (x.shape[1],):
            raise GraphError(f"rope: {list(x.shape)} at positions {list(positions.shape)}; D must be even")
        if factors and factors.shape != (size // 2,):
            raise GraphError(f"rope: {factors.shape[0]} factors for heads of {size}: it takes one for each pair")
        make = ggml.ggml_rope_ext_back if back else ggml.ggml_rope_ext
        mode = ggml.GGML_ROPE_TYPE_NEOX if rotary.halves else ggml.GGML_ROPE_TYPE_NORMAL
        rest = (size, mode, 0, rotary.base, 1 / rotary.scale, 0.0, 1.0, 32.0, 1.0)  # no YaRN
        return self._node(make(self._context, x.ptr, positions.ptr, factors and factors.ptr, *rest), x.shape)

    def adamw(self, w: Node, g: Node, m: Node, v: Node, hp: Node) -> Node:
        """Updates w, m and v in place by the seven numbers of hp."""
        for other in (g, m, v):
            self._same("adamw", w, other)
        return self._node(ggml.ggml_opt_step_adamw(self._context, w.ptr, g.ptr, m.ptr, v.ptr, hp.ptr), w.shape)
