"""A recipe of your own; as it stands, every so many blocks keep their random weights and never learn.

A recipe says which tensors there are, where their first values come from and which of them train. It knows no engine.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import IMAGES, TOKENS, Kind, PlanTensor, Recipe, UserError, hookimpl


@dataclass
class MyRecipe(Recipe):
    """Every second block stays random and frozen, the rest learns (Shen et al. 2021)."""

    name: ClassVar[str] = "my_recipe"  # what `recipe=` takes
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)  # whose models it can train

    # Fields are settings, `recipe.every=3`; the comment behind one is its help.
    every: int = 2  # the last of so many blocks stays as it began

    def check(self):
        """Raises UserError for what cannot work: what was asked, and what is true."""
        if self.every < 1:
            raise UserError(f"recipe.every={self.every}: must be at least 1")

    def frozen(self, name):
        """Whether a tensor stays as it began; blocks are named blk.0, blk.1, ..."""
        return name.startswith("blk.") and int(name.split(".")[1]) % self.every == self.every - 1

    def plan(self, model, setup):
        """The plan of a model: each tensor with its first values, and whether it trains.

        `t.init` are the model's own; `FromGGUF` takes those of a file, and `warm` may upload others.
        """
        tensors = [PlanTensor(t.name, t.shape, t.init, trainable=not self.frozen(t.name)) for t in model.tensors()]
        if not any(t.trainable for t in tensors):
            raise UserError(f"recipe.every={self.every}: leaves nothing of model={model.name} to train")
        return setup.plan(model, tensors)


@hookimpl
def register_recipes(register):
    """What toyexp calls to learn of it."""
    register(MyRecipe)
