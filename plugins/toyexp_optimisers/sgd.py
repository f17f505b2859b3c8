"""Stochastic gradient descent, and Lion, whose steps have the sign of the momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Arithmetic, Optimiser, UserError
from toyexp.base import require_range


@dataclass
class SGD(Optimiser):
    """SGD with momentum (Polyak 1964) or Nesterov momentum, and decoupled weight decay."""

    name: ClassVar[str] = "sgd"
    elementwise: ClassVar[bool] = True

    momentum: float = 0.9  # momentum; 0: none, without memory for it
    nesterov: bool = False  # use Nesterov momentum (Sutskever et al. 2013, as in PyTorch)

    def check(self) -> None:
        super().check()
        require_range("optim", self, momentum="[0,1)")
        if self.nesterov and not self.momentum:
            raise UserError("optim.nesterov=true: needs optim.momentum above 0, such as 0.9")

    @property
    def title(self) -> str:
        kind = "Nesterov momentum" if self.nesterov else "momentum"
        return f"SGD, {kind} {self.momentum:g}" if self.momentum else "SGD"

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the momentum, named m, or an empty mapping if `momentum` is 0."""
        return {"m": shape} if self.momentum else {}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return lr, the momentum, and the number `kept` = 1 - lr * weight_decay that scales the weights."""
        return {"lr": lr, "kept": 1 - lr * weight_decay, "momentum": self.momentum}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """Apply m = momentum m + g; w = w (1 - lr wd) - lr m, with gradient g and weight decay wd.

        With Nesterov momentum, g + momentum m replaces m in the second formula.
        """
        if self.momentum:
            m = ops.add(ops.scale(state["m"], n["momentum"]), g)
            g, state = ops.add(g, ops.scale(m, n["momentum"])) if self.nesterov else m, {"m": m}
        return ops.sub(ops.scale(w, n["kept"]), ops.scale(g, n["lr"])), state


@dataclass
class Lion(Optimiser):
    """Lion (Chen et al. 2023): steps along the sign of the momentum; needs an lr 3 to 10 times below AdamW's."""

    name: ClassVar[str] = "lion"
    title: ClassVar[str] = "Lion"
    elementwise: ClassVar[bool] = True

    beta1: float = 0.9  # weight of the momentum in a step's direction
    beta2: float = 0.99  # decay of the momentum

    def check(self) -> None:
        super().check()
        require_range("optim", self, beta1="[0,1)", beta2="[0,1)")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the momentum, named m."""
        return {"m": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return lr, the two betas, and the number `kept` = 1 - lr * weight_decay that scales the weights."""
        return {"lr": lr, "kept": 1 - lr * weight_decay, "beta1": self.beta1, "beta2": self.beta2}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """Apply w = w (1 - lr wd) - lr sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.

        g is the gradient, m the momentum and wd the weight decay.
        """
        direction = ops.sign(ops.blend(g, state["m"], n["beta1"]))
        m = ops.blend(g, state["m"], n["beta2"])
        return ops.sub(ops.scale(w, n["kept"]), ops.scale(direction, n["lr"])), {"m": m}
