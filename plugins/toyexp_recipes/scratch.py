"""Training from random values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toyexp import IMAGES, TOKENS, Kind, Model, Plan, PlanTensor, Recipe, Setup
from toyexp.base import require_words

if TYPE_CHECKING:
    from toyexp import Session

INITS = ("default", "toy")
DONOR = Path(__file__).parent / "assets" / "donor.gguf"


@dataclass
class Scratch(Recipe):
    """All weights from random values."""

    name: ClassVar[str] = "scratch"
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)

    init: str = "default"  # initial values: default (drawn by name) | toy (as the original draws llama and gpt2)

    def check(self) -> None:
        """Raises UserError for an unknown initialiser."""
        require_words("recipe", self, init=INITS)

    def vocabulary(self) -> Path | None:
        """The small donor's tokenizer, so that losses compare with recipe=warm."""
        return DONOR

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Every tensor of the model, trainable, from its own initialiser."""
        if self.init == "toy":
            from toyexp_recipes import original

            original.check_model(model)
        return setup.plan(model, [PlanTensor(t.name, t.shape, t.init) for t in model.tensors()])

    def warm(self, session: Session) -> None:
        """Uploads the original's initial values, if they were asked for."""
        if self.init == "toy":
            from toyexp_recipes import original

            original.upload(session)
