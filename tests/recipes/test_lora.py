"""LoRA: the base does not change, and gradients and steps of the adapters agree with a float64 reference."""

import dataclasses
import hashlib
import re

import numpy as np
import pytest
import torch
from float64_models import FORWARD
from float64_models import loss as reference_loss
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tiny import CONTEXT, MODELS, batches, replace_initial_values, write_base

from toyexp import AdamW, Normal, Setup, TensorSpec, UserError
from toyexp.batching.tokens import Dropout
from toyexp.config.request import Request
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_adapter
from toyexp.interfaces.plan import NOISE, export_tensors, lora_names
from toyexp.interfaces.recipe import start_session
from toyexp.plugins.discovery import load
from toyexp.reference.engine import reference_logits
from toyexp.reference.engine import reference_loss as reference_ops_loss
from toyexp.tokenizers.byte_level import Bytes
from toyexp.training.experiment import prepare
from toyexp_ggml.engines import GGMLCPU
from toyexp_recipes.base import Full
from toyexp_recipes.lora import Lora
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1)}
BASES = {"llama": ["q", "v", "ffn_*"], "llama_tied_bias": ["*"], "gpt2": ["qkv", "o", "up", "down"]}


def make_plan(path, name, accumulate=1, kind="f32", **settings):
    model = write_base(path / "base.gguf", name, kind)
    recipe = Lora(base=str(path / "base.gguf"), **{"rank": 3, "targets": BASES[name], **settings})
    recipe.check()
    return recipe, recipe.plan(model, Setup(batches().inputs, rows=3 // accumulate, accumulate=accumulate, seed=2))


def make_full(path, name, **settings):
    model = write_base(path / "base.gguf", name)
    recipe = Full(base=str(path / "base.gguf"), **settings)
    return recipe, recipe.plan(model, Setup(batches().inputs, rows=3, seed=2))


def randomise_adapters(plan):
    """Return the plan with random values for A, B and the base's biases; with B at zero, A would have no gradient."""
    draw = np.random.default_rng(0)
    tensors = [*plan.trainable, *(t for t in plan.tensors if t.name.endswith(".bias"))]
    scales = {t.name: 0.3 if t.trainable else 0.03 for t in tensors}  # larger biases of q and k lose digits in float32
    return replace_initial_values(
        plan, {t.name: draw.normal(0, scales[t.name], t.shape).astype(np.float32) for t in tensors}
    )


def make_reference(plan):
    """Return float64 leaves for the adapters, and a function that computes logits with the weights W + scale B A."""
    values = {t.name: torch.from_numpy(plan.initial_values(t)).double() for t in plan.tensors}
    leaves = {t.name: values[t.name].requires_grad_() for t in plan.trainable}

    def logits(batch):
        weights = {n: v for n, v in values.items() if n not in leaves}
        for adapter in plan.adapters:
            a, b = (leaves[name] for name in lora_names(adapter.target))
            update = a @ b.T if adapter.target == "token_embd.weight" else b @ a
            merged = weights[adapter.target] + adapter.scale * update
            if adapter.dora:
                merged = merged * (leaves[f"{adapter.target}.lora_magnitude"] / merged.norm(dim=1))[:, None]
            weights[adapter.target] = merged
        return FORWARD[plan.model.name](weights, plan.model, torch.from_numpy(batch["tokens"]).long())

    return leaves, logits


PATTERNS = {
    "targets": ["embed_tokens", "lm_head", "q", "down"], "rank_pattern": {"token_embd": 5, "blk.1.*": 2, "q": 4},
    "alpha_pattern": {"lm_head": 6.0},
}  # fmt: skip


DORA = {"dora": True}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "settings"), [*((n, s) for n in BASES for s in ({}, DORA)), ("llama", PATTERNS)])
def test_logits_and_every_adapters_gradient_agree_with_float64(tmp_path, name, settings, engine):
    recipe, plan = make_plan(tmp_path, name, alpha=4.5, **settings)
    plan, batch = randomise_adapters(plan), batches().batch(0)
    leaves, forward = make_reference(plan)
    logits = forward(batch)
    grads = torch.autograd.grad(reference_loss(logits, batch), list(leaves.values()))
    with start_session(recipe, ENGINES[engine], plan) as session:
        np.testing.assert_allclose(session.logits(batch), logits.detach().numpy(), atol=2e-5)
        ours = session.gradients(batch)
        assert ours.keys() == leaves.keys()
        for tensor, theirs in zip(leaves, grads, strict=True):
            assert np.linalg.norm(ours[tensor] - theirs.numpy()) <= 1e-5 * np.linalg.norm(theirs.numpy()), tensor


