"""Objectives on every engine, against torch.nn.functional in float64."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from float64_models import FORWARD
from tiny import MODELS, VOCAB, add_weights, batches, plan, replace_initial_values, write_base

from toyexp import AdamW, CrossEntropy, InputSpec, Setup, UserError, program_difference
from toyexp.base.errors import BadBatch
from toyexp.interfaces.micro_batches import prepare_batches
from toyexp.reference.engine import reference_logits, reference_loss, reference_metrics
from toyexp.testing import ObjectiveSuite, ReferenceOps, token_dataset
from toyexp_ggml.engines import GGMLCPU, GGMLCUDA, GGMLMetal, GGMLVulkan
from toyexp_models.vit import ViT
from toyexp_objectives.distil import Distil
from toyexp_objectives.preference import Preference
from toyexp_objectives.vectors import MSE, Contrastive
from toyexp_recipes.scratch import Scratch
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


CLASS_WEIGHTS = {0: 0.25, 3: 4.0, 17: 2.0, 39: 0.5}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("engine", ["cpu", "float64", "compiled", "ggml", "vulkan"])
def test_class_weights_are_those_of_torch(engine, accumulate, smoothing):
    """The mean is over the weights of all targets of a step, and held-out losses stay plain."""
    objective = CrossEntropy(smoothing, class_weights=CLASS_WEIGHTS)
    the_plan = plan("llama", rows=3 // accumulate, accumulate=accumulate, objective=objective)
    the_plan = the_plan.with_frozen(objective.tensors(the_plan))
    batch = batches().batch(0)
    values = {t.name: torch.from_numpy(the_plan.initial_values(t)).double() for t in the_plan.trainable}
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    logits = FORWARD["llama"](leaves, the_plan.model, torch.from_numpy(batch["tokens"]).long()).flatten(0, 1)
    by_class = torch.tensor([CLASS_WEIGHTS.get(i, 1.0) for i in range(VOCAB)]).double()
    targets = torch.from_numpy(batch["targets"]).long().flatten()
    assert {0, 3, 17, 39} & set(targets.tolist())
    loss = torch.nn.CrossEntropyLoss(by_class, label_smoothing=smoothing)(logits, targets)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), retain_graph=True), strict=True))
    with build(ENGINES[engine], the_plan) as session:
        for name, ours in session.gradients(batch).items():
            theirs = gradients[name].numpy()
            assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs), name
        plain = torch.nn.CrossEntropyLoss()(logits, targets).item()
        assert session.evaluate([batch]) == pytest.approx(plain, rel=1e-6)
        block = {name: np.concatenate([array] * 2) for name, array in batch.items()}
        for prepared in (batch, prepare_batches(the_plan, block, 2)[1]):
            with build(ENGINES[engine], the_plan) as fresh:
                step = fresh.step(prepared, AdamW.for_lora().hp_for_step(0))
                assert step.loss == pytest.approx(loss.item(), rel=2e-6)


def test_the_z_loss_is_weighted_by_the_targets_class_with_and_without_smoothing():
    for smoothing in (0.0, 0.2):
        objective = CrossEntropy(smoothing, 1e-2, CLASS_WEIGHTS)
        the_plan = plan("llama", objective=objective)
        the_plan = the_plan.with_frozen(objective.tensors(the_plan))
        values, batch = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}, batches().batch(0)
        logits = torch.from_numpy(reference_logits(the_plan, values, batch)).flatten(0, 1)
        by_class = torch.tensor([CLASS_WEIGHTS.get(i, 1.0) for i in range(VOCAB)]).double()
        targets = torch.from_numpy(batch["targets"]).long().flatten()
        loss = torch.nn.CrossEntropyLoss(by_class, label_smoothing=smoothing)(logits, targets)
        loss += 1e-2 * logits.logsumexp(-1) ** 2 @ by_class[targets] / by_class[targets].sum()
        assert reference_loss(the_plan, values, batch) == pytest.approx(loss.item(), rel=1e-7)


@pytest.mark.parametrize(
    ("weights", "smoothing", "message"),
    [
        ({1: float("nan")}, 0.0, "class_weights={1: nan}: must be a finite number at least 0"),
        ({1: -2.0}, 0.0, "class_weights={1: -2.0}: must be a finite number at least 0"),
        ({1: 0.0}, 0.1, "class_weights={1: 0.0}: must be a finite number above 0 with objective.smoothing=0.1"),
        ({40: 2.0}, 0.0, "class_weights={40: 2.0}: classes are 0 to 39"),
        ({-1: 2.0}, 0.0, "class_weights={-1: 2.0}: classes are 0 to 39"),
        (dict.fromkeys(range(VOCAB), 0.0), 0.0, "class_weights: at least one class must have a weight above 0"),
    ],
)
def test_bad_class_weights_are_rejected(weights, smoothing, message):
    objective = CrossEntropy(smoothing, class_weights=weights)
    spec = InputSpec((12,), "int32", below=VOCAB)
    with pytest.raises(UserError, match=re.escape(message)):
        objective.check()
        objective.check_inputs(MODELS["llama"], {"targets": spec})


def test_one_class_may_have_the_weight_0():
    spec = InputSpec((12,), "int32", below=VOCAB)
    CrossEntropy(class_weights={1: 0.0}).check_inputs(MODELS["llama"], {"targets": spec})


def test_a_batch_whose_classes_all_have_the_weight_0_is_rejected_by_the_name_of_the_setting():
    batch = {"targets": np.array([[1, 2]], np.int32), "weights": np.ones((1, 2), np.float32)}
    assert CrossEntropy(class_weights={1: 0.0}).weigh(batch)["weights"].tolist() == [[0, 1]]
    with pytest.raises(BadBatch, match=r"objective.class_weights gives all targets of the batch the weight 0"):
        CrossEntropy(class_weights={1: 0.0, 2: 0.0}).weigh(batch)


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


# -- every shipped objective: its kit, and published numbers -----------------------------------------------------------

SOME = (ENGINES["cpu"], ENGINES["float64"], ENGINES["ggml"], ENGINES["metal"], ENGINES["cuda"], ENGINES["vulkan"])


class TestCrossEntropy(ObjectiveSuite):
    objective, engines = CrossEntropy(0.1, 1e-3), SOME


class TestClassWeights(ObjectiveSuite):
    objective, engines = CrossEntropy(0.1, 1e-3, {2: 3.0, 5: 0.5}), SOME


class TestMSE(ObjectiveSuite):
    objective, engines = MSE(), SOME


class TestContrastive(ObjectiveSuite):
    objective, engines = Contrastive(), SOME


class TestPreference(ObjectiveSuite):
    objective, engines = Preference(), SOME

    def inputs(self):
        ids = InputSpec((5,), "int32", below=8)
        inputs = {
            "tokens": ids, "targets": ids, "mask": InputSpec((5,), "float32"), "weights": InputSpec((), "float32")
        }  # fmt: skip
        return {**inputs, **self.objective.precomputed(inputs)}

    def batch(self, seed=0):
        draw = np.random.default_rng(seed)
        ids = draw.integers(0, 8, (2, 4, 5), dtype=np.int32)
        mask = (draw.random((4, 5)) < 0.7).astype(np.float32)
        mask[:, -1] = 1
        weights = np.array([1, 1, 2, 2], np.float32)
        reference = draw.normal(-8, 2, 4).astype(np.float32)
        batch = {"tokens": ids[0], "targets": ids[1], "mask": mask, "weights": weights, "reference": reference}
        return {name: batch[name] for name in self.inputs()}


class TestSimPO(TestPreference):
    objective = Preference("simpo", beta=2.0)


class TestORPO(TestPreference):
    objective = Preference("orpo")


class TestIPO(TestPreference):
    objective = Preference("ipo")


class TestKTO(TestPreference):
    objective = Preference("kto")


# Log-probabilities of torchtune's test of DPO: chosen and rejected completions, of the model and of the reference.
CHOSEN, REJECTED = np.array([-0.5, -10, -1]), np.array([-0.1, -30, -21])
RATIOS = np.stack([CHOSEN - [-0.5, -10.1, -0.1], REJECTED - [-0.1, -20.1, -0.1]], 1).ravel()


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("dpo", RATIOS, [0.693147, 0.313262, 0.126928]),
        ("hinge", RATIOS, [1, 0, 0]),
        ("ipo", RATIOS, [25, 25, 225]),  # of the sums, as in the test; the objective takes means per token
        ("kto", RATIOS, [(0.5 + 0.5) / 2, (0.4975 + 0.270912) / 2, (0.522485 + 0.110073) / 2]),
    ],
)
def test_preference_losses_have_the_published_values(kind, values, expected):
    losses = Preference(kind)._by_pair(ReferenceOps(), values, values)
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_simpo_and_orpo_have_the_published_values():
    means = np.array([-0.5, -1.0])
    for gamma, expected in ((1.0, 0.693147), (0.5, 0.474077)):
        (loss,) = Preference("simpo", beta=2.0, gamma=gamma)._by_pair(ReferenceOps(), means, means)
        assert loss == pytest.approx(expected, abs=1e-6)
    (loss,) = Preference("orpo", beta=1.0)._by_pair(ReferenceOps(), means, means)
    assert loss == pytest.approx(0.5 + 0.320300, abs=1e-5)  # -log p, and -log sigmoid(0.974077)


def test_the_divergences_of_distillation_have_the_published_values():
    """TRL's test of GKD: probabilities (0.1, 0.9) and (0.9, 0.1)."""
    p, q = np.log([[0.1, 0.9]]), np.log([[0.9, 0.1]])
    for kind, expected in (("forward", 1.757780), ("reverse", 1.757780), ("jsd", 0.368064)):
        assert Distil(kind=kind)._divergence(ReferenceOps(), q, p, kind, 1.0)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo"])
