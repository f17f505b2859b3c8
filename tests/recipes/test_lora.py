"""The seed's LoRA: a base that stays as it is, and adapters whose numbers are those of a float64 reference."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from float64_models import FORWARD
from float64_models import loss as reference_loss
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tiny import CONTEXT, batches, replace_initial_values, write_base

from toyexp import AdamW, Normal, Setup, TensorSpec, UserError
from toyexp.batching.tokens import Dropout
from toyexp.config.request import Request
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_adapter
from toyexp.interfaces.plan import export_tensors, lora_names
from toyexp.interfaces.recipe import start_session
from toyexp.plugins.discovery import load
from toyexp.reference.engine import reference_loss as reference_ops_loss
from toyexp.tokenizers.byte_level import Bytes
from toyexp.training.experiment import prepare
from toyexp_ggml.engines import GGMLCPU
from toyexp_recipes.base import Full
from toyexp_recipes.lora import Lora
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1)}
BASES = {"llama": ["q", "v", "ffn_*"], "llama_tied_bias": ["*"], "gpt2": ["qkv", "o", "up", "down"]}


def planned(path, name, accumulate=1, kind="f32", **settings):
    model = write_base(path / "base.gguf", name, kind)
    recipe = Lora(base=str(path / "base.gguf"), **{"rank": 3, "targets": BASES[name], **settings})
    recipe.check()
    return recipe, recipe.plan(model, Setup(batches().inputs, rows=3 // accumulate, accumulate=accumulate, seed=2))


def stirred(plan):
    """The same plan with B away from zero, where A has a gradient too."""
    draw = np.random.default_rng(0)
    return replace_initial_values(
        plan, {t.name: draw.normal(0, 0.3, t.shape).astype(np.float32) for t in plan.trainable}
    )


def reference(plan):
    """float64 leaves for the adapters, and a function that gives the weights W + scale B A for a batch's logits."""
    values = {t.name: torch.from_numpy(plan.initial_values(t)).double() for t in plan.tensors}
    leaves = {t.name: values[t.name].requires_grad_() for t in plan.trainable}

    def logits(batch):
        weights = {n: v for n, v in values.items() if n not in leaves}
        for adapter in plan.adapters:
            a, b = lora_names(adapter.target)
            weights[adapter.target] = weights[adapter.target] + adapter.scale * leaves[b] @ leaves[a]
        return FORWARD[plan.model.name](weights, plan.model, torch.from_numpy(batch["tokens"]).long())

    return leaves, logits


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BASES)
def test_logits_and_every_adapters_gradient_against_float64(tmp_path, name, engine):
    recipe, plan = planned(tmp_path, name, alpha=4.5)
    plan, batch = stirred(plan), batches().batch(0)
    leaves, forward = reference(plan)
    logits = forward(batch)
    grads = torch.autograd.grad(reference_loss(logits, batch), list(leaves.values()))
    with start_session(recipe, ENGINES[engine], plan) as session:
        np.testing.assert_allclose(session.logits(batch), logits.detach().numpy(), atol=2e-5)
        ours = session.gradients(batch)
        assert ours.keys() == leaves.keys()
        for tensor, theirs in zip(leaves, grads, strict=True):
            assert np.linalg.norm(ours[tensor] - theirs.numpy()) <= 1e-5 * np.linalg.norm(theirs.numpy()), tensor


def test_twenty_steps_are_those_of_torch_optim_adamw_on_the_adapters(tmp_path):
    recipe, plan = planned(tmp_path, "llama")
    leaves, forward = reference(plan)
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


def losses(recipe, engine, plan, stream, steps):
    adamw = dataclasses.replace(AdamW.for_lora(), lr=0.01)
    with start_session(recipe, engine, plan) as session:
        curve = [session.step(stream.batch(k), adamw.hp_for_step(k)).loss for k in range(steps)]
        return curve, session.evaluate(stream.held_out()), {t.name: session.download(t.name) for t in plan.tensors}


