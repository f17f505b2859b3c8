"""Matrix products, sums and concatenations for the ops and their gradient rules. Transposes are reused.

A device with `wide_tiles` divides a product among groups of threads only by the shape of the result. A group computes
128 x 128 numbers, or 64 x 64 if the result has at most 64 rows or columns (`ggml_vk_guess_matmul_pipeline` and
`ggml_vk_guess_split_k` of ggml's Vulkan). The product of a 256 x 256 weight with 1024 positions has 16 groups, and the
weight's gradient has 4, while GPUs have room for hundreds. Such products are therefore split into a stack of products
of 64 rows each, with the same memory layout. Long sums are also split into slices for several groups; otherwise a
single group would compute each sum.

`TapedOps` records a forward pass and computes its gradients. If `recompute` is set, only one block's activations are in
memory at a time, after Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toyexp import Ops, Params
from toyexp_ggml.binding import GraphError
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Node
from toyexp_ggml.inputs import Inputs
from toyexp_ggml.profiles import Profile

Rule = Callable[..., Sequence[Callable[[], Node]]]  # gets each result's gradient, or None for an unused result
Tape = list[tuple[tuple[Node, ...], tuple[Node, ...], Rule]]  # results, inputs and gradient rule of each op

UNPACKED_ROWS = 8192  # rows of a quantised matrix that the backward pass dequantises at a time
FEWEST_UNPACKED = 32  # rows from which kernels.c multiplies a quantised matrix; for fewer, dequantising takes too long
WIDE, NARROW = 128, 64  # sides of the tiles that a group of threads computes
COLUMN = 8  # results with at most this many rows or columns have other kernels
ENOUGH = 128  # groups of threads that keep a large GPU busy
SHORTEST = 128  # fewest terms in a slice: with fewer, writing the result costs more than adding


def stack_count(n: int, m: int) -> int:
    """Return into how many matrix products, of NARROW rows each, to split a product with the result [n, m]."""
    if min(n, m) <= NARROW or n % NARROW or _groups(n, m, WIDE) >= ENOUGH:
        return 1
    return n // NARROW


def slice_count(n: int, m: int, k: int) -> int:
    """Return into how many slices to split the k terms of each sum in a matrix product with the result [n, m]."""
    side = NARROW if min(n, m) <= NARROW or stack_count(n, m) > 1 else WIDE
    count, groups = 1, _groups(n, m, side)
    while min(n, m) > COLUMN and count * groups < ENOUGH and k % (2 * count * SHORTEST) == 0:
        count *= 2
    return count


def _groups(n: int, m: int, side: int) -> int:
    return -(-n // side) * -(-m // side)


def _as_tuple(results: Node | tuple[Node, ...]) -> tuple[Node, ...]:
    return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True)
class Block:
    """Record of a block's first forward pass: its tape, its results, and a function that runs the block again."""

    tape: Tape
    run: Callable[[], Node | tuple[Node, ...]]
    outs: tuple[Node, ...]


