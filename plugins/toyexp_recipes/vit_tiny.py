"""The seed's ViT recipe: an image classifier from random values, AdamW in mode from_scratch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from toyexp import IMAGES, Kind, Model, Normal, Plan, PlanTensor, Recipe, Setup, TensorSpec
from toyexp.base import require_positive


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
