"""The plugins of the page plugins/examples.md compute the formulas that they name, and pass their own tests."""

import sys

import environments
import numpy as np
import pytest
import snippets
import torch
from shown import import_shown

from toyexp import InputSpec, Params, Setup
from toyexp.testing import reference_loss
from toyexp.testing.objectives import Rows
from toyexp.testing.suites import Bare
from toyexp_objectives.preference import Preference
from toyexp_torch.ops import TorchOps

B, T = 2, 6
SIZES = {"d_model": 8, "d_ff": 6, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1, "vocab": 5}


def draw_params(model, seed=0):
    """Return random float64 tensors of the first block of a model, and a random input [B, T, d]."""
    draw = np.random.default_rng(seed)
    values = {t.name: torch.from_numpy(draw.normal(0, 0.5, t.shape)) for t in model.tensors()}
    return Params(values).block(0), torch.from_numpy(draw.normal(size=(B, T, model.d_model)))


def test_the_mixture_is_the_weighted_sum_of_the_chosen_experts(tmp_path, monkeypatch):
    module = import_shown("expert_llama", tmp_path, monkeypatch)
    model = module.ExpertLlama(
        d_model=8, d_ff=6, n_heads=2, n_kv_heads=2, n_layers=1, vocab=5, experts=5, experts_used=3
    )
    p, h = draw_params(model)
    result = model.feed_forward(TorchOps(), h, p)
    for b in range(B):
        for t in range(T):
            scores, chosen = torch.topk(p["router.weight"] @ h[b, t], 3)
            outputs = [
                p["down.weight"][e] @ torch.nn.functional.silu(p["up.weight"][e] @ h[b, t]) for e in chosen.tolist()
            ]
            expected = sum(w * out for w, out in zip(scores.softmax(0), outputs, strict=True))
            torch.testing.assert_close(result[b, t], expected, rtol=1e-12, atol=1e-12)


def test_linear_attention_is_the_recurrence_of_a_decaying_state(tmp_path, monkeypatch):
    module = import_shown("linear_llama", tmp_path, monkeypatch)
    model = module.LinearLlama(**SIZES)
    p, h = draw_params(model)
    q, k, v = ((h @ p[f"attn_{name}.weight"].T).reshape(B, T, 2, 4) for name in "qkv")
    decay = torch.exp(-0.1 * torch.nn.functional.softplus(h @ p["attn_decay.weight"].T))  # [B, T, H]
    state, rows = torch.zeros(B, 2, 4, 4, dtype=torch.float64), []
    for t in range(T):
        state = decay[:, t, :, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :] / 2
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state).reshape(B, 8))
    expected = torch.stack(rows, 1) @ p["attn_output.weight"].T
    torch.testing.assert_close(model.mix(TorchOps(), h, p), expected, rtol=1e-10, atol=1e-12)


def test_dpo_by_hand_is_the_built_in_one(tmp_path, monkeypatch):
    dpo = import_shown("my_dpo", tmp_path, monkeypatch).DPO(beta=0.3)
    ids, row = InputSpec((5,), "int32", below=8), InputSpec((), "float32")
    inputs = {"tokens": ids, "targets": ids, "mask": InputSpec((5,), "float32"), "weights": row, "reference": row}
    draw = np.random.default_rng(0)
    batch = {name: draw.integers(0, 8, (4, 5)).astype(spec.dtype) for name, spec in inputs.items()}
    batch |= {"mask": (batch["mask"] > 3).astype(np.float32), "weights": np.array([1, 1, 2, 2], np.float32)}
    batch["mask"][:, -1] = 1
    batch["reference"] = draw.normal(-8, 2, 4).astype(np.float32)
    losses = []
    for objective in (dpo, Preference(beta=0.3)):
        plan = Bare().plan(Rows(), Setup(inputs, 4, objective=objective))
        losses.append(reference_loss(plan, {t.name: plan.initial_values(t) for t in plan.tensors}, batch))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    log_probs = np.log(draw.random((4, 5, 8)))
    for name, values in Preference().precompute(log_probs, batch).items():
        np.testing.assert_array_equal(dpo.precompute(log_probs, batch)[name], values)


def test_the_autoencoder_multiplies_by_a_matrix_and_its_transpose(tmp_path, monkeypatch):
    model = import_shown("superposition", tmp_path, monkeypatch).Superposition(hidden=2, features=5)
    draw = np.random.default_rng(0)
    w, b, x = (torch.from_numpy(draw.normal(size=shape)) for shape in ((2, 5), (5,), (7, 5)))
    result = model.forward(TorchOps(), Params({"w.weight": w, "b.bias": b}), {"vectors": x})
    torch.testing.assert_close(result, torch.relu(x @ w.T @ w + b), rtol=1e-12, atol=1e-12)


@pytest.mark.release
def test_the_tests_that_the_page_shows_pass(tmp_path):
    for block in snippets.blocks("plugins/examples.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    done = environments.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_page_counts_the_lines_of_its_files():
    page = (snippets.PAGES / "plugins/examples.md").read_text()
    files = [b for b in snippets.blocks("plugins/examples.md") if b.file and not b.file.startswith("test_")]
    counts = [sum(1 for line in b.text.splitlines() if line.strip() and not line.startswith("#")) for b in files]
    rows = [line.split(" | ")[-1].strip(" |") for line in page.splitlines() if line.startswith("| [")]
    assert rows == [str(count) for count in counts] and max(counts) <= 25
