"""What the rules of several ops are made of: products whose transposes are made once, sums of rows, joined nodes."""

from __future__ import annotations

from collections.abc import Sequence

from toyexp_ggml.binding import Graph, Node
from toyexp_ggml.inputs import Inputs
from toyexp_ggml.profiles import Profile
from toyexp_ggml.tape import Rule, TapedOps

UNPACKED_ROWS = 8192  # of a quantised matrix that the backward pass holds as float32 at a time


class Products(TapedOps):
    """Products, sums and joins of nodes as the device does them best."""

    def __init__(self, graph: Graph, profile: Profile, inputs: Inputs, recompute: bool):
        super().__init__(graph, recompute)
        self._profile, self._inputs = profile, inputs
        self._turned: dict[Node, Node] = {}

    def _turn(self, x: Node) -> Node:
        """The contiguous transpose of x [n, d], made once for all rules that need it."""
        if x not in self._turned:
            self._turned[x] = self._soon(self._transpose(x))
        return self._turned[x]

    def _soon(self, x: Node) -> Node:
        """x, in the graph's order before what is made later, where that lets more run side by side."""
        if self._profile.side_by_side:
            self.g.want(x)
        return x

    def _note(self, out: Node, inputs: tuple[Node, ...], rule: Rule) -> Node:
        return super()._note(self._soon(out), inputs, rule)

    def _transpose(self, x: Node) -> Node:
        return self.g.transpose(x, slow_cont=self._profile.slow_cont)

    def _out_prod(self, x: Node) -> bool:
        """Whether the device multiplies these without transposed copies: BLAS and CUDA do, but not stacks of them."""
        return self._profile.has("OUT_PROD") and len(x.shape) == 2

    def _times(self, x: Node, w: Node) -> Node:
        """x [.., n, k] times w [.., k, m] -> [.., n, m]."""
        if w.packed:
            return self._times_packed(x, w)
        return self.g.out_prod(w, x, turned=True) if self._out_prod(x) else self.g.mul_mat(self._turn(w), x)

    def _times_packed(self, x: Node, w: Node) -> Node:
        """x [n, k] times w [k, m], whose rows are made into numbers some at a time and forgotten again."""
        g = self.g
        total = None
        for start in range(0, w.shape[0], UNPACKED_ROWS):
            stop = min(start + UNPACKED_ROWS, w.shape[0])
            numbers = g.get_rows(w, self._inputs.span(start, stop))
            part = self._times(g.part(x, 1, start, stop), numbers)
            total = part if total is None else g.add(total, part)
        assert total is not None
        return total

    def _concat(self, parts: Sequence[Node], axis: int) -> Node:
        return self.g.concat(parts, axis, by_set=self._profile.slow_concat)

    def _outer(self, x: Node, y: Node) -> Node:
        """x [k, n] transposed times y [k, m] -> [n, m]."""
        return self.g.out_prod(y, x) if self._out_prod(x) else self.g.mul_mat(self._turn(y), self._turn(x))

    def _sum_rows(self, x: Node) -> Node:
        """x [n, d] summed over n -> [d]."""
        if self._profile.has("REPEAT_BACK"):
            return self.g.repeat_back(x, self._inputs.zeros(x.shape[1]))
        n, d = x.shape
        ones = self._inputs.ones(n)
        if self._out_prod(x):
            return self.g.reshape(self.g.out_prod(x, self.g.reshape(ones, n, 1)), d)
        return self.g.reshape(self.g.mul_mat(self._turn(x), self.g.reshape(ones, 1, n)), d)
