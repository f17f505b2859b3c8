"""model=lab: it equals the families of llama.cpp, and trains in all other combinations."""

import json
from pathlib import Path

import float64_models as float64
import numpy as np
import pytest
from faults import BOOK, TEXT, words
from tiny import SIZES, VOCAB, add_weights, batches, replace_initial_values

from toyexp import Setup, UserError
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.ops import Params
from toyexp.testing import ModelSuite, ReferenceOps, token_dataset
from toyexp_ggml.engines import GGMLCPU
from toyexp_models.lab import FAMILIES, Lab
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCPU

ENGINES = {"cpu": TorchCPU(threads=1, dtype="float64"), "ggml": GGMLCPU(threads=1)}
BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
GEMMA = {"activation": "geglu", "norm_place": "both", "tied": True, "window": 5}
# Settings with which lab equals each family. All sizes and rope settings differ from the defaults.
FAMILY = {
    "llama": {**BIASES, "head_dim": 12},
    "qwen3": {"qk_norm": "head", "head_dim": 12, "tied": True},
    "olmo2": {"norm_place": "after", "qk_norm": "width"},
    "arcee": {"activation": "relu2", "qkv_bias": True},
    "smollm3": {"nope_every": 4, "n_layers": 5, "tied": True},
    "granite": {"positions": "none", **BIASES},
    "gemma": {"activation": "geglu", "tied": True, "head_dim": 12},
    "gemma2": {**GEMMA, "window_period": 2, "score_softcap": 2.0, "final_softcap": 1.5, "head_dim": 12},
    "gemma3": {**GEMMA, "window_period": 3, "n_layers": 3, "qk_norm": "head", "rope_scale": 1.0},
    "qwen3moe": {"experts": 4, "experts_used": 3, "qk_norm": "head", "d_ff": 24, "tied": True},
    "olmoe": {"experts": 4, "qk_norm": "width", "experts_normalised": False, "n_kv_heads": 4, "d_ff": 24},
    "gpt2": {
        "norm_kind": "layer", "positions": "learned", "activation": "gelu", **BIASES, "n_kv_heads": 4, "tied": True,
    },
}  # fmt: skip
# Combinations that no family has.
OTHERS = {
    "scalars": {"value_residual": True, "residual_scalars": "branch", "qk_norm": "head", "n_layers": 3},
    "blocks": {"value_residual": True, "residual_scalars": "block", "norm_place": "after", "qk_norm": "width"},
    "layer": {"norm_kind": "layer", "norm_place": "both", "activation": "relu2", "nope_every": 2, **BIASES},
    "bare": {"norm_kind": "none", "positions": "learned", "activation": "geglu", "tied": True},
    "windows": {"window": 3, "window_period": 2, "score_softcap": 2.0, "final_softcap": 3.0, "activation": "gelu"},
    "experts": {
        "experts": 4,
        "positions": "none",
        "head_dim": 11,
        "norm_place": "both",
        "value_residual": True,
        "d_ff": 24,
    },
}


def make_lab(**settings):
    sizes = {**SIZES, "d_ff": 48, "rope_base": 500.0, "rope_scale": 2.5, "norm_eps": 1e-4}
    return Lab(**{**sizes, **settings}).fit(token_dataset(VOCAB))


def draw_values(model):
    """Return random weights. Without norms they are smaller, because log-probabilities below -85 are less exact."""
    draw, noise = np.random.default_rng(0), 0.05 if model.norm_kind == "none" else 0.2
    return {
        t.name: (t.init.draw(t.shape, 1, t.name) + draw.normal(0, noise, t.shape)).astype(np.float32)
        for t in model.tensors()
    }


def build_session(engine, model, values):
    plan = Scratch().plan(model, Setup(batches().inputs, rows=3, seed=0))
    session = ENGINES[engine].realize(replace_initial_values(plan, values))
    session.build()
    return session


