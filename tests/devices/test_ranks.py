"""engine.devices=2 on two NVIDIA GPUs: results against one GPU, captured and not, and failures of a rank."""

import json
import os
import signal

import numpy as np
import pytest
from faults import TEXT, words
from multi_device import ADAMW, OPTIMISERS, StartedRun, take_steps
from tiny import plan, write_base

from toyexp import Unavailable
from toyexp.interfaces.plan import apply_optimiser
from toyexp_recipes.lora import Lora
from toyexp_torch.engines import TorchCUDA

pytestmark = pytest.mark.device("cuda")

try:
    TorchCUDA().check()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)
if TorchCUDA().available_devices()[0] < 2:
    pytest.skip("needs two NVIDIA GPUs, there is one", allow_module_level=True)


def two_gpus(**settings):
    return TorchCUDA(devices="2", deterministic=True, **settings)


def assert_same(one, other):
    np.testing.assert_array_equal(one[0], other[0])
    for name, array in one[2].items():
        np.testing.assert_array_equal(array, other[2][name], err_msg=name)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_50_steps_on_two_gpus_have_the_losses_of_one(name):
    the_plan = apply_optimiser(plan(name, rows=4, accumulate=2, grad_clip=0.5), ADAMW, 1e-2)
    losses, expected = (take_steps(TorchCUDA(devices=n), the_plan, 50, lr=1e-3)[0][:, 0] for n in ("2", "1"))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_of_every_optimiser_are_bit_identical_captured_or_not_and_sharded_or_not(name):
    the_plan = apply_optimiser(plan("llama_tied_bias", rows=4, grad_clip=0.5), OPTIMISERS[name].with_mode("lora"), 1e-2)
    expected = take_steps(two_gpus(), the_plan)
    with two_gpus().realize(the_plan) as session:
        session.build()
        assert session.describe()["captured"] is True
    assert_same(take_steps(two_gpus(capture=False), the_plan), expected)
    assert_same(take_steps(two_gpus(shard=True), the_plan), expected)
    assert_same(take_steps(two_gpus(shard=True, capture=False), the_plan), expected)
    # Rules with a sign or a root amplify rounding, so only the first steps are compared.
    np.testing.assert_allclose(expected[0][:2], take_steps(TorchCUDA(deterministic=True), the_plan)[0][:2], rtol=1e-4)


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # advice from the compiler
@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"compile": True}, {"dtype": "bfloat16", "compile": True}, {"tf32": True},
     {"recompute": True}, {"dtype": "float64"}],
)  # fmt: skip
@pytest.mark.parametrize("shard", [False, True])
def test_losses_with_every_engine_setting_agree_with_one_gpu(settings, shard):
    the_plan = apply_optimiser(plan("gpt2", rows=4, accumulate=2), ADAMW, 1e-2)
    results, expected = (
        take_steps(TorchCUDA(devices="2", shard=shard, **settings), the_plan),
        take_steps(TorchCUDA(**settings), the_plan),
    )
    # bfloat16 keeps 8 bits of an activation, TF32 11 bits of a factor.
    rtol = 2e-2 if {"dtype", "tf32"} & settings.keys() and settings.get("dtype") != "float64" else 1e-4
    np.testing.assert_allclose(results[0][:, 0], expected[0][:, 0], rtol=rtol)


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_with_dropout_train_on_a_base_that_only_rank_0_reads(tmp_path, packed):
    write_base(tmp_path / "base.gguf", "llama", "q8_0")
    recipe = Lora(base=str(tmp_path / "base.gguf"), rank=2, dropout=0.5)
    the_plan = apply_optimiser(plan("llama", rows=4, recipe=recipe), ADAMW, 1e-2)
    metrics, expected = (take_steps(TorchCUDA(devices=n, packed=packed), the_plan)[0] for n in ("2", "1"))
    np.testing.assert_allclose(metrics, expected, rtol=1e-4)


@pytest.mark.parametrize("shard", [False, True])
def test_a_skipped_step_changes_no_rank(shard):
    the_plan = apply_optimiser(plan("llama", rows=4, skip_nonfinite=True), ADAMW, 1e-2)
    metrics, _, arrays = take_steps(two_gpus(shard=shard), the_plan, bad=3)
    assert [bool(np.isfinite(step).all()) for step in metrics] == [step != 3 for step in range(6)]
    arrays = {name: a[:-1] if name.startswith("token_embd.weight") else a for name, a in arrays.items()}
    assert all(np.isfinite(array).all() for array in arrays.values())


def test_a_snapshot_resumes_bit_identically_on_two_gpus_and_within_tolerance_on_one():
    the_plan = apply_optimiser(plan("llama", rows=4), ADAMW, 1e-2)
    uninterrupted = take_steps(two_gpus(), the_plan, 8)
    snapshot = dict(take_steps(two_gpus(shard=True), the_plan, 4)[2])
    for shard in (True, False):
        resumed = take_steps(two_gpus(shard=shard), the_plan, 4, snapshot, first=4)
        np.testing.assert_array_equal(resumed[0], uninterrupted[0][4:])
    resumed_on_one = take_steps(TorchCUDA(), the_plan, 4, snapshot, first=4)
    np.testing.assert_allclose(resumed_on_one[0], uninterrupted[0][4:], rtol=1e-4)


RUN = [*words("scratch", "llama", "cuda"), "callbacks=[constant,events]", "checkpoint_every=4", "engine.devices=2"]


@pytest.mark.parametrize("capture", ["true", "false"])
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has sent no heartbeat for")]
)
def test_a_killed_or_stopped_rank_ends_the_run_with_an_error_that_names_it(tmp_path, number, message, capture):
    (tmp_path / "book.txt").write_text(TEXT)
    run = StartedRun(tmp_path, *RUN, f"engine.capture={capture}")
    os.kill(run.second, number)
    code, line = run.end()
    assert code == 1
    assert line.startswith(f"toyexp: error: rank 1 (pid {run.second} on ") and message in line, line
    assert message in json.loads((tmp_path / "run" / "result.json").read_text())["error"]


def test_an_interrupted_run_saves_and_all_its_ranks_end(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    run = StartedRun(tmp_path, *RUN, "engine.shard=true")
    run.process.send_signal(signal.SIGINT)
    code, line = run.end()
    assert (code, "steps are saved" in line) == (130, True), line
