"""AdamW in its two modes, and the seven numbers it hands to every step.

Every engine computes exactly

    m = b1 m + (1 - b1) g
    v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd) - lr (m s5) / (sqrt(v s6) + eps)

from hp = [lr, b1, b2, eps, wd, s5, s6] (ggml's OPT_STEP_ADAMW). The modes differ in s5 and s6 and must never be
mixed up: FROM_SCRATCH feeds the constant betas; LORA feeds the bias corrections 1/(1 - b^t), which makes it
torch.optim.AdamW (Loshchilov and Hutter 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from toyexp.base.bounds import require_float32
from toyexp.base.errors import UserError, choose

FROM_SCRATCH = "from_scratch"
LORA = "lora"
MODES = (FROM_SCRATCH, LORA)
DEFAULT_BETA2 = {FROM_SCRATCH: 0.95, LORA: 0.999}


@dataclass
class AdamW:
    """The optimiser's settings; use `for_from_scratch()` or `for_lora()`, or set `mode` and `bias_correct`."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correct: bool = False
    mode: str | None = None

    @classmethod
    def for_from_scratch(cls) -> AdamW:
        """Constant betas in slots 5 and 6: recipes scratch, warm and vit_tiny."""
        return cls(mode=FROM_SCRATCH)

    @classmethod
    def for_lora(cls) -> AdamW:
        """Bias correction in slots 5 and 6, beta2 0.999: recipes lora and full, model gpt2."""
        return cls(beta2=DEFAULT_BETA2[LORA], bias_correct=True, mode=LORA)

    def hp(self, t: int) -> np.ndarray:
        """The seven numbers; `t` counts steps from 1 and matters only with bias correction.

        Raises UserError while `mode` is unset or contradicts `bias_correct`: fed into the other kind of graph,
        the same seven slots would silently train with other numbers.
        """
        if self.mode is None:
            raise UserError("AdamW.hp: mode is unset; use AdamW.for_from_scratch() or AdamW.for_lora(), or set .mode")
        if self.mode not in MODES:
            raise UserError(f"AdamW.hp: mode={self.mode!r}: {choose(self.mode, MODES)}")
        if self.mode == FROM_SCRATCH and self.bias_correct:
            raise UserError(
                "AdamW.hp: mode=from_scratch but bias_correct=True; its slots 5 and 6 are the constant betas"
            )
        if self.mode == LORA and not self.bias_correct:
            raise UserError("AdamW.hp: mode=lora but bias_correct=False; its slots 5 and 6 are 1/(1 - beta^t)")
        slot5, slot6 = self.beta1, self.beta2
        if self.bias_correct:
            if t < 1:
                raise UserError(f"AdamW.hp: bias correction counts steps from 1, got t={t}")
            slot5, slot6 = 1 / (1 - self.beta1**t), 1 / (1 - self.beta2**t)
        return np.array([self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, slot5, slot6])

    def hp_for_step(self, step: int) -> np.ndarray:
        """The seven numbers for the loop's 0-based `step`, in either mode."""
        return self.hp(step + 1 if self.mode == LORA else step)


@dataclass
class Optim:
    """AdamW with its two modes, gradient clipping and micro-batch accumulation."""

    mode: str = "auto"  # from_scratch (constant betas) | lora (bias correction, as in PyTorch) | auto (the recipe's)
    beta1: float = 0.9  # decay of the first moment; 0 only in mode lora
    beta2: float | None = None  # and of the second; null: 0.95 in mode from_scratch, 0.999 in mode lora
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # decoupled decay of matrices; norms and biases never decay
    grad_clip: float = 0.0  # largest global norm of the gradient; 0: no clipping
    accumulate: int = 1  # micro-batches a batch is cut into; lowers memory, not the result

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        if self.mode not in (*MODES, "auto"):
            raise UserError(f"optim.mode={self.mode}: {choose(self.mode, (*MODES, 'auto'))}")
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            if beta is not None and not 0 <= beta < 1:
                raise UserError(f"optim.{name}={beta}: must be at least 0 and below 1")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise UserError(f"optim.eps={self.eps}: must be above 0")
        for name in ("weight_decay", "grad_clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"optim.{name}={value}: must be 0 or above")
        for name in ("eps", "weight_decay", "grad_clip"):
            require_float32(f"optim.{name}", getattr(self, name))
        if self.accumulate < 1:
            raise UserError(f"optim.accumulate={self.accumulate}: must be at least 1")

    def adamw(self, lr: float, default_mode: str) -> AdamW:
        """The AdamW these settings describe, in `default_mode` unless a mode was chosen.

        Raises UserError for a beta of 0 in mode from_scratch, which multiplies its moment by it: nothing would move
        (beta1), or each step divide by eps alone (beta2).
        """
        mode = default_mode if self.mode == "auto" else self.mode
        beta2 = DEFAULT_BETA2[mode] if self.beta2 is None else self.beta2
        for name, beta in (("beta1", self.beta1), ("beta2", beta2)):
            if mode == FROM_SCRATCH and beta == 0:
                raise UserError(f"optim.{name}=0: {FROM_SCRATCH} multiplies a moment by it; choose: optim.mode={LORA}")
        return AdamW(lr, self.beta1, beta2, self.eps, self.weight_decay, mode == LORA, mode)
