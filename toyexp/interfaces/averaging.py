"""Averaged weights: an update rule that also keeps the exponential moving average of a tensor's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toyexp.interfaces.arithmetic import Arithmetic
from toyexp.interfaces.ops import Tensor
from toyexp.interfaces.optimiser import EVAL_OFFSET, WrappedRule

DECAY = "ema_factor"  # name of the scalar in `numbers`


@dataclass
class Averaged(WrappedRule):
    """Update rule that wraps another rule, `rule`, and keeps an average a of the weights w that it computes.

    After each step, a becomes d a + (1 - d) w. At the 0-based step t, d = decay (1 - decay^t) / (1 - decay^(t+1)). So a
    is the exponential moving average with bias correction, as in Adam: the sum of (1 - decay) decay^i w(t-i) over all
    steps, divided by 1 - decay^(t+1). It excludes the initial weights. The state array `eval_offset` is a - w, because
    the small difference keeps its precision in float32.
    """

    decay: float

    def names(self) -> Sequence[str]:
        """Return the names of the wrapped rule's scalars, and the name of the averaging factor d."""
        return (*self.rule.names(), DECAY)

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the wrapped rule's state arrays, and of `eval_offset` (average minus weights)."""
        return {**self.rule.slots(shape), EVAL_OFFSET: shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return the wrapped rule's scalars, and the averaging factor d of this step."""
        factor = self.decay * (1 - self.decay**step) / (1 - self.decay ** (step + 1))
        return {**self.rule.numbers(step, lr, weight_decay), DECAY: factor}

    def update(
        self, ops: Arithmetic, w: Tensor, g: Tensor, state: Mapping[str, Tensor], n: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Apply the wrapped rule, and return its new `w` and state, plus the state array d (a - new w).

        Here a is the average before the step, and d is the averaging factor.
        """
        new, new_state = self.rule.update(ops, w, g, state, n)
        distance = ops.add(state[EVAL_OFFSET], ops.sub(w, new))
        return new, {**new_state, EVAL_OFFSET: ops.scale(distance, n[DECAY])}
