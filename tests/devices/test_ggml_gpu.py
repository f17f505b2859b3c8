"""The ggml engines on real GPUs. tests/engines runs the same graphs emulated on the CPU."""

import numpy as np
import pytest
from float64_models import FORWARD, gradients
from tiny import MODELS, add_weights, batches, plan

from toyexp import AdamW, Unavailable, UserError
from toyexp.testing import EngineSuite
from toyexp_ggml.engines import GGMLCUDA, GGMLMetal, GGMLVulkan
from toyexp_torch.engines import TorchCPU

# The worst relative error of a gradient: Metal rounds the inputs of a product to float16.
GPUS = {"metal": (GGMLMetal(), 5e-3), "ggml_cuda": (GGMLCUDA(), 2e-5), "vulkan": (GGMLVulkan(), 2e-5)}


@pytest.fixture(autouse=True)
def _alone():
    """Skip if PyTorch has used the GPU: cuBLAS reads its TF32 setting once, so these tests need their own process."""
    try:
        GGMLCUDA().check()
    except Unavailable:
        pass
    except UserError as told:
        pytest.skip(str(told))


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.device(n)) for n in GPUS])
def gpu(request):
    engine, tolerance = GPUS[request.param]
    try:
        engine.check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    return engine, tolerance


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_of_a_model_is_float64s(gpu, name):
    engine, tolerance = gpu
    the_plan, batch = plan(name), add_weights(batches().batch(0))
    _, value, grads = gradients(FORWARD[the_plan.model.name], the_plan, batch)
    with engine.realize(the_plan) as session:
        session.build()
        assert session.evaluate([batch]) == pytest.approx(value, rel=tolerance)
        for tensor, ours in session.gradients(batch).items():
            theirs = grads[tensor]
            assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs) + 1e-9, tensor


def curve(engine, name, steps):
    data = batches(rows=8)
    with engine.realize(plan(name, rows=8)) as session:
        session.build()
        hps = (AdamW.for_from_scratch().hp_for_step(s) for s in range(steps))
        return [session.step(data.batch(s), hp).loss for s, hp in enumerate(hps)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_100_steps_follow_torch_on_the_cpu(gpu, name):
    engine, tolerance = gpu
    np.testing.assert_allclose(curve(engine, name, 100), curve(TorchCPU(), name, 100), rtol=5 * tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_no_node_leaves_the_device(gpu, name, recompute):
    engine = type(gpu[0])(recompute=recompute)
    with engine.realize(plan(name)) as session:
        session.build()
        facts = session.describe()
    assert facts["off_device"] == 0
    assert len(facts["residency"]) == 1


@pytest.mark.device("metal")
class TestMetal(EngineSuite):
    engine = GGMLMetal()
    rtol, gradient_rtol = 1e-2, 1e-2


@pytest.mark.device("ggml_cuda")
class TestCUDA(EngineSuite):
    engine = GGMLCUDA()
    rtol, gradient_rtol = 2e-3, 2e-3  # ggml's own kernel for narrow products works in TF32, whatever cuBLAS does


@pytest.mark.device("vulkan")
class TestVulkan(EngineSuite):
    engine = GGMLVulkan()


def test_a_snapshot_over_an_earlier_one_is_what_the_device_holds(gpu):
    engine, _ = gpu
    data = batches(rows=8)
    with engine.realize(plan("llama", rows=8)) as session:
        session.build()
        kept = session.snapshot()
        session.step(data.batch(0), AdamW.for_from_scratch().hp_for_step(0))
        taken = session.snapshot(kept)
        assert all(array is kept[name] for name, array in taken.items())
        for tensor in session.plan.trainable:
            np.testing.assert_array_equal(taken[tensor.name], session.download(tensor.name))
    assert all(np.isfinite(array).all() for array in taken.values()), "the session is closed, its arrays are not"
