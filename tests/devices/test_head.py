"""engine=cuda: the chunked loss of a large vocabulary against float64."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

from toyexp import AdamW, InputSpec, Setup, Unavailable
from toyexp_models.llama import Llama
from toyexp_objectives.preference import Preference
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU, TorchCUDA
from toyexp_torch.loss import ProjectedLossOps

pytestmark = pytest.mark.device("cuda")

try:
    TorchCUDA().check()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

torch = pytest.importorskip("torch")
head = pytest.importorskip("toyexp_torch.kernels.head", exc_type=ImportError)


def compute_in_float64(x, w, targets, weights):
    x, w = (t.double().detach().requires_grad_() for t in (x, w))
    losses = torch.nn.functional.cross_entropy(x @ w.T, targets.long(), reduction="none")
    loss = (losses * weights.double()).sum()
    return loss, *torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("vocab", [50257, 4096, 33])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_loss_and_gradients_agree_with_float64(vocab, dtype, tolerance, monkeypatch):
    """Includes numbers of positions that chunks do not divide, odd vocabularies, and targets of weight 0."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 300 * vocab * 4)
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(1000, 64, device="cuda", generator=generator).to(dtype).float()
    w = (torch.randn(vocab, 64, device="cuda", generator=generator) / 4).to(dtype).float()
    targets = torch.randint(vocab, (1000,), device="cuda", generator=generator, dtype=torch.int32)
    weights = torch.rand(1000, device="cuda", generator=generator) / 1000
    weights[::7] = 0
    references = compute_in_float64(x, w, targets, weights)
    x.requires_grad_(), w.requires_grad_()
    loss = head.ProjectedLoss.apply(x, w, targets, weights, dtype)
    results = (loss, *torch.autograd.grad(loss, (x, w)))
    for value, expected in zip(results, references, strict=True):
        scale = expected.abs().max()
        assert ((value.double() - expected).abs().max() / scale) < tolerance
    with torch.no_grad():
        loss_without_gradients = head.ProjectedLoss.apply(x, w, targets, weights, dtype)
    assert torch.equal(loss_without_gradients, loss)
    only_x = head.ProjectedLoss.apply(x, w.detach(), targets, weights, dtype)
    assert torch.equal(torch.autograd.grad(only_x, x)[0], results[1])


def test_infinite_logits_give_a_nonfinite_loss():
    x = torch.ones(256, 64, device="cuda", requires_grad=True)
    w = torch.full((1000, 64), 1e38, device="cuda")
    zeros = torch.zeros(256, device="cuda")
    loss = head.ProjectedLoss.apply(x, w, zeros.int(), zeros + 1, torch.float32)
    assert not np.isfinite(loss.item())


def test_a_packed_weight_has_the_loss_and_gradient_of_its_dequantised_values():
    """The type is Q8_0, with blocks of a float16 scale and 32 bytes."""
    from toyexp_torch.kernels.packed import Packed

    generator = torch.Generator("cuda").manual_seed(2)
    raw = torch.randint(256, (5000, 2, 34), device="cuda", generator=generator, dtype=torch.uint8)
    raw[..., :2] = torch.tensor([0.002], dtype=torch.float16, device="cuda").view(torch.uint8)
    packed = Packed(raw.flatten(1), "Q8_0", torch.float32)
    x = torch.randn(3, 100, 64, device="cuda", generator=generator).requires_grad_()
    targets = torch.randint(5000, (3, 100), device="cuda", generator=generator, dtype=torch.int32)
    weights = torch.rand(3, 100, device="cuda", generator=generator) / 300
    loss = head.projected_loss(x, packed, targets, weights)
    expected_loss, gradient, _ = compute_in_float64(
        x.flatten(0, 1), packed.dense(), targets.flatten(), weights.flatten()
    )
    assert abs(loss.item() / expected_loss.item() - 1) < 2e-6
    x_gradient = torch.autograd.grad(loss, x)[0].flatten(0, 1).double()
    assert ((x_gradient - gradient).abs().max() / gradient.abs().max()) < 2e-6


