"""muP: activations of wide models, and exported files that compute the same as the run."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny
from faults import BOOK, TEXT, words
from tiny import CONTEXT, VOCAB, batches

from toyexp import Setup, UserError
from toyexp.cli.main import main
from toyexp.interfaces.plan import apply_optimiser
from toyexp.reference.engine import reference_logits
from toyexp.testing import token_dataset
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.gpt2 import GPT2
from toyexp_models.granite import Granite
from toyexp_models.llama import Llama
from toyexp_optimisers.adamw import AdamWOptimiser
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": TorchCPU(threads=1), "ggml": GGMLCPU(threads=1)}
LR = 0.01


def rotary(cls, width, **settings):
    heads = width // 16
    return cls(d_model=width, d_ff=2 * width, n_heads=heads, n_kv_heads=heads, context=CONTEXT, **settings)


FAMILIES = {
    "llama": partial(rotary, Llama),
    "granite": partial(rotary, Granite, embedding_scale=2.0, residual_scale=0.5, logit_scale=0.5),
    "gpt2": lambda width, **settings: GPT2(
        d_model=width, d_ff=4 * width, n_heads=width // 16, context=CONTEXT, **settings
    ),
}


def make_plan(model, seed=0):
    model = model.fit(token_dataset(VOCAB))
    plan = Scratch().plan(model, Setup(batches(8).inputs, rows=8, seed=seed))
    return apply_optimiser(plan, AdamWOptimiser(mode="lora"), LR)


def measure_change(model):
    """Return the mean absolute change of the logits in three steps, over three seeds."""
    changes = []
    for seed in range(3):
        plan, stream = make_plan(model, seed), batches(8)
        with ENGINES["cpu"].realize(plan) as session:
            session.build()
            before = session.logits(stream.batch(0))
            for step in range(3):
                session.step(stream.batch(step), plan.numbers(step, LR))
            changes.append(np.abs(session.logits(stream.batch(0)) - before).mean())
    return float(np.mean(changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_change_of_logits_grows_with_width_only_without_mup(family):
    """The coordinate check of Yang et al. (2021, appendix D.1): activations after three steps, by width."""
    widths = (32, 64, 128, 256)
    usual, mup = (
        [measure_change(FAMILIES[family](w, mup=on, mup_base_width=32)) for w in widths] for on in (False, True)
    )
    assert usual[-1] > 2.5 * usual[0], usual
    assert mup[-1] < 1.3 * mup[0], mup


def test_mup_scales_rates_values_scores_and_logits_as_table_8_says():
    """Matrices of blocks: variance 1 / inputs, rate base / width. Embeddings, norms, biases: as without muP."""
    for family, make in FAMILIES.items():
        usual, mup = (make(128, vocab=VOCAB, tied=False, mup=on, mup_base_width=32) for on in (False, True))
        for before, spec in zip(usual.tensors(), mup.tensors(), strict=True):
            if spec.name.startswith("blk.") and len(spec.shape) == 2:
                assert spec.lr_scale == 0.25 and spec.init.std == pytest.approx(spec.shape[1] ** -0.5), family
            else:
                assert spec == before, family
    assert (Granite(mup=True).score_factor(16), Granite(mup=True).fold({})[0].attention_scale) == (1 / 16, 1 / 16)
    assert Granite(mup=True, attention_scale=0.3).fold({})[0].attention_scale == 0.3
    with pytest.raises(UserError, match=r"model.mup_base_width=0"):
        GPT2(mup=True, mup_base_width=0).check()


@pytest.mark.parametrize("name", ["embedding_scale", "residual_scale", "attention_scale", "logit_scale"])
def test_multipliers_of_granite_are_positive(name):
    with pytest.raises(UserError, match=rf"model\.{name}=-2\.0: must be "):
        Granite(**{name: -2.0}).check()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama_all", "granite", "granite_nope", "gpt2"])
def test_a_folded_model_computes_the_same_logits_without_mup(name, tied):
    model = replace(tiny.MODELS[name], mup=True, mup_base_width=20, tied=tied)
    plan, batch = make_plan(model), batches(8).batch(0)
    draw = np.random.default_rng(0)
    values = {t.name: plan.initial_values(t) + draw.normal(0, 0.1, t.shape).astype(np.float32) for t in plan.tensors}
    folded, tensors = plan.model.fold(values)
    expected = reference_logits(plan, values, batch)
    assert not folded.mup and folded.fold(tensors) == (folded, tensors)
    np.testing.assert_allclose(reference_logits(make_plan(folded), tensors, batch), expected, rtol=1e-5, atol=1e-5)
    unscaled = reference_logits(make_plan(replace(plan.model, mup=False)), values, batch)
    assert np.abs(unscaled - expected).max() > 0.1


def test_engines_compute_mup_as_float64_does():
    for name in ("llama", "granite", "granite_nope", "gpt2"):
        plan, batch = make_plan(replace(tiny.MODELS[name], mup=True, mup_base_width=20)), batches(8).batch(0)
        expected = reference_logits(plan, {t.name: plan.initial_values(t) for t in plan.tensors}, batch)
        for engine in ENGINES.values():
            with engine.realize(plan) as session:
                session.build()
                np.testing.assert_allclose(session.logits(batch), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["llama", "granite", "gpt2"])
def test_the_files_of_a_mup_run_have_its_held_out_loss(model, tmp_path, monkeypatch, capsys):
    """The sizes make every factor of muP differ from 1."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    mup = ["model.mup=true", "model.mup_base_width=5", "lr=0.05"]
    settings = [*words("scratch", model, "ggml"), *mup, "eval_every=6"]
    assert main([*settings, "steps=6", "checkpoint_every=6", "hydra.run.dir=run"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    events = map(json.loads, Path("run/events.jsonl").read_text().splitlines())
    trained = [e["loss"] for e in events if e["kind"] == "eval"][-1]
    data = [*BOOK, "data.eval_batches=8", "batch_size=4"]
    for place in ("run/model.gguf", *tmp_path.glob("run/checkpoints/*")):
        assert main(["eval", str(place), *data, "engine=ggml", "--json"]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(trained, rel=1e-5), place