def test_metrics_and_means_of_preference_are_those_of_completions_of_different_lengths(kind):
    """The accuracy is the weighted share of pairs whose chosen completion has the larger reward."""
    suite = TestPreference()
    suite.objective = Preference(kind, beta=0.3)
    the_plan, batch = suite.make_plan(), suite.batch()
    values = {t.name: the_plan.initial_values(t) for t in the_plan.tensors}
    logits = torch.from_numpy(reference_logits(the_plan, values, batch))
    by_token = logits.log_softmax(-1).gather(-1, torch.from_numpy(batch["targets"]).long()[..., None])[..., 0].numpy()
    total, length = (by_token * batch["mask"]).sum(1), batch["mask"].sum(1)
    assert len(set(length)) > 1
    total = total if kind == "simpo" else total - batch["reference"]
    gaps, means = ((x[0::2] - x[1::2]) for x in (total, total / length))
    weights = (batch["weights"][0::2] + batch["weights"][1::2]) / batch["weights"].sum()
    margins = 0.3 * (means if kind == "simpo" else gaps)
    metrics = reference_metrics(the_plan, values, batch)
    assert metrics["margin"] == pytest.approx(margins @ weights) and abs(metrics["margin"]) > 1e-3
    assert metrics["accuracy"] == pytest.approx((margins > 0) @ weights) and metrics["accuracy"] != 0.5
    softplus = np.logaddexp(0, -(margins - 0.5 * (kind == "simpo")))
    losses = (means - 1 / 0.6) ** 2 if kind == "ipo" else softplus
    assert reference_loss(the_plan, values, batch) == pytest.approx(losses @ weights)
    if kind != "simpo":  # the first pair differs by 1e-3 nats; the second by 5e-5, which counts as a tie
        near = total + batch["reference"] - [1e-3, 0, 0, 5e-5]
        accuracy = reference_metrics(the_plan, values, {**batch, "reference": near.astype(np.float32)})["accuracy"]
        assert accuracy == pytest.approx([1, 0.5] @ weights)


