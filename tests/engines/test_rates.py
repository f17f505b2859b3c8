"""Learning rates that a tensor multiplies by its own factor, `lr_scale`."""

from dataclasses import replace

import float64_optimisers as float64
import numpy as np
import pytest
import tiny
from tiny import batches

from toyexp import PlanTensor, TensorSpec, UserError
from toyexp.interfaces.plan import apply_optimiser
from toyexp_ggml.engines import GGMLCPU
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_optimisers.muon import Muon
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1)}
LR = 0.01


def scale_rates(plan, scales):
    """Return the plan with `lr_scale` set for the tensors named in `scales`."""
    return replace(plan, tensors=tuple(replace(t, lr_scale=scales.get(t.name, 1.0)) for t in plan.tensors))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensors_scale_multiplies_the_rate_of_its_group(engine):
    scales = {"blk.0.ffn_up.weight": 0.25, "output_norm.weight": 3.0, "blk.1.ffn_up.weight": 0.0}
    groups = {"blk.0.*": {"lr": 0.03}}
    the_plan = apply_optimiser(scale_rates(tiny.plan("llama"), scales), AdamWOptimiser(mode="lora", groups=groups), LR)
    expected = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    references = {n: float64.adamw(w, 0.0) for n, w in expected.items()}
    with ENGINES[engine].realize(the_plan) as session:
        session.build()
        for step in range(4):
            batch = batches().batch(step)
            gradients = session.gradients(batch)
            session.step(batch, the_plan.numbers(step, LR / (1 + step)))
            for name, g in gradients.items():
                rate = (0.03 if name.startswith("blk.0.") else LR) * scales.get(name, 1.0) / (1 + step)
                expected[name] = references[name].step(g.astype(np.float64), rate)
        for name, values in expected.items():
            np.testing.assert_allclose(session.download(name), values, rtol=1e-5, atol=1e-5, err_msg=name)


def test_scales_multiply_the_rates_of_both_of_muons_rules():
    the_plan = scale_rates(tiny.plan("llama"), {"blk.0.attn_q.weight": 0.5, "output_norm.weight": 0.5})
    groups = apply_optimiser(the_plan, Muon(adamw_lr=0.002), LR).updates
    rates = {name: group.lr_scale * LR for group in groups for name in group.tensors}
    assert rates["blk.0.attn_q.weight"] == pytest.approx(LR / 2) and rates["blk.0.attn_k.weight"] == pytest.approx(LR)
    assert rates["output_norm.weight"] == pytest.approx(0.001)
    assert rates["blk.0.attn_norm.weight"] == pytest.approx(0.002)


def test_a_spec_passes_its_scale_to_the_plan():
    spec = TensorSpec("w", (2, 2), tiny.MODELS["gpt2"].tensors()[0].init, lr_scale=0.5)
    assert PlanTensor.from_spec(spec).lr_scale == 0.5 and PlanTensor.from_spec(spec).trainable
    with pytest.raises(UserError, match=r"w has lr_scale=-1.0; must be a finite number >= 0"):
        scale_rates(replace(tiny.plan("gpt2"), tensors=(PlanTensor.from_spec(spec),)), {"w": -1.0})
