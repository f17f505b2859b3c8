"""An exported ONNX file has the same logits in ONNX Runtime as the model has in float64."""

import json
from pathlib import Path

import numpy as np
import pytest

from toyexp import InputSpec, ModelExport, Setup
from toyexp.cli.main import main
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.write import write_model
from toyexp.reference.engine import reference_logits
from toyexp.testing import FormatSuite
from toyexp_models.vit import ViT, cut
from toyexp_torch.onnx import ONNX

pytestmark = [pytest.mark.judge, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of torch
pytest.importorskip("torch")
pytest.importorskip("onnxscript", reason="torch's exporter needs it: pip install 'toyexp[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="the judge is ONNX Runtime: pip install onnxruntime")

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 48, "patch": 4, "image_size": 12, "classes": 5}
DATA = {"classes": ["a", "b", "c"], "image_mean": [0.1, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def draw_values(model):
    """Return values so large that logits differ clearly."""
    return {t.name: 3 * t.init.draw(t.shape, 7, t.name) + np.float32(0.01) for t in model.tensors()}


@pytest.mark.parametrize("block", ["layernorm_gelu", "layernorm_gelu_erf", "rmsnorm_silu"])
def test_logits_of_images_are_those_in_float64_for_any_number_of_images(block, capsys):
    model = ViT(**SIZES, channels=3, block=block)
    values = draw_values(model)
    write_model(Path("v.gguf"), model, values, None, data=DATA)
    assert main(["export", "v.gguf", "--type", "onnx"]) == 0
    assert capsys.readouterr().out.startswith("v.onnx  ") and [p.name for p in Path().iterdir()].count("v.onnx") == 1
    session = onnxruntime.InferenceSession("v.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == ["a", "b", "c"]
    for rows in (1, 3):
        images = np.random.default_rng(rows).random((rows, 12, 12, 3))
        patches = cut((images - DATA["image_mean"]) / DATA["image_std"], 4)
        inputs = {"patches": InputSpec(patches.shape[1:], "float32"), "targets": InputSpec((), "int32")}
        plan = frozen_plan(model, Path("v.gguf"), Setup({**inputs, "weights": InputSpec((), "float32")}, rows=rows))
        expected = reference_logits(plan, {n: v.astype(np.float64) for n, v in values.items()}, {"patches": patches})
        (logits,) = session.run(["logits"], {"images": images.transpose(0, 3, 1, 2).astype(np.float32)})
        assert expected.std() > 0.3
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_a_tensor_with_nan_is_named():
    model = ViT(**SIZES, channels=1)
    values = draw_values(model)
    values["v.head.bias"][1] = np.nan
    assert ONNX().write(ModelExport(model, values), Path("nan.onnx")) == ["v.head.bias contains NaN or infinity"]


class TestONNX(FormatSuite):
    form = ONNX()
    models = [ViT(**SIZES, channels=1)]


def test_a_language_model_is_rejected(capsys):
    from tiny import write_base

    write_base(Path("m.gguf"), "llama")
    assert main(["export", "m.gguf", "--type", "onnx"]) == 2
    assert "model=llama: the format onnx only holds image classifiers (model=vit)" in capsys.readouterr().err
