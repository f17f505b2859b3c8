"""What a forward pass notes of itself, and the walk back along it that adds the gradients.

Where activations are computed twice, only one block's are held at a time: after Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toyexp import Ops, Params
from toyexp_ggml.binding import Graph, GraphError, Node

Rule = Callable[..., Sequence[Callable[[], Node]]]  # of each result's gradient; None where nothing asked for one
Tape = list[tuple[tuple[Node, ...], tuple[Node, ...], Rule]]


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
