"""recipe=warm: the embedding is filled from a donor GGUF, a lens projects it, and errors name their cause."""

import dataclasses
import re
from typing import ClassVar

import numpy as np
import pytest
from tiny import MODELS, batches, replace_initial_values

from toyexp import AdamW, SessionError, Setup, UserError
from toyexp.formats.gguf.write import write_model
from toyexp.interfaces.plan import export_tensors
from toyexp.interfaces.recipe import start_session
from toyexp.testing import token_dataset
from toyexp_models.llama import Llama
from toyexp_recipes.warm import PROJECTION, TABLE, Warm, donor_embed_width, pca
from toyexp_torch.engines import TorchCPU

VOCAB, WIDTH = 40, 48


@pytest.fixture
def donor(tmp_path):
    return make_donor(tmp_path / "donor.gguf")


def make_donor(path, rows=VOCAB + 10, width=WIDTH, kind="f32", drop=()):
    model = Llama(d_model=width, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=32, context=8, vocab=rows, tied=True)
    draw = np.random.default_rng(0)
    values = {t.name: draw.standard_normal(t.shape).astype(np.float32) for t in model.tensors()}
    write_model(path, model, values, None, kind)
    return path, values[TABLE]


def make_plan(recipe, model=MODELS["llama"]):
    setup = Setup(batches().inputs, rows=3, seed=0)
    return recipe.plan(model.fit(token_dataset(VOCAB)), setup)


def test_the_donors_first_rows_fill_the_embedding_and_stay_frozen(donor):
    path, rows = donor
    recipe = Warm(donor=str(path))
    plan = make_plan(recipe)
    assert donor_embed_width(path) == WIDTH
    assert plan.tensor(TABLE).shape == (VOCAB, WIDTH)
    assert plan.tensor(PROJECTION).shape == (32, WIDTH)
    with start_session(recipe, TorchCPU(), plan) as session:
        np.testing.assert_array_equal(session.download(TABLE), rows[:VOCAB])
        lens = session.download(PROJECTION)
        for step in range(3):
            session.step(batches().batch(step), AdamW.for_from_scratch().hp_for_step(step))
        np.testing.assert_array_equal(session.download(TABLE), rows[:VOCAB])
        assert not np.array_equal(session.download(PROJECTION), lens)


def test_an_unfrozen_donor_trains(donor):
    recipe = Warm(donor=str(donor[0]), freeze_donor=False)
    with start_session(recipe, TorchCPU(), make_plan(recipe)) as session:
        session.step(batches().batch(0), AdamW.for_from_scratch().hp_for_step(0))
        assert not np.array_equal(session.download(TABLE), donor[1][:VOCAB])


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_a_donor_of_another_type_is_dequantised(tmp_path, kind):
    path, rows = make_donor(tmp_path / "donor.gguf", width=64, kind=kind)
    recipe = Warm(donor=str(path))
    with start_session(recipe, TorchCPU(), make_plan(recipe)) as session:
        values = session.download(TABLE)
    # bf16 has an error of 1 in 256, q8_0 of 1 in 127 of a block's largest value.
    np.testing.assert_allclose(values, rows[:VOCAB], atol=0.02)
    assert not np.array_equal(values, rows[:VOCAB])


def test_a_session_that_is_not_warmed_starts_from_random_values(donor):
    """A caller may skip `warm`, or upload rows of its own before build."""
    plan = make_plan(Warm(donor=str(donor[0])))
    with TorchCPU().realize(plan) as session:
        rows = np.ones((VOCAB, WIDTH), np.float32)
        assert abs(session.download(TABLE).std() - 0.02) < 0.002
        session.upload(TABLE, rows)
        session.build()
        np.testing.assert_array_equal(session.download(TABLE), rows)
        with pytest.raises(SessionError, match="upload before build"):
            session.upload(TABLE, rows, source="donor.gguf")


def test_folding_the_lens_into_the_embedding_keeps_the_logits(donor):
    recipe = Warm(donor=str(donor[0]))
    plan = make_plan(recipe)
    batch = batches().batch(0)
    with start_session(recipe, TorchCPU(), plan) as session:
        session.step(batch, AdamW.for_from_scratch().hp_for_step(0))
        logits_with_lens = session.logits(batch)
        folded = export_tensors(plan, {t.name: session.download(t.name) for t in plan.tensors})
    from toyexp_recipes.scratch import Scratch

    plain = replace_initial_values(Scratch().plan(plan.model, Setup(batches().inputs, rows=3)), folded)
    with start_session(Scratch(), TorchCPU(), plain) as session:
        np.testing.assert_allclose(session.logits(batch), logits_with_lens, atol=2e-5)


def test_pca_finds_the_directions_of_the_largest_variance():
    """The reference is numpy's singular value decomposition of the centred rows."""
    draw = np.random.default_rng(3)
    rows = (draw.standard_normal((200, 12)) * np.linspace(3, 0.1, 12) + 5).astype(np.float32)
    axes, explained_share = pca(rows, 4)
    _, s, vt = np.linalg.svd(rows.astype(np.float64) - rows.mean(0, dtype=np.float64), full_matrices=False)
    np.testing.assert_allclose(np.abs(axes @ vt[:4].T), np.eye(4), atol=1e-5)
    assert explained_share == pytest.approx((s[:4] ** 2).sum() / (s**2).sum())
    assert (axes[np.arange(4), np.abs(axes).argmax(1)] > 0).all()


