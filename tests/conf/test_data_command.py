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


def test_warnings_about_the_data_are_shown(show):
    """Those about other settings are for a run."""
    words = ["data.val_path=x.json", "callbacks.cosine.warmup=9", "steps=2"]
    warned = "data.val_path: the held-out loss means little"
    out, result = show(*words), json.loads(show("--json", *words))
    assert out.count("warning  ") == 1 and f"warning  {warned}" in out
    assert [text[: len(warned)] for text in result["warnings"]] == [warned]


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


@pytest.mark.parametrize("pack", ["none", "joined"])
def test_only_tokens_within_the_context_are_counted(show, pack):
    """The prompts have 25 tokens; `one` and `two` are 3 tokens, and the end is cut off."""
    result = json.loads(show("model.context=27", "--json", "data.val_fraction=0.1", f"data.pack={pack}"))
    learned = result["rows"][0]["counts"]
    assert (result["data"]["train_tokens"], result["data"]["train_examples"]) == (2 * sum(learned), 2)
    assert 0 < sum(learned) < 4


def test_more_rows_than_a_batch_are_printed(show):
    assert show("--rows", "25", "steps=1").count("\nrow ") == 25


def test_control_characters_of_the_data_are_escaped(show, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps([{"prompt": "\x1b[31m\0a", "completion": "\x1b]0;b\x07"}] * 2))
    for words in (), ("--ids",):
        assert (out := show(*words)).replace("\n", "").isprintable() and "\\x1b" in out and "\\x00" in out


def test_pairs_are_counted_as_pairs(show, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 5))
    assert " in 4 pairs" in show("data=preference", "objective=preference", "recipe=scratch")


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
