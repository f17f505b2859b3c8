"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Arithmetic, Optimiser, UserError
from toyexp.base import require_within


@dataclass
class SGD(Optimiser):
    """SGD, with momentum (Polyak 1964) or Nesterov's; weight decay is decoupled."""

    name: ClassVar[str] = "sgd"
    elementwise: ClassVar[bool] = True

    momentum: float = 0.9  # share of the last direction that is kept; 0: none, and no memory for it
    nesterov: bool = False  # look ahead by the momentum (Sutskever et al. 2013, as in PyTorch)

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        super().check()
        require_within("optim", self, momentum="[0,1)")
        if self.nesterov and not self.momentum:
            raise UserError("optim.nesterov=true: needs optim.momentum, such as 0.9")

    @property
    def fused(self) -> str | None:
        """sgd, where there is no momentum."""
        return None if self.momentum else "sgd"

    @property
    def title(self) -> str:
        """With its momentum."""
        kind = "Nesterov momentum" if self.nesterov else "momentum"
        return f"SGD, {kind} {self.momentum:g}" if self.momentum else "SGD"

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The direction of the last step."""
        return {"m": shape} if self.momentum else {}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """The rate, what decay leaves of a weight, and the momentum."""
        return {"lr": lr, "kept": 1 - lr * weight_decay, "momentum": self.momentum}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """m = momentum m + g; w = w (1 - lr wd) - lr m, or with Nesterov - lr (g + momentum m)."""
        if self.momentum:
            m = ops.add(ops.scale(state["m"], n["momentum"]), g)
            g, state = ops.add(g, ops.scale(m, n["momentum"])) if self.nesterov else m, {"m": m}
        return ops.sub(ops.scale(w, n["kept"]), ops.scale(g, n["lr"])), state
