"""`toyexp data`: rows as the model reads them, and what counts in the loss."""

import json

import numpy as np
import pytest

from toyexp.cli.main import main

ROWS = [{"instruction": f"Say {word}", "output": word, "id": n} for n, word in enumerate(("one", "two", "three"))]


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """A function that runs `toyexp data` on ROWS and returns its output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps(ROWS))

    def run(*words, code=0):
        settings = ["data=examples", "data.path=x.json", "data.tokenizer=byte", "model.context=48", "batch_size=2"]
        assert main(["data", *settings, *words]) == code
        out, err = capsys.readouterr()
        assert not any(path.name == "outputs" for path in tmp_path.iterdir())
        return out if code == 0 else err

    return run


def test_learned_text_is_marked_and_columns_are_named(show):
    out = show()
    assert "read as instruction, output; not read: id" in out
    assert out.count("row ") == 2 and "[[" in out
    for word in ("one", "two"):
        assert f"user:\nSay {word}\nassistant:\n[[{word}<|endoftext|>]]" in out
    assert "[[" not in (coloured := show("--color=always")) and "\x1b[32mtwo<|endoftext|>" in coloured
    assert "user:\nSay one\nassistant:\none" in show("data.train_on=all").replace("[[", "")


def test_json_has_ids_and_the_share_that_counts(show):
    result = json.loads(show("--json", "--rows", "1"))
    (row,) = result["rows"]
    learned = bytes(i for i, counts in zip(row["ids"], row["counts"], strict=True) if counts and i < 256).decode()
    assert learned in ("one", "two") and row["ids"][-1] == 256
    assert result["positions"] % 96 == 0
    assert result["counted"] / result["positions"] == pytest.approx(4 / 48)  # 4 tokens of each row
    assert result["data"]["other_columns"] == ["id"]


def test_packed_rows_are_counted(show):
    assert "in 2 examples, packed into 1 row;" in (out := show("data.pack=joined", "model.context=96")), out
    assert json.loads(show("data.pack=apart", "model.context=96", "--json"))["data"]["packed_rows"] == 1


def test_ids_are_listed_one_to_a_line(show):
    lines = show("--ids", "--rows", "1").splitlines()
    assert lines[-1].split() == [str(len(lines) - 4), "256", "loss", "'<|endoftext|>'"]


def test_vectors_and_unknown_settings_are_refused(show, capsys):
    assert "data.pth" in show("data.pth=x", code=2)
    np.save("v.npy", np.zeros((9, 2)))
    assert main(["data", "data=vectors", "data.path=v.npy", "model=mlp", "objective=mse"]) == 2
    assert "data=vectors: holds vectors; toyexp data shows data of tokens or images" in capsys.readouterr().err


def test_images_are_counted_by_class(capsys):
    command = ["data", "data=digits", "model=vit", "recipe=vit_tiny"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[1].split(), lines[2].split()] == [["class", "training", "held", "out"], ["0", "142", "36"]]
    assert len(lines) == 12
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"]["9"] == {"training": 144, "held_out": 36}
