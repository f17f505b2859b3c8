"""The ViT on every engine available, against independent float64 code."""

import dataclasses

import numpy as np
import pytest
import torch
from float64_models import adamw as reference_adamw
from float64_models import loss as reference_loss
from float64_models import vit

from toyexp import AdamW, CrossEntropy, ImageDataset, SessionError, Setup, UserError
from toyexp.testing import image_dataset
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_models.vit import ViT, cut
from toyexp_recipes.scratch import VitTiny
from toyexp_torch.engines import TorchCPU

ENGINES = {
    "torch": TorchCPU(threads=1),
    "ggml": GGMLCPU(threads=1),
    "ggml_without_kernels": GGMLCPU(threads=1, products="ggml"),
    "metal": GGMLMetal(threads=1, emulate=True),
}
BLOCKS = ("layernorm_gelu", "layernorm_gelu_erf", "rmsnorm_silu")
DATA = image_dataset(count=120, size=12, channels=3, classes=5)


def make_plan(block, rows=6, accumulate=1, data=DATA, objective=None, pool="class"):
    model = ViT(d_model=32, n_layers=2, n_heads=4, d_ff=48, patch=4, block=block, pool=pool).fit(data)
    inputs = model.batches(data, rows, 0).inputs
    # Initial values that reach the curved parts of nonlinearities, and a class token and biases that are not 0.
    draw = np.random.default_rng(3)
    recipe = VitTiny()
    plan = recipe.plan(
        model, Setup(inputs, rows=rows, accumulate=accumulate, **({"objective": objective} if objective else {}))
    )
    values = {
        t.name: plan.initial_values(t) + 0.1 * draw.standard_normal(t.shape).astype(np.float32) for t in plan.tensors
    }
    return plan, values


def build_session(engine, plan, values):
    session = ENGINES[engine].realize(plan)
    for name, array in values.items():
        session.upload(name, array)
    session.build()
    return session


def images_and_batch(plan, k=0, rows=6):
    """Return images for the reference, which convolves them, and the same batch in patches for the engine."""
    pixels = DATA.batches(0, rows, 0).batch(k)
    weights = np.random.default_rng(k).uniform(0, 2, rows).astype(np.float32)
    weights[1] = 0
    batch = {**plan.model.batches(DATA, rows, 0).batch(k), "weights": weights}
    return torch.from_numpy(pixels["images"]).double(), batch


@pytest.mark.parametrize(("block", "pool"), [*((block, "class") for block in BLOCKS), ("layernorm_gelu", "mean")])
@pytest.mark.parametrize("engine", ENGINES)
def test_loss_logits_and_every_gradient_agree_with_float64(engine, block, pool):
    plan, values = make_plan(block, pool=pool)
    images, batch = images_and_batch(plan)
    weights = {n: torch.from_numpy(v).double().requires_grad_() for n, v in values.items()}
    logits = vit(weights, plan.model, images)
    value = reference_loss(logits, batch)
    grads = dict(zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True))
    with build_session(engine, plan, values) as session:
        ours = session.logits({"patches": batch["patches"]})
        assert ours.shape == (6, 5)
        np.testing.assert_allclose(ours, logits.detach().numpy(), atol=1e-5 * float(logits.detach().abs().max()))
        assert session.evaluate([batch]) == pytest.approx(value.item(), rel=1e-5)
        total = float(np.sqrt(sum(float((g**2).sum()) for g in grads.values())))
        for tensor, gradient in session.gradients(batch).items():
            theirs = grads[tensor].numpy()
            assert np.linalg.norm(gradient - theirs) <= 1e-5 * np.linalg.norm(theirs) + 1e-7 * total, tensor


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_steps_agree_with_float64(engine):
    plan, values = make_plan("layernorm_gelu")
    settings = dataclasses.replace(AdamW.for_from_scratch(), lr=1e-3, weight_decay=0.1)
    weights = {n: torch.from_numpy(v).double().requires_grad_() for n, v in values.items()}
    moments = {n: (torch.zeros_like(w), torch.zeros_like(w)) for n, w in weights.items()}
    with build_session(engine, plan, values) as session:
        for step in range(10):
            images, batch = images_and_batch(plan, step)
            value = reference_loss(vit(weights, plan.model, images), batch)
            grads = torch.autograd.grad(value, list(weights.values()))
            assert session.step(batch, settings.hp_for_step(step)).loss == pytest.approx(value.item(), rel=1e-4)
            with torch.no_grad():
                for (tensor, w), g in zip(weights.items(), grads, strict=True):
                    reference_adamw(
                        w, g, *moments[tensor], step + 1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8,
                        weight_decay=0.1 if w.ndim > 1 else 0.0, correct=False,
                    )  # fmt: skip
        for tensor, w in weights.items():
            if tensor.endswith(
                "attn_k.bias"
            ):  # it shifts all scores of a query equally, so its gradient is only rounding
                continue
            # Adam keeps only the sign of a gradient that is nearly zero; hence a bound on the whole tensor.
            error = np.linalg.norm(session.download(tensor) - w.detach().numpy())
            assert error <= 5e-3 * np.linalg.norm(w.detach().numpy() - values[tensor]), tensor


MIXED = ImageDataset(*DATA.train, DATA.classes, 0.2, mixup=0.4)


