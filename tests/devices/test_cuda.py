"""engine=cuda against engine=cpu, on an NVIDIA GPU."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny import batches, plan

from toyexp import AdamW, Unavailable
from toyexp.cli.main import main
from toyexp_torch.engines import TorchCPU, TorchCUDA

pytestmark = pytest.mark.device("cuda")

try:
    TorchCUDA().check()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


def loss_curve(engine, name, steps):
    data = batches(rows=8)
    with engine.realize(plan(name, rows=8)) as session:
        session.build()
        hps = (AdamW.for_from_scratch().hp_for_step(s) for s in range(steps))
        return [session.step(data.batch(s), hp).loss for s, hp in enumerate(hps)]


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "gpt2"])
def test_50_steps_in_float32_agree_with_the_cpus(name):
    # Both are float32, with sums in a different order; over 50 steps the differences grow.
    np.testing.assert_allclose(loss_curve(TorchCUDA(), name, 50), loss_curve(TorchCPU(), name, 50), rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_50_steps_in_float64_agree_with_the_cpus(name):
    ours, theirs = (loss_curve(e(dtype="float64"), name, 50) for e in (TorchCUDA, TorchCPU))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


FAST = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "compile": True}, {"tf32": True}, {"bfloat16_attention": True}]


@pytest.mark.parametrize("settings", FAST)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_losses_with_fast_settings_are_near_those_of_float32(name, settings):
    # bfloat16 keeps 8 bits of an activation, TF32 11 bits of a factor.
    np.testing.assert_allclose(loss_curve(TorchCUDA(**settings), name, 50), loss_curve(TorchCPU(), name, 50), rtol=2e-2)


def test_deterministic_runs_repeat_to_the_bit():
    engine = TorchCUDA(deterministic=True)
    assert loss_curve(engine, "llama", 20) == loss_curve(engine, "llama", 20)


@pytest.mark.parametrize(("settings", "atol"), [({}, 1e-4), ({"dtype": "float64"}, 1e-5), ({"dtype": "bfloat16"}, 0.1)])
@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "gpt2"])
def test_a_decoders_logits_agree_with_the_cpus(name, settings, atol):
    ids = batches(rows=1).batch(0)["tokens"]
    with TorchCPU().realize(plan(name)) as cpu, TorchCUDA(**settings).realize(plan(name)) as cuda:
        cpu.build()
        cuda.build()
        expected, decoder = cpu.logits({"tokens": ids})[0], cuda.decoder()
        logits = [decoder.feed(part) for part in np.split(ids[0], [5, 6, 7, 10])]
    np.testing.assert_allclose(logits, expected[[4, 5, 6, 9, 11]], atol=atol * np.abs(expected).max())


def test_a_snapshot_is_in_pinned_memory_which_the_next_one_reuses():
    """Pinned memory needs no staging copy; each array is a view of the vector that is copied at once."""
    data = batches(rows=8)
    with TorchCUDA().realize(plan("llama", rows=8)) as session:
        session.build()
        first = session.snapshot()
        addresses = {name: array.ctypes.data for name, array in first.items()}
        session.step(data.batch(0), AdamW.for_from_scratch().hp_for_step(0))
        second, fresh = session.snapshot(first), session.snapshot()
        assert addresses == {name: array.ctypes.data for name, array in second.items()}
        for name, array in second.items():
            assert torch.from_numpy(array).is_pinned(), name
            np.testing.assert_array_equal(array, fresh[name])
            values = session.download(name) if "@" not in name else None
            assert values is None or (values == array).all(), name


TINY = ["data=random", "data.vocab=32", "model.d_model=16", "model.n_layers=1", "model.context=8", "model.d_ff=24",
        "batch_size=2"]  # fmt: skip


@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The .grad attribute")  # of the compiler
def test_parity_and_bench_compare_captured_and_uncaptured_steps(capsys):
    engines = "engine=cuda,cuda:capture=false"
    assert main(["parity", *TINY, "steps=5", engines]) == 0
    assert "cuda:capture=false" in capsys.readouterr().out
    assert main(["bench", *TINY, "model=gpt2", engines, "--rounds=1", "--steps=2", "--baseline", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    engines_by_name = {engine["name"]: engine for engine in report["engines"]}
    assert list(engines_by_name) == ["cuda", "cuda:capture=false", "nanoGPT-style", "nanoGPT-style eager"], report[
        "left_out"
    ]
    assert all(engine["device_bytes"] > 1000 and 0 < engine["share_of_peak"] < 1 for engine in engines_by_name.values())
    assert report["left_out"].keys() - {"ggml autodiff"} == {"PEFT", "PEFT compiled"}  # it needs ggml


def test_the_compiler_is_never_imported_without_engine_compile(tmp_path):
    """The import takes a second or more, in each job of a sweep."""
    code = (
        "import sys\n"
        "from toyexp.cli.main import main\n"
        "code = main(['engine=cuda', 'steps=1', 'hydra.run.dir=run'])\n"
        "sys.exit(code or 'torch._dynamo' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


OPEN_CODE = """
import sys, time, torch
from toyexp_torch.engines import TorchCUDA
assert not torch.cuda.is_initialized()
TorchCUDA(devices="2").open_device_early()
assert not torch.cuda.is_initialized() and len(sys._current_frames()) == 1
TorchCUDA().open_device_early()
until = time.monotonic() + 60
while len(sys._current_frames()) > 1 and time.monotonic() < until:
    time.sleep(0.01)
assert torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0
"""


def test_a_gpu_is_opened_in_a_background_thread():
    subprocess.run([sys.executable, "-c", OPEN_CODE], check=True)
