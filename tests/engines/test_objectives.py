"""Objectives on every engine, against torch.nn.functional in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from float64_models import FORWARD
from tiny import add_weights, batches, plan, replace_initial_values

from toyexp import AdamW, CrossEntropy, program_difference
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan
from toyexp_torch.engines import TorchCPU

ENGINES = {
    "cpu": TorchCPU(), "float64": TorchCPU(dtype="float64"), "compiled": TorchCPU(compile=True), "ggml": GGMLCPU(),
    "metal": GGMLMetal(emulate=True), "cuda": GGMLCUDA(emulate=True), "vulkan": GGMLVulkan(emulate=True),
}  # fmt: skip
CROSS_ENTROPIES = {
    "plain": CrossEntropy(), "smoothing": CrossEntropy(smoothing=0.1), "z_loss": CrossEntropy(z_loss=1e-2),
    "both": CrossEntropy(0.3, 1e-3),
}  # fmt: skip


def reference(the_plan, batch, smoothing=0.0, z_loss=0.0):
    """Return torch's mean loss and its gradients, in float64."""
    weights = {t.name: torch.from_numpy(the_plan.initial_values(t)).double().requires_grad_() for t in the_plan.tensors}
    logits = FORWARD[the_plan.model.name](weights, the_plan.model, torch.from_numpy(batch["tokens"]).long())
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch["targets"]).long().flatten(), reduction="none",
        label_smoothing=smoothing,
    ) + z_loss * logits.flatten(0, 1).logsumexp(-1) ** 2  # fmt: skip
    by_target = torch.from_numpy(batch["weights"]).double().flatten()
    loss = losses @ by_target / by_target.sum()
    return loss.item(), dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def build(engine, the_plan):
    session = engine.realize(the_plan)
    session.build()
    return session


@pytest.mark.parametrize("objective", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_cross_entropy_with_smoothing_and_z_loss_agrees_with_torch_in_float64(engine, objective):
    the_plan, batch = plan("llama", objective=objective), add_weights(batches().batch(0))
    loss, gradients = reference(the_plan, batch, objective.smoothing, objective.z_loss)
    with build(engine, the_plan) as session:
        for name, ours in session.gradients(batch).items():
            theirs = gradients[name].numpy()
            assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs), name
        assert session.evaluate([batch]) == pytest.approx(reference(the_plan, batch)[0], rel=1e-6)  # plain
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(loss, rel=2e-6)


def test_smoothing_of_a_masked_vocabulary_and_large_logits_stays_exact():
    """Logits of 300 underflow to probabilities of 0, whose logarithms smoothing needs."""
    the_plan = plan("llama", objective=CrossEntropy(0.2, 1e-4))
    values = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    values["output.weight"] = values["output.weight"] * 3000
    the_plan, batch = replace_initial_values(the_plan, values), batches().batch(0)
    _, gradients = reference(the_plan, batch, 0.2, 1e-4)
    for engine in (ENGINES["cpu"], ENGINES["ggml"]):
        with build(engine, the_plan) as session:
            ours = session.gradients(batch)["output.weight"]
            theirs = gradients["output.weight"].numpy()
            assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)


def test_objectives_of_stacked_plans_must_be_equal():
    first, second = plan("llama", objective=CrossEntropy(0.1)), plan("llama", objective=CrossEntropy(0.2))
    assert program_difference([first, dataclasses.replace(first, seed=1)]) == ""
    assert program_difference([first, second]) == "the objectives differ"
