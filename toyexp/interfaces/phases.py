"""An update rule for runs of several phases, in which some tensors or elements of tensors do not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toyexp.interfaces.arithmetic import Arithmetic
from toyexp.interfaces.ops import Tensor
from toyexp.interfaces.optimiser import WrappedRule

FROZEN = "frozen"  # array of a tensor whose elements do not train where it is 1
TURN = "turn"  # array of a batch [rows]: the number of the step modulo the number of turns
SHARES = ("new_share", "old_share")  # names of scalars in `numbers`: 1 and 0 in steps that train the tensor, or 0 and 1


@dataclass
class Phased(WrappedRule):
    """Update rule that wraps another rule, `rule`, for tensors with `turns` or `keeps`, which `PlanTensor` describes.

    The wrapped rule counts only the steps in which the tensor trains.
    """

    turns: tuple[int, ...]
    keeps: tuple[str, ...]

    def names(self) -> Sequence[str]:
        """Return the names of the wrapped rule's scalars, and with `turns` those of the two shares."""
        return (*self.rule.names(), *(SHARES if self.turns else ()))

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the wrapped rule's state and of the arrays in `keeps`."""
        return {**self.rule.slots(shape), **dict.fromkeys(self.keeps, shape)}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return the wrapped rule's scalars, and with `turns` the two shares."""
        turns = self.turns or (1,)
        cycles, turn = divmod(step, len(turns))
        trained = cycles * sum(turns) + sum(turns[:turn])
        shares = dict(zip(SHARES, (float(turns[turn]), 1.0 - turns[turn]), strict=True))
        return {**self.rule.numbers(trained, lr, weight_decay), **(shares if self.turns else {})}

    def update(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the wrapped rule's new `w` and state where the tensor trains, and the exact old numbers elsewhere."""
        new_w, new = self.rule.update(ops, w, g, state, n)
        if self.turns:
            on, off = (n[name] for name in SHARES)
            new_w = ops.add(ops.scale(new_w, on), ops.scale(w, off))
            new = {slot: ops.add(ops.scale(x, on), ops.scale(state[slot], off)) for slot, x in new.items()}
        if FROZEN in self.keeps:
            trains = ops.shift(ops.scale(state[FROZEN], -1.0), 1.0)
            new_w = ops.add(ops.mul(new_w, trains), ops.mul(w, state[FROZEN]))
        return new_w, {**new, **{name: state[name] for name in self.keeps}}
