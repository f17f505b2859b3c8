"""objective.auxiliary: the load balance of experts on every engine, against float64 and transformers."""

import dataclasses
from functools import partial

import float64_models
import numpy as np
import pytest
import torch
from float64_models import FORWARD
from tiny import MODELS, SIZES, VOCAB, add_weights, batches, plan

from toyexp import AdamW, CrossEntropy, InputSpec, Setup, UserError
from toyexp.reference.engine import ReferenceOps, reference_loss, reference_slope
from toyexp.testing import token_dataset
from toyexp_ggml.engines import GGMLCPU, GGMLVulkan
from toyexp_models.lab import Lab
from toyexp_models.moe import Olmoe
from toyexp_objectives.distil import Distil
from toyexp_objectives.preference import Preference
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

ENGINES = {
    "cpu": TorchCPU(threads=1), "float64": TorchCPU(dtype="float64"), "compiled": TorchCPU(compile=True),
    "recompute": TorchCPU(recompute=True), "compiled recompute": TorchCPU(compile=True, recompute=True),
    "ggml": GGMLCPU(threads=1), "ggml recompute": GGMLCPU(recompute=True), "vulkan": GGMLVulkan(emulate=True),
}  # fmt: skip
FACTOR = 0.3


def make_plan(name="qwen3moe", **settings):
    return plan(name, objective=CrossEntropy(auxiliary=FACTOR), **settings)


def router_scores(the_plan, batch, monkeypatch):
    """Return logits and the router's scores of each layer, [B, T, E], and the weights, in float64."""
    weights = {t.name: torch.from_numpy(the_plan.initial_values(t)).double().requires_grad_() for t in the_plan.tensors}
    scores, mixture = [], float64_models.mixture

    def listen(h, block, cfg):
        scores.append(h @ block["ffn_gate_inp.weight"].T)
        return mixture(h, block, cfg)

    monkeypatch.setattr(float64_models, "mixture", listen)
    logits = FORWARD[the_plan.model.name](weights, the_plan.model, torch.from_numpy(batch["tokens"]).long())
    return logits, scores, weights


