"""Text that is tokenized during training: the same batches in any order of reading, and a held-out part."""

import json
from pathlib import Path

import numpy as np
import pytest

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.interfaces.dataset import batch_digest
from toyexp.testing import DataSuite
from toyexp_data import streaming
from toyexp_data.text import Text


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Three files with 40 documents each of different lengths, of which no two share a character sequence."""
    monkeypatch.setattr(streaming, "BLOCK", 96)
    monkeypatch.setattr(streaming, "GROUP", 3)
    (tmp_path / "in").mkdir()
    for file in range(3):
        rows = [{"text": f"{file}/{n}:" + "x" * (n % 7)} for n in range(40)]
        (tmp_path / "in" / f"part{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "in"


def open_stream(path, **changes):
    data = Text(path=str(path), **{"tokenizer": "byte", "stream": True, "val_fraction": 0.25, **changes})
    data.check()
    return data.open(None)


def text_of(ids):
    return "".join("|" if i == 256 else chr(i) for i in ids)


class TestStream(DataSuite):
    epoch = 0
    tells = ()

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"{n}" * 9}) + "\n" for n in range(300)))
        self.data = Text(path=str(tmp_path / "x.jsonl"), tokenizer="byte", stream=True, val_fraction=0.25)

    def subject(self):
        return Text


def test_every_training_document_is_read_once_per_pass_and_held_out_ones_never(shards):
    batches = open_stream(shards).batches(8, 4, seed=3)
    documents = [(file, n) for file in range(3) for n in range(40)]
    kept = [f"{f}/{n}:" + "x" * (n % 7) for f, n in documents if (f + n) % 4 != 3]
    expected = "".join(f"{text}|" for text in kept)
    count = len(expected) // 8  # windows of the first pass
    windows = [row for k in range(count // 4) for row in batches.batch(k)["tokens"]]
    for first in range(0, len(windows) // 12 * 12, 12):  # a block has 12 windows
        block = [text_of(row) for row in windows[first : first + 12]]
        in_order = [expected[start : start + 8] for start in range(first * 8, first * 8 + 96, 8)]
        assert sorted(block) == sorted(in_order) and block != in_order
    assert len(windows) > 60
    held = text_of(np.concatenate([b["tokens"][b["weights"][:, 0] > 0].ravel() for b in batches.held_out()]))
    assert held.startswith("0/3:xxx|0/7:|0/11:xxxx|") and not any(f"|{text}|" in held for text in kept)


@pytest.mark.parametrize("cache", [True, False])
def test_a_batch_is_the_same_from_wherever_it_is_read(shards, tmp_path, monkeypatch, cache):
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    if not cache:
        monkeypatch.setattr(streaming, "remember", lambda *_: None)
    dataset = open_stream(shards)
    expected = [batch_digest(dataset.batches(8, 4, 0).batch(k)) for k in range(80)]
    order = [79, 3, 40, 41, 0, 78]
    again = dataset.batches(8, 4, 0)
    assert [batch_digest(again.batch(k)) for k in order] == [expected[k] for k in order]
    assert batch_digest(dataset.batches(8, 4, 1).batch(0)) != expected[0]
    assert len(set(expected)) == 80
    later = dataset.batches(8, 4, 0)
    assert (len(later._marks) > 20) == cache, "with a cache, block 20 is read from its own beginning"
    assert batch_digest(later.batch(60)) == expected[60]


def test_files_without_text_and_settings_that_need_all_text_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 3)
    (tmp_path / "x.txt").write_text("a" * 100)
    for name in "x.jsonl", "x.txt":
        with pytest.raises(UserError, match=r"one document in 4.*data\.val_path=FILE"):
            open_stream(tmp_path / name).batches(8, 1, 0)
    (tmp_path / "u.txt").write_text("a" * 100, "utf-16")
    with pytest.raises(UserError, match=r"u\.txt: not UTF-8 text"):
        open_stream(tmp_path / "u.txt").batches(8, 1, 0)
    open_stream(tmp_path / "x.txt", val_path=str(tmp_path / "x.txt")).batches(8, 1, 0)
    with pytest.raises(UserError, match=r"data\.tokenizer=bpe: cannot be used with data\.stream=true"):
        open_stream(tmp_path / "x.jsonl", tokenizer="bpe")
    with pytest.raises(UserError, match=r"data\.max_mb=1\.0: cannot be used"):
        open_stream(tmp_path / "x.jsonl", max_mb=1.0)


def test_unusable_files_and_records_are_left_out_with_a_note(tmp_path, capsys):
    for name, raw in {"a.txt": b"a" * 40, "b.txt": b"b" * 40 + b"\xff", "c.txt": b"c" * 40}.items():
        (tmp_path / name).write_bytes(raw)
    settings = {"on_error": "skip", "val_path": str(tmp_path / "a.txt")}
    batches = open_stream(tmp_path, **settings).batches(8, 2, 0)
    assert {*text_of(np.concatenate([batches.batch(k)["tokens"].ravel() for k in range(20)]))} == {*"ac|"}
    assert "b.txt: not UTF-8 text (byte 40 is 0xff)" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n' * 9)
    open_stream(tmp_path / "x.jsonl", on_error="skip", val_fraction=0.5).batches(4, 1, 0)
    assert capsys.readouterr().err.count("x.jsonl:2: not UTF-8 text") == 1


def test_a_resumed_run_reads_the_same_rows(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["engine=ggml", "engine.threads=1", "data=text", f"data.path={shards}", "data.tokenizer=byte",
             "data.stream=true", "model.d_model=16", "model.d_ff=16", "model.context=8", "batch_size=4",
             "checkpoint_every=1", "eval_every=0", "callbacks=[default,constant]", "~callbacks.cosine"]  # fmt: skip
    assert main([*words, "steps=20", "hydra.run.dir=whole"]) == 0
    assert main([*words, "steps=9", "hydra.run.dir=parts"]) == 0
    assert main(["resume=parts", "steps=20"]) == 0
    losses = [
        {e["step"]: e["loss"] for e in map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
         if e["kind"] == "step"} for run in ("whole", "parts")
    ]  # fmt: skip
    assert len(losses[0]) == 20 and losses[0].keys() == losses[1].keys()
    assert [losses[0][k] for k in (9, 10, 11)] == [losses[1][k] for k in (9, 10, 11)]
