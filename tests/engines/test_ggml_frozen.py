"""A frozen base on ggml: mapped from its file in the file's types, compared with dequantised weights."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tiny import add_weights, batches

from toyexp import AdamW, ArrayValues, FromGGUF, Normal, PlanTensor, SessionError, Setup, UserError
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.plan import LoraAdapter, lora_names
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_ggml.products import UNPACKED_ROWS
from toyexp_ggml.profiles import CPU_BLAS
from toyexp_models.llama import Llama
from toyexp_torch.engines import TorchCPU

MODEL = Llama(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=256, context=12, vocab=40, tied=True)
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"]
# Relative tolerances of the loss and of a gradient. BLAS multiplies dequantised numbers; ggml's kernels first round the
# other factor to 8 bits, like llama.cpp (to 16 bits if the file has 16).
ENGINES = {
    "blas": (GGMLCPU(threads=1), 1e-6, 2e-5),
    "cpu": (GGMLCPU(threads=1, blas=False), 5e-3, 0.1),
    "metal": (GGMLMetal(threads=1, emulate=True), 5e-3, 0.1),
}


def pack_matrix(values, kind):
    """Return a matrix in a type; for K-quants, which gguf-py cannot write, random blocks around zero."""
    made = GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return quants.quantize(values, made), made
    # Bytes of a block, offsets of its float16 scales, and scales that give weights of about 0.05.
    size, scales_at, scales = {"Q4_K": (144, slice(0, 4), [2e-4, 1.5e-3]), "Q6_K": (210, slice(208, 210), [6e-5])}[kind]
    draw = np.random.default_rng(values.size)
    raw = draw.integers(0, 256, (values.shape[0], values.shape[1] // 256, size), dtype=np.uint8)
    raw[..., scales_at] = np.frombuffer(np.float16(scales).tobytes(), np.uint8)
    return raw.reshape(values.shape[0], -1), made


def base(path, kind):
    writer, draw = GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    for t in MODEL.tensors():
        values = np.ones(t.shape, np.float32)
        if len(t.shape) == 2:
            values, made = pack_matrix(draw.normal(0, t.shape[1] ** -0.5, t.shape).astype(np.float32), kind)
            writer.add_tensor(t.name, values, raw_dtype=made)
        else:
            writer.add_tensor(t.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plan(path, frozen):
    specs = {t.name: t for t in MODEL.tensors()}
    targets = [n for n in specs if n.endswith(("attn_q.weight", "ffn_down.weight"))]
    tensors = [PlanTensor(t.name, t.shape, frozen(str(path), t.name), trainable=False) for t in specs.values()]
    for target in targets:
        out, inputs = specs[target].shape
        a, b = lora_names(target)
        tensors += [PlanTensor(a, (4, inputs), Normal(0.05)), PlanTensor(b, (out, 4), Normal(0.05))]
    return Setup(batches().inputs, rows=3, seed=2).plan(MODEL, tensors, [LoraAdapter(t, 0.5) for t in targets])


def dequantise_tensor(path, name):
    with GGUFFile(path) as file:
        return ArrayValues(file.read(name))


def run(engine, the_plan):
    batch = add_weights(batches().batch(0))
    with engine.realize(the_plan) as session:
        session.build()
        loss, gradients = session.evaluate([batch]), session.gradients(batch)
        session.step(batch, AdamW.for_lora().hp_for_step(0))
        return loss, gradients, session.evaluate([batch])


@pytest.mark.parametrize("kind", TYPES)
def test_the_adapters_gradients_are_those_of_the_dequantised_weights(kind, tmp_path):
    path = base(tmp_path / "base.gguf", kind)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    loss, gradients, after = run(TorchCPU(threads=1, dtype="float64"), plan(path, dequantise_tensor))
    for name, (engine, of_loss, of_gradient) in ENGINES.items():
        if name == "blas" and engine.profile is not CPU_BLAS:
            continue  # this ggml-python is built without BLAS
        if kind == "F32":
            of_loss, of_gradient = 1e-6, 1e-5
        ours = run(engine, plan(path, FromGGUF))
        assert ours[0] == pytest.approx(loss, rel=of_loss), name
        assert ours[2] == pytest.approx(after, rel=of_loss), name
        for tensor, theirs in gradients.items():
            assert np.linalg.norm(ours[1][tensor] - theirs) <= of_gradient * np.linalg.norm(theirs), (name, tensor)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_the_base_takes_no_memory_of_its_own_and_cannot_be_overwritten(tmp_path):
    path = base(tmp_path / "base.gguf", "Q8_0")
    the_plan = plan(path, FromGGUF)
    with GGMLCPU(threads=1).realize(the_plan) as session:
        frozen = {t.name for t in the_plan.tensors if not t.trainable}
        assert set(session._frozen) == frozen
        with pytest.raises(SessionError, match="frozen and mapped from its file"):
            session.upload("token_embd.weight", np.zeros((40, 256), np.float32))
        session.build()
        np.testing.assert_array_equal(
            session.download("blk.0.attn_k.weight"), dequantise_tensor(path, "blk.0.attn_k.weight").array
        )


def test_a_large_vocabulary_is_unpacked_in_parts(tmp_path, monkeypatch):
    path = base(tmp_path / "base.gguf", "Q8_0")
    whole = run(GGMLCPU(threads=1), plan(path, FromGGUF))
    monkeypatch.setattr("toyexp_ggml.products.UNPACKED_ROWS", 16)  # 40 tokens: two full parts and a shorter one
    parts = run(GGMLCPU(threads=1), plan(path, FromGGUF))
    assert UNPACKED_ROWS > 40
    for tensor, gradient in whole[1].items():
        np.testing.assert_allclose(parts[1][tensor], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "engine", [GGMLCPU(threads=1), TorchCPU(threads=1), TorchCPU(threads=1, packed=True)], ids=["ggml", "cpu", "packed"]
)
def test_of_a_table_with_rows_to_spare_the_first_are_the_tables(engine, tmp_path):
    path, few = base(tmp_path / "base.gguf", "Q8_0"), 32
    whole = plan(path, FromGGUF)
    table = replace(whole.tensors[0], shape=(few, 256), values=FromGGUF(str(path), "token_embd.weight", few))
    the_plan = replace(whole, model=replace(MODEL, vocab=few), tensors=(table, *whole.tensors[1:]))
    batch = {name: array % few if name != "weights" else array for name, array in batches().batch(0).items()}
    with engine.realize(whole) as session:
        session.build()
        wanted = session.logits(batch)[..., :few]
    with engine.realize(the_plan) as session:
        expected = dequantise_tensor(path, "token_embd.weight").array[:few]
        np.testing.assert_array_equal(session.download("token_embd.weight"), expected)
        session.build()
        np.testing.assert_allclose(session.logits(batch), wanted, rtol=1e-5, atol=1e-5)


def test_a_base_that_lost_a_tensor_is_told(tmp_path):
    path = base(tmp_path / "base.gguf", "Q8_0")
    the_plan = plan(path, FromGGUF)
    tensors = (replace(the_plan.tensors[0], values=FromGGUF(str(path), "nothing.weight")), *the_plan.tensors[1:])
    with pytest.raises(Exception, match=r"has no tensor nothing\.weight"):
        GGMLCPU(threads=1).realize(replace(the_plan, tensors=tensors))


@pytest.mark.parametrize("engine", [GGMLCPU(threads=1), TorchCPU(threads=1)], ids=lambda e: e.name)
def test_a_base_of_another_shape_is_told_and_not_taken_as_it_lies(engine, tmp_path):
    the_plan = plan(base(tmp_path / "base.gguf", "Q8_0"), FromGGUF)
    first = replace(the_plan.tensors[0], shape=(41, 256))
    with pytest.raises(UserError, match=r"token_embd\.weight: expected shape \[41, 256\], got \[40, 256\]"):
        engine.realize(replace(the_plan, tensors=(first, *the_plan.tensors[1:])))
