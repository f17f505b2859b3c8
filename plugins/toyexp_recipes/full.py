"""Training on: every weight starts from a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from toyexp import Model, Plan, PlanTensor, Setup, UserError
from toyexp_recipes.base import FromBase

EMBEDDINGS = ("token_embd.weight", "position_embd.weight", "v.position_embd.weight")  # the last a ViT's


@dataclass
class Full(FromBase):
    """All weights of a GGUF model, trained further."""

    name: ClassVar[str] = "full"
    hint: ClassVar[str] = "lr=1e-4"

    train_embeddings: bool = True  # false keeps the token and position embeddings as they are
    new_head: bool = False  # of a classifier: a new output layer, for the classes of the data in place of the base's

    def of_base(self, model: Model) -> Model:
        """With a new head the classes are the data's; UserError for a model that has none."""
        if self.new_head and "classes" not in model.settings():
            raise UserError(f"recipe.new_head=true: is for classifiers, and a {model.name} has no classes")
        return replace(model, **({"classes": 0} if self.new_head else {}))

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Every tensor of the model from the base, but for those of a new head."""
        frozen, head = () if self.train_embeddings else EMBEDDINGS, self._head(model)
        return setup.plan(model, [
            PlanTensor(t.name, t.shape, t.init) if t.name in head else self._from_base(t, t.name not in frozen)
            for t in model.tensors()
        ])  # fmt: skip

    def _head(self, model: Model) -> set[str]:
        """The tensors of a new head: those that one more class makes larger."""
        if not self.new_head:
            return set()
        larger = replace(model, classes=model.settings()["classes"] + 1)  # type: ignore[call-arg]
        sizes = {t.name: t.shape for t in larger.tensors()}
        return {t.name for t in model.tensors() if sizes[t.name] != t.shape}
