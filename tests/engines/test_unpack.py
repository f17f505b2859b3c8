"""Dequantisation of ggml's types by torch, bit for bit against gguf-py, and products with packed matrices."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from requantise import q4_k, requantise
from tiny import batches, write_base

import toyexp_torch.kernels
from toyexp import RunPreview, Setup
from toyexp.formats import GGUF_TYPES, dequantise
from toyexp.interfaces.plan import apply_optimiser
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_recipes.lora import Lora
from toyexp_torch.engines import TorchCPU
from toyexp_torch.kernels import packed as unpack
from toyexp_torch.kernels.packed import Packed
from toyexp_torch.ops import recompute_in_backward

KINDS = {name: type_id for type_id, (name, _, _) in GGUF_TYPES.items() if name in unpack.KINDS}
CPU = torch.device("cpu")
IN_TRITON = [kind for kind in KINDS if kind not in unpack.UNBLOCKED]


def token_bytes(kind, rows=40, below=256):
    _, per_block, block_bytes = GGUF_TYPES[KINDS[kind]]
    width = 2 * per_block if per_block > 1 else 64
    return np.random.default_rng(KINDS[kind]).integers(0, below, (rows, width // per_block * block_bytes), np.uint8)


def assert_same_bits(values, expected):
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    integer_type = {4: torch.int32, 2: torch.int16, 8: torch.int64}[values.itemsize]
    same = values.contiguous().view(integer_type) == expected.contiguous().view(integer_type)
    assert bool((same | values.isnan() & expected.isnan()).all())


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_equals_gguf_pys_values_rounded_once(kind, monkeypatch):
    monkeypatch.setattr(unpack, "CHUNK", 16 * 256)  # several chunks, and a shorter one
    raw = np.concatenate([token_bytes(kind), token_bytes(kind, below=0x3C), np.zeros_like(token_bytes(kind, rows=1))])
    expected = torch.from_numpy(dequantise(raw, KINDS[kind]))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        packed = Packed(torch.from_numpy(raw), kind, dtype)
        assert_same_bits(packed.dense(), expected.to(dtype))
        assert_same_bits(packed.dense(slice(3, 7)), expected[3:7].to(dtype))
        ids = torch.tensor([80, 0, 0, 41], dtype=torch.int32)
        assert_same_bits(packed.dense(ids), expected[[80, 0, 0, 41]].to(dtype))


def test_types_without_an_unpacker_are_dequantised_with_a_warning(tmp_path):
    model = write_base(tmp_path / "base.gguf", "llama", d_model=256, d_ff=512)
    for name, stays_packed in (("Q8_0", True), ("MXFP4", False)):
        kind = GGMLQuantizationType[name]
        path = requantise(tmp_path / "base.gguf", tmp_path / f"{name}.gguf", kind, lambda x, k=kind: quantize(x, k))
        plan = Lora(base=str(path), rank=4).plan(model, Setup(batches().inputs, rows=3))
        engine = TorchCPU(packed=True)
        with engine.realize(apply_optimiser(plan, AdamWOptimiser().with_mode("lora"), 1e-2)) as session:
            weight = session._tensors["blk.0.attn_q.weight"]
        assert isinstance(weight, Packed) is stays_packed
        warnings = list(engine.warnings(RunPreview({}, None, None, plan)))
        assert warnings == [] if stays_packed else "no effect on MXFP4" in warnings[0]


def test_without_triton_torch_ops_unpack(monkeypatch):
    monkeypatch.setitem(sys.modules, "toyexp_torch.kernels.unpack", None)
    monkeypatch.delattr(toyexp_torch.kernels, "unpack", raising=False)
    assert unpack._choose_gpu_unpacker.__wrapped__() is unpack._unpack_blocks


@pytest.fixture
def kernels(monkeypatch):
    """Return the module of Triton kernels, loaded for Triton's interpreter, which needs no GPU."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = Path(unpack.__file__).with_name("unpack.py")
    spec = importlib.util.spec_from_file_location("interpreted_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.KERNELS) == set(IN_TRITON)
    return module


@pytest.mark.parametrize("kind", IN_TRITON)
def test_a_triton_kernel_agrees_with_gguf_py_for_any_number_of_blocks(kind, kernels):
    _, per_block, block_bytes = GGUF_TYPES[KINDS[kind]]
    blocks_per_program = kernels.NUMBERS // per_block  # blocks per program
    blocks = token_bytes(kind, rows=3 * blocks_per_program).reshape(-1, block_bytes)
    # The interpreter truncates to bfloat16, while a GPU rounds.
    for count, dtype in zip(
        (0, 1, blocks_per_program, 2 * blocks_per_program + 3),
        ("float32", "float64", "float16", "float32"),
        strict=True,
    ):
        expected = torch.from_numpy(dequantise(blocks[:count], KINDS[kind]) if count else np.zeros(0, np.float32))
        with np.errstate(all="ignore"):  # some scales are NaN
            flat = torch.from_numpy(blocks[:count]).flatten()
            values = kernels.unpack_blocks(flat, kind, getattr(torch, dtype))
        assert_same_bits(values, expected.flatten().to(values.dtype))


def test_the_unpacking_op_passes_torchs_checks_of_custom_ops():
    raw = torch.from_numpy(token_bytes("Q5_K", below=0x3C))
    torch.library.opcheck(unpack.unpack_op, (raw, "Q5_K", torch.bfloat16))


# -- products ---------------------------------------------------------------------------------------------------------


def matrix(seed):
    values = np.random.default_rng(seed).normal(0, 0.06, (256, 256)).astype(np.float32)
    return Packed(torch.from_numpy(q4_k(values)), "Q4_K", torch.float32)


def multiply_thrice(product, matrices, x, dtype):
    """Return the result of three products, and its gradient by x."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = x
        for w in matrices:
            y = torch.nn.functional.silu(product(y, w))
    y.float().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["plain", "recomputed"])
def test_products_and_gradients_agree_with_dequantised_matrices(mode, dtype):
    x, matrices = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)), [matrix(i) for i in range(3)]

    def packed(x, w):
        return recompute_in_backward(w.product, x) if mode == "recomputed" else w.product(x)

    results = multiply_thrice(packed, matrices, x, dtype)
    expected = multiply_thrice(torch.nn.functional.linear, [w.dense() for w in matrices], x, dtype)
    for value, wanted_value in zip(results, expected, strict=True):
        torch.testing.assert_close(value, wanted_value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_is_one_graph_and_saves_packed_bytes_for_the_backward_pass(dtype):
    # Imported here because torch's compiler takes a second to load.
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    x, matrices, saved_values = torch.randn(5, 256), [matrix(i) for i in range(3)], []

    def forward(graph, inputs):
        *_, last = graph.graph.nodes
        saved_values.extend(node.meta["val"] for node in last.args[0][1:] if isinstance(node, torch.fx.Node))
        return make_boxed_func(graph.forward)

    def backward(graph, inputs):
        return make_boxed_func(graph.forward)

    def multiply_three_times(x):
        for w in matrices:
            x = torch.nn.functional.silu(w.product(x))
        return x

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    products = torch.compile(multiply_three_times, backend=backend, fullgraph=True, dynamic=False)
    expected = multiply_thrice(lambda x, w: w.product(x), matrices, x, dtype)
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = products(x)
    y.float().sum().backward()
    for result, wanted_result in zip((y.detach(), x.grad), expected, strict=True):
        torch.testing.assert_close(result, wanted_result, rtol=1e-5, atol=1e-7)
    assert sum(value.dtype == torch.uint8 for value in saved_values) == 3
    assert all(value.numel() < 256 * 256 for value in saved_values)
