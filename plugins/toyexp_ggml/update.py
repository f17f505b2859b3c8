"""Optimiser step as graph nodes: a fused op if the device has one, otherwise the formulas of the optimiser's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from toyexp import Arithmetic, Group, Plan
from toyexp_ggml.binding.graph import Graph
from toyexp_ggml.binding.tensors import Memory, Node, clear, put
from toyexp_ggml.profiles import Profile

State = Mapping[str, Node]


class GGMLArithmetic(Arithmetic):
    """Operations in which optimisers' rules are written, on nodes of one graph. A scalar is a node [1]."""

    def __init__(self, graph: Graph, profile: Profile):
        self._g, self._profile = graph, profile

    def add(self, a: Node, b: Node) -> Node:
        return self._g.add(a, b)

    def sub(self, a: Node, b: Node) -> Node:
        return self._g.sub(a, b)

    def mul(self, a: Node, b: Node) -> Node:
        return self._g.mul(a, b)

    def div(self, a: Node, b: Node) -> Node:
        return self._g.div(a, b)

    def scale(self, x: Node, factor: Node | float) -> Node:
        return self._g.mul(x, factor) if isinstance(factor, Node) else self._g.scale(x, factor)

    def shift(self, x: Node, amount: Node | float) -> Node:
        return self._g.add(x, amount) if isinstance(amount, Node) else self._g.scale(x, 1.0, amount)

    def sqrt(self, x: Node) -> Node:
        return self._g.sqrt(x)

    def sign(self, x: Node) -> Node:
        return self._g.sgn(x)

    def at_least(self, x: Node, low: float) -> Node:
        return self._g.clamp(self._g.scale(x, 1.0), low, LARGEST)

    def sum(self, x: Node) -> Node:
        return self._g.total(x, by_rows=self._profile.narrow_sum)

    def sum_last(self, x: Node) -> Node:
        return self._g.sum_last(x)

    def matmul(self, a: Node, b: Node) -> Node:
        return self._g.mul_mat(b, a)

    def transpose(self, x: Node) -> Node:
        return self._g.transpose(x, slow_cont=self._profile.slow_cont)


LARGEST = float(np.finfo(np.float32).max)


class Update:
    """Optimiser state and hyperparameters in a session's memory, and the graph nodes of the optimiser step."""

    def __init__(self, plan: Plan, memory: Memory, profile: Profile):
        self._profile = profile
        self._groups = plan.updates
        self.state: dict[str, State] = {
            t.name: {slot: memory.tensor(shape) for slot, shape in plan.slots(t).items()} for t in plan.trainable
        }
        self._numbers = [memory.tensor((len(group.rule.names()),)) for group in self._groups]

    def reset(self) -> None:
        for state in self.state.values():
            for node in state.values():
                clear(node)

    def load(self, numbers: Sequence[np.ndarray]) -> None:
        """Upload the hyperparameters of each parameter group for the next step."""
        for group, node, vector in zip(self._groups, self._numbers, numbers, strict=True):
            put(node, float32_hp(vector) if self._has_fused_op(group) else vector.astype(np.float32))

    def _has_fused_op(self, group: Group) -> bool:
        return group.rule.fused_kernel == "adamw" and self._profile.has("OPT_STEP_ADAMW")

    def build(self, graph: Graph, weights: Mapping[str, Node], gradients: Mapping[str, Node]) -> None:
        """Add nodes that update the weights and the optimiser state; both mappings have tensor names as keys."""
        ops = GGMLArithmetic(graph, self._profile)
        for group, numbers in zip(self._groups, self._numbers, strict=True):
            has_fused_op = self._has_fused_op(group)
            n = {} if has_fused_op else {name: graph.number(numbers, i) for i, name in enumerate(group.rule.names())}
            for name in group.tensors:
                w, g, state = weights[name], gradients[name], self.state[name]
                if has_fused_op:
                    by_kernel = self._profile.fast_products
                    graph.want(graph.adamw(w, g, state["m"], state["v"], numbers, by_kernel))
                    continue
                results = group.rule.results(ops, w, g, state, n)
                for node in results:  # compute all results before the first replaces a tensor that others read
                    graph.want(node)
                for node, target in zip(results, (w, *state.values()), strict=True):
                    graph.want(graph.copy_into(node, target))


def float32_hp(hp: np.ndarray) -> np.ndarray:
    """Convert AdamW's hyperparameters [lr, beta1, beta2, eps, weight_decay, s5, s6] to float32 for ggml's kernel.

    The kernel computes 1 - beta in float32. For beta = 0.999 this has a relative error of 1.3e-5. To correct the error,
    adjust s5 and s6, by which the kernel multiplies the moments.
    """
    rounded = hp.astype(np.float32)
    complement = (1 - rounded[1:3]).astype(np.float64)
    rounded[5:] = hp[5:] * np.divide(1 - hp[1:3], complement, out=np.ones(2), where=complement > 0)
    return rounded