def test_the_loss_of_the_positions_with_a_weight_equals_that_of_all_positions():
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(500, 64, device="cuda", generator=generator).requires_grad_()
    w = (torch.randn(1000, 64, device="cuda", generator=generator) / 4).requires_grad_()
    targets = torch.randint(1000, (500,), device="cuda", generator=generator, dtype=torch.int32)
    weights = torch.zeros(500, device="cuda")
    weights[::3] = 0.01
    order = torch.randperm(500, device="cuda", generator=generator)
    selected = torch.cat((order[weights[order] > 0], order[weights[order] == 0]))[:200]
    loss = head.projected_loss(x, w, targets, weights, SimpleNamespace(selected=selected))
    for value, expected in zip(
        (loss, *torch.autograd.grad(loss, (x, w))), compute_in_float64(x, w, targets, weights), strict=True
    ):
        assert ((value.double() - expected).abs().max() / expected.abs().max()) < 2e-6


CONTEXT, VOCAB, ROWS = 512, 32768, 24  # 403 million logits, 12 chunks


def preference_run(engine):
    """Return the gradients of a DPO step, the losses of three steps, and how much GPU memory they add at most."""
    gc.collect()
    others = torch.cuda.memory_allocated()  # by earlier tests of this process
    ids, number = InputSpec((CONTEXT,), "int32", below=VOCAB), InputSpec((), "float32")
    inputs = {"tokens": ids, "targets": ids, "mask": InputSpec((CONTEXT,), "float32")}
    inputs |= {"reference": number, "weights": number}
    model = Llama(d_model=64, n_layers=1, n_heads=2, d_ff=64, context=CONTEXT, vocab=VOCAB)
    the_plan = Scratch().plan(model, Setup(inputs, rows=ROWS, objective=Preference()))
    draw = np.random.default_rng(0)
    tokens, targets = draw.integers(0, VOCAB, (2, ROWS, CONTEXT), dtype=np.int32)
    batch = {"tokens": tokens, "targets": targets, "mask": np.ones((ROWS, CONTEXT), np.float32)}
    batch |= {"reference": np.full(ROWS, -5300, np.float32), "weights": np.ones(ROWS, np.float32)}
    with engine.realize(the_plan) as session:
        session.build()
        torch.cuda.reset_peak_memory_stats()
        losses = [session.step(batch, AdamW.for_lora().hp_for_step(step)).loss for step in range(3)]
        peak = torch.cuda.max_memory_allocated() - others
        return session.gradients(batch), losses, peak


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 1e-4), ({"capture": False}, 1e-4), ({"recompute": True}, 1e-4), ({"compile": True}, 1e-4),
        ({"dtype": "float64"}, 1e-5), ({"dtype": "bfloat16"}, 1e-1),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The .grad attribute")  # raised by the compiler
def test_a_preference_step_agrees_with_the_cpu(settings, tolerance):
    expected, losses, _ = preference_run(TorchCPU())
    gradients, ours, _ = preference_run(TorchCUDA(**settings))
    np.testing.assert_allclose(ours, losses, rtol=tolerance, atol=1e-6)  # later losses are almost 0
    for name, gradient in expected.items():
        assert np.linalg.norm(gradients[name] - gradient) <= 10 * tolerance * np.linalg.norm(gradient), name


# Only of steps that are not captured: a captured step reuses memory of its own.
@pytest.mark.parametrize("settings", [{"capture": False}, {"dtype": "float64"}])
def test_a_preference_step_holds_a_part_of_the_logits(settings, monkeypatch):
    peak = preference_run(TorchCUDA(**settings))[2]
    monkeypatch.setattr(ProjectedLossOps, "chunk", 1 << 40)
    assert peak < 0.25 * preference_run(TorchCUDA(**settings))[2]
