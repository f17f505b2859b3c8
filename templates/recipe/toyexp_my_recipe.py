"""A recipe that freezes every second block at its random initial values. Change it into your own.

A recipe decides which tensors a run has, where their initial values come from, and which of them are trained.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import IMAGES, TOKENS, Kind, PlanTensor, Recipe, UserError, hookimpl


@dataclass
class MyRecipe(Recipe):
    """Freeze every second block at random values and train the rest (Shen et al. 2021)."""

    name: ClassVar[str] = "my_recipe"  # what `recipe=` takes
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)  # kinds of data whose models it can train

    # Fields are settings: `recipe.every=3`. The comment behind a field is its help.
    every: int = 2  # freeze one block of this many

    def check(self):
        """Raise UserError for bad settings. The message has the key, its value and the allowed values."""
        if self.every < 1:
            raise UserError(f"recipe.every={self.every}: must be at least 1")

    def is_frozen(self, name):
        """Return True for a tensor of a frozen block; blocks are named blk.0, blk.1, ..."""
        return name.startswith("blk.") and int(name.split(".")[1]) % self.every == self.every - 1

    def plan(self, model, setup):
        """Return the plan: each tensor with its initial values and whether it is trained.

        `t.init` are the model's own values; `FromGGUF` reads values from a file.
        """
        tensors = [PlanTensor(t.name, t.shape, t.init, trainable=not self.is_frozen(t.name)) for t in model.tensors()]
        if not any(t.trainable for t in tensors):
            raise UserError(f"recipe.every={self.every}: leaves nothing of model={model.name} to train")
        return setup.plan(model, tensors)


@hookimpl
def register_recipes(register):
    """Register the class; toyexp calls this when it loads the module."""
    register(MyRecipe)
