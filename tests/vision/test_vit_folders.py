"""Directories of ViTs that transformers and timm wrote, as models and as bases of runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from float64_models import vit
from PIL import Image
from safetensors.numpy import load_file, save_file
from tiny import write_base
from vit_folders import draw_values, write_timm, write_transformers

from toyexp import InputSpec, Setup, UserError
from toyexp.cli.main import main
from toyexp.formats import open_gguf
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.open_model import load_open_model
from toyexp.plugins.discovery import load
from toyexp.tokenizers.byte_level import Bytes
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.vit import ViT, cut, read_vit_config
from toyexp_recipes.positions import bicubic_weights
from toyexp_torch.engines import TorchCPU

MODEL = ViT(
    d_model=128, n_layers=2, n_heads=2, d_ff=512, patch=4, block="layernorm_gelu_erf", norm_eps=1e-6, image_size=12,
    channels=3, classes=5,
)  # fmt: skip
TANH = replace(MODEL, block="layernorm_gelu", norm_eps=1e-12)
ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1)}
NAMES = ["ant", "bee", "cat", "dog", "eel"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compute_logits(path, engine, images):
    model = load_open_model(open_gguf(path), load())
    patches = cut(images, model.patch)
    inputs = {"patches": InputSpec(patches.shape[1:], "float32"), "targets": InputSpec((), "int32")}
    setup = Setup({**inputs, "weights": InputSpec((), "float32")}, rows=len(images))
    with ENGINES[engine].realize(frozen_plan(model, Path(path), setup)) as session:
        session.build()
        return session.logits({"patches": patches})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("write", "model"),
    [("transformers", MODEL), ("transformers", TANH), ("timm", MODEL), ("timm", replace(MODEL, pool="mean"))],
)
def test_a_directory_has_the_logits_of_its_model_in_float64(engine, write, model):
    values, images = draw_values(model), np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    if write == "timm":
        write_timm(Path("vit"), model, values)
    else:
        write_transformers(Path("vit"), model, values, NAMES)
    weights = {name: torch.from_numpy(array).double() for name, array in values.items()}
    expected = vit(weights, model, torch.from_numpy(images).double()).numpy()
    assert expected.std() > 0.3
    np.testing.assert_allclose(compute_logits("vit", engine, images), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_a_directory_that_transformers_wrote_has_its_logits(activation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=12, patch_size=4,
        num_labels=5, hidden_act=activation, initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained("vit")
    images = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).logits.numpy()
    assert expected.std() > 0.3
    for engine in ENGINES:
        np.testing.assert_allclose(compute_logits("vit", engine, images), expected, rtol=0, atol=2e-5)


def test_classes_and_normalisation_are_those_of_the_directory(capsys):
    write_transformers(Path("hf"), MODEL, draw_values(MODEL), NAMES)
    write_timm(Path("timm"), MODEL, draw_values(MODEL), label_names=NAMES)
    for folder in ("hf", "timm"):
        metadata = open_gguf(folder).metadata
        assert metadata["toyexp-vit.classes"] == NAMES
        assert [*metadata["toyexp-vit.image_mean"], *metadata["toyexp-vit.image_std"]] == [0.5] * 3 + [0.25] * 3
    Path("hf/preprocessor_config.json").unlink()
    metadata = open_gguf("hf").metadata
    assert [*metadata["toyexp-vit.image_mean"], *metadata["toyexp-vit.image_std"]] == [0.5] * 6
    assert capsys.readouterr().err == (
        "note: hf has no preprocessor_config.json; pixels are normalised with mean and std 0.5\n"
    )
    Path("hf/preprocessor_config.json").write_text('{"do_normalize": false, "image_mean": [0.1, 0.1, 0.1]}')
    metadata = open_gguf("hf").metadata
    assert [*metadata["toyexp-vit.image_mean"], *metadata["toyexp-vit.image_std"]] == [0.0] * 3 + [1.0] * 3


@pytest.mark.parametrize(
    ("architecture", "width", "args", "heads", "d_ff"),
    [
        ("vit_tiny_patch16_224", 192, {}, 3, 768),
        ("vit_small_patch16_224", 384, {}, 6, 1536),
        ("deit_base_patch16_224", 768, None, 12, 3072),
        ("vit_large_patch16_224", 1024, {}, 16, 4096),
        ("vit_huge_patch14_224", 1280, {}, 16, 5120),
        ("vit_giant_patch14_224", 1408, {"mlp_ratio": 48 / 11, "img_size": 336}, 16, 6144),
        ("vit_small_patch32_384", 384, {"num_heads": 8, "patch_size": 16}, 8, 1536),
    ],
)
def test_sizes_that_timms_config_does_not_state_are_those_of_its_architectures(architecture, width, args, heads, d_ff):
    """The sizes are those in timm/models/vision_transformer.py."""
    pixels = {"input_size": [3, 224, 224], "num_classes": 7}
    config = {"architecture": architecture, "num_features": width, "model_args": args, "pretrained_cfg": pixels}
    model = read_vit_config(ViT, config, ["head.weight", "blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"])
    assert (model.d_model, model.n_heads, model.d_ff, model.n_layers, model.classes) == (width, heads, d_ff, 2, 7)
    size, patch = (args or {}).get("img_size", 224), 14 if "14" in architecture else 16
    assert (model.image_size, model.patch, model.channels, model.pool) == (size, patch, 3, "class")


def test_defaults_of_transformers_vit_config_are_those_of_a_directory_without_them():
    write_transformers(Path("hf"), replace(MODEL, classes=2), draw_values(replace(MODEL, classes=2)), NAMES[:2])
    config = json.loads(Path("hf/config.json").read_text())
    for key in ("hidden_act", "qkv_bias", "id2label", "label2id"):
        del config[key]
    Path("hf/config.json").write_text(json.dumps(config))
    file = open_gguf("hf")
    assert load_open_model(file, load()) == replace(MODEL, classes=2)
    assert file.metadata["toyexp-vit.classes"] == ["0", "1"]


def test_a_fine_tuned_model_of_timm_has_the_classes_at_the_top_of_its_config():
    """timm keeps those of the pretraining in pretrained_cfg; see _parse_model_cfg in timm/models/_hub.py."""
    pretrained = {"input_size": [3, 12, 12], "num_classes": 1000, "label_names": [f"n{i}" for i in range(1000)]}
    write_timm(Path("timm"), MODEL, draw_values(MODEL), label_names=NAMES, pretrained_cfg=pretrained)
    assert open_gguf("timm").metadata["toyexp-vit.classes"] == NAMES


def test_a_directory_becomes_a_gguf_and_a_directory_again():
    write_timm(Path("timm"), MODEL, draw_values(MODEL), label_names=NAMES)
    assert main(["export", "timm", "--type", "gguf", "--to", "v.gguf"]) == 0
    assert main(["export", "v.gguf", "--type", "hf", "--to", "v-hf"]) == 0
    config = json.loads(Path("v-hf/config.json").read_text())
    assert config["hidden_act"] == "gelu" and config["layer_norm_eps"] == 1e-6 and config["id2label"]["1"] == "bee"
    first, last = open_gguf("timm"), open_gguf("v-hf")
    for name in first.tensors:
        np.testing.assert_array_equal(first.read(name), last.read(name))


def change_tensors(folder, change):
    tensors = load_file(f"{folder}/model.safetensors")
    change(tensors)
    save_file(tensors, f"{folder}/model.safetensors")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "resnet50"}, "is timm's architecture resnet50 with"),
        ({"global_pool": "map"}, "with global_pool map and"),
        ({"model_args": {"act_layer": "quick_gelu"}}, "model_args {'act_layer': 'quick_gelu'}"),
        ({"architecture": "vit_tiny_patch5_12"}, "model.patch=5 does not divide images of 12 pixels"),
        ({"global_pool": "avg"}, "lacks the tensor fc_norm.bias, unlike toyexp's model=vit"),
        ({"num_features": None}, "config.json: "),
    ],
)
def test_a_timm_model_that_toyexp_does_not_compute_is_rejected_in_one_line(changes, said):
    write_timm(Path("timm"), MODEL, draw_values(MODEL), **changes)
    with pytest.raises(UserError) as error:
        open_gguf("timm")
    assert str(error.value).startswith("timm") and said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "swin"}, "its model_type is swin"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is quick_gelu, qkv_bias True; toyexp's model=vit has gelu_pytorch"),
        ({"qkv_bias": False}, "hidden_act is gelu, qkv_bias False; toyexp's"),
        ({"patch_size": 5}, "model.patch=5 does not divide images of 12 pixels"),
        ({"hidden_size": None}, "config.json: "),
    ],
)
def test_a_vit_of_transformers_that_toyexp_does_not_compute_is_rejected_in_one_line(changes, said):
    write_transformers(Path("hf"), MODEL, draw_values(MODEL), NAMES)
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError) as error:
        open_gguf("hf")
    assert str(error.value).startswith("hf") and said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("blocks.1.attn.qkv.bias"), "lacks the tensor blocks.1.attn.qkv.bias"),
        (lambda t: t.update({"blocks.0.ls1.gamma": np.ones(128, np.float32)}), "has the tensor blocks.0.ls1.gamma"),
    ],
)
def test_a_missing_or_extra_tensor_is_named(change, said):
    write_timm(Path("timm"), MODEL, draw_values(MODEL))
    change_tensors("timm", change)
    with pytest.raises(UserError, match=said):
        open_gguf("timm")


# -- as bases of runs -------------------------------------------------------------------------------------------------

SMALL = replace(MODEL, d_model=64, n_heads=1, d_ff=256)
PHOTOS = ["data=images", "data.path=photos", "data.image_size=12", "data.val_fraction=0.25"]
QUICK = ["batch_size=8", "steps=6", "lr=0.002", *PHOTOS]


def write_photos(classes, count=12):
    """Write images of one colour each, which differs between classes."""
    draw = np.random.default_rng(1)
    for number, name in enumerate(classes):
        Path("photos", name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 120, (12, 12, 3)) + 120 * (np.arange(3) == number)
            Image.fromarray(pixels.astype(np.uint8)).save(f"photos/{name}/{i}.png")


def run_json(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("write", ["transformers", "timm"])
@pytest.mark.parametrize("recipe", [["full"], ["lora", "recipe.targets=[query,v,fc1]"]], ids=["full", "lora"])
def test_a_run_on_new_classes_learns_them_and_engines_agree(capsys, write, recipe):
    """Its model file has the new classes; it becomes a directory of transformers with the same loss."""
    write_photos(NAMES[2:])
    values = draw_values(SMALL, 1)
    if write == "timm":
        write_timm(Path("vit"), SMALL, values)
    else:
        write_transformers(Path("vit"), SMALL, values, ["0", "1", "2", "3", "4"])
    words = [f"recipe={recipe[0]}", *recipe[1:], "recipe.base=vit", "recipe.new_head=true", *QUICK]
    (engine,) = run_json(capsys, "parity", *words, "engine=cpu:threads=1,ggml:threads=1")["engines"]
    assert engine["loss"]["largest"] < 1e-4
    words += ["engine=cpu", "engine.threads=1", "steps=30", "eval_every=30", "checkpoint_every=30"]
    capsys.readouterr()
    assert main([*words, "hydra.run.dir=on"]) == 0
    assert "base    vit, with a new output layer" in capsys.readouterr().out
    result = json.loads(Path("on/result.json").read_text())
    assert result["eval_scores"]["accuracy"] == 1 and result["eval_loss"] < result["first_eval_loss"] / 2
    assert not Path("on/adapter.gguf").exists(), "an adapter file has no place for the output layer"
    assert main(["export", "on", "--type", "hf", "--to", "on-hf"]) == 0
    for model in ("on", "on/checkpoints/step-30", "on-hf"):
        report = run_json(capsys, "eval", model, *PHOTOS, "engine=ggml", "engine.threads=1")
        assert report["loss"] == pytest.approx(result["eval_loss"], abs=2e-5), model
    assert open_gguf("on/model.gguf").metadata["toyexp-vit.classes"] == NAMES[2:]
    weights = [open_gguf(path).read("v.blk.0.attn_k.weight") for path in ("vit", "on/model.gguf")]
    assert np.array_equal(*weights) == (recipe[0] == "lora")
    if recipe[0] == "lora":
        assert main(["eval", "vit", "--adapter", "on/checkpoints/step-30", *PHOTOS]) == 2
        assert "which trains no adapter alone" in capsys.readouterr().err


def test_a_run_on_a_directory_starts_from_its_loss(capsys):
    """The data has three of the five classes; toyexp numbers them as the directory does."""
    write_photos(NAMES[2:])
    write_transformers(Path("vit"), SMALL, draw_values(SMALL, 1), NAMES)
    before = run_json(capsys, "eval", "vit", *PHOTOS, "engine=cpu", "engine.threads=1")["loss"]
    words = [
        "recipe=lora",
        "recipe.base=vit",
        *QUICK,
        "engine=ggml",
        "engine.threads=1",
        "eval_every=6",
        "hydra.run.dir=on",
    ]
    assert main(words) == 0
    assert json.loads(Path("on/result.json").read_text())["first_eval_loss"] == pytest.approx(before, abs=2e-5)
    report = run_json(capsys, "eval", "vit", "--adapter", "on", *PHOTOS, "engine=cpu", "engine.threads=1")
    after = json.loads(Path("on/result.json").read_text())["eval_loss"]
    assert report["loss"] == pytest.approx(after, abs=2e-5)


def test_a_base_without_an_output_layer_gets_a_new_one(capsys):
    """transformers' ViTModel, whose names have no prefix, and which has a pooler that classifiers do not use."""
    write_photos(NAMES[2:])
    write_transformers(Path("vit"), SMALL, draw_values(SMALL, 1), NAMES)

    def change(tensors):
        for name in list(tensors):
            array = tensors.pop(name)
            if not name.startswith("classifier."):
                tensors[name.removeprefix("vit.")] = array
        tensors["pooler.dense.weight"], tensors["pooler.dense.bias"] = np.eye(64, dtype="f4"), np.ones(64, "f4")

    change_tensors("vit", change)
    words = ["recipe=full", "recipe.base=vit", *QUICK, "engine=cpu", "engine.threads=1", "hydra.run.dir=on"]
    assert main(words) == 0
    assert "note: vit has no output layer; recipe=full and recipe=lora add a new one" in capsys.readouterr().err
    metadata = open_gguf("on/model.gguf").metadata
    assert metadata["toyexp-vit.classes"] == NAMES[2:] and metadata["toyexp-vit.class_count"] == 3
    assert main(["eval", "vit", *PHOTOS]) == 2
    assert "vit: " in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["recipe=full recipe.train_embeddings=false", "recipe=lora recipe.targets=[v,o]"])