def pull_back(model, gradients):
    """Return the gradients of the lab model's tensors, from those of the equal model, whose tensors fold computes.

    Each number of the equal model is a number of the lab model times a factor. fold of ones gives the factors, and fold
    of numbers that count all elements gives their places.
    """
    sizes = {t.name: int(np.prod(t.shape)) for t in model.tensors()}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    shapes = {t.name: t.shape for t in model.tensors()}
    factors = model.fold({name: np.ones(shape) for name, shape in shapes.items()})[1]
    places = model.fold({n: starts[n] + np.arange(sizes[n], dtype=float).reshape(s) for n, s in shapes.items()})[1]
    flat = np.zeros(sum(sizes.values()))
    for name, gradient in gradients.items():
        flat[np.rint(places[name] / factors[name]).astype(int)] += factors[name] * gradient
    return {name: flat[starts[name] :][: sizes[name]].reshape(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FAMILY)
def test_loss_and_gradients_are_those_of_the_equal_family(name, engine):
    model = make_lab(**FAMILY[name])
    values, batch = draw_values(model), add_weights(batches().batch(0))
    family, folded = model.fold(values)
    assert (family.name, sorted(folded)) == (name, sorted(t.name for t in family.tensors()))
    with build_session(engine, model, values) as ours, build_session(engine, family, folded) as theirs:
        assert ours.evaluate([batch]) == pytest.approx(theirs.evaluate([batch]), rel=1e-6)
        expected = pull_back(model, theirs.gradients(batch))
        for tensor, gradient in ours.gradients(batch).items():
            # ggml computes both in float32, with sums in another order. An attn_k.bias without rope has the gradient 0.
            limit = (1e-6 if engine == "cpu" else 1e-5) * np.linalg.norm(expected[tensor]) + 1e-7
            assert np.linalg.norm(gradient - expected[tensor]) <= limit, tensor


def test_every_family_but_qwen2_which_is_a_llama_is_compared():
    assert {cls.name for cls in FAMILIES} == {*FAMILY, "qwen2"}


@pytest.mark.parametrize("name", FAMILY)
def test_learned_factors_of_branches_are_multiplied_into_the_familys_weights(name):
    model = make_lab(**FAMILY[name], residual_scalars="branch")
    values = {n: v.astype(np.float64) for n, v in draw_values(model).items()}
    family, folded = model.fold(values)
    ids = {"tokens": batches().batch(0)["tokens"]}
    expected = model.forward(ReferenceOps(), Params(values), ids)
    assert family.name == name
    np.testing.assert_allclose(family.forward(ReferenceOps(), Params(folded), ids), expected, rtol=1e-9, atol=1e-12)
    unscaled = model.forward(ReferenceOps(), Params(values | {"blk.1.ffn_scale.weight": np.ones(1)}), ids)
    assert np.abs(unscaled - expected).max() > 1e-3


@pytest.mark.parametrize("name", OTHERS)
def test_a_combination_that_no_family_has_stays_a_lab(name):
    model = make_lab(**OTHERS[name])
    values = draw_values(model)
    assert model.fold(values) == (model, values)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"window": 5}),
        ("llama", {"score_softcap": 2.0}),
        ("llama", {"final_softcap": 2.0}),
        ("gemma3", {"rope_scale": 2.5}),  # local layers of gemma3 have no scale
        ("smollm3", {"nope_every": 3}),
        ("olmoe", {"qkv_bias": True}),
        ("gemma", {"ffn_bias": True}),
    ],
)
def test_a_family_without_one_of_the_settings_is_not_equal(name, settings):
    model = make_lab(**{**FAMILY[name], **settings})
    assert model.find_family() is None


@pytest.mark.parametrize("engine", [*ENGINES, "recompute"])
@pytest.mark.parametrize("name", [n for n in OTHERS if n != "experts"])
def test_other_combinations_agree_with_float64(name, engine):
    model, batch = make_lab(**OTHERS[name]), add_weights(batches().batch(0))
    plan = Scratch().plan(model, Setup(batches().inputs, rows=3, seed=0))
    plan = replace_initial_values(plan, draw_values(model))
    logits, loss, expected = float64.gradients(float64.lab, plan, batch)
    engines = {**ENGINES, "recompute": TorchCPU(threads=1, recompute=True)}
    with engines[engine].realize(plan) as session:
        session.build()
        np.testing.assert_allclose(session.logits(batch), logits, atol=2e-6 * np.abs(logits).max())
        assert session.evaluate([batch]) == pytest.approx(loss, rel=1e-6)
        # The gradient of a factor is a sum of B T d products that nearly cancel each other, and that of attn_k.bias
        # without rope is 0: their errors are absolute.
        for tensor, gradient in session.gradients(batch).items():
            limit = 5e-6 * np.linalg.norm(expected[tensor]) + (1e-6 if gradient.size == 1 else 1e-7)
            assert np.linalg.norm(gradient - expected[tensor]) <= limit, tensor


for _name, _settings in OTHERS.items():
    _model = Lab(**{"d_model": 16, "n_heads": 4, "context": 8, "d_ff": 24, **_settings, "n_layers": 3})
    _members = {"model": _model, "engines": (TorchCPU(threads=1), GGMLCPU(threads=1))}
    # A softmax does not change when all its scores grow alike: without rope a bias of all keys has no gradient.
    _members |= {"without_gradient": ("blk.1.attn_k.bias",)} if _settings.get("nope_every") else {}
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (ModelSuite,), _members)


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    Path("book.txt").write_text(TEXT)


