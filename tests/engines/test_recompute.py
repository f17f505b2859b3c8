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


def deep(engine, layers=4, **settings):
    """Return a model of `layers` blocks, and a batch for it."""
    data = token_dataset(VOCAB, count=4000, seed=5).batches(512, 1, 0)
    model = Llama(d_model=64, n_layers=layers, n_heads=4, n_kv_heads=4, d_ff=176, context=512, vocab=VOCAB)
    the_plan = Scratch().plan(model, Setup(data.inputs, rows=1))
    return build_session(ENGINES[engine](threads=1, **settings), the_plan), data.batch(0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", [*MODELS, "vit", "lora"])
def test_every_gradient_is_the_same_to_the_bit(name, engine, tmp_path):
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
        build_session(ENGINES[engine](threads=1), the_plan) as usual,
        build_session(ENGINES[engine](threads=1, recompute=True), the_plan) as again,
    ):
        for session in (usual, again):  # makes the second matrix of an adapter non-zero
            session.step(batch, AdamW.for_lora().hp_for_step(0))
        one, two = usual.gradients(batch), again.gradients(batch)
    assert all(np.abs(g).max() > 0 for g in one.values())
    for tensor in one:
        np.testing.assert_array_equal(one[tensor], two[tensor], err_msg=tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_steps_are_the_same_to_the_bit(dtype):
    losses = []
    for recompute in (False, True):
        with build_session(
            TorchCPU(threads=1, dtype=dtype, recompute=recompute), plan("gpt2", grad_clip=0.1)
        ) as session:
            hps = (AdamW.for_lora().hp_for_step(s) for s in range(5))
            losses.append([session.step(batches().batch(s), hp) for s, hp in enumerate(hps)])
    assert losses[0] == losses[1]


def test_it_compiles_to_one_graph_with_the_eager_gradients(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    batch = batches().batch(0)
    with build_session(TorchCPU(threads=1), plan("llama")) as session:
        wanted = session.gradients(batch)
    with build_session(TorchCPU(threads=1, compile=True, recompute=True), plan("llama")) as session:
        for name, gradient in session.gradients(batch).items():
            np.testing.assert_allclose(gradient, wanted[name], atol=1e-6 * np.abs(wanted[name]).max(), err_msg=name)


def test_it_halves_the_memory_of_a_step_in_torch():
    """12 layers, context 512; weights, gradients and moments, which cannot be saved, are included."""
    needed = {}
    for recompute in (False, True):
        session, batch = deep("torch", layers=12, recompute=recompute)
        with session:
            hp = AdamW.for_lora().hp_for_step(0)
            session.step(batch, hp)
            held = 4 * 4 * session.plan.model.parameters()
            needed[recompute] = held + measure_peak_tensor_bytes(lambda: session.step(batch, hp))  # noqa: B023 - called at once
    assert needed[True] <= needed[False] / 2


def test_blocks_are_forgotten_in_torch():
    """Tensors saved for the backward pass come from outside the blocks, however many blocks there are."""
    kept = []
    for layers in (4, 6):
        session, batch = deep("torch", layers=layers, recompute=True)
        with session:
            tensors = {n: torch.from_numpy(a) for n, a in batch.items()}
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda i: i):
                session._loss(tensors)
            weights = {t.data_ptr() for t in session._tensors.values()}
            kept.append(sum({t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in weights}.values()))
    assert kept[0] == kept[1]


class Changing(type(op_plan("block").model)):
    """A model whose block computes something else at its second call."""

    def forward(self, ops, p, batch):
        calls = []

        def block(ops, x, p):
            calls.append(x)
            return ops.silu(ops.linear(x, p["w"])) if len(calls) == 1 else ops.linear(x, p["w"])

        return ops.block(block, ops.embed(p["x"], batch["tokens"]), p.block(0))


def test_a_block_that_changes_is_told_and_gives_no_gradient():
    the_plan = op_plan("block")
    the_plan = type(the_plan)(**{**vars(the_plan), "model": Changing("block")})
    with (
        build_session(TorchCPU(threads=1, recompute=True), the_plan) as session,
        pytest.raises(RuntimeError, match="when it is computed again"),
    ):
        session.gradients(op_batch())


class Leaking(type(op_plan("block").model)):
    """A model that uses an inner tensor of a block outside of it."""

    def forward(self, ops, p, batch):
        left = []

        def block(ops, x, p):
            left.append(ops.linear(x, p["w"]))
            return ops.silu(left[-1])

        x = ops.embed(p["x"], batch["tokens"])
        for i in range(3):
            x = ops.block(block, x, p.block(i))
        return ops.add(x, left[0])


def test_what_leaves_a_block_by_a_side_door_is_refused_by_a_graph_and_right_in_torch():
    the_plan, batch = op_plan("block"), op_batch()
    the_plan = type(the_plan)(**{**vars(the_plan), "model": Leaking("block")})
    with pytest.raises(GraphError, match="outside the block"):
        build_session(GGMLCPU(threads=1, recompute=True), the_plan)
    with (
        build_session(TorchCPU(threads=1), the_plan) as usual,
        build_session(TorchCPU(threads=1, recompute=True), the_plan) as again,
    ):
        wanted = usual.gradients(batch)
        for name, gradient in again.gradients(batch).items():
            np.testing.assert_array_equal(gradient, wanted[name])