class TapedOps(Ops):
    """Ops that record each call as (results, inputs, gradient rule) on a tape, from which `backward` builds gradients.

    If `recompute` is True, `backward` runs each block's forward pass again, so that the allocator can free all
    activations of the first pass except the block's result. Activations between blocks and in the last block are kept.
    """

    def __init__(self, graph: Graph, recompute: bool):
        self.g = graph
        self._tape: Tape = []
        self._segments: list[Tape | Block] = [self._tape]
        self._is_inside = not recompute  # True inside a block, and always if `recompute` is False
        self._seed: tuple[Node, float] | None = None  # gradient of the loss: a constant, and its value

    def _record(self, out: Node, inputs: tuple[Node, ...], rule: Rule) -> Node:
        self._tape.append(((out,), inputs, rule))
        return out

    def block(self, function: Callable[..., Any], x: Node, p: Params, *rest: Any) -> Any:
        """Run a block of the model; see Ops.block. A block inside another is recorded as a part of the outer one."""
        if self._is_inside:
            return super().block(function, x, p, *rest)

        def run() -> Any:
            self._tape, self._is_inside = [], True
            out = function(self, x, p, *rest)
            self._is_inside = False
            return out

        out = run()
        block, self._tape = Block(self._tape, run, _as_tuple(out)), []
        self._segments += [block, self._tape]
        return out

    def backward(self, loss: Node, seed: Node, factor: float, trainable: Sequence[Node]) -> dict[Node, Node]:
        """Return `factor` times the gradients of the scalar `loss` with respect to the `trainable` nodes.

        `seed` is a node [1] with the value `factor`. Nodes on which the loss does not depend are left out.
        """
        self._seed = seed, factor
        gradients, dependents = {loss: seed}, set(trainable)
        tapes = [s.tape if isinstance(s, Block) else s for s in self._segments]
        for tape in tapes:
            self._mark_dependents(tape, dependents)
        last = max((i for i, s in enumerate(self._segments) if isinstance(s, Block)), default=0)
        for i, segment in reversed(list(enumerate(self._segments))):
            tape = tapes[i]
            if isinstance(segment, Block) and i != last:
                tape = self._run_again(segment, gradients)
                self._mark_dependents(tape, dependents)
            self._walk(tape, gradients, dependents)
        return {node: gradients[node] for node in trainable if node in gradients}

    def _times_scalar(self, x: Node, dy: Node) -> Node:
        """Return x times the node dy [1], which is the gradient of a scalar result."""
        if self._seed is None or dy is not self._seed[0]:
            return self.g.mul(x, dy)
        return x if self._seed[1] == 1 else self.g.scale(x, self._seed[1])

    def _run_again(self, block: Block, gradients: dict[Node, Node]) -> Tape:
        """Run the block again and return the new tape, which is empty if the block's results have no gradient.

        In `gradients`, the new results take the places of the first ones.
        """
        of_outs = [gradients.pop(out, None) for out in block.outs]
        if any(out in gradients for outs, _, _ in block.tape for out in outs):
            raise GraphError("engine.recompute=true: a block's tensor is used outside the block; use recompute=false")
        if not any(of_outs):
            return []
        again = zip(_as_tuple(block.run()), of_outs, strict=True)
        gradients.update((out, gradient) for out, gradient in again if gradient is not None)
        return self._tape

    @staticmethod
    def _mark_dependents(tape: Tape, dependents: set[Node]) -> None:
        """Add to `dependents` each result on the tape that depends on a node in `dependents`."""
        for outs, inputs, _ in tape:
            if dependents.intersection(inputs):
                dependents.update(outs)

    def _walk(self, tape: Tape, gradients: dict[Node, Node], dependents: set[Node]) -> None:
        """Read the tape backwards. In `gradients`, replace each result's gradient by the gradients of its inputs."""
        for outs, inputs, rule in reversed(tape):
            dys = [gradients.pop(out, None) for out in outs]
            if not any(dys):
                continue
            built = [(x, build()) for x, build in zip(inputs, rule(*dys), strict=True) if x in dependents]
            for x, gradient in built:
                gradients[x] = self.g.add(gradients[x], gradient) if x in gradients else gradient
                # A weight's gradient is computed as early as possible, to free activations that only it still reads.
                self.g.want(gradients[x])