def train(capsys, engine, settings, steps=20):
    typed = [f"model.{name}={str(value).lower()}" for name, value in settings.items()]
    line = [*words("scratch", "lab", engine), *typed, "lr=0.02", f"steps={steps}", "hydra.run.dir=run"]
    assert main([*line, f"eval_every={steps}", f"checkpoint_every={steps}"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    return [e["loss"] for e in events if e["kind"] == "eval"][-1], shown.out + shown.err


def evaluate(capsys, path, engine):
    data = [*BOOK, "data.eval_batches=8", "batch_size=4"]
    assert main(["eval", path, *data, f"engine={engine}", "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["loss"]


@pytest.mark.parametrize(("name", "engine"), [(name, [*ENGINES][i % 2]) for i, name in enumerate(FAMILY)])
def test_the_files_of_a_run_hold_the_family_and_have_its_held_out_loss(name, engine, folder, capsys):
    loss, shown = train(capsys, engine, FAMILY[name])
    with GGUFFile(Path("run/model.gguf")) as file:
        assert file.architecture == name
    assert "no equal model" not in shown
    for path in ("run/model.gguf", *map(str, Path("run/checkpoints").glob("*"))):
        for judge in ENGINES:
            assert evaluate(capsys, path, judge) == pytest.approx(loss, rel=1e-5), (path, judge)


def test_a_run_without_an_equal_family_says_so_once_and_writes_a_file_for_toyexp(folder, capsys):
    loss, shown = train(capsys, "cpu", OTHERS["scalars"])
    warning = "model=lab: stock llama.cpp has no equal model, so only toyexp can read model.gguf; "
    assert shown.count(warning) == 1
    assert f"{warning}with model.value_residual=false it would be qwen3" in shown
    assert shown.index(warning) < shown.index("held-out")
    texts = []
    for judge in ENGINES:
        assert evaluate(capsys, "run/model.gguf", judge) == pytest.approx(loss, rel=1e-5)
        greedy = ["--tokens=8", "--temperature=0", f"--engine={judge}"]
        assert main(["generate", "run", "--prompt=It was", *greedy]) == 0, capsys.readouterr().err
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) >= 8


def test_lab_with_the_default_settings_is_a_llama(folder, capsys):
    loss, _ = train(capsys, "cpu", {}, 6)
    llama = [*words("scratch", "llama", "cpu"), "lr=0.02", "steps=6", "eval_every=6", "hydra.run.dir=llama"]
    assert main(llama) == 0
    events = [json.loads(line) for line in Path("llama/events.jsonl").read_text().splitlines()]
    assert [e["loss"] for e in events if e["kind"] == "eval"][-1] == loss


@pytest.mark.parametrize(
    ("settings", "suggestion"),
    [
        ({"norm_place": "after"}, "with model.qk_norm=width it would be olmo2"),
        ({"experts": 4}, "with model.qk_norm=head it would be qwen3moe"),
        ({"norm_kind": "none"}, "with model.norm_kind=rms it would be llama"),
        ({"nope_every": 3, "n_layers": 3}, "with model.nope_every=0 it would be llama"),
        (
            {"norm_kind": "layer", "positions": "learned", "activation": "gelu", "tied": True},
            "with model.qkv_bias=true and model.o_bias=true and model.ffn_bias=true and model.n_kv_heads=4 "
            "it would be gpt2",
        ),
        (
            {"value_residual": True, "residual_scalars": "block", "activation": "relu2"},
            "with model.residual_scalars=none and model.value_residual=false it would be arcee",
        ),
    ],
)
def test_the_warning_names_the_settings_that_stand_in_the_way(settings, suggestion):
    *_, warning = make_lab(**settings).warnings()  # others name settings without effect
    assert warning.endswith(f"only toyexp can read model.gguf; {suggestion}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm_kind": "batch"}, r"model\.norm_kind=batch: .*rms"),
        ({"activation": "relu"}, r"model\.activation=relu: .*relu2"),
        ({"norm_kind": "none", "norm_place": "both"}, "model.norm_place=both: contradicts model.norm_kind=none"),
        ({"positions": "none", "nope_every": 2}, "model.nope_every=2: contradicts model.positions=none"),
        ({"nope_every": 1}, "model.nope_every=1: leaves no layer with RoPE; type model.positions=none"),
        ({"experts": 2, "activation": "gelu"}, "model.experts=2: contradicts model.activation=gelu"),
        ({"experts": 2, "ffn_bias": True}, "model.experts=2: contradicts model.ffn_bias=true"),
        ({"experts": 2, "experts_used": 3}, r"model\.experts_used=3: must be at least 1 and at most 2"),
        ({"experts": -1}, r"model\.experts=-1: must be at least 0"),
        ({"value_residual": True, "n_layers": 1}, "model.value_residual=true: contradicts model.n_layers=1"),
        ({"window": -1}, r"model\.window=-1: must be at least 0"),
        ({"window_period": 0}, r"model\.window_period=0: must be at least 1"),
        ({"score_softcap": -1.0}, r"model\.score_softcap=-1\.0: must be at least 0"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0: must be at least 0 and below 1"),
        ({"n_kv_heads": 3}, r"model\.n_kv_heads=3 does not divide"),
    ],
)
def test_settings_that_cannot_work_or_contradict_each_other_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        make_lab(**settings).check()


def test_the_angles_of_rope_are_checked_only_in_models_that_rotate():
    make_lab(positions="learned", rope_base=1e-30).check()
    with pytest.raises(UserError, match="radians"):
        make_lab(rope_base=1e-30).check()