@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_set_rank_and_alpha_of_their_targets_and_the_first_that_matches_wins(tmp_path, rslora):
    _, plan = make_plan(tmp_path, "llama", alpha=4.5, rslora=rslora, **PATTERNS)
    ranks = {a.target: plan.tensor(lora_names(a.target)[1]).shape[1] for a in plan.adapters}
    assert ranks == {
        "token_embd.weight": 5, "blk.0.attn_q.weight": 4, "blk.0.ffn_down.weight": 3, "blk.1.attn_q.weight": 2,
        "blk.1.ffn_down.weight": 2, "output.weight": 3,
    }  # fmt: skip
    for adapter in plan.adapters:
        alpha, rank = 6.0 if adapter.target == "output.weight" else 4.5, ranks[adapter.target]
        assert adapter.scale == pytest.approx(alpha / (rank**0.5 if rslora else rank))


def test_an_adapter_file_has_the_alpha_of_most_adapters_and_scales_the_others(tmp_path):
    _, plan = make_plan(tmp_path, "llama", alpha=4.5, **PATTERNS)
    plan = randomise_adapters(plan)
    values = {t.name: plan.initial_values(t) for t in plan.trainable}
    alpha, stored = plan.adapter_file(values)
    assert alpha == 4.5 and stored.keys() == values.keys()
    for name, array in stored.items():
        np.testing.assert_allclose(array, values[name] * (6 / 4.5 if name == "output.weight.lora_b" else 1), rtol=1e-6)


def test_a_rank_may_equal_the_smaller_size_of_a_layer(tmp_path):
    _, plan = make_plan(tmp_path, "llama", rank=16, targets=["k"])
    assert plan.tensor("blk.0.attn_k.weight.lora_b").shape == plan.tensor("blk.0.attn_k.weight").shape[:1] * 2


def test_a_router_is_a_target_only_if_it_is_named():
    specs = {t.name: t for t in MODELS["olmoe"].tensors()}
    router = "blk.0.ffn_gate_inp.weight"
    assert len(specs[router].shape) == 2 and router not in Lora(base="x")._targets(specs)
    assert router in Lora(base="x", targets=["ffn_gate_inp"])._targets(specs)


