"""Adafactor: second moments of a matrix from its rows and columns alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import Arithmetic, Optimiser
from toyexp.base import require_within


@dataclass
class Adafactor(Optimiser):
    """Adafactor (Shazeer and Stern 2018): AdamW's steps with next to no memory; lr is relative to a tensor's size."""

    name: ClassVar[str] = "adafactor"
    title: ClassVar[str] = "Adafactor"

    beta2_decay: float = -0.8  # at step t the share of the memory that is kept is 1 - t^beta2_decay
    eps1: float = 1e-30  # added to the squared gradient
    eps2: float = 1e-3  # least size of a tensor that lr is relative to
    clip: float = 1.0  # largest root mean square of an update

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        super().check()
        require_within("optim", self, beta2_decay="[-1,0)", eps1="(0,inf)", eps2="(0,inf)", clip="(0,inf)")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The mean squares of a matrix's rows and of its columns; of anything else, of each number."""
        return {"row": (shape[0], 1), "column": (1, shape[1])} if len(shape) == 2 else {"v": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """The relative rate, what decay leaves of a weight, and the share of the memory that is kept."""
        t = step + 1
        return {"lr": min(lr, 1 / math.sqrt(t)), "kept": 1 - lr * weight_decay, "beta2": 1 - t**self.beta2_decay}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """Algorithms 4 and 5: u = g / sqrt(v), held to `clip`; w = w (1 - lr wd) - lr max(eps2, rms(w)) u.

        A matrix's v is row column / mean(row).
        """
        squares = ops.shift(ops.square(g), self.eps1)
        if "v" in state:
            v = ops.blend(squares, state["v"], n["beta2"])
            state, u = {"v": v}, ops.div(g, ops.sqrt(v))
        else:
            row = ops.blend(ops.mean_last(squares), state["row"], n["beta2"])
            across = ops.mean_last(ops.transpose(squares))
            column = ops.blend(ops.transpose(across), state["column"], n["beta2"])
            share = ops.div(row, ops.mean(row))
            # One root after the other: the product of two mean squares may be below what float32 holds.
            state, u = {"row": row, "column": column}, ops.div(ops.div(g, ops.sqrt(share)), ops.sqrt(column))
        held = ops.at_least(ops.scale(self._rms(ops, u), 1 / self.clip), 1.0)
        rate = ops.div(ops.scale(ops.at_least(self._rms(ops, w), self.eps2), n["lr"]), held)
        return ops.sub(ops.scale(w, n["kept"]), ops.mul(u, rate)), state

    @staticmethod
    def _rms(ops: Arithmetic, x: Any) -> Any:
        """The root of the mean square, [1]."""
        return ops.sqrt(ops.mean(ops.square(x)))
