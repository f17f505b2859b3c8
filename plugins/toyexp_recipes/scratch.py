"""Training from random values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from toyexp import IMAGES, TOKENS, Kind, Model, Normal, Plan, PlanTensor, Recipe, Setup, TensorSpec
from toyexp.base import require_choice, require_positive

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
        require_choice("recipe", self, init=INITS)

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


@dataclass
class VitTiny(Recipe):
    """An image classifier, all weights from random values."""

    name: ClassVar[str] = "vit_tiny"
    reads: ClassVar[tuple[Kind, ...]] = (IMAGES,)

    init_scale: float = 1.0  # multiplies the initial values of the blocks' matrices

    def check(self) -> None:
        """Raises UserError for a scale that is no number above 0."""
        require_positive("recipe.init_scale", self.init_scale)

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Every tensor of the model, trainable, from its own initialiser."""
        return setup.plan(model, [self._planned(t) for t in model.tensors()])

    def _planned(self, spec: TensorSpec) -> PlanTensor:
        values = spec.init
        if ".blk." in spec.name and isinstance(values, Normal):
            values = replace(values, std=values.std * self.init_scale)
        return PlanTensor(spec.name, spec.shape, values)