def test_twenty_steps_agree_with_torch_optim_adamw(tmp_path):
    recipe, plan = make_plan(tmp_path, "llama")
    leaves, forward = make_reference(plan)
    optimiser = torch.optim.AdamW(leaves.values(), lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    adamw = dataclasses.replace(AdamW.for_lora(), lr=0.01, weight_decay=0.1)
    with start_session(recipe, TorchCPU(threads=1, dtype="float64"), plan) as session:
        for step in range(20):
            batch = batches().batch(step)
            value = reference_loss(forward(batch), batch)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            assert session.step(batch, adamw.hp_for_step(step)).loss == pytest.approx(value.item(), rel=1e-6)


def train(recipe, engine, plan, stream, steps):
    adamw = dataclasses.replace(AdamW.for_lora(), lr=0.01)
    with start_session(recipe, engine, plan) as session:
        curve = [session.step(stream.batch(k), adamw.hp_for_step(k)).loss for k in range(steps)]
        return curve, session.evaluate(stream.held_out()), {t.name: session.download(t.name) for t in plan.tensors}


@pytest.mark.parametrize(("name", "settings"), [("llama", {"dropout": 0.2, "accumulate": 3}), ("gpt2", {})])
def test_fifty_steps_agree_between_torch_and_ggml(tmp_path, name, settings):
    recipe, plan = make_plan(tmp_path, name, **settings)
    stream = Dropout(batches(), plan) if plan.dropout_adapters else batches()
    (curve, held_out_loss, _), (other_curve, other_held_out_loss, _) = (
        train(recipe, e, plan, stream, 50) for e in ENGINES.values()
    )
    assert curve[-1] < curve[0] - 0.02
    np.testing.assert_allclose(curve, other_curve, atol=1e-3)
    assert held_out_loss == pytest.approx(other_held_out_loss, abs=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_does_not_change_and_has_no_optimiser_state(tmp_path, engine):
    recipe, plan = make_plan(tmp_path, "llama")
    digest = hashlib.sha256((tmp_path / "base.gguf").read_bytes()).hexdigest()
    assert {t.name for t in plan.trainable} == {n for a in plan.adapters for n in lora_names(a.target)}
    with start_session(recipe, ENGINES[engine], plan) as session:
        for step in range(3):
            session.step(batches().batch(step), AdamW.for_lora().hp_for_step(step))
        with GGUFFile(tmp_path / "base.gguf") as file:
            for name in file.tensors:
                np.testing.assert_array_equal(session.download(name), file.read(name))
        if engine == "cpu":
            assert len(session._flat) < sum(t.size + 64 for t in plan.trainable)
        state = session._update.state
        assert state.keys() == {t.name for t in plan.trainable}
        assert all(set(slots) == {"m", "v"} for slots in state.values())
    assert hashlib.sha256((tmp_path / "base.gguf").read_bytes()).hexdigest() == digest


def test_training_starts_with_the_logits_of_the_base(tmp_path):
    recipe, plan = make_plan(tmp_path, "llama", init_scale=0.5)
    full = Full(base=recipe.base)
    with (
        start_session(recipe, TorchCPU(threads=1), plan) as lora_session,
        start_session(
            full, TorchCPU(threads=1), full.plan(plan.model, Setup(batches().inputs, rows=3))
        ) as base_session,
    ):
        np.testing.assert_array_equal(lora_session.logits(batches().batch(0)), base_session.logits(batches().batch(0)))
        assert lora_session.download("blk.0.attn_q.weight.lora_a").std() == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize(
    ("settings", "scale", "alpha"),
    [({}, 1, 4), ({"alpha": 12.0}, 3, 12), ({"alpha": 12.0, "rslora": True}, 6, 24)],
)
def test_the_adapter_file_has_the_keys_and_tensors_that_llama_cpp_reads(tmp_path, settings, scale, alpha):
    _, plan = make_plan(tmp_path, "llama", rank=4, targets=["k"], **settings)
    assert {a.scale for a in plan.adapters} == {scale}
    values = {t.name: plan.initial_values(t) for t in randomise_adapters(plan).trainable}
    write_adapter(tmp_path / "adapter.gguf", plan, values, {"name": "mine"})
    with GGUFFile(tmp_path / "adapter.gguf") as file:
        assert file.metadata == {
            "general.architecture": "llama", "general.type": "adapter", "general.name": "mine",
            "adapter.type": "lora", "adapter.lora.alpha": alpha,
        }  # fmt: skip
        shapes = {t.name: t.shape for t in file.tensors.values()}
        assert shapes == {
            f"blk.{i}.attn_k.weight.lora_{x}": shape for i in range(2) for x, shape in (("a", (4, 32)), ("b", (16, 4)))
        }
        for name in shapes:
            np.testing.assert_array_equal(file.read(name), values[name])


@pytest.mark.parametrize("dora", [False, True])
def test_the_merged_model_has_the_logits_of_base_and_adapter(tmp_path, dora):
    recipe, plan = make_plan(tmp_path, "gpt2", alpha=5.0, dora=dora)
    plan, batch = randomise_adapters(plan), batches().batch(0)
    with start_session(recipe, TorchCPU(threads=1), plan) as session:
        logits = session.logits(batch)
        merged = export_tensors(plan, {t.name: session.download(t.name) for t in plan.tensors})
    full = Full(base=recipe.base)
    plain = replace_initial_values(full.plan(plan.model, Setup(batches().inputs, rows=3)), merged)
    with start_session(full, TorchCPU(threads=1), plain) as session:
        np.testing.assert_allclose(session.logits(batch), logits, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "targets", "expected"),
    [
        ("llama", ["attn_q"], ["0.attn_q", "1.attn_q"]),
        ("llama", ["down", "o"], ["0.attn_output", "0.ffn_down", "1.attn_output", "1.ffn_down"]),
        ("llama", ["blk.1.*"], [f"1.{n}" for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up",
                                                   "ffn_down")]),
        ("llama", ["blk.0.attn_[qk].weight", "q"], ["0.attn_q", "0.attn_k", "1.attn_q"]),
        ("gpt2", ["qkv"], ["0.attn_qkv", "1.attn_qkv"]),
        ("llama", ["q_proj", "o_proj"], ["0.attn_q", "0.attn_output", "1.attn_q", "1.attn_output"]),
        ("llama", ["gate_proj", "k_proj"], ["0.attn_k", "0.ffn_gate", "1.attn_k", "1.ffn_gate"]),
        ("gpt2", ["c_attn", "c_fc"], ["0.attn_qkv", "0.ffn_up", "1.attn_qkv", "1.ffn_up"]),
        ("gpt2", ["attn.c_proj"], ["0.attn_output", "1.attn_output"]),
        ("gpt2", ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"], [f"{i}.{n}" for i in "01" for n in ("attn_qkv", "ffn_up",
                                                                                               "ffn_down")]),
        ("gpt2", ["c_proj"], ["0.attn_output", "0.ffn_down", "1.attn_output", "1.ffn_down"]),
        ("gpt2", ["transformer.h.1.attn.c_proj", "transformer.h.0.mlp.c_fc"], ["0.ffn_up", "1.attn_output"]),
        ("llama", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"], ["0.attn_q", "1.ffn_down"]),
        ("llama", ["model.layers.*.self_attn.k_proj"], ["0.attn_k", "1.attn_k"]),
        ("llama", ["self_attn.o_proj"], ["0.attn_output", "1.attn_output"]),
        ("llama", ["c_attn"], [f"{i}.attn_{x}" for i in "01" for x in "qkv"]),
        ("gpt2", ["all-linear"], [f"{i}.{n}" for i in "01" for n in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")]),
    ],
)  # fmt: skip
def test_targets_can_be_names_and_patterns(tmp_path, name, targets, expected):
    _, plan = make_plan(tmp_path, name, targets=targets)
    assert [a.target for a in plan.adapters] == [f"blk.{c}.weight" for c in expected]


def test_a_models_own_name_of_a_linear_takes_precedence_over_an_abbreviation():
    """Error messages suggest these names."""
    shapes = {"qkv": (96, 32), "up": (64, 32), "ffn_down": (32, 64)}
    names = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    specs = {name: TensorSpec(name, shape, Normal(0.02)) for name, shape in names.items()}

    def choose_targets(*targets):
        return [name.removesuffix(".weight") for name in Lora(base="x", targets=list(targets))._targets(specs)]

    assert choose_targets("qkv", "down") == ["blk.0.qkv", "blk.0.ffn_down", "blk.1.qkv", "blk.1.ffn_down"]
    assert choose_targets("up") == ["blk.0.up", "blk.1.up"]
    with pytest.raises(UserError, match="choose one of: ffn_down, qkv, up"):
        choose_targets("gate")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama", {"targets": ["attn_w"]}, "did you mean attn_"),
        ("llama", {"targets": ["attn_norm"]}, "recipe.targets="),
        ("llama_tied_bias", {"targets": ["output"]}, "[output]: the model's embedding is also its output layer, which"),
        ("llama", {"targets": ["attn_norm"]}, "[attn_norm]: is not a linear layer of a block; choose one of: attn_k, "),
        ("llama", {"rank_pattern": {"q": 40}}, "recipe.rank_pattern.q=40: blk.0.attn_q.weight is 32 x 32; use"),
        ("llama", {"rank_pattern": {"k": 4}, "targets": ["q"]}, "rank_pattern.k: matches no target of this run, such"),
        ("llama", {"rank_pattern": {"attn_w": 4}}, "recipe.rank_pattern.attn_w: did you mean attn_"),
        (
            "llama",
            {"dora": True, "targets": ["token_embd"]},
            "recipe.dora=true: applies to linear layers; leave",
        ),
        ("llama", {"rank_pattern": {"q": 0}}, "recipe.rank_pattern.q=0: must be above 0"),
        ("llama", {"alpha_pattern": {"q": 0.0}}, "recipe.alpha_pattern.q=0.0: must be above 0"),
        ("llama", {"targets": ["q", "blk.7.*"]}, "recipe.targets="),
        ("gpt2", {"targets": ["q"]}, "did you mean attn_qkv"),
        ("llama", {"targets": ["model.layers.9.self_attn.q_proj"]}, "self_attn.q_proj]: choose one of: attn_k, "),
        ("llama", {"targets": ["blk.9.q"]}, "recipe.targets=[blk.9.q]: "),
        ("llama", {"targets": []}, "name at least one"),
        ("llama", {"rank": 0}, "recipe.rank=0: must be at least 1"),
        ("llama", {"rank": 17, "targets": ["k"]}, "blk.0.attn_k.weight is 16 x 32; use recipe.rank=16 or less"),
        ("llama", {"alpha": 0.0}, "recipe.alpha=0.0: must be above 0"),
        ("llama", {"init_scale": float("inf")}, "recipe.init_scale=inf"),
        ("llama", {"dropout": 1.0}, "recipe.dropout=1.0"),
    ],
)
def test_settings_that_cannot_work_are_rejected(tmp_path, name, settings, words):
    with pytest.raises(UserError) as error:
        make_plan(tmp_path, name, **settings)
    assert words in str(error.value)


