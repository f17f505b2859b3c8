"""Muon, which orthogonalises the momentum of matrices, and Adafactor, which factorises their second moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import DEFAULT_BETA2, LORA, AdamW, Arithmetic, Optimiser, Rule
from toyexp.base import require_choice, require_range

SCALES = ("match_adamw", "original")
# Coefficients of a x + b x^3 + c x^5, chosen for the steepest slope at 0 (Jordan 2024).
A, B, C = 3.4445, -4.7750, 2.0315
TINY = 1e-7  # avoids a division by 0


@dataclass
class Muon(Optimiser):
    """Muon for the matrices inside blocks (Jordan 2024), AdamW for all other tensors."""

    name: ClassVar[str] = "muon"
    title: ClassVar[str] = "Muon for matrices of blocks, AdamW with bias correction for the rest"

    momentum: float = 0.95  # decay of the momentum
    nesterov: bool = True  # use Nesterov momentum
    iterations: int = 5  # number of Newton-Schulz iterations
    scale: str = "match_adamw"  # scale of a step: match_adamw (same lr as AdamW; Liu et al. 2025) | original
    adamw_lr: float | None = None  # base learning rate of tensors trained by AdamW; null: the run's lr
    adamw_beta1: float = 0.9  # AdamW's decay of the first moment
    adamw_beta2: float = DEFAULT_BETA2[LORA]  # AdamW's decay of the second moment, with bias correction

    def check(self) -> None:
        super().check()
        require_choice("optim", self, scale=SCALES)
        require_range("optim", self, momentum="[0,1)", adamw_beta1="[0,1)", adamw_beta2="[0,1)")
        require_range("optim", self, iterations="[1,20]", adamw_lr="[0,inf)")

    def rules(self) -> Sequence[Rule]:
        """Return the Muon rule, and AdamW with bias correction for the tensors that Muon does not train."""
        return self, AdamW(beta1=self.adamw_beta1, beta2=self.adamw_beta2, mode=LORA)

    def base_lr(self, rule: Rule) -> float | None:
        """Return `adamw_lr` for the AdamW rule, and None for Muon, which uses the run's `lr`."""
        return None if rule is self else self.adamw_lr

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True for matrices inside blocks, but not for norms, embeddings and the output layer."""
        is_matrix = len(shape) == 2 and not name.endswith(("_norm.weight", ".ssm_a", ".ssm_d"))
        return is_matrix and name.startswith("blk.")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the momentum, named m."""
        return {"m": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return lr, the momentum, and the number `kept` = 1 - lr * weight_decay that scales the weights."""
        return {"lr": lr, "kept": 1 - lr * weight_decay, "momentum": self.momentum}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """Apply m = momentum m + (1 - momentum) g; w = w (1 - lr wd) - lr scale orthogonal(m).

        g is the gradient, m the momentum and wd the weight decay. With Nesterov momentum, m is blended with g once more
        before it is orthogonalised. The number `scale` depends on the setting `scale` and on the matrix's shape.
        """
        m = ops.blend(g, state["m"], n["momentum"])
        direction = ops.blend(g, m, n["momentum"]) if self.nesterov else m
        rows, columns = w.shape
        # An orthogonal matrix has RMS 1/sqrt(max(rows, columns)); AdamW's steps have an RMS of about 0.2.
        size = math.sqrt(max(1, rows / columns)) if self.scale == "original" else 0.2 * math.sqrt(max(rows, columns))
        step = ops.scale(ops.scale(orthogonal(ops, direction, self.iterations), size), n["lr"])
        return ops.sub(ops.scale(w, n["kept"]), step), {"m": m}


def orthogonal(ops: Arithmetic, x: Any, iterations: int) -> Any:
    """Return an approximation of the orthogonal matrix nearest to x. Its singular values are about 0.7 to 1.2.

    Divide x by its Frobenius norm, then repeat x <- a x + (b x x^T + c (x x^T)^2) x `iterations` times (Jordan 2024). A
    matrix with more rows than columns is transposed before and after, so that x x^T is small.
    """
    is_tall = x.shape[0] > x.shape[1]
    x = ops.transpose(x) if is_tall else x
    x = ops.div(x, ops.shift(ops.sqrt(ops.sum(ops.square(x))), TINY))
    for _ in range(iterations):
        square = ops.matmul(x, x)  # x x^T is symmetric, so its square needs no transpose
        polynomial = ops.add(ops.scale(square, B), ops.scale(ops.matmul(square, square), C))
        x = ops.add(ops.scale(x, A), ops.matmul(polynomial, ops.transpose(x)))
    return ops.transpose(x) if is_tall else x


# -- Adafactor ---------------------------------------------------------------------------------------------------------


@dataclass
class Adafactor(Optimiser):
    """Adafactor (Shazeer and Stern 2018): like AdamW with little memory; lr is multiplied by each tensor's RMS."""

    name: ClassVar[str] = "adafactor"
    title: ClassVar[str] = "Adafactor"

    beta2_decay: float = -0.8  # at step t = 1, 2, ..., beta2 = 1 - t^beta2_decay
    eps1: float = 1e-30  # added to the squared gradient
    eps2: float = 1e-3  # lr is multiplied by the tensor's RMS, or by eps2 if that is larger
    clip: float = 1.0  # maximum RMS of an update

    def check(self) -> None:
        super().check()
        require_range("optim", self, beta2_decay="[-1,0)", eps1="(0,inf)", eps2="(0,inf)", clip="(0,inf)")

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the arrays that hold the second moment.

        A matrix has one value per row and one per column; another tensor has one per element.
        """
        return {"row": (shape[0], 1), "column": (1, shape[1])} if len(shape) == 2 else {"v": shape}

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        """Return the scalars of the formula in `update`.

        They are lr, limited to 1/sqrt(step + 1); beta2; and `kept` = 1 - lr * weight_decay, which scales the weights.
        """
        t = step + 1
        return {"lr": min(lr, 1 / math.sqrt(t)), "kept": 1 - lr * weight_decay, "beta2": 1 - t**self.beta2_decay}

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        """Apply algorithms 4 and 5 of the paper: w = w (1 - lr wd) - lr max(eps2, rms(w)) u, with u = g / sqrt(v).

        g is the gradient, wd the weight decay, and v a moving average of g^2. For a matrix, only the means `row` and
        `column` of v are kept, and v = row column / mean(row). u is scaled down if its RMS exceeds `clip`.
        """
        squares = ops.shift(ops.square(g), self.eps1)
        if "v" in state:
            v = ops.blend(squares, state["v"], n["beta2"])
            state, u = {"v": v}, ops.div(g, ops.sqrt(v))
        else:
            row = ops.blend(ops.mean_last(squares), state["row"], n["beta2"])
            column_means = ops.mean_last(ops.transpose(squares))
            column = ops.blend(ops.transpose(column_means), state["column"], n["beta2"])
            share = ops.div(row, ops.mean(row))
            # Separate square roots, because the product of two mean squares may underflow in float32.
            state, u = {"row": row, "column": column}, ops.div(ops.div(g, ops.sqrt(share)), ops.sqrt(column))
        divisor = ops.at_least(ops.scale(self._rms(ops, u), 1 / self.clip), 1.0)
        rate = ops.div(ops.scale(ops.at_least(self._rms(ops, w), self.eps2), n["lr"]), divisor)
        return ops.sub(ops.scale(w, n["kept"]), ops.mul(u, rate)), state

    @staticmethod
    def _rms(ops: Arithmetic, x: Any) -> Any:
        """Return the root mean square of x as a tensor of shape [1]."""
        return ops.sqrt(ops.mean(ops.square(x)))