@pytest.mark.parametrize(("name", "accumulate"), [("qwen3moe", 1), ("qwen3moe", 3), ("olmoe", 1)])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_balance_of_rows_and_layers_is_added_to_the_training_loss(engine, name, accumulate, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    the_plan, batch = make_plan(name, rows=3 // accumulate, accumulate=accumulate), add_weights(batches().batch(0))
    logits, scores, weights = router_scores(the_plan, batch, monkeypatch)
    count, used = the_plan.model.experts, the_plan.model.experts_used
    by_target = torch.from_numpy(batch["weights"]).double() / batch["weights"].sum(dtype=np.float64)
    targets = torch.from_numpy(batch["targets"]).long()
    plain = (torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none") * by_target).sum()
    balance = 0.0
    for layer in scores:
        for row, weight in zip(layer, by_target.sum(1), strict=True):
            chosen = row.topk(used).indices.flatten().bincount(minlength=count) / len(row)
            balance = balance + weight * count * (chosen * row.softmax(-1).mean(0)).sum() / len(scores)
    loss = plain + FACTOR * balance
    expected = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    with engine.realize(the_plan) as session:
        session.build()
        for tensor, ours in session.gradients(batch).items():
            theirs = expected[tensor].numpy()
            assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs), tensor
        assert session.evaluate([batch]) == pytest.approx(plain.item(), rel=1e-6)
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(loss.item(), rel=2e-6)


@pytest.mark.parametrize("engine", ["cpu", "recompute", "ggml", "ggml recompute"])
def test_lab_balances_its_experts_with_other_arguments_of_a_block(engine, monkeypatch):
    model = Lab(**SIZES, experts=4, positions="none", norm_place="both", value_residual=True, d_ff=24)
    monkeypatch.setitem(MODELS, "lab", model)
    the_plan, batch = make_plan("lab"), add_weights(batches().batch(0))
    values = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    loss, name = reference_loss(the_plan, values, batch), "blk.1.ffn_gate_inp.weight"
    assert loss > reference_loss(the_plan, values, batch, held_out=True) + FACTOR
    with ENGINES[engine].realize(the_plan) as session:
        session.build()
        gradient = session.gradients(batch)[name].astype(np.float64)
        norm = np.linalg.norm(gradient)
        assert reference_slope(the_plan, values, batch, name, gradient / norm) == pytest.approx(norm, rel=1e-4)
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(loss, rel=2e-6)


def test_the_balance_is_that_of_transformers_averaged_over_rows_and_layers(monkeypatch):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    the_plan, batch = make_plan(), batches().batch(0)
    _, scores, weights = router_scores(the_plan, batch, monkeypatch)
    balances = [
        modeling.load_balancing_loss_func((row,), the_plan.model.experts, the_plan.model.experts_used).item()
        for layer in scores
        for row in layer
    ]
    values = {name: tensor.detach().numpy() for name, tensor in weights.items()}
    ours = reference_loss(the_plan, values, batch) - reference_loss(the_plan, values, batch, held_out=True)
    assert ours == pytest.approx(FACTOR * np.mean(balances), rel=1e-7)  # transformers averages the choices in float32


def test_the_balance_of_rows_with_one_weight_each_is_weighted_by_them(monkeypatch):
    inputs = {**batches().inputs, "mask": InputSpec((12,), "float32"), "weights": InputSpec((), "float32")}
    model, balances = MODELS["qwen3moe"].fit(token_dataset(VOCAB)), []
    batch = {**batches(4).batch(0), "mask": np.ones((4, 12), np.float32), "weights": np.float32([1, 2, 0, 5])}
    the_plan = Scratch().plan(model, Setup(inputs, 4, objective=Preference("simpo", auxiliary=FACTOR)))
    values = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    balance = type(model).balance
    monkeypatch.setattr(type(model), "balance", lambda *given: balances.append(balance(*given)) or balances[-1])
    added = reference_loss(the_plan, values, batch)
    added -= reference_loss(the_plan, values, batch, held_out=True)
    assert added == pytest.approx(FACTOR * np.mean(balances, 0) @ batch["weights"] / 8)


def test_parameters_that_were_trained_with_can_be_evaluated_afterwards():
    the_plan, batch = make_plan(), batches().batch(0)
    params = the_plan.params({t.name: the_plan.initial_values(t) for t in the_plan.tensors})
    the_plan.objective.training_loss(ReferenceOps(), the_plan.model, params, batch)
    assert params.auxiliary is None


def test_training_with_the_loss_spreads_positions_over_experts():
    balances = []
    for factor in (0.0, 1.0):
        the_plan = plan("qwen3moe", objective=CrossEntropy(auxiliary=factor))
        with TorchCPU(threads=1).realize(the_plan) as session:
            session.build()
            for step in range(30):
                session.step(batches().batch(step), AdamW(lr=0.02, mode="lora").hp_for_step(step))
            values = {t.name: session.download(t.name) for t in the_plan.tensors}
        batch, judge = batches().batch(99), make_plan()
        total = reference_loss(judge, values, batch) - reference_loss(judge, values, batch, held_out=True)
        balances.append(total / FACTOR)
    least = MODELS["qwen3moe"].experts_used
    assert least <= balances[1] < balances[0]


def test_olmoe_needs_as_many_key_heads_as_query_heads():
    with pytest.raises(UserError, match=r"model.n_kv_heads=2: olmoe requires model.n_kv_heads=4"):
        Olmoe(**SIZES, n_kv_heads=2).check()


def test_a_model_without_an_auxiliary_loss_rejects_the_setting():
    for objective in (CrossEntropy(auxiliary=0.1), dataclasses.replace(Distil("x"), auxiliary=0.1)):
        with pytest.raises(UserError, match=r"auxiliary=0.1: model=llama has no auxiliary loss; leave objective"):
            plan("llama", objective=objective)
    with pytest.raises(UserError, match=r"auxiliary=-1.0: must be at least 0"):
        plan("qwen3moe", objective=CrossEntropy(auxiliary=-1.0))