# -- DoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [*ENGINES.values(), TorchCPU(threads=1, dtype="bfloat16")])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_dora_starts_with_the_logits_of_the_base(tmp_path, engine, kind):
    recipe, plan = make_plan(tmp_path, "llama", kind=kind, init_scale=0.5, dora=True)
    _, plain = make_plan(tmp_path, "llama", kind=kind, init_scale=0.5)
    batch = batches().batch(0)
    with start_session(recipe, engine, plan) as session, start_session(recipe, engine, plain) as base:
        # In bfloat16 also the logits of the base differ from those in float32, by 0.055.
        tolerance = 0.055 if getattr(engine, "dtype", "") == "bfloat16" else 1e-5
        np.testing.assert_allclose(session.logits(batch), base.logits(batch), atol=tolerance)
        assert session.decoder().feed([1, 2]).shape == (plan.model.vocab,)
        with GGUFFile(tmp_path / "base.gguf") as file:
            for adapter in plan.adapters:
                norms = np.linalg.norm(file.read(adapter.target).astype(np.float64), axis=1)
                np.testing.assert_allclose(session.download(adapter.tensors[2]), norms, rtol=1e-6)


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_a_dropout_mask_hides_its_share_and_keeps_the_mean(tmp_path):
    _, plan = make_plan(tmp_path, "llama", dropout=0.3, targets=["q", "k"])
    stream = Dropout(batches(), plan)
    masks = np.stack([stream.batch(k)["blk.0.attn_q.weight.dropout"] for k in range(40)])
    assert masks.shape == (40, 3, CONTEXT, 32)
    hidden = masks == -1
    # 46080 draws: a standard deviation of 0.002.
    assert hidden.mean() == pytest.approx(0.3, abs=0.01)
    np.testing.assert_allclose(masks[~hidden], 0.3 / 0.7, rtol=1e-4)
    assert masks.mean() == pytest.approx(0, abs=0.015)


