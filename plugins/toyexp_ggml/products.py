"""What the rules of several ops are made of: products whose transposes are made once, sums of rows, joined nodes.

A device with `wide_tiles` shares a product out among groups of threads by its shape alone: a group computes 128 x 128
numbers, or 64 x 64 where the result has no more than 64 rows or columns, and adds up all their terms, however few
groups that makes (`ggml_vk_guess_matmul_pipeline` and `ggml_vk_guess_split_k` of ggml's Vulkan). 256 weights by 1024
positions are 16 groups, and the weights' gradient 4, for GPUs that have room for hundreds. So such products are cut: a
stack of products of 64 rows each lies in memory as the one product does, and long sums are added up in slices.

`TapedOps` notes a forward pass and walks back along it. With `recompute` it holds the activations of one block at a
time, after Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
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

Rule = Callable[..., Sequence[Callable[[], Node]]]  # of each result's gradient; None where nothing asked for one
Tape = list[tuple[tuple[Node, ...], tuple[Node, ...], Rule]]

UNPACKED_ROWS = 8192  # of a quantised matrix that the backward pass holds as float32 at a time
WIDE, NARROW = 128, 64  # sides of what one group of threads computes
COLUMN = 8  # up to so many rows or columns there are other kernels
ENOUGH = 128  # groups, of which one keeps a core of a large GPU busy
SHORTEST = 128  # terms of a slice: fewer would be more writing than adding


def stack_of(n: int, m: int) -> int:
    """Of how many products of fewer rows a result [n, m] is made; 1 where it is enough groups, or cannot be cut."""
    if min(n, m) <= NARROW or n % NARROW or _groups(n, m, WIDE) >= ENOUGH:
        return 1
    return n // NARROW


def slices_of(n: int, m: int, k: int) -> int:
    """In how many slices the k terms of a result [n, m] are added up."""
    side = NARROW if min(n, m) <= NARROW or stack_of(n, m) > 1 else WIDE
    count, groups = 1, _groups(n, m, side)
    while min(n, m) > COLUMN and count * groups < ENOUGH and k % (2 * count * SHORTEST) == 0:
        count *= 2
    return count


def _groups(n: int, m: int, side: int) -> int:
    return -(-n // side) * -(-m // side)


@dataclass(frozen=True)
class Block:
    """A block's first forward pass, and what computes it again."""

    tape: Tape
    again: Callable[[], Node]
    out: Node


class TapedOps(Ops):
    """Notes (results, inputs, rule) of each op; with `recompute` each block is walked on a second pass of its own.

    Of a block's first pass only its result is then still needed, and the allocator frees the rest. What stands between
    the blocks, and the last block, is kept as it is.
    """

    def __init__(self, graph: Graph, recompute: bool):
        self.g = graph
        self._tape: Tape = []
        self._stretches: list[Tape | Block] = [self._tape]
        self._inside = not recompute  # of a block, or of a pass that keeps all

    def _note(self, out: Node, inputs: tuple[Node, ...], rule: Rule) -> Node:
        self._tape.append(((out,), inputs, rule))
        return out

    def _note_several(self, outs: tuple[Node, ...], inputs: tuple[Node, ...], rule: Rule) -> tuple[Node, ...]:
        self._tape.append((outs, inputs, rule))
        return outs

    def block(self, function: Callable[..., Node], x: Node, p: Params, *rest: Any) -> Node:
        """See Ops.block; a block inside another is a part of it."""
        if self._inside:
            return super().block(function, x, p, *rest)

        def again() -> Node:
            self._tape, self._inside = [], True
            out = function(self, x, p, *rest)
            self._inside = False
            return out

        out = again()
        block, self._tape = Block(self._tape, again, out), []
        self._stretches += [block, self._tape]
        return out

    def backward(self, dlogits: dict[Node, Node], trainable: Sequence[Node]) -> dict[Node, Node]:
        """The gradients of the trainable nodes, from those of the results in `dlogits`."""
        gradients, leads_somewhere = dict(dlogits), set(trainable)
        tapes = [s.tape if isinstance(s, Block) else s for s in self._stretches]
        for tape in tapes:
            self._follow(tape, leads_somewhere)
        last = max((i for i, s in enumerate(self._stretches) if isinstance(s, Block)), default=0)
        for i, stretch in reversed(list(enumerate(self._stretches))):
            tape = tapes[i]
            if isinstance(stretch, Block) and i != last:
                tape = self._again(stretch, gradients)
                self._follow(tape, leads_somewhere)
            self._walk(tape, gradients, leads_somewhere)
        return {node: gradients[node] for node in trainable if node in gradients}

    def _again(self, block: Block, gradients: dict[Node, Node]) -> Tape:
        """The tape of the block's second forward pass; the gradient of its result goes over to the new one."""
        gradient = gradients.pop(block.out, None)
        if any(out in gradients for outs, _, _ in block.tape for out in outs):
            raise GraphError("a tensor left its block by another way than as the block's result")
        if gradient is None:
            return []
        gradients[block.again()] = gradient
        return self._tape

    @staticmethod
    def _follow(tape: Tape, leads_somewhere: set[Node]) -> None:
        """Adds the results that something trainable lies behind."""
        for outs, inputs, _ in tape:
            if leads_somewhere.intersection(inputs):
                leads_somewhere.update(outs)

    def _walk(self, tape: Tape, gradients: dict[Node, Node], leads_somewhere: set[Node]) -> None:
        """Trades the gradients of the tape's results for those of its inputs, from its end to its beginning."""
        for outs, inputs, rule in reversed(tape):
            dys = [gradients.pop(out, None) for out in outs]
            if not any(dys):
                continue
            built = [(x, build()) for x, build in zip(inputs, rule(*dys), strict=True) if x in leads_somewhere]
            for x, gradient in built:
                gradients[x] = self.g.add(gradients[x], gradient) if x in gradients else gradient
                # In the graph's order a weight's gradient comes as soon as it can, so that the activations
                # which only it still reads are freed.
                self.g.want(gradients[x])


