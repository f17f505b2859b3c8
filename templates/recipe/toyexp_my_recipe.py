"""A recipe that freezes every second block at its random initial values. Change it into your own.

A recipe decides which tensors a run has, where their initial values come from, and which of them are trained.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import IMAGES, TOKENS, Kind, PlanTensor, Recipe, UserError, hookimpl


@dataclass
class MyRecipe(Recipe):
    """Freeze every second block at random values and train the rest (Shen et al. 2021)."""

    name: ClassVar[str] = "my_recipe"  # the name to type: `recipe=my_recipe`
    reads: ClassVar[tuple[Kind, ...]] = (TOKENS, IMAGES)  # it can train models that read these kinds of data

    # Fields are settings: `recipe.every=3`. The comment after a field is its help text.
    every: int = 2  # freeze the last block of every group of this many

    def check(self):
        """Raise UserError for bad settings. The message names the key, its value and the allowed values."""
        if self.every < 1:
            raise UserError(f"recipe.every={self.every}: must be at least 1")

    def is_frozen(self, name):
        """Return True if the tensor `name` belongs to a frozen block. Blocks are named blk.0, blk.1, ..."""
        return name.startswith("blk.") and int(name.split(".")[1]) % self.every == self.every - 1

    def plan(self, model, setup):
        """Return the plan: each tensor with its initial values and whether it is trained.

        This recipe uses the model's own initial values, `t.init`; `FromGGUF` would read values from a file.
        """
        tensors = [PlanTensor.from_spec(t, trainable=not self.is_frozen(t.name)) for t in model.tensors()]
        if not any(t.trainable for t in tensors):
            raise UserError(
                f"recipe.every={self.every}: freezes all tensors of model={model.name}; use a larger number"
            )
        return setup.plan(model, tensors)


@hookimpl
def register_recipes(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyRecipe)