def test_a_dropout_mask_depends_on_seed_adapter_and_step(tmp_path):
    _, plan = make_plan(tmp_path, "llama", dropout=0.3, targets=["q", "k"])
    stream, same_stream = (Dropout(batches(), plan) for _ in range(2))
    other_seed = Dropout(batches(), dataclasses.replace(plan, seed=3))
    explicit_seed = Dropout(batches(), dataclasses.replace(plan, seed=3), seed=plan.seed)
    names = [f"blk.{i}.attn_{x}.weight.dropout" for i in range(2) for x in "qk"]
    batch = stream.batch(5)
    masks = [stream.batch(k)[n] for k in range(2) for n in names] + [other_seed.batch(0)[names[0]]]
    for n in names:
        np.testing.assert_array_equal(same_stream.batch(5)[n], batch[n])
        np.testing.assert_array_equal(explicit_seed.batch(5)[n], batch[n])
    assert len({m.tobytes() for m in masks}) == len(masks)


def test_dropout_masks_depend_on_seed_and_not_on_data_seed_or_model_seed(tmp_path):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes())
    (tmp_path / "book.txt").write_text("the clocks were striking. " * 99)
    words = ["engine=noop", "data=text", f"data.path={tmp_path}/book.txt", "model.context=12", "batch_size=2",
             "recipe=lora", f"recipe.base={tmp_path}/base.gguf", "recipe.dropout=0.3"]  # fmt: skip
    request = Request([], load(["toyexp.testing.null"]), ["toyexp.testing.null"])

    def draw_batch(*seeds):
        run = prepare(request.build_config(*words, *seeds))
        batch, (name, *_) = run.batches.batch(0), [adapter.mask for adapter in run.plan.dropout_adapters]
        return batch[name].tobytes(), batch["tokens"].tobytes()

    masks, tokens = draw_batch("seed=1")
    assert draw_batch("seed=1", "model_seed=2") == (masks, tokens)
    assert draw_batch("seed=1", "data_seed=2") == (masks, draw_batch("seed=2")[1])
    assert draw_batch("seed=2", "data_seed=1", "model_seed=1")[0] != masks


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_acts_in_training_and_not_in_evaluation(tmp_path, engine):
    """A training step's loss is that of the reference with masks; evaluation and logits use no masks."""
    recipe, plan = make_plan(tmp_path, "llama", dropout=0.4)
    plan = randomise_adapters(plan)
    batch, plain = Dropout(batches(), plan).batch(0), batches().batch(0)
    values = {t.name: plan.initial_values(t) for t in plan.tensors}
    empty_masks = {a.mask: np.zeros_like(batch[a.mask]) for a in plan.dropout_adapters}
    loss_with_masks, loss_without_masks = (
        reference_ops_loss(plan, values, batch),
        reference_ops_loss(plan, values, {**plain, **empty_masks}),
    )
    assert abs(loss_with_masks - loss_without_masks) > 0.01
    with start_session(recipe, ENGINES[engine], plan) as session:
        assert session.evaluate([plain]) == pytest.approx(loss_without_masks, abs=1e-5)
        np.testing.assert_allclose(session.logits({"tokens": plain["tokens"]}), session.logits(plain), atol=1e-6)
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(loss_with_masks, abs=1e-5)


