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
def skip_if_cublas_is_set_up():
    """Skip if PyTorch has used the GPU: cuBLAS reads its TF32 setting once, so these tests need their own process."""
    try:
        GGMLCUDA().check()
    except Unavailable:
        pass
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.device(n)) for n in GPUS])
def gpu(request):
    engine, tolerance = GPUS[request.param]
    try:
        engine.check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    return engine, tolerance


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_agrees_with_float64(gpu, name):
    engine, tolerance = gpu
    the_plan, batch = plan(name), add_weights(batches().batch(0))
    _, value, grads = gradients(FORWARD[the_plan.model.name], the_plan, batch)
    with engine.realize(the_plan) as session:
        session.build()
        assert session.evaluate([batch]) == pytest.approx(value, rel=tolerance)
        for tensor, ours in session.gradients(batch).items():
            theirs = grads[tensor]
            assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs) + 1e-9, tensor


def loss_curve(engine, name, steps):
    data = batches(rows=8)
    with engine.realize(plan(name, rows=8)) as session:
        session.build()
        hps = (AdamW.for_from_scratch().hp_for_step(s) for s in range(steps))
        return [session.step(data.batch(s), hp).loss for s, hp in enumerate(hps)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_100_steps_agree_with_torch_on_the_cpu(gpu, name):
    engine, tolerance = gpu
    np.testing.assert_allclose(loss_curve(engine, name, 100), loss_curve(TorchCPU(), name, 100), rtol=5 * tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_node_runs_on_the_device(gpu, name, recompute):
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


def test_a_snapshot_that_reuses_an_earlier_one_equals_the_devices_weights(gpu):
    engine, _ = gpu
    data = batches(rows=8)
    with engine.realize(plan("llama", rows=8)) as session:
        session.build()
        first = session.snapshot()
        session.step(data.batch(0), AdamW.for_from_scratch().hp_for_step(0))
        second = session.snapshot(first)
        assert all(array is first[name] for name, array in second.items())
        for tensor in session.plan.trainable:
            np.testing.assert_array_equal(second[tensor.name], session.download(tensor.name))
    assert all(np.isfinite(array).all() for array in second.values()), "arrays of a snapshot must outlive their session"
