"""A trained ViT as the base of `full` and `lora`: its classes, its pixels, its numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import write_base

from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.tokenizers.byte_level import Bytes
from toyexp_data.images import Digits

TINY = ["engine=ggml", "engine.threads=1", "batch_size=16", "lr=0.01"]
ON_DIGITS = ["recipe.base=run", "data=digits", *TINY]
PAIRS = ["recipe=lora", "recipe.rank=2", "recipe.init_scale=0.2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on digits, and images of two of them in a folder per class."""
    root = tmp_path_factory.mktemp("vit-base")
    assert main(["model=vit", "recipe=vit_tiny", "data=digits", "model.d_model=32", "model.n_layers=2", *TINY,
                 "model.d_ff=32", "eval_every=25", "steps=25", f"hydra.run.dir={root / 'run'}"]) == 0  # fmt: skip
    images, labels = Digits().open(None).train
    for digit in (7, 2):
        (root / "some" / str(digit)).mkdir(parents=True)
        for i, pixels in enumerate(images[labels == digit][:20, ..., 0]):
            Image.fromarray(pixels).save(root / "some" / str(digit) / f"{i}.png")

    write_base(root / "text.gguf", "llama", tokenizer=Bytes())
    (root / "cats" / "cat").mkdir(parents=True)
    (root / "cats" / "dog").mkdir()
    for i, name in enumerate(("cat", "dog", "cat", "dog")):
        Image.fromarray(images[i, ..., 0]).save(root / "cats" / name / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def here(trained, tmp_path, monkeypatch):
    for path in trained.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


def result(directory):
    return json.loads(Path(directory, "result.json").read_text())


def told(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [(["recipe=full"], "cpu"), ([*PAIRS, "recipe.targets=[q,o,ffn_*]"], "ggml")],
    ids=["full", "lora"],
)
def test_training_goes_on_where_the_base_ended(capsys, recipe, engine):
    words = [*recipe, *ON_DIGITS, f"engine={engine}", "lr=0.002", "steps=8", "eval_every=8", "checkpoint_every=8"]
    assert main([*words, "hydra.run.dir=on"]) == 0
    assert result("on")["first_eval_loss"] == pytest.approx(result("run")["eval_loss"], abs=2e-5)
    assert result("on")["eval_loss"] < result("on")["first_eval_loss"]
    for what in ("on", "on/checkpoints/step-8", *(["run --adapter on"] if "recipe=lora" in recipe else [])):
        found = told(capsys, "eval", *what.split(), "data=digits", "engine=cpu", "engine.threads=1")
        assert found["loss"] == pytest.approx(result("on")["eval_loss"], abs=2e-5), what
        assert found["scores"]["accuracy"] == pytest.approx(result("on")["eval_scores"]["accuracy"])


def test_engines_agree_on_its_adapters(capsys):
    engines = "engine=cpu:threads=1,ggml:threads=1"
    words = [*PAIRS, "recipe.targets=[*]", "recipe.base=run", "data=digits", "batch_size=16", "lr=0.01", "steps=10"]
    (engine,) = told(capsys, "parity", *words, engines)["engines"]
    assert engine["loss"]["largest"] < 1e-4


def test_the_default_target_is_the_queries_and_patterns_name_blocks(tmp_path):
    for given, found in (
        ([], {"v.blk.0.attn_q", "v.blk.1.attn_q"}),
        (["recipe.targets=[blk.1.attn_o*]"], {"v.blk.1.attn_out"}),
    ):
        assert (
            main(
                ["recipe=lora", *ON_DIGITS, *given, "steps=1", "eval_every=0", f"hydra.run.dir={tmp_path}/{len(given)}"]
            )
            == 0
        )
        with GGUFFile(tmp_path / str(len(given)) / "adapter.gguf") as file:
            assert {name.rpartition(".weight")[0] for name in file.tensors} == found


def test_images_have_the_numbers_and_the_pixels_that_their_classes_have_in_the_base(capsys):
    """Two of ten classes, in a folder whose own mean is another: nothing moves before the first step."""
    data = ["data=images", "data.path=some", "data.image_size=8", "data.color=false", "data.val_fraction=0.5"]
    before = told(capsys, "eval", "run/model.gguf", *data, "engine=ggml", "engine.threads=1", "batch_size=16")
    assert main(["recipe=full", "recipe.base=run", *data, *TINY, "steps=2", "eval_every=2", "hydra.run.dir=on"]) == 0
    assert result("on")["first_eval_loss"] == pytest.approx(before["loss"], abs=2e-5)
    with GGUFFile("run/model.gguf") as one, GGUFFile("on/model.gguf") as other:
        keys = [f"toyexp-vit.{key}" for key in ("classes", "class_count", "image_mean", "image_std")]
        assert all(np.array_equal(one.metadata[key], other.metadata[key]) for key in keys)


def test_position_embeddings_stay_where_they_are_not_trained():
    words = ["recipe=full", *ON_DIGITS, "recipe.train_embeddings=false", "steps=1", "eval_every=0"]
    assert main([*words, "hydra.run.dir=on"]) == 0
    with GGUFFile("run/model.gguf") as one, GGUFFile("on/model.gguf") as other:
        same = {name for name in one.tensors if np.array_equal(one.read(name), other.read(name))}
    assert same == {"v.position_embd.weight"}


def test_a_new_head_is_of_the_datas_classes_and_all_else_of_the_base(capsys):
    """Pixels are seen as the base saw its own; the run goes on, and its checkpoint is a model like its file."""
    data = ["data=images", "data.path=cats", "data.image_size=8", "data.color=false", "data.val_fraction=0.5"]
    words = ["recipe=full", "recipe.new_head=true", "recipe.base=run", *data, *TINY, "batch_size=2"]
    assert main([*words, "steps=1", "eval_every=0", "lr=0", "hydra.run.dir=still"]) == 0
    with GGUFFile("run/model.gguf") as one, GGUFFile("still/model.gguf") as other:
        assert other.metadata["toyexp-vit.classes"] == ["cat", "dog"]
        assert np.array_equal(one.metadata["toyexp-vit.image_mean"], other.metadata["toyexp-vit.image_mean"])
        assert {name: info.shape for name, info in other.tensors.items() if info.shape != one.tensors[name].shape} == {
            "v.head.weight": (2, 32), "v.head.bias": (2,),
        }  # fmt: skip
        same = [name for name in one.tensors if not name.startswith("v.head.")]
        assert all(np.array_equal(one.read(name), other.read(name)) for name in same)
    assert main([*words, "steps=4", "eval_every=4", "checkpoint_every=2", "hydra.run.dir=on"]) == 0
    assert main(["resume=on", "steps=6"]) == 0
    scored = {
        told(capsys, "eval", what, "engine=cpu", "engine.threads=1")["loss"] for what in ("on", "on/checkpoints/step-6")
    }
    assert all(loss == pytest.approx(result("on")["eval_loss"], abs=2e-5) for loss in scored)


@pytest.mark.parametrize(("words", "said"), [
    ("recipe=full recipe.base=run data=images data.path=cats data.image_size=8 data.color=false data.val_fraction=0.5",
     "the data has the class cat, but the model knows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; to train a new output layer for "
     "them: recipe=full recipe.new_head=true"),
    ("recipe=full recipe.base=text.gguf recipe.new_head=true", "recipe.new_head=true: applies to classifiers only"),
    ("recipe=full recipe.base=run data=images data.path=some data.image_size=16 data.color=false",
     "model.image_size=8: the data has 16; type data.image_size=8 for data=images"),
    ("recipe=lora recipe.base=run data=digits recipe.dropout=0.1", "recipe.dropout=0.1: applies to text models only"),
    ("recipe=lora recipe.base=run data=digits recipe.targets=[gate]", "recipe.targets=[gate]"),
    ("recipe=full recipe.base=run model.d_model=64 data=digits", "model.d_model=64: recipe=full takes the model from"),
    ("recipe=full recipe.base=run", "model=vit reads images; data=stdlib gives tokens"),
    ("recipe=warm recipe.donor=run", "the donor has no token_embd.weight"),
])  # fmt: skip
def test_what_does_not_fit_the_base_is_one_line(capsys, words, said):
    capsys.readouterr()
    assert main([*words.split(), *TINY, "hydra.run.dir=no"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not Path("no").exists()


def test_describe_says_how_to_train_it_on(capsys):
    uses = [use["command"] or "" for use in told(capsys, "describe", "run")["uses"]]
    assert any("recipe=full recipe.base=run/model.gguf data=images" in use for use in uses)
    assert any("recipe=lora recipe.base=run/model.gguf data=images" in use for use in uses)