# -- noise on embeddings ----------------------------------------------------------------------------------------------


def test_neftunes_noise_is_uniform_and_depends_on_seed_and_step(tmp_path):
    _, plan = make_plan(tmp_path, "llama", neftune=5.0, targets=["q"])
    noise = np.stack([Dropout(batches(), plan).batch(k)[NOISE] for k in range(40)])
    assert noise.shape == (40, 3, CONTEXT, 32) and noise.dtype == np.float32
    widest = 5 / np.sqrt(CONTEXT * 32)
    # Uniform numbers between -w and w have the mean 0, the standard deviation w / sqrt(3), and few beyond 0.99 w.
    assert 0.999 * widest < noise.max() <= widest and -widest <= noise.min() < -0.999 * widest
    assert noise.mean() == pytest.approx(0, abs=0.01 * widest)
    assert noise.std() == pytest.approx(widest / np.sqrt(3), rel=0.01)
    assert (np.abs(noise) > 0.99 * widest).mean() == pytest.approx(0.01, abs=0.002)
    assert len({n.tobytes() for n in noise}) == 40
    assert np.array_equal(Dropout(batches(), plan).batch(7)[NOISE], noise[7])
    assert not np.array_equal(Dropout(batches(), dataclasses.replace(plan, seed=3)).batch(7)[NOISE], noise[7])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [
    lambda path: make_plan(path, "llama", neftune=40.0, dropout=0.4),
    lambda path: make_plan(path, "llama", neftune=40.0, targets=["token_embd", "output", "q"]),
    lambda path: make_plan(path, "llama_tied_bias", neftune=40.0, accumulate=3),
    lambda path: make_full(path, "gpt2", neftune=40.0),
])  # fmt: skip
def test_neftunes_noise_is_added_to_embeddings_in_training_only(tmp_path, engine, make):
    recipe, plan = make(tmp_path)
    plan = randomise_adapters(plan) if plan.adapters else plan
    batch, plain = Dropout(batches(), plan).batch(0), batches().batch(0)
    values = {t.name: plan.initial_values(t).astype(np.float64) for t in plan.tensors}
    silent = {name: np.zeros_like(array) for name, array in batch.items() if name not in plain}
    with_noise, without_noise = (reference_ops_loss(plan, values, b) for b in (batch, {**plain, **silent}))
    assert abs(with_noise - without_noise) > 1e-3
    with start_session(recipe, ENGINES[engine], plan) as session:
        assert session.evaluate([plain]) == pytest.approx(without_noise, abs=1e-5)
        np.testing.assert_allclose(session.decoder().feed(plain["tokens"][0]), session.logits(plain)[0, -1], atol=1e-5)
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(with_noise, abs=1e-5)


