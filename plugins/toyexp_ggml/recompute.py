"""Activations computed twice, so that only one block's are held at a time.

After Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toyexp import Ops
from toyexp_ggml.binding import Graph, Node
from toyexp_ggml.inputs import Inputs
from toyexp_ggml.ops import GGMLOps, Tape
from toyexp_ggml.profiles import Profile


@dataclass
class Block:
    """What the model called between two beginnings of blocks, and the tape of it."""

    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    tape: Tape = field(default_factory=list)


class RecomputingOps(GGMLOps):
    """Walks the tape block by block, each on a second forward pass of its own.

    Of a block's first pass only what later blocks read is then still needed, and the allocator frees the rest. What
    stands before the first block, and from the last block on, is kept as it is.
    """

    def __init__(self, graph: Graph, profile: Profile, inputs: Inputs):
        super().__init__(graph, profile, inputs)
        self._blocks = [Block(tape=self._tape)]
        self._inside = False
        for name in Ops.__abstractmethods__:
            setattr(self, name, self._noting(getattr(self, name)))

    def begin_block(self) -> None:
        """Closes the block before."""
        self._tape = []
        self._blocks.append(Block(tape=self._tape))

    def backward(self, dlogits: dict[Node, Node], trainable: Sequence[Node]) -> dict[Node, Node]:
        """The gradients of the trainable nodes, from those of the results in `dlogits`."""
        gradients, leads_somewhere = dict(dlogits), set(trainable)
        for block in self._blocks:
            self._follow(block.tape, leads_somewhere)
        for i, block in reversed(list(enumerate(self._blocks))):
            tape = block.tape
            if 0 < i < len(self._blocks) - 1:
                tape = self._again(block, gradients)
                self._follow(tape, leads_somewhere)
            self._walk(tape, gradients, leads_somewhere)
        return {node: gradients[node] for node in trainable if node in gradients}

    def _again(self, block: Block, gradients: dict[Node, Node]) -> Tape:
        """The tape of the block's second forward pass; the gradients of its results go over to the new ones."""
        self._tape = []
        new: dict[Any, Any] = {}
        self._inside = True
        for call, args, named, out in block.calls:
            args = tuple(new.get(a, a) for a in args)
            result = call(*args, **{k: new.get(v, v) for k, v in named.items()})
            new.update(zip(out, result, strict=True) if isinstance(out, tuple) else [(out, result)])
        for old in [node for node in gradients if node in new]:
            gradients[new[old]] = gradients.pop(old)
        return self._tape

    def _noting(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            if self._inside:  # an op that another one calls
                return op(*args, **named)
            self._inside = True
            out = op(*args, **named)
            self._inside = False
            self._blocks[-1].calls.append((op, args, named, out))
            return out

        return noted
