"""Run the conformance suite, and test which blocks the recipe freezes."""

from toyexp_my_recipe import MyRecipe

from toyexp.testing import RecipeSuite
from toyexp_models.gpt2 import GPT2


class TestMyRecipe(RecipeSuite):
    recipe, model = MyRecipe(), GPT2(d_model=8, n_layers=4, n_heads=2, context=8)

    def test_the_last_of_every_two_blocks_is_frozen(self):
        frozen = {t.name.split(".")[1] for t in self.make_plan().tensors if not t.trainable}
        assert frozen == {"1", "3"}
