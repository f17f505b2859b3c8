"""AdamW as an optimiser plugin, in its two modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from toyexp import DEFAULT_BETA2, FROM_SCRATCH, LORA, MODES, AdamW, Arithmetic, Optimiser, Rule
from toyexp.base import require_choice, require_range


@dataclass
class AdamWOptimiser(Optimiser):
    """AdamW without or with bias correction (`mode`), with gradient clipping and gradient accumulation."""

    name: ClassVar[str] = "adamw"

    mode: str = "auto"  # from_scratch (no bias correction) | lora (bias correction, as in PyTorch) | auto (by recipe)
    beta1: float = 0.9  # decay of the first moment; 0 only in mode lora
    beta2: float | None = None  # decay of the second moment; null: 0.95 in mode from_scratch, 0.999 in mode lora
    eps: float = 1e-8  # added to the square root of the second moment

    def check(self) -> None:
        super().check()
        require_choice("optim", self, mode=(*MODES, "auto"))
        require_range("optim", self, beta1="[0,1)", beta2="[0,1)", eps="(0,inf)")

    def with_mode(self, mode: str) -> AdamWOptimiser:
        """Return a copy with `mode` in place of the mode auto. If beta2 is not set, it gets the default of its mode.

        A mode that the user has chosen is kept. Raise UserError for settings that are invalid in the resulting mode.
        """
        mode = mode if self.mode == "auto" else self.mode
        merged = dataclasses.replace(self, mode=mode, beta2=DEFAULT_BETA2[mode] if self.beta2 is None else self.beta2)
        merged.adamw.check()
        return merged

    @property
    def adamw(self) -> AdamW:
        """The AdamW rule with these settings. While the setting `mode` is auto, the rule's mode is None."""
        mode = None if self.mode == "auto" else self.mode
        beta2 = self.beta2 if self.beta2 is not None else DEFAULT_BETA2[mode or FROM_SCRATCH]
        return AdamW(beta1=self.beta1, beta2=beta2, eps=self.eps, weight_decay=self.weight_decay, mode=mode)

    def rules(self) -> Sequence[Rule]:
        return (self.adamw,)

    def slots(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return self.adamw.slots(shape)

    def numbers(self, step: int, lr: float, weight_decay: float) -> Mapping[str, float]:
        return self.adamw.numbers(step, lr, weight_decay)

    def update(self, ops: Arithmetic, w: Any, g: Any, state: Mapping[str, Any], n: Mapping[str, Any]) -> Any:
        return self.adamw.update(ops, w, g, state, n)

    @property
    def title(self) -> str:
        correction = "with" if self.mode == LORA else "without"
        betas = f"betas {self.adamw.beta1:g} and {self.adamw.beta2:g}"
        return f"AdamW {correction} bias correction, {betas} (optim.mode={self.mode})"

    def describe(self, lr: float) -> dict[str, Any]:
        """Return JSON data for the event run_start: the rule's fields, and the settings that all optimisers share."""
        shared = {k: getattr(self, k) for k in ("grad_clip", "accumulate", "ema", "groups")}
        return {"name": self.name, **dataclasses.asdict(dataclasses.replace(self.adamw, lr=lr)), **shared}
