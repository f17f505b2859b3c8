"""Training on: every weight starts from a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toyexp import Model, Plan, Setup
from toyexp_recipes.base import FromBase

EMBEDDINGS = ("token_embd.weight", "position_embd.weight")


@dataclass
class Full(FromBase):
    """All weights of a GGUF model, trained further."""

    name: ClassVar[str] = "full"
    hint: ClassVar[str] = "lr=1e-4"

    train_embeddings: bool = True  # false keeps the token and position embeddings as they are

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Every tensor of the model from the base."""
        frozen = () if self.train_embeddings else EMBEDDINGS
        return setup.plan(model, [self._from_base(t, t.name not in frozen) for t in model.tensors()])