def test_the_reference_adds_neftunes_noise_to_the_rows_of_the_table(tmp_path):
    """Each position of the batch gets a token of its own, whose row has the noise, in a model without noise."""
    _, plan = make_full(tmp_path, "llama", neftune=40.0)
    batch = Dropout(batches(), plan).batch(0)
    values = {t.name: plan.initial_values(t).astype(np.float64) for t in plan.tensors}
    noisy = reference_logits(plan, values, batch)
    table, ids = values["token_embd.weight"], batch["tokens"]
    rows = (table[ids] + batch[NOISE]).reshape(-1, table.shape[1])
    plain = dataclasses.replace(plan, neftune=0.0, inputs=batches().inputs)
    positions = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
    with_rows = reference_logits(plain, {**values, "token_embd.weight": rows}, {"tokens": positions})
    np.testing.assert_allclose(noisy, with_rows, atol=1e-9)


def test_neftune_is_for_text_and_within_bounds(tmp_path):
    for alpha in (-1.0, 1e30):
        with pytest.raises(UserError, match=rf"recipe.neftune={re.escape(str(alpha))}: must be at least 0 and at most"):
            make_plan(tmp_path, "llama", neftune=alpha)


def test_plan_params_without_the_batch_raises(tmp_path):
    _, plan = make_plan(tmp_path, "llama", dropout=0.4)
    with pytest.raises(UserError, match=r"pass the batch to plan"):
        plan.params({t.name: None for t in plan.tensors})


# -- a base that is not float32 ---------------------------------------------------------------------------------------


def requantise_file(path, kind):
    """Rewrite the file with its matrices in another GGUF type."""
    with GGUFFile(path) as file:
        tensors = {name: file.read(name) for name in file.tensors}
    writer = GGUFWriter(path, "llama")
    for name, array in tensors.items():
        if array.ndim == 2:
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1"])
def test_packed_weights_have_the_same_results_and_the_size_of_the_file(tmp_path, kind):
    recipe, plan = make_plan(tmp_path, "llama_tied_bias", targets=["q", "o"])
    model = dataclasses.replace(plan.model, d_ff=64)
    write_base(tmp_path / "base.gguf", "llama_tied_bias", d_ff=64)
    requantise_file(tmp_path / "base.gguf", GGMLQuantizationType[kind])
    batch, results = batches().batch(0), {}
    for packed in (False, True):
        plan = randomise_adapters(recipe.plan(model, Setup(batches().inputs, rows=3)))
        with start_session(recipe, TorchCPU(threads=1, packed=packed), plan) as session:
            weights = {t.name: session.download(t.name) for t in plan.tensors}
            results[packed] = (session.logits(batch), session.gradients(batch), weights)
            if packed:
                packed_bytes = sum(w.raw.nbytes for w in session._tensors.values() if hasattr(w, "raw"))
                with GGUFFile(tmp_path / "base.gguf") as file:
                    assert packed_bytes == sum(t.nbytes for t in file.tensors.values() if len(t.shape) == 2)
    (logits, gradients, weights), (packed_logits, packed_gradients, packed_weights) = results[False], results[True]
    np.testing.assert_allclose(packed_logits, logits, atol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(packed_gradients[name], gradient, atol=1e-6 * np.abs(gradient).max() + 1e-9)
    for name, array in weights.items():
        np.testing.assert_array_equal(packed_weights[name], array)
