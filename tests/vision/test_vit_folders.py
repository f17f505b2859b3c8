"""Directories of ViTs that transformers and timm wrote, as models and as bases of runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from float64_models import vit
from safetensors.numpy import load_file, save_file
from vit_folders import draw_values, write_timm, write_transformers

from toyexp import InputSpec, Setup, UserError
from toyexp.cli.main import main
from toyexp.formats import open_gguf
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.open_model import load_open_model
from toyexp.plugins.discovery import load
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.vit import ViT, cut
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


def test_classes_and_normalisation_are_those_of_the_directory():
    write_transformers(Path("hf"), MODEL, draw_values(MODEL), NAMES)
    write_timm(Path("timm"), MODEL, draw_values(MODEL), label_names=NAMES)
    for folder in ("hf", "timm"):
        metadata = open_gguf(folder).metadata
        assert metadata["toyexp-vit.classes"] == NAMES
        assert [*metadata["toyexp-vit.image_mean"], *metadata["toyexp-vit.image_std"]] == [0.5] * 3 + [0.25] * 3
    Path("hf/preprocessor_config.json").write_text('{"do_normalize": false, "image_mean": [0.1, 0.1, 0.1]}')
    metadata = open_gguf("hf").metadata
    assert [*metadata["toyexp-vit.image_mean"], *metadata["toyexp-vit.image_std"]] == [0.0] * 3 + [1.0] * 3


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