def test_another_image_size_interpolates_the_positions(capsys, recipe):
    """As torch's bicubic interpolation, which transformers' interpolate_pos_encoding calls."""
    write_photos(NAMES[:3])
    values = draw_values(SMALL, 1)
    write_transformers(Path("vit"), SMALL, values, NAMES)
    words = [*recipe.split(), "recipe.base=vit", *QUICK, "data.image_size=20"]
    assert main([*words, "hydra.run.dir=no"]) == 2
    error = capsys.readouterr().err
    assert (
        "model.image_size=12: the data has 20; type data.image_size=12 for data=images, recipe.new_size=true" in error
    )
    assert main([*words, "recipe.new_size=true", "data.image_size=18", "hydra.run.dir=no"]) == 2
    assert "model.patch=4 does not divide images of 18 pixels" in capsys.readouterr().err
    words += ["recipe.new_size=true"]
    assert main([*words, "engine=ggml", "engine.threads=1", "hydra.run.dir=on", "checkpoint_every=3"]) == 0
    assert "base    vit, with interpolated positions" in capsys.readouterr().out
    assert main(["resume=on", "steps=8"]) == 0
    (engine,) = run_json(capsys, "parity", *words, "engine=cpu:threads=1,ggml:threads=1")["engines"]
    assert engine["loss"]["largest"] < 1e-4
    stored = torch.from_numpy(values["v.position_embd.weight"])
    grid = stored[1:].reshape(1, 3, 3, 64).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(5, 5), mode="bicubic", align_corners=False)
    expected = torch.cat([stored[:1], grid.permute(0, 2, 3, 1).reshape(25, 64)])
    np.testing.assert_allclose(open_gguf("on/model.gguf").read("v.position_embd.weight"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [(3, 7), (7, 3), (14, 24), (24, 14), (5, 5), (1, 4), (4, 1)])
def test_bicubic_weights_are_those_of_torch(old, new):
    points = torch.eye(old, dtype=torch.float64)[None, :, None]  # [1, old, 1, old]
    expected = torch.nn.functional.interpolate(points, size=(1, new), mode="bicubic", align_corners=False)
    np.testing.assert_allclose(bicubic_weights(old, new), expected[0, :, 0].T, rtol=0, atol=1e-12)


def test_new_size_is_for_image_models(capsys):
    write_base(Path("text.gguf"), "llama", tokenizer=Bytes())
    assert main(["recipe=full", "recipe.base=text.gguf", "recipe.new_size=true"]) == 2
    assert "recipe.new_size=true: applies to classifiers only; model=llama has no image_size" in capsys.readouterr().err
