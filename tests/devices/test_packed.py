"""engine=cuda with engine.packed=true: a base kept in the bytes of its file."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from requantise import q4_k, requantise
from tiny import batches, write_base

from toyexp import Setup, Unavailable
from toyexp.formats import GGUF_TYPES, dequantise
from toyexp.interfaces.plan import apply_optimiser
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_recipes.lora import Lora
from toyexp_torch import loss
from toyexp_torch.engines import TorchCUDA

pytestmark = pytest.mark.device("cuda")

try:
    TorchCUDA().check()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
KINDS = {n: (i, size, length) for i, (n, size, length) in GGUF_TYPES.items() if n in (*QUANTISED, "F16", "BF16")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_equals_gguf_pys_values(kind):
    import torch

    from toyexp_torch.kernels import packed as unpack
    from toyexp_torch.kernels.packed import Packed

    type_id, per_block, block_bytes = KINDS[kind]
    # Scales below 1; scales that are exponents are large enough that a GPU does not flush the numbers to 0.
    raw = np.random.default_rng(type_id).integers(8, 0x3C, (300, 256 // per_block * block_bytes), np.uint8)
    expected = torch.from_numpy(dequantise(raw, type_id)).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        packed = Packed(torch.from_numpy(raw).cuda(), kind, dtype)
        ids = torch.tensor([299, 5, 5], device="cuda")
        assert torch.equal(packed.dense(), expected.to(dtype))
        assert torch.equal(packed.dense(ids), expected[ids].to(dtype))
        if kind not in unpack.UNBLOCKED:
            assert unpack._choose_gpu_unpacker() is not unpack._unpack_blocks, "it is unpacked op by op"


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_kernel_gives_the_bits_of_the_torch_ops(kind):
    import torch

    from toyexp_torch.kernels import packed as unpack

    _, _, block_bytes = KINDS[kind]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kernel = unpack._choose_gpu_unpacker()
        assert kernel is not unpack._unpack_blocks, "it is unpacked op by op"
        for count in (1, 7, 64, 1003):
            raw = np.random.default_rng(count).integers(0, 256, (count, block_bytes), np.uint8)
            flat = torch.from_numpy(raw).flatten()
            expected = unpack._unpack_blocks(flat, kind, dtype)
            values = kernel(flat.cuda(), kind, dtype).cpu()
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
            zero = expected == 0
            assert torch.equal(values[zero].signbit(), expected[zero].signbit())


def test_more_than_2_to_the_31_numbers_are_unpacked():
    import torch

    from toyexp_torch.kernels import packed as unpack

    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("8 GiB of the GPU are not free")
    blocks = (1 << 31) // 32 + 5
    flat = torch.zeros(blocks * 34, dtype=torch.uint8, device="cuda")
    flat[-68:] = torch.arange(68, dtype=torch.uint8, device="cuda")
    values = unpack.unpack(flat.view(1, -1), "Q8_0", torch.bfloat16)
    expected = unpack._unpack_blocks(flat[-68:].cpu(), "Q8_0", torch.bfloat16)
    assert values.shape == (1, 32 * blocks)
    assert torch.equal(values[0, -64:].cpu(), expected)
    assert not values[0, :-64].any()


def train(base, **settings):
    """Return the metrics of ten LoRA steps on a model with rows of 256 numbers, and whether they were captured."""
    path, model = base
    recipe, data = Lora(base=str(path), rank=4, targets=["q", "gate"]), batches(rows=3)
    the_plan = apply_optimiser(recipe.plan(model, Setup(data.inputs, rows=3)), AdamWOptimiser().with_mode("lora"), 1e-2)
    with TorchCUDA(deterministic=True, **settings).realize(the_plan) as session:
        session.build()
        metrics = [session.step(data.batch(step), the_plan.numbers(step, 1e-2)) for step in range(10)]
        return metrics, session.describe()["captured"]


@pytest.fixture(params=["Q4_K", "Q6_K", "Q5_0", "Q8_0"])
def base(request, tmp_path):
    """Return a base with matrices of that type (built here if gguf-py cannot quantise to it), and its model."""
    model = write_base(tmp_path / "base.gguf", "llama", d_model=256, d_ff=512)
    kind = GGMLQuantizationType[request.param]

    def q6_k(values):
        draw = np.random.default_rng(len(values))
        blocks = draw.integers(0, 256, (len(values), values.shape[1] // 256, 210), dtype=np.uint8)
        blocks[..., 208:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        return blocks.reshape(len(values), -1)

    quantisers = {"Q4_K": q4_k, "Q6_K": q6_k}
    quantise_with_gguf_py = lambda values: quants.quantize(values, kind)  # noqa: E731
    quantise = quantisers.get(request.param, quantise_with_gguf_py)
    return requantise(tmp_path / "base.gguf", tmp_path / "packed.gguf", kind, quantise), model


@pytest.mark.parametrize("large", [loss.LARGE, 0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_on_packed_weights_agrees_with_dequantised_weights(base, dtype, large, monkeypatch):
    """Runs with all logits in memory, and with chunks."""
    monkeypatch.setattr(loss, "LARGE", large)
    (numbers, _), (packed, captured) = (train(base, packed=packed, dtype=dtype) for packed in (False, True))
    assert captured is True
    # The numbers are equal, but bfloat16 products may sum them in a different order, over ten steps.
    np.testing.assert_allclose(packed, numbers, rtol=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("large", [loss.LARGE, 0])
def test_captured_steps_on_packed_weights_are_bit_identical(base, large, monkeypatch):
    monkeypatch.setattr(loss, "LARGE", large)
    captured, uncaptured = (train(base, packed=True, capture=capture)[0] for capture in (True, False))
    np.testing.assert_array_equal(captured, uncaptured)


# Warnings: advice from the compiler, and what it reports when it inspects the logits' input.
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The .grad attribute")
@pytest.mark.parametrize("large", [loss.LARGE, 0])
def test_compiled_losses_agree_with_eager_losses(base, large, monkeypatch):
    monkeypatch.setattr(loss, "LARGE", large)
    (eager, _), (compiled, captured) = (train(base, packed=True, compile=compile) for compile in (False, True))
    assert captured is True
    np.testing.assert_allclose(compiled, eager, rtol=1e-4)
