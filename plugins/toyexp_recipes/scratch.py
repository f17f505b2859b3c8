"""Training from random values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toyexp import Model, Plan, PlanTensor, Recipe, Setup

DONOR = Path(__file__).parent / "assets" / "donor.gguf"


@dataclass
class Scratch(Recipe):
    """All weights from random values."""

    name: ClassVar[str] = "scratch"
    reads: ClassVar[tuple[str, ...]] = ("tokens", "images")

    def vocabulary(self) -> Path | None:
        """The small donor's tokenizer, so that losses compare with recipe=warm."""
        return DONOR

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Every tensor of the model, trainable, from its own initialiser."""
        return setup.plan(model, [PlanTensor(t.name, t.shape, t.init) for t in model.tensors()])