class Products(TapedOps):
    """Products, sums and joins of nodes as the device does them best."""

    def __init__(self, graph: Graph, profile: Profile, inputs: Inputs, recompute: bool):
        super().__init__(graph, recompute)
        self._profile, self._inputs = profile, inputs
        self._turned: dict[tuple[Node, int], Node] = {}

    def _soon(self, x: Node) -> Node:
        """x, in the graph's order before what is made later, where that lets more run side by side."""
        if self._profile.side_by_side:
            self.g.want(x)
        return x

    def _note(self, out: Node, inputs: tuple[Node, ...], rule: Rule) -> Node:
        return super()._note(self._soon(out), inputs, rule)

    def _transpose(self, x: Node) -> Node:
        return self.g.transpose(x, slow_cont=self._profile.slow_cont)

    def _turn(self, x: Node, slices: int = 1) -> Node:
        """The contiguous transpose of x [n, d], or of each slice of its rows, made once for all rules that need it."""
        if (x, slices) not in self._turned:
            rows = x if slices == 1 else self.g.reshape(x, slices, x.shape[0] // slices, x.shape[1])
            self._turned[x, slices] = self._soon(self._transpose(rows))
        return self._turned[x, slices]

    def _out_prod(self, x: Node) -> bool:
        """Whether the device multiplies these without transposed copies: BLAS and CUDA do, but not stacks of them."""
        return self._profile.has("OUT_PROD") and len(x.shape) == 2

    def _by_rows(self, w: Node, x: Node) -> Node:
        """x [n, k] times w [m, k] transposed -> [n, m]."""
        (n, k), m = x.shape, w.shape[0]
        count = stack_of(n, m) if self._profile.wide_tiles else 1
        if count == 1:
            return self.g.mul_mat(w, x)
        return self.g.reshape(self.g.mul_mat(w, self.g.reshape(x, count, n // count, k)), n, m)

    def _times(self, x: Node, w: Node) -> Node:
        """x [.., n, k] times w [.., k, m] -> [.., n, m]."""
        if w.packed:
            return self._times_packed(x, w)
        if self._out_prod(x):
            return self.g.out_prod(w, x, turned=True)
        return self._by_rows(self._turn(w), x) if len(x.shape) == 2 else self.g.mul_mat(self._turn(w), x)

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
        if self._out_prod(x):
            return self.g.out_prod(y, x)
        (k, n), m = x.shape, y.shape[1]
        slices = slices_of(n, m, k) if self._profile.wide_tiles else 1
        if slices == 1:
            return self._by_rows(self._turn(y), self._turn(x))
        stack = stack_of(n, m)
        columns = self.g.reshape(self._turn(y, slices), slices, 1, m, k // slices)
        rows = self.g.reshape(self._turn(x, slices), slices, stack, n // stack, k // slices)
        products = self.g.mul_mat(columns, rows)
        return self.g.sum_first(self.g.reshape(products, slices, n, m))

    def _sum_rows(self, x: Node) -> Node:
        """x [n, d] summed over n -> [d]."""
        if self._profile.has("REPEAT_BACK") and not self._profile.slow_repeat_back:
            return self.g.repeat_back(x, self._inputs.zeros(x.shape[1]))
        n, d = x.shape
        ones = self._inputs.ones(n)
        if self._out_prod(x):
            return self.g.reshape(self.g.out_prod(x, self.g.reshape(ones, n, 1)), d)
        return self.g.reshape(self.g.mul_mat(self._turn(x), self.g.reshape(ones, 1, n)), d)
