"""mamba2: its sizes, the sign of its decays, which of its tensors decay, and what config.json may lack."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from tiny import MODELS, VOCAB, batches, plan, replace_initial_values, write_base

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.plan import apply_optimiser
from toyexp.plugins.discovery import load
from toyexp_formats.shipped import HuggingFace
from toyexp_models.huggingface import mamba2_layout
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
        ({"conv_length": 10**9}, "model.conv_length=1000000000: must be at least 2 and at most 64"),
        ({"state": 0}, "model.state=0: must be"),
    ],
)
def test_sizes_that_llama_cpp_cannot_compute_are_rejected(changes, said):
    with pytest.raises(UserError, match=said):
        replace(MODELS["mamba2"], **changes).check()


def test_time_steps_decays_and_skips_start_as_in_the_paper():
    values = {t.name: t.init.draw(t.shape, 0, t.name) for t in replace(Mamba2(n_heads=8), vocab=VOCAB).tensors()}
    steps = np.log1p(np.exp(values["blk.0.ssm_dt.bias"]))
    np.testing.assert_allclose([steps[0], steps[-1]], [0.001, 0.1], rtol=1e-5)
    decays = values["blk.1.ssm_a"]
    assert (np.diff(steps) > 0).all() and (decays.max(), decays.min()) == (-1.0, -16.0)
    assert (values["blk.1.ssm_d"] == 1).all()


def test_matrices_start_with_the_variance_1_over_their_inputs():
    for t in Mamba2(d_model=128, d_ff=512, n_heads=8, vocab=VOCAB).tensors():
        if t.name.endswith((".ssm_in.weight", ".ssm_conv1d.weight", ".ssm_out.weight")):
            assert t.init.draw(t.shape, 0, t.name).std() == pytest.approx(t.shape[1] ** -0.5, rel=0.05), t.name


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


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_only_the_matrices_of_a_smaller_file_are_rounded(capsys, kind):
    """llama-quantize also leaves norms, convolutions, and tensors whose names do not end in `weight` in F32."""
    write_base(Path("m.gguf"), "mamba2")
    assert main(["export", "m.gguf", "--type", kind, "--to", "small.gguf"]) == 0
    types = {t.name.removeprefix("blk.1."): t.tensor_type.name for t in GGUFReader("small.gguf").tensors}
    small = {"token_embd.weight", "ssm_in.weight", "ssm_out.weight"}
    assert {n for n, kind in types.items() if kind != "F32" and not n.startswith("blk.")} == small


def test_adapters_change_both_matrices_by_default_and_no_convolution():
    write_base(Path("base.gguf"), "mamba2")
    both = {"ssm_in", "ssm_out"}
    for targets, layers in ((None, both), (["*"], both), (["out_proj"], {"ssm_out"}), (["mixer.in_proj"], {"ssm_in"})):
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


def test_files_have_what_llama_cpps_converter_writes_and_reads(capsys):
    """It writes 0 for attention and feed-forward layers, and pads the vocabulary to a multiple in config.json."""
    write_base(Path("m.gguf"), "mamba2", vocab=257)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    with GGUFFile("m.gguf") as file:
        absent = {key for key, value in file.metadata.items() if key.startswith("mamba2.") and value == 0}
    assert absent == {"mamba2.feed_forward_length", "mamba2.attention.head_count"}
    assert 257 % json.loads(Path("m-hf/config.json").read_text()).get("pad_vocab_size_multiple", 16) == 0


def test_decays_near_0_keep_their_values_as_the_logarithms_of_transformers():
    stored = mamba2_layout(MODELS["mamba2"], {}).tensors["blk.0.ssm_a"]
    decays = np.float32([[-16.0], [-1.0], [-1e-5], [0.0]])
    logarithms = stored.form(decays)
    np.testing.assert_allclose(-np.exp(logarithms), decays[:, 0], rtol=2e-6, atol=1e-29)  # transformers' formula
    np.testing.assert_allclose(stored.back(logarithms), decays, rtol=2e-6, atol=1e-29)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit is [0.001, 0.1]; toyexp's model=mamba2 has no limits"),
        ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit is [0.001, inf]"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit is [0.0, 0.1]"),
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
