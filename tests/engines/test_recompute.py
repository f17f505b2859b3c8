"""engine.recompute=true: blocks are computed twice, with the same results and a fraction of the memory."""

from functools import partial

import numpy as np
import pytest
import torch
from tensor_memory import measure_peak_tensor_bytes
from tiny import MODELS, VOCAB, batches, plan, write_base

from toyexp import AdamW, Setup
from toyexp.testing import image_dataset, op_batch, op_plan, token_dataset
from toyexp_ggml.binding import GraphError
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.llama import Llama
from toyexp_models.vit import ViT
from toyexp_recipes.lora import Lora
from toyexp_recipes.scratch import Scratch, VitTiny
from toyexp_torch.engines import TorchCPU

ENGINES = {"torch": TorchCPU, "ggml": GGMLCPU}


def build_session(engine, the_plan):
    session = engine.realize(the_plan)
    session.build()
    return session


def open_deep_model(engine, layers=4, **settings):
    """Return a model of `layers` blocks, and a batch for it."""
    data = token_dataset(VOCAB, count=4000, seed=5).batches(512, 1, 0)
    model = Llama(d_model=64, n_layers=layers, n_heads=4, n_kv_heads=4, d_ff=176, context=512, vocab=VOCAB)
    the_plan = Scratch().plan(model, Setup(data.inputs, rows=1))
    return build_session(ENGINES[engine](threads=1, **settings), the_plan), data.batch(0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [*MODELS, "vit", "lora"])
def test_every_gradient_with_recompute_is_bit_identical(name, engine, tmp_path):
    if name == "lora":
        write_base(tmp_path / "base.gguf", "llama", "q8_0", n_layers=3)
        recipe = Lora(base=str(tmp_path / "base.gguf"), targets=["*"], dropout=0.3)
        the_plan, batch = plan("llama", recipe=recipe), batches().batch(0)
        draw = np.random.default_rng(0)
        masks = {a.mask: draw.choice([-1, 0.5], (3, *the_plan.inputs[a.mask].shape)) for a in the_plan.dropout_adapters}
        batch = {**batch, **{n: m.astype(np.float32) for n, m in masks.items()}}
    elif name == "vit":
        dataset = image_dataset()
        model = ViT(d_model=8, n_layers=3, n_heads=2, d_ff=16).fit(dataset)
        data = model.batches(dataset, 3, 0)
        the_plan, batch = VitTiny().plan(model, Setup(data.inputs, rows=3)), data.batch(0)
    else:
        the_plan, batch = plan(name), batches().batch(0)
    with (
        build_session(ENGINES[engine](threads=1), the_plan) as plain,
        build_session(ENGINES[engine](threads=1, recompute=True), the_plan) as recomputed,
    ):
        for session in (plain, recomputed):  # makes the second matrix of an adapter non-zero
            session.step(batch, AdamW.for_lora().hp_for_step(0))
        gradients, gradients_recomputed = plain.gradients(batch), recomputed.gradients(batch)
    assert all(np.abs(g).max() > 0 for g in gradients.values())
    for tensor in gradients:
        np.testing.assert_array_equal(gradients[tensor], gradients_recomputed[tensor], err_msg=tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_steps_with_recompute_are_bit_identical(dtype):
    losses = []
    for recompute in (False, True):
        with build_session(
            TorchCPU(threads=1, dtype=dtype, recompute=recompute), plan("gpt2", grad_clip=0.1)
        ) as session:
            hps = (AdamW.for_lora().hp_for_step(s) for s in range(5))
            losses.append([session.step(batches().batch(s), hp) for s, hp in enumerate(hps)])
    assert losses[0] == losses[1]


def test_recompute_compiles_to_one_graph_with_the_eager_gradients(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    batch = batches().batch(0)
    with build_session(TorchCPU(threads=1), plan("llama")) as session:
        expected = session.gradients(batch)
    with build_session(TorchCPU(threads=1, compile=True, recompute=True), plan("llama")) as session:
        for name, gradient in session.gradients(batch).items():
            np.testing.assert_allclose(gradient, expected[name], atol=1e-6 * np.abs(expected[name]).max(), err_msg=name)


def test_recompute_halves_the_memory_of_a_step_in_torch():
    """12 layers, context 512; weights, gradients and moments, which cannot be saved, are included."""
    peak_bytes = {}
    for recompute in (False, True):
        session, batch = open_deep_model("torch", layers=12, recompute=recompute)
        with session:
            hp = AdamW.for_lora().hp_for_step(0)
            session.step(batch, hp)
            state_bytes = 4 * 4 * session.plan.model.parameters()
            peak_bytes[recompute] = state_bytes + measure_peak_tensor_bytes(lambda: session.step(batch, hp))  # noqa: B023 - called at once
    assert peak_bytes[True] <= peak_bytes[False] / 2


def test_torch_saves_no_activations_of_recomputed_blocks():
    """Tensors saved for the backward pass come from outside the blocks, however many blocks there are."""
    saved_bytes = []
    for layers in (4, 6):
        session, batch = open_deep_model("torch", layers=layers, recompute=True)
        with session:
            tensors = {n: torch.from_numpy(a) for n, a in batch.items()}
            saved_tensors = []
            with torch.autograd.graph.saved_tensors_hooks(saved_tensors.append, lambda i: i):
                session._loss(tensors)
            weights = {t.data_ptr() for t in session._tensors.values()}
            saved_bytes.append(
                sum({t.data_ptr(): t.nbytes for t in saved_tensors if t.data_ptr() not in weights}.values())
            )
    assert saved_bytes[0] == saved_bytes[1]


class Changing(type(op_plan("block").model)):
    """A model whose block computes something else at its second call."""

    def forward(self, ops, p, batch):
        calls = []

        def block(ops, x, p):
            calls.append(x)
            return ops.silu(ops.linear(x, p["w"])) if len(calls) == 1 else ops.linear(x, p["w"])

        return ops.block(block, ops.embed(p["x"], batch["tokens"]), p.block(0))


def test_a_block_that_computes_something_else_the_second_time_raises():
    the_plan = op_plan("block")
    the_plan = type(the_plan)(**{**vars(the_plan), "model": Changing("block")})
    with (
        build_session(TorchCPU(threads=1, recompute=True), the_plan) as session,
        pytest.raises(RuntimeError, match="when it was computed again"),
    ):
        session.gradients(op_batch())


class Leaking(type(op_plan("block").model)):
    """A model that uses an inner tensor of a block outside of it."""

    def forward(self, ops, p, batch):
        leaked = []

        def block(ops, x, p):
            leaked.append(ops.linear(x, p["w"]))
            return ops.silu(leaked[-1])

        x = ops.embed(p["x"], batch["tokens"])
        for i in range(3):
            x = ops.block(block, x, p.block(i))
        return ops.add(x, leaked[0])


def test_a_tensor_leaked_from_a_block_is_rejected_by_ggml_and_right_in_torch():
    the_plan, batch = op_plan("block"), op_batch()
    the_plan = type(the_plan)(**{**vars(the_plan), "model": Leaking("block")})
    with pytest.raises(GraphError, match="outside the block"):
        build_session(GGMLCPU(threads=1, recompute=True), the_plan)
    with (
        build_session(TorchCPU(threads=1), the_plan) as plain,
        build_session(TorchCPU(threads=1, recompute=True), the_plan) as recomputed,
    ):
        expected = plain.gradients(batch)
        for name, gradient in recomputed.gradients(batch).items():
            np.testing.assert_array_equal(gradient, expected[name])
