"""Recipes `scratch` and `vit_tiny`, which train a model from random values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import toyexp
from toyexp import IMAGES, TOKENS, VECTORS, Kind, Model, Normal, Plan, PlanTensor, Recipe, Setup, TensorSpec
from toyexp.base import require_choice, require_positive
from toyexp_recipes import original

INITS = ("default", "toy")
DONOR = Path(__file__).parent / "assets" / "donor.gguf"


@dataclass
class Scratch(Recipe):
    """Train all weights from random values."""

    name: ClassVar[str] = "scratch"
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES, VECTORS)

    init: str = "default"  # initial values: default (seeded by tensor name) | toy (as toyexp's predecessor in Ruby)

    def check(self) -> None:
        """Raise UserError for an unknown value of `init`."""
        require_choice("recipe", self, init=INITS)

    def vocabulary(self) -> Path | None:
        """Return a small GGUF file that comes with toyexp, so that the data uses its tokenizer.

        By default, recipe=warm uses the same file, so the losses of both recipes are comparable.
        """
        return DONOR

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan with the model's initial values. All tensors that the model does not freeze are trainable."""
        if self.init == "toy":
            original.check_model(model)
        return setup.plan(model, [PlanTensor.from_spec(t) for t in model.tensors()])

    def warm(self, session: toyexp.Session) -> None:
        """If `init` is toy, upload the initial values of toyexp's predecessor in Ruby."""
        if self.init == "toy":
            original.upload(session)


@dataclass
class VitTiny(Recipe):
    """Train an image classifier from random values."""

    name: ClassVar[str] = "vit_tiny"
    reads: ClassVar[tuple[Kind, ...]] = (IMAGES,)

    init_scale: float = 1.0  # factor for the random initial values of the matrices in blocks

    def check(self) -> None:
        """Raise UserError unless `init_scale` is above 0."""
        require_positive("recipe.init_scale", self.init_scale)

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan with all tensors trainable and the model's initial values.

        In blocks, normally distributed initial values are multiplied by `init_scale`.
        """
        return setup.plan(model, [self._plan_tensor(t) for t in model.tensors()])

    def _plan_tensor(self, spec: TensorSpec) -> PlanTensor:
        values = spec.init
        if ".blk." in spec.name and isinstance(values, Normal):
            values = replace(values, std=values.std * self.init_scale)
        return PlanTensor.from_spec(spec, values)
