"""An optimiser of your own; as it stands, RMSprop: each weight's step is divided by the usual size of its gradient.

It is a formula and knows no engine: what `update` does with `ops` runs on all of them, as CUDA graphs and ggml graphs
too. Clipping, accumulation, weight decay, groups of tensors and checkpoints come with the base class.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import Optimiser, UserError, hookimpl


@dataclass
class MyOptimiser(Optimiser):
    """RMSprop (Tieleman and Hinton 2012): gradients divided by the root of their mean square."""  # its line in lists

    name: ClassVar[str] = "my_optimiser"  # what `optim=` takes
    elementwise: ClassVar[bool] = True  # no number depends on another of its tensor: engines may join tensors

    # Fields are settings, `optim.decay=0.9`; the comment behind one is its help.
    decay: float = 0.99  # share of the mean square that stays at each step
    eps: float = 1e-8  # added to the root, so that nothing is divided by 0

    def check(self):
        """Raises UserError for what cannot work: what was asked, and what is true."""
        super().check()
        if not 0 <= self.decay < 1:
            raise UserError(f"optim.decay={self.decay}: must be at least 0 and below 1")
        if not self.eps > 0:
            raise UserError(f"optim.eps={self.eps}: must be above 0")

    def slots(self, shape):
        """What it remembers of a tensor of this shape, by name; zeros at first, kept in checkpoints."""
        return {"square": shape}

    def numbers(self, step, lr, weight_decay):
        """The numbers of a step, counted from 0; `lr` comes from the schedule. The same names at every step.

        Here the mean is divided by 1 - decay^t, as one that began at 0 is too small for its first steps.
        """
        grown = 1 - self.decay ** (step + 1)
        return {"lr": lr, "kept": 1 - lr * weight_decay, "decay": self.decay, "grown": 1 / grown, "eps": self.eps}

    def update(self, ops, w, g, state, n):
        """The new weights, and the new state by the names of `slots`; `toyexp.Arithmetic` has what `ops` can do."""
        square = ops.blend(ops.square(g), state["square"], n["decay"])  # decay * old + (1 - decay) * g^2
        root = ops.shift(ops.sqrt(ops.scale(square, n["grown"])), n["eps"])
        return ops.sub(ops.scale(w, n["kept"]), ops.scale(ops.div(g, root), n["lr"])), {"square": square}


@hookimpl
def register_optimisers(register):
    """What toyexp calls to learn of it."""
    register(MyOptimiser)
