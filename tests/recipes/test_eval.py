"""`toyexp eval` against the run that wrote the file."""

import json
import math
from pathlib import Path

import pytest

from toyexp.cli import main

TEXT = ["data=text", "data.path=book.txt", "data.tokenizer=byte", "data.val_fraction=0.2", "model.context=16"]
TINY = ["model.d_model=32", "model.n_layers=1", "engine.threads=1", "batch_size=4", "steps=12", "hydra.run.dir=run"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)


def outcome():
    return json.loads(Path("run/result.json").read_text())


def evaluated(capsys, *words):
    capsys.readouterr()
    assert main(["eval", "run/model.gguf", "engine.threads=1", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_text_scores_what_the_run_said(model, capsys):
    assert main([f"model={model}", *TEXT, *TINY, "engine=cpu"]) == 0
    for engine in ("cpu", "ggml"):
        found = evaluated(capsys, f"engine={engine}", "batch_size=4", "data=text", "data.path=book.txt",
                          "data.val_fraction=0.2")  # fmt: skip
        assert found["loss"] == pytest.approx(outcome()["eval_loss"], abs=2e-5)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # a token is a byte here


def test_images_score_what_the_run_said(capsys):
    assert main(["recipe=vit_tiny", "model=vit", "data=digits", *TINY, "model.patch=4", "engine=ggml"]) == 0
    found = evaluated(capsys, "data=digits", "engine=cpu", "batch_size=4")
    assert found["loss"] == pytest.approx(outcome()["eval_loss"], abs=2e-5)
    assert found["scores"] == pytest.approx(outcome()["eval_scores"])
    assert found["perplexity"] is None


def test_a_run_directory_and_data_for_short(capsys):
    assert main(["model=llama", *TEXT, *TINY, "engine=ggml"]) == 0
    Path("it's a \\'book\\").write_text(Path("book.txt").read_text())
    long = evaluated(capsys, "engine=ggml", "data=text", "data.path=book.txt")
    for words in (["run", "--data", "book.txt"], ["--data=it's a \\'book\\", "run/model.gguf"]):
        assert main(["eval", *words, "engine=ggml", "engine.threads=1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {**long, "file": "run/model.gguf"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes one file"),
        (["run/model.gguf", "--data"], "--data needs a value, such as --data book.txt"),
        (["run/model.gguf", "--data", "none.txt"], "none.txt"),
        (["run/model.gguf", "--dat", "none.txt"], "did you mean --data?"),
        ([".", "seed=1"], "without model.gguf"),
        (["missing.gguf"], "missing.gguf: not found"),
        (["book.txt"], "book.txt"),
        (["run/model.gguf", "more"], "eval run/model.gguf more: takes one file"),
        (["run/model.gguf", "recipe=full"], "the model comes from"),
        (["run/model.gguf", "model.context=17"], "from 1 to 16"),
        (["run/model.gguf", "data=digits"], "reads tokens; data=digits gives images"),
        (["run/model.gguf", "seed=1,2"], "give one value"),
    ],
)
def test_bad_words_are_told(words, said, capsys):
    assert main([*TEXT, *TINY, "engine=ggml", "steps=1"]) == 0
    capsys.readouterr()
    assert main(["eval", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_loss_that_is_no_number_fails(capsys, monkeypatch):
    assert main([*TEXT, *TINY, "engine=ggml", "steps=1"]) == 0
    monkeypatch.setattr("toyexp.engine.Session.evaluate", lambda *_: float("nan"))
    capsys.readouterr()
    assert main(["eval", "run", "engine=ggml", "engine.threads=1", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["loss"] is None and "its held-out loss is nan" in err
