"""RMSprop, which divides each gradient by its running root mean square. Change it into your own optimiser.

`update` is a formula written with operations of `ops`, so every engine can run it. Clipping, gradient accumulation,
parameter groups and checkpoints work without further code.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import Optimiser, UserError, hookimpl


@dataclass
class MyOptimiser(Optimiser):
    """RMSprop: divide gradients by the running root of their mean square (Tieleman and Hinton 2012)."""

    name: ClassVar[str] = "my_optimiser"  # the name to type: `optim=my_optimiser`
    elementwise: ClassVar[bool] = True  # elements are updated independently, so engines may join tensors

    # Fields are settings: `optim.decay=0.9`. The comment after a field is its help text.
    decay: float = 0.99  # share of the running mean square that a step keeps
    eps: float = 1e-8  # added to the root to avoid division by 0

    def check(self):
        """Raise UserError for bad settings. The message names the key, its value and the allowed values."""
        super().check()
        if not 0 <= self.decay < 1:
            raise UserError(f"optim.decay={self.decay}: must be at least 0 and below 1")
        if not self.eps > 0:
            raise UserError(f"optim.eps={self.eps}: must be above 0")

    def slots(self, shape):
        """Return the names and shapes of a tensor's state, which starts at 0 and is saved in checkpoints."""
        return {"square": shape}

    def numbers(self, step, lr, weight_decay):
        """Return the scalars of a step by name; every step has the same names. `step` counts from 0.

        `lr` follows the schedule. The mean square starts at 0, so it is divided by 1 - decay^(step + 1) (bias
        correction).
        """
        correction = 1 / (1 - self.decay ** (step + 1))
        return {
            "lr": lr,
            "shrink": 1 - lr * weight_decay,
            "decay": self.decay,
            "correction": correction,
            "eps": self.eps,
        }

    def update(self, ops, w, g, state, n):
        """Return the new value of `w` and the new state. `toyexp help plugins/optimiser` lists the methods of `ops`."""
        square = ops.blend(ops.square(g), state["square"], n["decay"])  # decay * old + (1 - decay) * g^2
        root = ops.shift(ops.sqrt(ops.scale(square, n["correction"])), n["eps"])
        return ops.sub(ops.scale(w, n["shrink"]), ops.scale(ops.div(g, root), n["lr"])), {"square": square}


@hookimpl
def register_optimisers(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyOptimiser)
