"""Dropout in models: masks of the batch in training, none in evaluation, the same on every engine."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import float64_models as float64
import numpy as np
import pytest
import tiny
import torch
from faults import BOOK, TEXT, words
from stacks import Job, build_stack, take_all, train_alone
from tiny import VOCAB, batches

from toyexp import Setup, UserError
from toyexp.batching.tokens import Dropout
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.plan import apply_optimiser
from toyexp.reference.engine import reference_logits
from toyexp.reference.forward import reason_to_recompute
from toyexp.testing import token_dataset
from toyexp_ggml.engines import GGMLCPU, GGMLMetal
from toyexp_models.gpt2 import GPT2
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

ENGINES = {
    "cpu": TorchCPU(threads=1),
    "cpu_recompute": TorchCPU(threads=1, recompute=True),
    "ggml": GGMLCPU(threads=1),
    "ggml_recompute": GGMLCPU(threads=1, recompute=True),
    "metal": GGMLMetal(emulate=True),
}
LR = 0.01


def make_plan(dropout=0.3, name="gpt2", seed=0, **settings):
    model = replace(tiny.MODELS[name], dropout=dropout).fit(token_dataset(VOCAB))
    plan = Scratch().plan(model, Setup(batches().inputs, rows=3, seed=seed, **settings))
    return apply_optimiser(plan, AdamWOptimiser(mode="lora"), LR)


def build_session(engine, plan):
    session = ENGINES[engine].realize(plan)
    session.build()
    return session


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["gpt2", "gpt2_untied", "lab"])
def test_gradients_with_masks_are_those_of_float64(name, engine):
    plan = make_plan(name=name)
    batch = Dropout(batches(), plan).batch(0)
    factors = {n: torch.from_numpy(1 + batch[f"{n}.dropout"].astype(np.float64)) for n in list_layers(plan)}
    usual = float64.FORWARD[plan.model.name]
    forward = partial(usual, drop=lambda x, layer: x * factors[layer])
    _, loss, expected = float64.gradients(forward, plan, batch)
    _, loss_without_masks, _ = float64.gradients(usual, plan, batch)
    with build_session(engine, plan) as session:
        for tensor, gradient in session.gradients(batch).items():
            assert np.linalg.norm(gradient - expected[tensor]) <= 1e-4 * np.linalg.norm(expected[tensor]) + 1e-8, tensor
        assert session.evaluate([batches().batch(0)]) == pytest.approx(loss_without_masks, rel=1e-5)
        assert session.step(batch, plan.numbers(0, LR)).loss == pytest.approx(loss, rel=1e-5)
    assert abs(loss - loss_without_masks) > 1e-4


def list_layers(plan):
    return ["token_embd", *(f"blk.{i}.{n}" for i in range(plan.model.n_layers) for n in ("attn_output", "ffn_down"))]


def test_each_mask_drops_its_own_share_and_keeps_the_mean():
    plan = make_plan(0.3)
    masks = [Dropout(batches(), plan).batch(k) for k in range(30)]
    names = [f"{name}.dropout" for name in list_layers(plan)]
    assert plan.dropout_shares == dict.fromkeys(names, 0.3)
    for name in names:
        numbers = np.stack([batch[name] for batch in masks])
        assert numbers.shape[1:] == (3, tiny.CONTEXT, 32)
        assert (numbers == -1).mean() == pytest.approx(0.3, abs=0.01) and numbers.mean() == pytest.approx(0, abs=0.02)
    assert len({masks[k][name].tobytes() for k in range(3) for name in names}) == 3 * len(names)
    other = Dropout(batches(), make_plan(0.3, seed=1)).batch(0)
    assert not np.array_equal(other[names[0]], masks[0][names[0]])


@pytest.mark.parametrize("name", ["gpt2", "lab"])
def test_a_model_without_dropout_ignores_masks(name):
    """For example a teacher, which reads the same batch as the model that it teaches."""
    plan, without = make_plan(0.3, name), make_plan(0.0, name)
    assert not without.dropout_shares and without.inputs.keys() == batches().inputs.keys()
    with build_session("cpu", replace(without, inputs=plan.inputs)) as session:
        masked, plain = Dropout(batches(), plan).batch(0), batches().batch(0)
        np.testing.assert_array_equal(session.logits(masked), session.logits(plain))
    values = {t.name: without.initial_values(t) for t in without.tensors}
    np.testing.assert_array_equal(*(reference_logits(without, values, batch) for batch in (masked, plain)))


def test_thirty_steps_agree_between_engines():
    plan = make_plan(0.2)
    stream, losses = Dropout(batches(), plan), []
    for engine in ("cpu", "ggml"):
        with build_session(engine, plan) as session:
            losses.append([session.step(stream.batch(k), plan.numbers(k, LR)).loss for k in range(30)])
    np.testing.assert_allclose(*losses, atol=1e-3)
    assert losses[0][-1] < losses[0][0] - 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_text_generation_uses_no_masks_and_caches_keys(engine):
    plan, ids = make_plan(0.5), np.arange(5, dtype=np.int32)
    assert reason_to_recompute(plan) is None
    with build_session(engine, plan) as session, build_session(engine, make_plan(0.0)) as without:
        np.testing.assert_allclose(session.decoder().feed(ids), without.decoder().feed(ids), atol=1e-6)


def test_runs_of_a_stack_draw_their_own_masks():
    jobs = [Job(make_plan(0.3, seed=i), LR, i) for i in range(2)]
    stack, sessions = build_stack(jobs, TorchCPU(threads=1, dtype="float64"))
    losses = np.array([take_all(stack, jobs, step) for step in range(3)])
    for row, job in enumerate(jobs):
        expected, _ = train_alone(job, 3, TorchCPU(threads=1, dtype="float64"))
        np.testing.assert_allclose(losses[:, row, 0], expected[:, 0], rtol=1e-9)
    for session in sessions:
        session.close()


def read_losses(directory):
    events = map(json.loads, Path(directory, "events.jsonl").read_text().splitlines())
    return {(e["kind"], e["step"]): e["loss"] for e in events if e["kind"] in ("step", "eval")}


@pytest.mark.parametrize("engine", ["cpu", "ggml"])
def test_a_resumed_run_equals_an_uninterrupted_one_and_its_file_has_no_dropout(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    settings = [*words("scratch", "gpt2", engine), "callbacks=[constant,events,gguf_export]", "checkpoint_every=3"]
    for name, dropout, steps in (("whole", 0.3, 6), ("parts", 0.3, 3), ("without", 0.0, 6)):
        run = [f"model.dropout={dropout}", f"steps={steps}", f"hydra.run.dir={name}"]
        assert main([*settings, *run]) == 0, capsys.readouterr().err
    assert main(["resume=parts", "steps=6"]) == 0, capsys.readouterr().err
    whole, parts, without = map(read_losses, ("whole", "parts", "without"))
    assert all(whole[key] == parts[key] for key in whole)
    assert whole["eval", 0] == without["eval", 0] and whole["step", 1] != without["step", 1]
    with GGUFFile(Path("whole/model.gguf")) as file:
        assert not any("dropout" in key for key in file.metadata)
    capsys.readouterr()
    data = [*BOOK, "data.eval_batches=8", "batch_size=4"]
    assert main(["eval", "whole/model.gguf", *data, f"engine={engine}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(whole["eval", 6], rel=1e-5)


@pytest.mark.parametrize("value", [1.0, -0.1])
def test_a_probability_outside_its_range_is_rejected(value):
    with pytest.raises(UserError, match=rf"model\.dropout={value}: must be at least 0 and below 1"):
        GPT2(dropout=value).check()