@pytest.mark.parametrize(("name", "settings"), [("llama", {"dropout": 0.2, "accumulate": 3}), ("gpt2", {})])
def test_fifty_steps_agree_between_torch_and_ggml(tmp_path, name, settings):
    recipe, plan = planned(tmp_path, name, **settings)
    stream = Dropout(batches(), plan) if plan.dropout_adapters else batches()
    (one, held, _), (other, held_other, _) = (losses(recipe, e, plan, stream, 50) for e in ENGINES.values())
    assert one[-1] < one[0] - 0.02
    np.testing.assert_allclose(one, other, atol=1e-3)
    assert held == pytest.approx(held_other, abs=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_stays_as_it_is_and_takes_no_optimiser_memory(tmp_path, engine):
    recipe, plan = planned(tmp_path, "llama")
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


def test_training_starts_from_the_base_itself(tmp_path):
    recipe, plan = planned(tmp_path, "llama", init_scale=0.5)
    full = Full(base=recipe.base)
    with (
        start_session(recipe, TorchCPU(threads=1), plan) as one,
        start_session(full, TorchCPU(threads=1), full.plan(plan.model, Setup(batches().inputs, rows=3))) as other,
    ):
        np.testing.assert_array_equal(one.logits(batches().batch(0)), other.logits(batches().batch(0)))
        assert one.download("blk.0.attn_q.weight.lora_a").std() == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize(
    ("settings", "scale", "alpha"),
    [({}, 1, 4), ({"alpha": 12.0}, 3, 12), ({"alpha": 12.0, "rslora": True}, 6, 24)],
)
def test_the_adapter_file_holds_what_llama_cpp_reads(tmp_path, settings, scale, alpha):
    _, plan = planned(tmp_path, "llama", rank=4, targets=["k"], **settings)
    assert {a.scale for a in plan.adapters} == {scale}
    values = {t.name: plan.initial_values(t) for t in stirred(plan).trainable}
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


def test_the_merged_model_computes_what_base_and_adapter_do(tmp_path):
    recipe, plan = planned(tmp_path, "gpt2", alpha=5.0)
    plan, batch = stirred(plan), batches().batch(0)
    with start_session(recipe, TorchCPU(threads=1), plan) as session:
        logits = session.logits(batch)
        merged = export_tensors(plan, {t.name: session.download(t.name) for t in plan.tensors})
    full = Full(base=recipe.base)
    plain = replace_initial_values(full.plan(plan.model, Setup(batches().inputs, rows=3)), merged)
    with start_session(full, TorchCPU(threads=1), plain) as session:
        np.testing.assert_allclose(session.logits(batch), logits, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "targets", "chosen"),
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
def test_targets_are_names_and_patterns(tmp_path, name, targets, chosen):
    _, plan = planned(tmp_path, name, targets=targets)
    assert [a.target for a in plan.adapters] == [f"blk.{c}.weight" for c in chosen]


def test_a_models_own_name_of_a_linear_wins_over_what_that_is_short_for():
    """As the errors offer them."""
    shapes = {"qkv": (96, 32), "up": (64, 32), "ffn_down": (32, 64)}
    names = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    specs = {name: TensorSpec(name, shape, Normal(0.02)) for name, shape in names.items()}

    def chosen(*targets):
        return [name.removesuffix(".weight") for name in Lora(base="x", targets=list(targets))._targets(specs)]

    assert chosen("qkv", "down") == ["blk.0.qkv", "blk.0.ffn_down", "blk.1.qkv", "blk.1.ffn_down"]
    assert chosen("up") == ["blk.0.up", "blk.1.up"]
    with pytest.raises(UserError, match="there is: ffn_down, qkv, up"):
        chosen("gate")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama", {"targets": ["attn_w"]}, "did you mean attn_"),
        ("llama", {"targets": ["attn_norm"]}, "recipe.targets="),
        ("llama", {"targets": ["output"]}, "[output]: is not a linear of a block; there is: attn_k, "),
        ("llama", {"targets": ["q", "blk.7.*"]}, "recipe.targets="),
        ("gpt2", {"targets": ["q"]}, "did you mean attn_qkv"),
        ("llama", {"targets": ["model.layers.9.self_attn.q_proj"]}, "self_attn.q_proj]: there is: attn_k, "),
        ("llama", {"targets": ["blk.9.q"]}, "recipe.targets=[blk.9.q]: "),
        ("llama", {"targets": []}, "name at least one"),
        ("llama", {"rank": 0}, "recipe.rank=0: must be at least 1"),
        ("llama", {"rank": 17, "targets": ["k"]}, "blk.0.attn_k.weight is 16 x 32; use recipe.rank=16 or less"),
        ("llama", {"alpha": 0.0}, "recipe.alpha=0.0: must be above 0"),
        ("llama", {"init_scale": float("inf")}, "recipe.init_scale=inf"),
        ("llama", {"dropout": 1.0}, "recipe.dropout=1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, name, settings, words):
    with pytest.raises(UserError) as raised:
        planned(tmp_path, name, **settings)
    assert words in str(raised.value)


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_a_mask_hides_its_share_and_keeps_the_mean(tmp_path):
    _, plan = planned(tmp_path, "llama", dropout=0.3, targets=["q", "k"])
    stream = Dropout(batches(), plan)
    masks = np.stack([stream.batch(k)["blk.0.attn_q.weight.dropout"] for k in range(40)])
    assert masks.shape == (40, 3, CONTEXT, 32)
    hidden = masks == -1
    # 46080 draws: a standard deviation of 0.002.
    assert hidden.mean() == pytest.approx(0.3, abs=0.01)
    np.testing.assert_allclose(masks[~hidden], 0.3 / 0.7, rtol=1e-4)
    assert masks.mean() == pytest.approx(0, abs=0.015)


def test_a_mask_is_a_function_of_seed_adapter_and_step(tmp_path):
    _, plan = planned(tmp_path, "llama", dropout=0.3, targets=["q", "k"])
    one, again = (Dropout(batches(), plan) for _ in range(2))
    other = Dropout(batches(), dataclasses.replace(plan, seed=3))
    told = Dropout(batches(), dataclasses.replace(plan, seed=3), seed=plan.seed)
    names = [f"blk.{i}.attn_{x}.weight.dropout" for i in range(2) for x in "qk"]
    later = one.batch(5)
    drawn = [one.batch(k)[n] for k in range(2) for n in names] + [other.batch(0)[names[0]]]
    for n in names:
        np.testing.assert_array_equal(again.batch(5)[n], later[n])
        np.testing.assert_array_equal(told.batch(5)[n], later[n])
    assert len({m.tobytes() for m in drawn}) == len(drawn)


def test_masks_are_drawn_by_seed_whatever_the_seeds_of_data_and_model_are(tmp_path):
    write_base(tmp_path / "base.gguf", "llama", tokenizer=Bytes())
    (tmp_path / "book.txt").write_text("the clocks were striking. " * 99)
    words = ["engine=noop", "data=text", f"data.path={tmp_path}/book.txt", "model.context=12", "batch_size=2",
             "recipe=lora", f"recipe.base={tmp_path}/base.gguf", "recipe.dropout=0.3"]  # fmt: skip
    request = Request([], load(["toyexp.testing.null"]), ["toyexp.testing.null"])

    def drawn(*seeds):
        run = prepare(request.build_config(*words, *seeds))
        batch, (name, *_) = run.batches.batch(0), [adapter.mask for adapter in run.plan.dropout_adapters]
        return batch[name].tobytes(), batch["tokens"].tobytes()

    masks, tokens = drawn("seed=1")
    assert drawn("seed=1", "model_seed=2") == (masks, tokens)
    assert drawn("seed=1", "data_seed=2") == (masks, drawn("seed=2")[1])
    assert drawn("seed=2", "data_seed=1", "model_seed=1")[0] != masks


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_acts_on_training_and_not_on_looking(tmp_path, engine):
    """A training step's loss is that of the reference with the masks; evaluation and logits know no masks."""
    recipe, plan = planned(tmp_path, "llama", dropout=0.4)
    plan = stirred(plan)
    batch, plain = Dropout(batches(), plan).batch(0), batches().batch(0)
    values = {t.name: plan.initial_values(t) for t in plan.tensors}
    none = {a.mask: np.zeros_like(batch[a.mask]) for a in plan.dropout_adapters}
    masked, bare = reference_ops_loss(plan, values, batch), reference_ops_loss(plan, values, {**plain, **none})
    assert abs(masked - bare) > 0.01
    with start_session(recipe, ENGINES[engine], plan) as session:
        assert session.evaluate([plain]) == pytest.approx(bare, abs=1e-5)
        np.testing.assert_allclose(session.logits({"tokens": plain["tokens"]}), session.logits(plain), atol=1e-6)
        assert session.step(batch, AdamW.for_lora().hp_for_step(0)).loss == pytest.approx(masked, abs=1e-5)


def test_an_engine_that_forgets_the_batch_is_told(tmp_path):
    _, plan = planned(tmp_path, "llama", dropout=0.4)
    with pytest.raises(UserError, match=r"pass the batch to plan"):
        plan.params({t.name: None for t in plan.tensors})


# -- a base that is not float32 ---------------------------------------------------------------------------------------


def requantise(path, kind):
    """The file with its matrices in another type of ggml."""
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
def test_packed_computes_the_same_and_holds_no_more_than_the_file(tmp_path, kind):
    recipe, plan = planned(tmp_path, "llama_tied_bias", targets=["q", "o"])
    model = dataclasses.replace(plan.model, d_ff=64)
    write_base(tmp_path / "base.gguf", "llama_tied_bias", d_ff=64)
    requantise(tmp_path / "base.gguf", GGMLQuantizationType[kind])
    batch, results = batches().batch(0), {}
    for packed in (False, True):
        plan = stirred(recipe.plan(model, Setup(batches().inputs, rows=3)))
        with start_session(recipe, TorchCPU(threads=1, packed=packed), plan) as session:
            held = {t.name: session.download(t.name) for t in plan.tensors}
            results[packed] = (session.logits(batch), session.gradients(batch), held)
            if packed:
                taken = sum(w.raw.nbytes for w in session._tensors.values() if hasattr(w, "raw"))
                with GGUFFile(tmp_path / "base.gguf") as file:
                    assert taken == sum(t.nbytes for t in file.tensors.values() if len(t.shape) == 2)
    (logits, gradients, held), (lean_logits, lean_gradients, lean_held) = results[False], results[True]
    np.testing.assert_allclose(lean_logits, logits, atol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(lean_gradients[name], gradient, atol=1e-6 * np.abs(gradient).max() + 1e-9)
    for name, array in held.items():
        np.testing.assert_array_equal(lean_held[name], array)
