"""Whole models on the torch engine, against independent float64 code."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from float64_models import FORWARD
from float64_models import adamw as reference_adamw
from float64_models import loss as reference_loss
from tiny import MODELS, add_weights, batches, plan

from toyexp import AdamW, Rotary
from toyexp.interfaces.plan import apply_optimiser
from toyexp_optimisers.sgd import SGD, Lion
from toyexp_torch import update
from toyexp_torch.engines import TorchCPU, TorchCUDA
from toyexp_torch.ops import TorchOps

MODES = {"from_scratch": AdamW.for_from_scratch(), "lora": AdamW.for_lora()}


def build_session(the_plan, **settings):
    session = TorchCPU(**settings).realize(the_plan)
    session.build()
    return session


def reference_weights(the_plan):
    return {t.name: torch.from_numpy(the_plan.initial_values(t)).double().requires_grad_() for t in the_plan.tensors}


def reference_backward(the_plan, weights, batch):
    logits = FORWARD[the_plan.model.name](weights, the_plan.model, torch.from_numpy(batch["tokens"]).long())
    value = reference_loss(logits, batch)
    grads = torch.autograd.grad(value, list(weights.values()))
    return logits, value, dict(zip(weights, grads, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_every_gradient_agree_with_float64(name):
    the_plan, batch = plan(name), add_weights(batches().batch(0))
    logits, value, grads = reference_backward(the_plan, reference_weights(the_plan), batch)
    with build_session(the_plan) as session:
        np.testing.assert_allclose(session.logits(batch), logits.detach().numpy(), atol=2e-6)
        assert session.evaluate([batch]) == pytest.approx(value.item(), rel=1e-6)
        for tensor, ours in session.gradients(batch).items():
            theirs = grads[tensor].numpy()
            assert np.linalg.norm(ours - theirs) <= 5e-6 * np.linalg.norm(theirs) + 1e-9, tensor


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ten_adamw_steps_agree_with_float64(name, mode):
    settings = dataclasses.replace(MODES[mode], lr=1e-3, weight_decay=0.1)
    the_plan = plan(name)
    weights = reference_weights(the_plan)
    moments = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}
    with build_session(the_plan) as session:
        for step in range(10):
            batch = add_weights(batches().batch(step), step)
            _, value, grads = reference_backward(the_plan, weights, batch)
            assert session.step(batch, settings.hp_for_step(step)).loss == pytest.approx(value.item(), rel=1e-5)
            with torch.no_grad():
                for tensor, w in weights.items():
                    decay = 0.1 if w.ndim > 1 else 0.0
                    reference_adamw(
                        w, grads[tensor], *moments[tensor], step + 1, lr=1e-3, beta1=0.9, beta2=settings.beta2,
                        eps=1e-8, weight_decay=decay, correct=mode == "lora",
                    )  # fmt: skip
        for tensor, w in weights.items():
            # Ten steps move a weight by up to 1e-2. Adam divides by the root of the second moment, so a gradient that
            # is nearly zero keeps only the sign of its rounding error; hence a bound on the whole tensor.
            error = np.linalg.norm(session.download(tensor) - w.detach().numpy())
            moved = np.linalg.norm(w.detach().numpy() - the_plan.initial_values(the_plan.tensor(tensor)))
            assert error <= 2e-3 * moved, tensor


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mode_lora_equals_torch_optim_adamw(name):
    """In float64, so that only the formula can differ."""
    the_plan = plan(name)
    weights = reference_weights(the_plan)
    optimiser = torch.optim.AdamW(
        [
            {"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": 0.1},
            {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
    )
    settings = dataclasses.replace(AdamW.for_lora(), lr=1e-3, weight_decay=0.1)
    with build_session(the_plan, dtype="float64") as session:
        for step in range(10):
            batch = batches().batch(step)
            _, _, grads = reference_backward(the_plan, weights, batch)
            for tensor, w in weights.items():
                w.grad = grads[tensor]
            optimiser.step()
            session.step(batch, settings.hp_for_step(step))
        for tensor, w in weights.items():
            # Downloads are float32: the error is at most half a unit in the last place of the largest weight.
            np.testing.assert_allclose(session.download(tensor), w.detach().numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mode_from_scratch_agrees_with_float64(name):
    the_plan = plan(name)
    weights = reference_weights(the_plan)
    moments = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}
    with build_session(the_plan, dtype="float64") as session:
        for step in range(10):
            batch = batches().batch(step)
            _, _, grads = reference_backward(the_plan, weights, batch)
            with torch.no_grad():
                for tensor, w in weights.items():
                    reference_adamw(
                        w, grads[tensor], *moments[tensor], step + 1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8,
                        weight_decay=0.0, correct=False,
                    )  # fmt: skip
            session.step(batch, AdamW.for_from_scratch().hp_for_step(step))
        for tensor, w in weights.items():
            np.testing.assert_allclose(session.download(tensor), w.detach().numpy(), rtol=1e-6, atol=1e-7)


def test_rope_may_start_at_a_later_position():
    """A decoder that caches keys of earlier positions does this."""
    rotary, x = Rotary(100.0, scale=2.0, factors=(1.0, 3.0), halves=True), torch.randn(2, 9, 3, 4)
    ops, ops_from_6 = TorchOps(), TorchOps()
    ops_from_6.start = 6
    torch.testing.assert_close(ops_from_6.rope(x[:, 6:], rotary), ops.rope(x, rotary)[:, 6:])


def loss_curve(the_plan, steps, total_rows=8, **settings):
    data = batches(rows=total_rows)
    with build_session(the_plan, **settings) as session:
        hps = (AdamW.for_from_scratch().hp_for_step(s) for s in range(steps))
        return [session.step(data.batch(s), hp).loss for s, hp in enumerate(hps)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_50_steps_repeat_to_the_bit(name):
    assert loss_curve(plan(name, rows=8), 50) == loss_curve(plan(name, rows=8), 50)


@pytest.mark.parametrize(
    ("name", "steps"), [("llama", 40), *(pytest.param(n, 200, marks=pytest.mark.full) for n in ("llama", "gpt2"))]
)
def test_accumulation_of_4_gives_the_same_curve_within_rounding(name, steps):
    one_batch = loss_curve(plan(name, rows=8), steps)
    accumulated = loss_curve(plan(name, rows=2, accumulate=4), steps)
    # A different order of sums changes the last bits, and the differences grow over 200 steps.
    np.testing.assert_allclose(one_batch, accumulated, rtol=2e-4)


def test_a_compiled_step_is_one_graph_with_the_eager_losses(monkeypatch):
    """The step is traced and differentiated ahead of time, and run by PyTorch's own kernels; compiling them would take
    a minute.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    the_plan = plan("llama", rows=8)
    np.testing.assert_allclose(loss_curve(the_plan, 5, compile=True), loss_curve(the_plan, 5), rtol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1, "the step is traced more than once"


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_losses_agree_with_eager_losses(name):
    np.testing.assert_allclose(
        loss_curve(plan(name, rows=8), 20, compile=True), loss_curve(plan(name, rows=8), 20), rtol=1e-4
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_losses_are_near_those_of_float32(name):
    # bfloat16 keeps 8 bits: a relative error of 1/256 in every activation.
    np.testing.assert_allclose(
        loss_curve(plan(name, rows=8), 30, dtype="bfloat16"), loss_curve(plan(name, rows=8), 30), rtol=2e-2
    )


@pytest.mark.parametrize("optimiser", [SGD(weight_decay=0.1), Lion(weight_decay=0.1)], ids=["sgd", "lion"])
def test_updating_a_vector_in_pieces_is_bit_identical(monkeypatch, optimiser):
    """Pieces may end anywhere within tensors, groups and their state."""
    the_plan, snapshots = apply_optimiser(plan("llama"), optimiser, 0.01), []
    for size in (update.CHUNK, 1000, 7919):
        monkeypatch.setattr(update, "CHUNK", size)
        with build_session(the_plan) as session:
            for step in range(3):
                session.step(batches().batch(step), the_plan.numbers(step, 0.01))
            snapshots.append(session.snapshot())
    for pieces in snapshots[1:]:
        for name, expected in snapshots[0].items():
            np.testing.assert_array_equal(pieces[name], expected, err_msg=name)


def test_a_session_reuses_its_own_snapshot_but_not_that_of_another_session():
    """The sessions have the same plan: their arrays have the same names and shapes but lie in different vectors."""
    with build_session(plan("llama")) as one, build_session(plan("llama", seed=1)) as other:
        first, expected = one.snapshot(), other.snapshot()
        before = {name: array.copy() for name, array in first.items()}
        second = other.snapshot(into=first)
        for name, array in expected.items():
            np.testing.assert_array_equal(second[name], array, err_msg=name)
            np.testing.assert_array_equal(first[name], before[name], err_msg=name)
        assert one.snapshot(into=first) is first


def test_a_session_restores_process_wide_settings():
    before = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    loss_curve(plan("llama", rows=8), 2, threads=1, deterministic=True)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_clipping_limits_the_norm_that_reaches_adamw():
    the_plan = plan("llama", grad_clip=1e-3)
    weights = reference_weights(the_plan)
    batch = batches().batch(0)
    _, _, grads = reference_backward(the_plan, weights, batch)
    norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    # With both betas 0, eps 1 and one step, the update is lr * g / (|g| + 1): the clipped gradient shows.
    hp = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    with build_session(the_plan, dtype="float64") as session:
        assert session.step(batch, hp).grad_norm == pytest.approx(norm.item(), rel=1e-6)
        g = grads["output.weight"] * (1e-3 / (norm + 1e-6))
        expected = weights["output.weight"] - g / (g.abs() + 1)
        np.testing.assert_allclose(session.download("output.weight"), expected.detach().numpy(), atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "products", "rounded"),
    [
        ({}, "bfloat16", torch.bfloat16), ({"tf32": True}, "bfloat16", torch.bfloat16),
        ({"dtype": "float64"}, "float64", None), ({"dtype": "bfloat16"}, "bfloat16", None),
    ],
)  # fmt: skip
def test_attention_is_rounded_to_bfloat16_only_beside_products_in_float32(settings, products, rounded):
    engine = TorchCUDA(bfloat16_attention=True, **settings)
    assert engine._session_settings("").attention_dtype is rounded
    assert engine.product_dtype() == products  # `toyexp doctor` and `parity` choose tolerances by it


RUN = """
from toyexp.cli.main import main
assert main(['engine=cpu', 'steps=1', 'eval_every=0', 'hydra.run.dir=run']) == 0
"""
TRIAL_OF_A_STACK = f"""
sys.path.insert(0, {str(Path(tiny.__file__).parent)!r})
import tiny, torch
from toyexp_torch.stacks.shapes import try_step
assert try_step(tiny.plan('llama'), torch.float32)[0] == ''
"""
LOSS_ON_CUDA = """
from types import SimpleNamespace
sys.modules['toyexp_torch.kernels.head'] = SimpleNamespace(projected_loss=len)  # the real module needs Triton
from toyexp_torch.loss import ProjectedLossOps, TorchOps, make_loss_ops
assert isinstance(make_loss_ops(TorchOps(), 'cuda', False), ProjectedLossOps)
"""


@pytest.mark.parametrize("code", [RUN, TRIAL_OF_A_STACK, LOSS_ON_CUDA])
def test_the_compiler_is_never_imported_without_engine_compile(code, tmp_path):
    """The import takes a second and 70 MB."""
    code = f"import sys\n{code}\nsys.exit('torch._dynamo' in sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120, stdout=subprocess.DEVNULL)