class Products(TapedOps):
    """Ops for matrix products, sums and concatenations. Each uses the ggml ops that are fastest on the device."""

    def __init__(self, graph: Graph, profile: Profile, inputs: Inputs, recompute: bool):
        super().__init__(graph, recompute)
        self._profile, self._inputs = profile, inputs
        self._transposes: dict[tuple[Node, int], Node] = {}

    def _schedule(self, x: Node) -> Node:
        """Add x to the graph now if the device runs independent nodes concurrently. Return x."""
        if self._profile.side_by_side:
            self.g.want(x)
        return x

    def _record(self, out: Node, inputs: tuple[Node, ...], rule: Rule) -> Node:
        return super()._record(self._schedule(out), inputs, rule)

    def _transpose(self, x: Node) -> Node:
        return self.g.transpose(x, slow_cont=self._profile.slow_cont)

    def _transpose_once(self, x: Node, slices: int = 1) -> Node:
        """Return a cached contiguous transpose of x [n, d], or of each of `slices` equal slices of its rows."""
        if (x, slices) not in self._transposes:
            rows = x if slices == 1 else self.g.reshape(x, slices, x.shape[0] // slices, x.shape[1])
            self._transposes[x, slices] = self._schedule(self._transpose(rows))
        return self._transposes[x, slices]

    def _has_out_prod(self, x: Node) -> bool:
        """Return True if x is a matrix and the device has the op OUT_PROD, which needs no transposed copy."""
        return self._profile.has("OUT_PROD") and len(x.shape) == 2

    def _multiply_rows(self, w: Node, x: Node) -> Node:
        """Return x [n, k] times w [m, k] transposed -> [n, m]."""
        (n, k), m = x.shape, w.shape[0]
        if self._profile.fast_products and len(w.shape) == 2 and (n >= FEWEST_UNPACKED or not w.packed):
            return self.g.product(x, w, b_transposed=True)
        count = stack_count(n, m) if self._profile.wide_tiles else 1
        if count == 1:
            return self.g.mul_mat(w, x)
        return self.g.reshape(self.g.mul_mat(w, self.g.reshape(x, count, n // count, k)), n, m)

    def _multiply(self, x: Node, w: Node) -> Node:
        """Return x [.., n, k] times w [.., k, m] -> [.., n, m]."""
        if w.packed:
            return self._multiply_packed(x, w)
        if self._profile.fast_products and len(x.shape) == len(w.shape) == 2:
            return self.g.product(x, w)
        if self._has_out_prod(x):
            return self.g.out_prod(w, x, transposed=True)
        transpose = self._transpose_once(w)
        return self._multiply_rows(transpose, x) if len(x.shape) == 2 else self.g.mul_mat(transpose, x)

    def _multiply_packed(self, x: Node, w: Node) -> Node:
        """Return x [n, k] times w [k, m], where w is not stored in float32; dequantise some rows of w at a time."""
        g = self.g
        total = None
        for start in range(0, w.shape[0], UNPACKED_ROWS):
            stop = min(start + UNPACKED_ROWS, w.shape[0])
            numbers = g.get_rows(w, self._inputs.span(start, stop))
            part = self._multiply(g.part(x, 1, start, stop), numbers)
            total = part if total is None else g.add(total, part)
        assert total is not None
        return total

    def _concat(self, parts: Sequence[Node], axis: int) -> Node:
        return self.g.concat(parts, axis, by_set=self._profile.slow_concat)

    def _outer(self, x: Node, y: Node) -> Node:
        """Return x [k, n] transposed times y [k, m] -> [n, m]."""
        if self._profile.fast_products:
            return self.g.product(x, y, a_transposed=True)
        if self._has_out_prod(x):
            return self.g.out_prod(y, x)
        (k, n), m = x.shape, y.shape[1]
        slices = slice_count(n, m, k) if self._profile.wide_tiles else 1
        if slices == 1:
            return self._multiply_rows(self._transpose_once(y), self._transpose_once(x))
        stack = stack_count(n, m)
        columns = self.g.reshape(self._transpose_once(y, slices), slices, 1, m, k // slices)
        rows = self.g.reshape(self._transpose_once(x, slices), slices, stack, n // stack, k // slices)
        products = self.g.mul_mat(columns, rows)
        return self.g.sum_first(self.g.reshape(products, slices, n, m))

    def _sum_rows(self, x: Node) -> Node:
        """Return x [n, d] summed over n -> [d]."""
        if self._profile.has("REPEAT_BACK") and not self._profile.slow_repeat_back:
            return self.g.repeat_back(x, self._inputs.zeros(x.shape[1]))
        n, d = x.shape
        ones = self._inputs.ones(n)
        if self._has_out_prod(x):
            return self.g.reshape(self.g.out_prod(x, self.g.reshape(ones, n, 1)), d)
        return self.g.reshape(self.g.mul_mat(self._transpose_once(x), self.g.reshape(ones, 1, n)), d)
