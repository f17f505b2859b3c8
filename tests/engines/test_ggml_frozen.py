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
from toyexp_ggml.binding import devices
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_ggml.products import UNPACKED_ROWS
from toyexp_models.llama import Llama
from toyexp_torch.engines import TorchCPU

MODEL = Llama(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=256, context=12, vocab=40, tied=True)
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"]
# Relative tolerances of the loss and of a gradient. BLAS multiplies dequantised numbers; ggml's kernels first round the
# other factor to 8 bits, like llama.cpp (to 16 bits if the file has 16).
ENGINES = {
    "blas": (GGMLCPU(threads=1, products="blas"), 1e-6, 2e-5),
    "kernels": (GGMLCPU(threads=1), 1e-6, 2e-5),
    "cpu": (GGMLCPU(threads=1, products="ggml"), 5e-3, 0.1),
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


def write_base_file(path, kind):
    writer, draw = GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    for t in MODEL.tensors():
        values = np.ones(t.shape, np.float32)
        if len(t.shape) == 2:
            values, type_id = pack_matrix(draw.normal(0, t.shape[1] ** -0.5, t.shape).astype(np.float32), kind)
            writer.add_tensor(t.name, values, raw_dtype=type_id)
        else:
            writer.add_tensor(t.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_plan(path, values_from):
    specs = {t.name: t for t in MODEL.tensors()}
    targets = [n for n in specs if n.endswith(("attn_q.weight", "ffn_down.weight"))]
    tensors = [PlanTensor(t.name, t.shape, values_from(str(path), t.name), trainable=False) for t in specs.values()]
    for target in targets:
        out, inputs = specs[target].shape
        a, b = lora_names(target)
        tensors += [PlanTensor(a, (4, inputs), Normal(0.05)), PlanTensor(b, (out, 4), Normal(0.05))]
    return Setup(batches().inputs, rows=3, seed=2).plan(MODEL, tensors, [LoraAdapter(t, 0.5) for t in targets])


def dequantise_tensor(path, name):
    with GGUFFile(path) as file:
        return ArrayValues(file.read(name))


def take_step(engine, the_plan):
    batch = add_weights(batches().batch(0))
    with engine.realize(the_plan) as session:
        session.build()
        loss, gradients = session.evaluate([batch]), session.gradients(batch)
        session.step(batch, AdamW.for_lora().hp_for_step(0))
        return loss, gradients, session.evaluate([batch])


@pytest.mark.parametrize("kind", TYPES)
def test_the_adapters_gradients_are_those_of_the_dequantised_weights(kind, tmp_path):
    path = write_base_file(tmp_path / "base.gguf", kind)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    loss, gradients, loss_after = take_step(TorchCPU(threads=1, dtype="float64"), make_plan(path, dequantise_tensor))
    for name, (engine, loss_rtol, gradient_rtol) in ENGINES.items():
        if name == "blas" and "BLAS" not in devices():
            continue  # this ggml-python is built without BLAS
        if kind == "F32":
            loss_rtol, gradient_rtol = 1e-6, 1e-5
        ours = take_step(engine, make_plan(path, FromGGUF))
        assert ours[0] == pytest.approx(loss, rel=loss_rtol), name
        assert ours[2] == pytest.approx(loss_after, rel=loss_rtol), name
        for tensor, theirs in gradients.items():
            assert np.linalg.norm(ours[1][tensor] - theirs) <= gradient_rtol * np.linalg.norm(theirs), (name, tensor)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_the_base_stays_mapped_from_its_file_and_cannot_be_overwritten(tmp_path):
    path = write_base_file(tmp_path / "base.gguf", "Q8_0")
    the_plan = make_plan(path, FromGGUF)
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
    path = write_base_file(tmp_path / "base.gguf", "Q8_0")
    unpacked_at_once = take_step(GGMLCPU(threads=1), make_plan(path, FromGGUF))
    monkeypatch.setattr("toyexp_ggml.products.UNPACKED_ROWS", 16)  # 40 tokens: two full parts and a shorter one
    unpacked_in_parts = take_step(GGMLCPU(threads=1), make_plan(path, FromGGUF))
    assert UNPACKED_ROWS > 40
    for tensor, gradient in unpacked_at_once[1].items():
        np.testing.assert_allclose(unpacked_in_parts[1][tensor], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "engine", [GGMLCPU(threads=1), TorchCPU(threads=1), TorchCPU(threads=1, packed=True)], ids=["ggml", "cpu", "packed"]
)
def test_an_embedding_shorter_than_the_files_uses_the_files_first_rows(engine, tmp_path):
    path, row_count = write_base_file(tmp_path / "base.gguf", "Q8_0"), 32
    full_plan = make_plan(path, FromGGUF)
    table = replace(
        full_plan.tensors[0], shape=(row_count, 256), values=FromGGUF(str(path), "token_embd.weight", row_count)
    )
    the_plan = replace(full_plan, model=replace(MODEL, vocab=row_count), tensors=(table, *full_plan.tensors[1:]))
    batch = {name: array % row_count if name != "weights" else array for name, array in batches().batch(0).items()}
    with engine.realize(full_plan) as session:
        session.build()
        expected_logits = session.logits(batch)[..., :row_count]
    with engine.realize(the_plan) as session:
        expected = dequantise_tensor(path, "token_embd.weight").array[:row_count]
        np.testing.assert_array_equal(session.download("token_embd.weight"), expected)
        session.build()
        np.testing.assert_allclose(session.logits(batch), expected_logits, rtol=1e-5, atol=1e-5)


def test_the_error_names_a_tensor_missing_from_the_base(tmp_path):
    path = write_base_file(tmp_path / "base.gguf", "Q8_0")
    the_plan = make_plan(path, FromGGUF)
    tensors = (replace(the_plan.tensors[0], values=FromGGUF(str(path), "nothing.weight")), *the_plan.tensors[1:])
    with pytest.raises(Exception, match=r"has no tensor nothing\.weight"):
        GGMLCPU(threads=1).realize(replace(the_plan, tensors=tensors))


@pytest.mark.parametrize("engine", [GGMLCPU(threads=1), TorchCPU(threads=1)], ids=lambda e: e.name)
def test_a_base_whose_tensor_has_another_shape_is_rejected(engine, tmp_path):
    the_plan = make_plan(write_base_file(tmp_path / "base.gguf", "Q8_0"), FromGGUF)
    first = replace(the_plan.tensors[0], shape=(41, 256))
    with pytest.raises(UserError, match=r"token_embd\.weight: expected shape \[41, 256\], got \[40, 256\]"):
        engine.realize(replace(the_plan, tensors=(first, *the_plan.tensors[1:])))
