"""mamba2: its sizes, the sign of its decays, which of its tensors decay, and what config.json may lack."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import MODELS, VOCAB, batches, plan, replace_initial_values, write_base

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.plan import apply_optimiser
from toyexp.plugins.discovery import load
from toyexp_formats.shipped import HuggingFace
from toyexp_models.mamba2 import Mamba2
from toyexp_optimisers.muon import Muon
from toyexp_recipes.lora import Lora
from toyexp_torch.engines import TorchCPU


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_heads": 3}, "model.n_heads=3 does not divide model.d_ff=64"),
        ({"n_groups": 3}, "model.n_groups=3 does not divide model.n_heads=4"),
        ({"d_ff": 32}, r"model.d_ff=32: must be a multiple of model.d_model \* model.n_groups; try model.d_ff=128"),
        ({"conv_length": 1}, "model.conv_length=1: must be at least 2"),
        ({"state": 0}, "model.state=0: must be"),
    ],
)
def test_sizes_that_llama_cpp_cannot_compute_are_rejected(changes, said):
    with pytest.raises(UserError, match=said):
        replace(MODELS["mamba2"], **changes).check()


def test_time_steps_and_decays_start_in_the_ranges_of_the_paper():
    values = {t.name: t.init.draw(t.shape, 0, t.name) for t in replace(Mamba2(n_heads=8), vocab=VOCAB).tensors()}
    steps = np.log1p(np.exp(values["blk.0.ssm_dt.bias"]))
    np.testing.assert_allclose([steps[0], steps[-1]], [0.001, 0.1], rtol=1e-5)
    decays = values["blk.1.ssm_a"]
    assert (np.diff(steps) > 0).all() and (decays.max(), decays.min()) == (-1.0, -16.0)


def test_a_decay_of_the_wrong_sign_counts_as_its_opposite_also_in_the_file():
    the_plan = plan("mamba2_wide")
    turned = replace_initial_values(
        the_plan, {n: np.array([[2.0], [-3.0], [0.5], [-0.1]], np.float32) for n in ("blk.0.ssm_a", "blk.1.ssm_a")}
    )
    with TorchCPU(threads=1).realize(turned) as session:
        session.build()
        logits = session.logits(batches().batch(0))
        model, written = turned.model.fold({t.name: session.download(t.name) for t in turned.tensors})
    assert model == turned.model
    np.testing.assert_array_equal(written["blk.1.ssm_a"].ravel(), np.float32([-2.0, -3.0, -0.5, -0.1]))
    with TorchCPU(threads=1).realize(replace_initial_values(the_plan, written)) as session:
        session.build()
        np.testing.assert_array_equal(session.logits(batches().batch(0)), logits)


def test_only_its_matrices_and_convolutions_decay_and_muon_takes_those_with_rows_and_columns():
    the_plan = apply_optimiser(plan("mamba2"), Muon(), 0.1)
    names = {t.name.removeprefix("blk.0.") for t in the_plan.tensors if t.has_weight_decay}
    matrices = {f"blk.1.{n}.weight" for n in ("ssm_in", "ssm_conv1d", "ssm_out")}
    assert {n for n in names if not n.startswith("blk.1.")} == {"token_embd.weight"} | {m[6:] for m in matrices}
    by_muon = {name for group in the_plan.updates if isinstance(group.rule, Muon) for name in group.tensors}
    assert {n for n in by_muon if n.startswith("blk.1.")} == matrices


def test_adapters_change_both_matrices_by_default_and_no_convolution():
    write_base(Path("base.gguf"), "mamba2")
    for targets, layers in ((None, {"ssm_in", "ssm_out"}), (["*"], {"ssm_in", "ssm_out"}), (["out_proj"], {"ssm_out"})):
        adapters = plan("mamba2", recipe=Lora(base="base.gguf", targets=targets)).adapters
        assert {a.target.split(".")[2] for a in adapters} == layers


def change_config(**changes):
    config = json.loads(Path("m-hf/config.json").read_text()) | changes
    Path("m-hf/config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_published_config_lacks_the_context_and_the_inner_size(capsys):
    model = write_base(Path("m.gguf"), "mamba2")
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    change_config(max_position_embeddings=None, intermediate_size=None, time_step_limit=[0.0, float("inf")])
    back = HuggingFace().read(Path("m-hf"), load().models())
    assert back.model == replace(model, context=1 << 20)
    with GGUFFile("m.gguf") as file:
        np.testing.assert_array_equal(back.tensors["blk.1.ssm_norm.weight"], file.read("blk.1.ssm_norm.weight"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit is [0.001, 0.1]; toyexp's model=mamba2 has no limits"),
        ({"use_bias": True}, "use_bias is True; toyexp's model=mamba2 has only False"),
        ({"use_conv_bias": False}, "use_conv_bias is False"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"num_heads": None}, "num_heads"),
    ],
)
def test_a_config_with_other_computations_is_refused(capsys, changes, said):
    write_base(Path("m.gguf"), "mamba2")
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    change_config(**changes)
    capsys.readouterr()
    assert main(["export", "m-hf", "--type", "f32", "--to", "new.gguf"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