@pytest.mark.parametrize("engine", SOME, ids=["cpu", "float64", "ggml", "metal", "cuda", "vulkan"])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_distillation_agrees_with_torch_in_float64(engine, kind, tmp_path):
    """The teacher is a model of another family; KLDivLoss and a mixture of probabilities are torch's."""
    teacher = write_base(tmp_path / "teacher.gguf", "qwen2", tokenizer=None)
    objective = Distil(str(tmp_path / "teacher.gguf"), kind, temperature=2.0, hard=0.3, beta=0.4)
    objective.second_model = teacher
    the_plan = plan("llama", objective=objective)
    the_plan = the_plan.with_frozen(objective.tensors(the_plan))
    batch = add_weights(batches().batch(0))
    values = {t.name: torch.from_numpy(the_plan.initial_values(t)).double() for t in the_plan.tensors}
    student = {t.name: values[t.name].requires_grad_() for t in the_plan.trainable}
    ids = torch.from_numpy(batch["tokens"]).long()
    logits = FORWARD["llama"](student, the_plan.model, ids)
    soft = FORWARD["qwen2"]({n.removeprefix("teacher."): v for n, v in values.items() if "teacher" in n}, teacher, ids)
    log_q, log_p = (x.div(2.0).log_softmax(-1) for x in (logits, soft))
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    log_m = torch.log(0.4 * log_p.exp() + 0.6 * log_q.exp())
    divergence = {
        "forward": kl(log_q, log_p), "reverse": kl(log_p, log_q), "jsd": 0.4 * kl(log_m, log_p) + 0.6 * kl(log_m, log_q)
    }[kind].sum(-1)  # fmt: skip
    weights = torch.from_numpy(batch["weights"]).double()
    hard = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch["targets"]).long().flatten(), reduction="none"
    ).view_as(weights)
    loss = ((0.7 * 4 * divergence + 0.3 * hard) * weights).sum() / weights.sum()
    expected = dict(zip(student, torch.autograd.grad(loss, list(student.values())), strict=True))
    with build(engine, the_plan) as session:
        for name, ours in session.gradients(batch).items():
            theirs = expected[name].numpy()
            assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs), name
        assert session.evaluate([batch]) == pytest.approx(((hard * weights).sum() / weights.sum()).item(), rel=1e-5)
        plain = (kl(logits.log_softmax(-1), soft.log_softmax(-1)).sum(-1) * weights).sum() / weights.sum()
        assert session.metrics([batch])["kl"] == pytest.approx(plain.item(), rel=1e-5)
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("engine", SOME, ids=["cpu", "float64", "ggml", "metal", "cuda", "vulkan"])
@pytest.mark.parametrize("k", [3, VOCAB])
def test_distillation_of_a_teachers_likeliest_tokens_agrees_with_torch_in_float64(engine, k):
    """With all tokens the divergence is KLDivLoss."""
    objective = Distil("teacher.gguf", temperature=2.0, hard=0.0, top_k=k)
    inputs = {**batches().inputs, **objective.precomputed(batches().inputs)}
    objective.second_model = dataclasses.replace(MODELS["llama"], vocab=VOCAB)
    model = MODELS["llama"].fit(token_dataset(VOCAB))
    the_plan = Scratch().plan(model, Setup(inputs, rows=3, objective=objective))
    batch, draw = add_weights(batches().batch(0)), np.random.default_rng(1)
    teacher = torch.from_numpy(draw.normal(0, 3, (*batch["targets"].shape, VOCAB))).log_softmax(-1)
    batch = {**batch, **objective.precompute(teacher.float().numpy(), batch)}
    student = {t.name: torch.from_numpy(the_plan.initial_values(t)).double().requires_grad_() for t in the_plan.tensors}
    logits = FORWARD["llama"](student, model, torch.from_numpy(batch["tokens"]).long())
    likeliest = teacher.topk(k, -1)
    log_p = likeliest.values.div(2.0).log_softmax(-1)
    log_q = logits.div(2.0).log_softmax(-1).gather(-1, likeliest.indices)
    divergence = torch.nn.KLDivLoss(reduction="none", log_target=True)(log_q, log_p).sum(-1)
    weights = torch.from_numpy(batch["weights"]).double()
    loss = 4 * (divergence * weights).sum() / weights.sum()
    expected = dict(zip(student, torch.autograd.grad(loss, list(student.values())), strict=True))
    with build(engine, the_plan) as session:
        for name, ours in session.gradients(batch).items():
            theirs = expected[name].numpy()
            assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs), name
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 6}, "the teacher's context is 6, the model's 12; set model.context=6"),
        ({"vocab": 50}, "the teacher has 50 tokens, the model 40; add data.tokenizer=teacher.gguf"),
    ],
)
def test_a_teacher_with_a_shorter_context_or_another_vocabulary_is_rejected(sizes, message):
    objective, model = Distil("teacher.gguf"), dataclasses.replace(MODELS["llama"], vocab=VOCAB)
    objective.second_model = dataclasses.replace(model, **sizes)
    with pytest.raises(UserError, match=re.escape(f"objective.teacher=teacher.gguf: {message}")):
        objective.check_inputs(model, batches().inputs)


def test_a_language_model_does_not_teach_a_model_of_images():
    objective = Distil("teacher.gguf")
    objective.second_model = dataclasses.replace(MODELS["llama"], vocab=VOCAB)
    with pytest.raises(UserError, match=r"objective.teacher=teacher.gguf: the teacher has 40 tokens"):
        objective.check_inputs(ViT(), batches().inputs)


def test_rows_that_an_objective_compares_stay_together():
    with pytest.raises(UserError, match="compares all rows"):
        dataclasses.replace(TestContrastive().make_plan(), accumulate=2)
    with pytest.raises(UserError, match="multiple of 2 rows, not 3"):
        pair = TestPreference()
        dataclasses.replace(pair.make_plan(), rows=3)


def test_class_targets_need_a_weight_each_so_pairs_need_a_preference_objective():
    with pytest.raises(UserError, match=r"needs a weight for each target, .* data=preference is for"):
        dataclasses.replace(TestPreference().make_plan(), objective=CrossEntropy())