@pytest.mark.parametrize("objective", [CrossEntropy(), CrossEntropy(smoothing=0.2, z_loss=1e-2)], ids=["plain", "both"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_of_mixed_images_agrees_with_float64(engine, objective):
    """Torch's cross-entropy with the target probabilities (1 - m) * one_hot(targets) + m * one_hot(second_targets)."""
    plan, values = make_plan("layernorm_gelu", rows=3, accumulate=2, data=MIXED, objective=objective)
    batch = plan.model.batches(MIXED, 6, 0).batch(0)
    weights = {n: torch.from_numpy(v).double().requires_grad_() for n, v in values.items()}
    logits = vit(weights, plan.model, torch.from_numpy(MIXED.batches(0, 6, 0).batch(0)["images"]).double())
    shares = torch.from_numpy(batch["second_shares"]).double()[:, None]
    first, second = (torch.eye(5).double()[torch.from_numpy(batch[n])] for n in ("targets", "second_targets"))
    loss = torch.nn.CrossEntropyLoss(label_smoothing=objective.smoothing)(
        logits, (1 - shares) * first + shares * second
    )
    loss = loss + objective.z_loss * (logits.logsumexp(-1) ** 2).mean()
    grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    total = float(np.sqrt(sum(float((g**2).sum()) for g in grads.values())))
    with build_session(engine, plan, values) as session:
        for tensor, gradient in session.gradients(batch).items():
            theirs = grads[tensor].numpy()
            assert np.linalg.norm(gradient - theirs) <= 1e-5 * np.linalg.norm(theirs) + 1e-7 * total, tensor
        plain = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["targets"]).long())
        assert session.evaluate([batch]) == pytest.approx(plain.item(), rel=1e-6)
        assert session.step(batch, AdamW.for_from_scratch().hp_for_step(0)).loss == pytest.approx(loss.item(), rel=2e-6)


def test_class_weights_of_mixed_images_are_rejected():
    with pytest.raises(UserError, match=r"objective\.class_weights: not with data\.mixup; data\.sampler=balanced"):
        make_plan("layernorm_gelu", data=MIXED, objective=CrossEntropy(class_weights={1: 2.0}))


@pytest.mark.parametrize("engine", ["torch", "ggml"])
def test_micro_batches_give_the_same_curve_and_the_same_accuracy(engine):
    curves, scores = [], []
    for rows, accumulate in ((6, 1), (2, 3)):
        plan, values = make_plan("layernorm_gelu", rows, accumulate)
        with build_session(engine, plan, values) as session:
            data = plan.model.batches(DATA, 6, 0)
            hps = [AdamW.for_from_scratch().hp_for_step(s) for s in range(20)]
            curves.append([session.step(data.batch(s), hp).loss for s, hp in enumerate(hps)])
            scores.append(plan.model.scores(session.logits, data.held_out()))
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)
    assert scores[0] == scores[1]
    assert curves[0][-1] < curves[0][0]


def test_accuracy_counts_the_images_with_a_weight():
    plan, values = make_plan("layernorm_gelu")
    batches = plan.model.batches(DATA, 16, 0).held_out()  # more rows than the plan's, including padding
    assert sum(len(b["targets"]) for b in batches) > len(DATA.held_out[1]) == sum(b["weights"].sum() for b in batches)
    images = torch.from_numpy((DATA.held_out[0] / 255 - DATA.mean) / DATA.std)
    weights = {n: torch.from_numpy(v).double() for n, v in values.items()}
    is_correct = vit(weights, plan.model, images).argmax(-1).numpy() == DATA.held_out[1]
    with build_session("torch", plan, values) as session:
        assert plan.model.scores(session.logits, batches) == {"accuracy": pytest.approx(is_correct.mean())}
    assert 0 < is_correct.mean() < 1, "an accuracy of 0 or 1 would prove nothing"


def test_more_than_ten_classes_also_have_a_top5_score():
    draw = np.random.default_rng(5)
    logits, targets = draw.standard_normal((40, 12)), draw.integers(0, 12, 40)
    weights = (np.arange(40) < 33).astype(np.float32)
    batches = [{"patches": logits[i : i + 10], "targets": targets[i : i + 10], "weights": weights[i : i + 10]}
               for i in range(0, 40, 10)]  # fmt: skip
    ranks = (logits > np.take_along_axis(logits, targets[:, None], 1)).sum(1)[:33]
    scores = ViT(classes=12).scores(lambda batch: batch["patches"], batches)
    assert scores == {"accuracy": pytest.approx((ranks < 1).mean()), "top5": pytest.approx((ranks < 5).mean())}
    assert 0 < scores["accuracy"] < scores["top5"] < 1


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unknown_class_is_rejected_before_it_reaches_the_device(engine):
    plan, values = make_plan("layernorm_gelu")
    _, batch = images_and_batch(plan)
    with build_session(engine, plan, values) as session:
        for wrong in (5, -1):
            bad = {**batch, "targets": np.where(np.arange(6) == 3, wrong, batch["targets"]).astype(np.int32)}
            for call in (lambda bad=bad: session.step(bad, AdamW.for_lora().hp_for_step(0)),
                         lambda bad=bad: session.evaluate([bad])):  # fmt: skip
                with pytest.raises(SessionError, match=rf"batch\['targets'\]: {wrong} is not one of 0\.\.4"):
                    call()


def test_patches_are_laid_out_as_a_convolutions_kernel():
    images = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    unfolded = torch.nn.functional.unfold(torch.from_numpy(images).permute(0, 3, 1, 2), 2, stride=2)
    np.testing.assert_array_equal(cut(images, 2), unfolded.transpose(1, 2).numpy())
