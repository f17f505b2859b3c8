"""Settings under `optim.` reach the step: command-line runs against a plain float64 loop."""

import numpy as np
import pytest
import torch
from float64_models import FORWARD

from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp_ggml.session import GGMLSession
from toyexp_torch.session import TorchSession

WORDS = [
    "data=random", "data.vocab=32", "model.d_model=16", "model.n_layers=1", "model.context=8", "model.d_ff=24",
    "batch_size=4", "steps=4", "eval_every=0", "checkpoint_every=0", "callbacks=[gguf_export]", "engine.threads=1",
    "hydra.run.dir=run",
]  # fmt: skip
SESSIONS = {"cpu": TorchSession, "ggml": GGMLSession}
DEFAULTS = {"beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0}
MODES = {"from_scratch": {**DEFAULTS, "beta2": 0.95}, "lora": {**DEFAULTS, "beta2": 0.999}}
OVERRIDES = {"beta1": 0.8, "beta2": 0.7, "eps": 0.003, "weight_decay": 0.3, "grad_clip": 0.2}
LR = 0.03
TOLERANCE = 1e-3 * LR  # tolerance: a step moves a weight by about lr, whatever its gradient


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Train through the command line; return the plan, the micro-batches of every step, and the final weights."""
    monkeypatch.chdir(tmp_path)

    def train(engine, *words):
        plans, steps = [], []
        kind, do_step = SESSIONS[engine], SESSIONS[engine].do_step

        def record_step(session, micros, hp):
            plans.append(session.plan)
            steps.append(micros)
            return do_step(session, micros, hp)

        monkeypatch.setattr(kind, "do_step", record_step)
        assert main([*WORDS, f"engine={engine}", f"lr={LR}", *words]) == 0, capsys.readouterr().err
        with GGUFFile(tmp_path / "run" / "model.gguf") as file:
            return plans[0], steps, {name: file.read(name) for name in file.tensors}

    return train


def plain_loop(plan, steps, mode, beta1, beta2, eps, weight_decay, grad_clip):
    """Return the weights after AdamW in one of its two modes, by autograd in float64."""
    weights = {
        t.name: torch.tensor(plan.initial_values(t), dtype=torch.float64, requires_grad=True) for t in plan.tensors
    }
    moments = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights.items()}
    for t, micros in enumerate(steps, start=1):
        tokens, targets = (torch.tensor(np.concatenate([m[k] for m in micros])).long() for k in ("tokens", "targets"))
        logits = FORWARD[plan.model.name](weights, plan.model, tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.stack([(g**2).sum() for g in gradients]).sum().sqrt()
        for (name, w), g in zip(weights.items(), gradients, strict=True):
            g = g * min(1.0, grad_clip / norm) if grad_clip else g
            m, v = moments[name]
            m, v = moments[name] = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            slot5, slot6 = (1 / (1 - beta1**t), 1 / (1 - beta2**t)) if mode == "lora" else (beta1, beta2)
            decay = weight_decay if w.ndim > 1 else 0  # never of norms
            with torch.no_grad():
                w.copy_(w * (1 - LR * decay) - LR * (m * slot5) / ((v * slot6).sqrt() + eps))
    return {name: w.detach().numpy() for name, w in weights.items()}


def distance(first, second):
    assert first.keys() == second.keys()
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)


@pytest.mark.parametrize("engine", SESSIONS)
@pytest.mark.parametrize("mode", MODES)
def test_settings_of_the_optimiser_reach_the_step(run, engine, mode):
    """The test sets everything at once; the loop with any single setting at its default gives other weights."""
    words = [f"optim.{name}={value}" for name, value in {"mode": mode, "accumulate": 2, **OVERRIDES}.items()]
    plan, steps, weights = run(engine, *words)
    assert [len(micros) for micros in steps] == [2] * 4 and plan.rows == 2
    assert distance(weights, plain_loop(plan, steps, mode, **OVERRIDES)) < TOLERANCE
    for name in OVERRIDES:
        assert (
            distance(weights, plain_loop(plan, steps, mode, **{**OVERRIDES, name: MODES[mode][name]})) > 30 * TOLERANCE
        ), name
    other = next(m for m in MODES if m != mode)
    assert distance(weights, plain_loop(plan, steps, other, **OVERRIDES)) > 30 * TOLERANCE


@pytest.mark.parametrize(("model", "mode"), [("llama", "from_scratch"), ("gpt2", "lora")])
def test_the_default_mode_is_that_of_the_model_or_recipe_with_its_own_defaults(run, model, mode):
    """eps is set, because otherwise weights without a gradient would move: gpt2's biases of keys."""
    plan, steps, weights = run("ggml", f"model={model}", "optim.eps=0.003")
    assert [len(micros) for micros in steps] == [1] * 4 and plan.rows == 4
    assert distance(weights, plain_loop(plan, steps, mode, **{**MODES[mode], "eps": 0.003})) < TOLERANCE
