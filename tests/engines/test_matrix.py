"""The matrix of models and recipes: allowed cells train alike on all engines, others are rejected with their line."""

import json

import numpy as np
import pytest

from toyexp.cli.main import main
from toyexp.plugins.compatibility import cells
from toyexp.plugins.discovery import load

ENGINES = {"cpu": [], "ggml": [], "metal": ["engine.emulate=true"]}
FOR_SOME_ENGINES = {name for name, cls in load().classes("model").items() if cls.engines}
CELLS = {(c.recipe, c.model): c for c in cells(load()) if c.model not in FOR_SOME_ENGINES}
ALLOWED = [pair for pair, cell in CELLS.items() if not cell.reason]

TINY = ["model.d_model=32", "model.n_layers=1", "engine.threads=1", "batch_size=4"]
POINTS = ["model.d_hidden=32", "data=vectors", "data.path=points.npz", "objective=mse", *TINY[2:]]
TEXT = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "model.context=16"]
LLAMA_FAMILY = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "arcee",
    "smollm3",
    "qwen3moe",
    "olmoe",
    "lab",
    "lfm2",
    "mamba2",
]
RARE = LLAMA_FAMILY[1:]  # the default suite trains them only from scratch
DATA = {**dict.fromkeys([*LLAMA_FAMILY, "gpt2"], TEXT), "vit": ["data=digits"]}
DATA["lab"] = [*TEXT, "model.norm_kind=layer"]  # with its defaults, its file holds a llama
BASE_SETTINGS = ["recipe.base=base/model.gguf", "data.tokenizer=auto"]
SETTINGS = {  # settings for the cells that the matrix marks with `set`
    **{("warm", model): ["model.tied=false"] for model in ("gpt2", "lfm2", "mamba2")},
    **{("warm", model): ["recipe.lens=none", "model.d_model=96"] for model in ("gemma", "gemma2", "gemma3")},
    **{("lora", model): [*BASE_SETTINGS, "lr=0.05"] for model in LLAMA_FAMILY},
    ("lora", "gpt2"): [*BASE_SETTINGS, "lr=0.05", "recipe.targets=[qkv]"],
    **{("full", model): BASE_SETTINGS for model in ("gpt2", *LLAMA_FAMILY)},
    # Four images per step have different classes each time, and eight such steps teach nothing.
    ("full", "vit"): [*BASE_SETTINGS[:1], "batch_size=64"],
    ("scratch", "mlp"): ["lr=0.03", "batch_size=64"],
    ("lora", "vit"): [*BASE_SETTINGS[:1], "batch_size=64", "lr=0.03", "recipe.targets=[*]"],
}


@pytest.fixture(autouse=True)
def _enter_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)
    x = np.random.default_rng(0).random((400, 5))
    np.savez(tmp_path / "points.npz", x=x, y=x[:, :2] ** 2)


def words(recipe, model):
    return [f"recipe={recipe}", f"model={model}", *(POINTS if model == "mlp" else [*DATA[model], *TINY])]


def test_recipes_that_start_from_random_values_train_the_listed_models():
    """Repeated here by hand, for recipes that start from random values."""
    allowed = {pair for pair in ALLOWED if pair[0] in ("scratch", "warm", "vit_tiny")}
    text_models = (*LLAMA_FAMILY, "gpt2")
    assert allowed == {
        *(("scratch", model) for model in (*text_models, "vit", "mlp")),
        *(("warm", model) for model in text_models),
        ("vit_tiny", "vit"),
    }


def is_default_cell(recipe, model):
    """Return True for cells in the default suite: each model once, and each recipe on models of two kinds."""
    return recipe == "scratch" or model not in RARE


@pytest.mark.parametrize(
    ("recipe", "model"),
    [pytest.param(*cell, marks=[pytest.mark.full] * (not is_default_cell(*cell))) for cell in ALLOWED],
)
def test_every_allowed_cell_trains_and_the_engines_agree(recipe, model, capsys):
    line = ["lr=1e-3", *words(recipe, model), *SETTINGS.get((recipe, model), [])]
    if recipe in ("lora", "full"):
        assert main([*words("scratch", model), "steps=1", "engine=ggml", "hydra.run.dir=base"]) == 0
        capsys.readouterr()
    all_engines = recipe == "scratch" or not is_default_cell(
        recipe, model
    )  # profiles do not differ in what other recipes compute
    settings_by_engine = {name: settings for name, settings in ENGINES.items() if all_engines or not settings}
    engines = [
        name + "".join(f":{s.removeprefix('engine.')}" for s in settings)
        for name, settings in settings_by_engine.items()
    ]
    assert main(["parity", *line, f"engine={','.join(engines)}", "steps=8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["engines"]) == len(engines) - 1
    assert report["losses"][-1] < report["losses"][0] - 0.01
    for engine in report["engines"]:
        assert engine["loss"]["largest"] < 1e-4


@pytest.mark.parametrize(("recipe", "model"), sorted(CELLS.keys() - set(ALLOWED)))
def test_every_forbidden_cell_is_rejected_before_anything_is_built(recipe, model, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert main([*words(recipe, model), "engine=ggml"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"toyexp: error: {CELLS[recipe, model].reason}") and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_cell_marked_set_names_the_setting_that_it_needs(capsys):
    for (recipe, model), cell in CELLS.items():
        if cell.missing:
            assert main([*words(recipe, model), "engine=ggml"]) == 2
            assert capsys.readouterr().err.startswith(
                f"toyexp: error: {cell.missing.partition(' or ')[0]}"
            )  # sizes differ


def test_the_plugins_command_prints_the_matrix(capsys):
    assert main(["plugins", "--matrix"]) == 0
    lines = capsys.readouterr().out.splitlines()
    recipes, models = (sorted(set(names)) for names in zip(*((c.recipe, c.model) for c in cells(load())), strict=True))
    assert lines[0].split() == ["recipe", *models]
    assert [line.split()[0] for line in lines[1 : 1 + len(recipes)]] == recipes
    assert main(["plugins", "--matrix", "warm"]) == 2
    assert "takes either one name or --matrix" in capsys.readouterr().err
