"""A trained ViT as the base of `full` and `lora`: its classes, pixels and weights."""

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
def trained_files(tmp_path_factory):
    """Train a run on digits, and write images of two digits in a directory per class."""
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
def working_directory(trained_files, tmp_path, monkeypatch):
    for path in trained_files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


def result(directory):
    return json.loads(Path(directory, "result.json").read_text())


def run_json(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [(["recipe=full"], "cpu"), ([*PAIRS, "recipe.targets=[q,o,ffn_*]"], "ggml")],
    ids=["full", "lora"],
)
def test_a_run_starts_from_the_loss_of_its_base(capsys, recipe, engine):
    words = [*recipe, *ON_DIGITS, f"engine={engine}", "lr=0.002", "steps=8", "eval_every=8", "checkpoint_every=8"]
    assert main([*words, "hydra.run.dir=on"]) == 0
    assert result("on")["first_eval_loss"] == pytest.approx(result("run")["eval_loss"], abs=2e-5)
    assert result("on")["eval_loss"] < result("on")["first_eval_loss"]
    for model in ("on", "on/checkpoints/step-8", *(["run --adapter on"] if "recipe=lora" in recipe else [])):
        report = run_json(capsys, "eval", *model.split(), "data=digits", "engine=cpu", "engine.threads=1")
        assert report["loss"] == pytest.approx(result("on")["eval_loss"], abs=2e-5), model
        assert report["scores"]["accuracy"] == pytest.approx(result("on")["eval_scores"]["accuracy"])


def test_engines_agree_on_adapters_of_a_vit(capsys):
    engines = "engine=cpu:threads=1,ggml:threads=1"
    words = [*PAIRS, "recipe.targets=[*]", "recipe.base=run", "data=digits", "batch_size=16", "lr=0.01", "steps=10"]
    (engine,) = run_json(capsys, "parity", *words, engines)["engines"]
    assert engine["loss"]["largest"] < 1e-4


def test_the_default_targets_are_all_linears_and_patterns_can_name_blocks(tmp_path):
    linears = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down")
    for overrides, targets in (
        ([], {f"v.blk.{i}.{name}" for i in (0, 1) for name in linears}),
        (["recipe.targets=[blk.1.attn_o*]"], {"v.blk.1.attn_out"}),
    ):
        assert (
            main(
                [
                    "recipe=lora",
                    *ON_DIGITS,
                    *overrides,
                    "steps=1",
                    "eval_every=0",
                    f"hydra.run.dir={tmp_path}/{len(overrides)}",
                ]
            )
            == 0
        )
        with GGUFFile(tmp_path / str(len(overrides)) / "adapter.gguf") as file:
            assert {name.rpartition(".weight")[0] for name in file.tensors} == targets


def test_a_run_uses_the_bases_class_numbers_and_normalisation(capsys):
    """The data has two of ten classes and another mean, but the loss before the first step is the base's."""
    data = ["data=images", "data.path=some", "data.image_size=8", "data.color=false", "data.val_fraction=0.5"]
    before = run_json(capsys, "eval", "run/model.gguf", *data, "engine=ggml", "engine.threads=1", "batch_size=16")
    assert main(["recipe=full", "recipe.base=run", *data, *TINY, "steps=2", "eval_every=2", "hydra.run.dir=on"]) == 0
    assert result("on")["first_eval_loss"] == pytest.approx(before["loss"], abs=2e-5)
    with GGUFFile("run/model.gguf") as base, GGUFFile("on/model.gguf") as trained:
        keys = [f"toyexp-vit.{key}" for key in ("classes", "class_count", "image_mean", "image_std")]
        assert all(np.array_equal(base.metadata[key], trained.metadata[key]) for key in keys)


def test_position_embeddings_can_be_frozen():
    words = ["recipe=full", *ON_DIGITS, "recipe.train_embeddings=false", "steps=1", "eval_every=0"]
    assert main([*words, "hydra.run.dir=on"]) == 0
    with GGUFFile("run/model.gguf") as base, GGUFFile("on/model.gguf") as trained:
        unchanged = {name for name in base.tensors if np.array_equal(base.read(name), trained.read(name))}
    assert unchanged == {"v.position_embd.weight"}


def test_a_new_head_has_the_datas_classes_and_all_other_weights_are_the_bases(capsys):
    """Pixels are normalised as in the base. The run resumes, and its checkpoint has the loss of its model file."""
    data = ["data=images", "data.path=cats", "data.image_size=8", "data.color=false", "data.val_fraction=0.5"]
    words = ["recipe=full", "recipe.new_head=true", "recipe.base=run", *data, *TINY, "batch_size=2"]
    assert main([*words, "steps=1", "eval_every=0", "lr=0", "hydra.run.dir=still"]) == 0
    with GGUFFile("run/model.gguf") as base, GGUFFile("still/model.gguf") as trained:
        assert trained.metadata["toyexp-vit.classes"] == ["cat", "dog"]
        assert np.array_equal(base.metadata["toyexp-vit.image_mean"], trained.metadata["toyexp-vit.image_mean"])
        shapes = {name: info.shape for name, info in trained.tensors.items()}
        assert {name: shape for name, shape in shapes.items() if shape != base.tensors[name].shape} == {
            "v.head.weight": (2, 32), "v.head.bias": (2,),
        }  # fmt: skip
        unchanged = [name for name in base.tensors if not name.startswith("v.head.")]
        assert all(np.array_equal(base.read(name), trained.read(name)) for name in unchanged)
    assert main([*words, "steps=4", "eval_every=4", "checkpoint_every=2", "hydra.run.dir=on"]) == 0
    assert main(["resume=on", "steps=6"]) == 0
    losses = {
        run_json(capsys, "eval", model, "engine=cpu", "engine.threads=1")["loss"]
        for model in ("on", "on/checkpoints/step-6")
    }
    assert all(loss == pytest.approx(result("on")["eval_loss"], abs=2e-5) for loss in losses)


@pytest.mark.parametrize(("words", "message"), [
    ("recipe=full recipe.base=run data=images data.path=cats data.image_size=8 data.color=false data.val_fraction=0.5",
     "the data has the class cat, but the model knows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; to train a new output layer for "
     "them: recipe.new_head=true with recipe=full or lora"),
    ("recipe=full recipe.base=text.gguf recipe.new_head=true", "recipe.new_head=true: applies to classifiers only"),
    ("recipe=full recipe.base=run data=images data.path=some data.image_size=16 data.color=false",
     "model.image_size=8: the data has 16; type data.image_size=8 for data=images"),
    ("recipe=lora recipe.base=run data=digits recipe.dropout=0.1", "recipe.dropout=0.1: applies to text models only"),
    ("recipe=lora recipe.base=run data=digits recipe.targets=[gate]", "recipe.targets=[gate]"),
    ("recipe=full recipe.base=run model.d_model=64 data=digits", "model.d_model=64: recipe=full takes the model from"),
    ("recipe=full recipe.base=run", "model=vit reads images; data=stdlib gives tokens"),
    ("recipe=warm recipe.donor=run", "the donor has no token_embd.weight"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_base_are_rejected_in_one_line(capsys, words, message):
    capsys.readouterr()
    assert main([*words.split(), *TINY, "hydra.run.dir=no"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not Path("no").exists()


def test_describe_prints_commands_that_train_a_vit_further(capsys):
    uses = [use["command"] or "" for use in run_json(capsys, "describe", "run")["uses"]]
    assert any("recipe=full recipe.base=run/model.gguf data=images" in use for use in uses)
    assert any("recipe=lora recipe.base=run/model.gguf data=images" in use for use in uses)
