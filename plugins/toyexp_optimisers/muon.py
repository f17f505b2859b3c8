"""Muon: matrices move along their orthogonalised momentum, everything else by AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import DEFAULT_BETA2, LORA, AdamW, Arithmetic, Optimiser, Rule
from toyexp.base import require_within, require_words

SCALES = ("match_adamw", "original")
# Of the polynomial a x + b x^3 + c x^5, whose slope at 0 is as steep as it can be (Jordan 2024).
A, B, C = 3.4445, -4.7750, 2.0315
TINY = 1e-7


@dataclass
class Muon(Optimiser):
    """Muon on the blocks' matrices (Jordan 2024), AdamW on the rest."""

    name: ClassVar[str] = "muon"
    title: ClassVar[str] = "Muon, and AdamW mode lora for what is no matrix of a block"

    momentum: float = 0.95  # share of the memory that is kept
    nesterov: bool = True  # look ahead by the momentum
    iterations: int = 5  # of Newton-Schulz; each brings the singular values nearer to 1
    scale: str = "match_adamw"  # of a step: match_adamw (at the lr that suits AdamW; Liu et al. 2025) | original
    adamw_lr: float | None = None  # base learning rate of the rest; null: lr
    adamw_beta1: float = 0.9  # of the rest: decay of the first moment
    adamw_beta2: float = DEFAULT_BETA2[LORA]  # and of the second; with bias correction

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        super().check()
        require_words("optim", self, scale=SCALES)
        require_within("optim", self, momentum="[0,1)", adamw_beta1="[0,1)", adamw_beta2="[0,1)")
        require_within("optim", self, iterations="[1,20]", adamw_lr="[0,inf)")

    def rules(self) -> Sequence[Rule]:
        """Itself, then AdamW with bias correction."""
        return self, AdamW(beta1=self.adamw_beta1, beta2=self.adamw_beta2, bias_correct=True, mode=LORA)

    def base_lr(self, rule: Rule) -> float | None:
        """That of AdamW's part."""
        return None if rule is self else self.adamw_lr

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Matrices inside blocks: embeddings and the output are no maps between features."""
        return len(shape) == 2 and name.startswith("blk.")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The running mean of gradients."""
        return {"m": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """The rate, what decay leaves of a weight, and the momentum."""
        return {"lr": lr, "kept": 1 - lr * weight_decay, "momentum": self.momentum}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """m = momentum m + (1 - momentum) g; w = w (1 - lr wd) - lr scale orthogonal(m, or one step ahead of it)."""
        m = ops.blend(g, state["m"], n["momentum"])
        direction = ops.blend(g, m, n["momentum"]) if self.nesterov else m
        rows, columns = w.shape
        # An orthogonal matrix has a root mean square of 1/sqrt(max(rows, columns)), AdamW's steps one of 0.2 or so.
        size = math.sqrt(max(1, rows / columns)) if self.scale == "original" else 0.2 * math.sqrt(max(rows, columns))
        step = ops.scale(ops.scale(orthogonal(ops, direction, self.iterations), size), n["lr"])
        return ops.sub(ops.scale(w, n["kept"]), step), {"m": m}


def orthogonal(ops: Arithmetic, x: Any, iterations: int) -> Any:
    """The orthogonal matrix next to x, nearly: its singular values come to lie around 1, from 0.7 to 1.2.

    x / |x|, then `iterations` times a x + (b x x^T + c (x x^T)^2) x (Jordan 2024), on the side that is shorter.
    """
    turned = x.shape[0] > x.shape[1]
    x = ops.transpose(x) if turned else x
    x = ops.div(x, ops.shift(ops.sqrt(ops.sum(ops.square(x))), TINY))
    for _ in range(iterations):
        square = ops.matmul(x, x)  # x x^T, symmetric: times another it needs no transpose
        polynomial = ops.add(ops.scale(square, B), ops.scale(ops.matmul(square, square), C))
        x = ops.add(ops.scale(x, A), ops.matmul(polynomial, ops.transpose(x)))
    return ops.transpose(x) if turned else x