def test_lens_none_copies_the_donors_rows_into_the_embedding(tmp_path):
    path, rows = make_donor(tmp_path / "donor.gguf", width=32)
    recipe = Warm(donor=str(path), lens="none", freeze_donor=False)
    for name in ("llama", "llama_tied_bias", "gpt2"):
        with start_session(recipe, TorchCPU(), make_plan(recipe, MODELS[name])) as session:
            np.testing.assert_array_equal(session.download(TABLE), rows[:VOCAB])


def test_auto_lens_is_random_for_a_model_wider_than_the_donor(tmp_path):
    path, _ = make_donor(tmp_path / "donor.gguf", width=16)
    recipe = Warm(donor=str(path))
    with start_session(recipe, TorchCPU(), make_plan(recipe)) as session:
        assert abs(session.download(PROJECTION).std() - 16**-0.5) < 0.02


def test_donor_errors_name_the_path_the_expected_and_the_actual_value(tmp_path, donor):
    path, _ = donor

    def error(**settings):
        recipe = Warm(**settings)
        with pytest.raises(UserError) as caught:
            recipe.check()
            make_plan(recipe, settings.pop("model", MODELS["llama"]) if "model" in settings else MODELS["llama"])
        return str(caught.value)

    missing = tmp_path / "nowhere.gguf"
    assert error(donor=str(missing)).startswith(f"{missing}: not found") and "toyexp models" in error(
        donor=str(missing)
    )
    (tmp_path / "text.gguf").write_text("this is no model, only a text that is long enough")
    assert "text.gguf: is not a GGUF file" in error(donor=str(tmp_path / "text.gguf"))
    assert "width mismatch: expected 32 (model.d_model), the donor has 48" in error(donor=str(path), lens="none")
    small, _ = make_donor(tmp_path / "small.gguf", rows=7)
    assert "too few rows: expected at least 40, got 7" in error(donor=str(small))
    assert "did you mean pca?" in error(donor=str(path), lens="pcaa")
    narrow, _ = make_donor(tmp_path / "narrow.gguf", width=16)
    assert "exceeds the donor's width 16" in error(donor=str(narrow), lens="pca")

    from gguf import GGUFWriter

    def write_bare_gguf(name, arch="llama", kind="model", **keys):
        writer = GGUFWriter(tmp_path / name, arch)
        writer.add_type(kind)
        for key, value in keys.items():
            writer.add_uint32(f"{arch}.{key}", value)
        writer.add_tensor("other.weight", np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(tmp_path / name)

    assert "the donor has no llama.embedding_length" in error(donor=write_bare_gguf("nokey.gguf"))
    images = write_bare_gguf("images.gguf", "toyexp-vit", embedding_length=48)
    with pytest.raises(UserError, match=r"no token_embd\.weight; its architecture is toyexp-vit"):
        Warm(donor=images).check()  # before the data is opened, which would read the donor's tokenizer
    assert "holds no model (general.type is adapter)" in error(donor=write_bare_gguf("adapter.gguf", kind="adapter"))


def test_a_donor_that_changed_after_planning_is_rejected(tmp_path, donor):
    """The width is checked again when rows are read, as the file may have been replaced since."""
    path, _ = donor
    recipe = Warm(donor=str(path))
    plan = make_plan(recipe)
    make_donor(path, width=64)
    with TorchCPU().realize(plan) as session, pytest.raises(UserError, match=r"\[50, 64\], expected rows of 48"):
        recipe.warm(session)


def test_a_lens_needs_an_untied_output_layer(donor):
    recipe = Warm(donor=str(donor[0]))
    with pytest.raises(UserError, match=r"model\.tied=false"):
        make_plan(recipe, MODELS["gpt2"])
    assert make_plan(recipe, dataclasses.replace(MODELS["gpt2"], tied=False)).tensor("output.weight")


@pytest.mark.parametrize("name", ["gpt2", "lfm2", "mamba2"])
@pytest.mark.parametrize("lens", ["auto", "none"])
def test_the_advised_sizes_can_be_typed(donor, name, lens):
    with pytest.raises(UserError) as error:
        make_plan(Warm(donor=str(donor[0]), lens=lens), MODELS[name])
    sizes = dict(re.findall(r"model\.(d_\w+)=(\d+)", str(error.value)))
    model = dataclasses.replace(MODELS[name], **{key: int(value) for key, value in sizes.items()})
    model.check()
    assert model.d_model == 48 and make_plan(Warm(donor=str(donor[0]), lens="none"), model)


@dataclasses.dataclass
class PluginModel(Llama):
    """A plugin's model whose width has another name, and which may have no output layer."""

    name: ClassVar[str] = "own"

    width: int = 32
    bound: bool = True

    def settings(self):
        return {"vocab": self.vocab, "width": self.width, "n_layers": self.n_layers}

    def tensors(self):
        return [t for t in super().tensors() if not self.bound or t.name != "output.weight"]


@pytest.mark.parametrize(
    ("without_output", "lens", "advice", "unmentioned"),
    [
        (True, "auto", ["recipe.lens=none model.width=48"], ["tied", "d_model"]),
        (True, "none", ["expected 32 (model.width)", "; model.width=48"], ["pca", "d_model"]),
        (False, "none", ["expected 32 (model.width)", "; use recipe.lens=pca, or model.width=48"], ["d_model"]),
    ],
)
def test_the_advice_names_the_models_own_keys_and_choices_that_work(donor, without_output, lens, advice, unmentioned):
    sizes = {f.name: getattr(MODELS["llama"], f.name) for f in dataclasses.fields(MODELS["llama"])}
    with pytest.raises(UserError) as error:
        make_plan(Warm(donor=str(donor[0]), lens=lens), PluginModel(**sizes, bound=without_output))
    assert all(words in str(error.value) for words in advice), error.value
    assert not any(words in str(error.value) for words in unmentioned), error.value
