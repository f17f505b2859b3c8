import numpy as np
import pytest
from tiny import MODELS, write_base

from toyexp.formats.gguf.write import write_model
from toyexp.testing import RecipeSuite
from toyexp_models.llama import Llama
from toyexp_recipes.base import Full
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch
from toyexp_recipes.warm import Warm


class TestScratch(RecipeSuite):
    recipe = Scratch()
    model = MODELS["llama"]


class TestWarm(RecipeSuite):
    model = MODELS["llama"]

    @pytest.fixture(autouse=True)
    def _donor(self, tmp_path):
        donor = Llama(d_model=48, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=8, context=8, vocab=20, tied=True)
        draw = np.random.default_rng(0)
        values = {t.name: draw.standard_normal(t.shape).astype(np.float32) for t in donor.tensors()}
        write_model(tmp_path / "donor.gguf", donor, values, None)
        self.recipe = Warm(donor=str(tmp_path / "donor.gguf"))


class TestFull(RecipeSuite):
    @pytest.fixture(autouse=True)
    def _base(self, tmp_path):
        self.model = write_base(tmp_path / "base.gguf", "llama")
        self.recipe = Full(base=str(tmp_path / "base.gguf"))


class TestLora(RecipeSuite):
    @pytest.fixture(autouse=True)
    def _base(self, tmp_path):
        self.model = write_base(tmp_path / "base.gguf", "gpt2")
        self.recipe = Lora(base=str(tmp_path / "base.gguf"), targets=["*"], rank=2, dropout=0.5)
