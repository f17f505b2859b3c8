"""What toyexp describe says can be typed works as it stands."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from tiny import VOCAB, write_base

from toyexp.cli import main
from toyexp.describe import describe
from toyexp.registry import load
from toyexp.tokenizer import Bytes


@pytest.mark.parametrize(("name", "tokenizer"), [("llama", Bytes()), ("gpt2", None)], ids=["text", "ids"])
def test_every_command_that_is_shown_runs(name, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    write_base(Path("my model.gguf"), name, tokenizer=tokenizer)
    (np.arange(4000, dtype=np.int32) % VOCAB).tofile("IDS.bin")
    quick = ["engine=ggml", "engine.threads=1", *(["data.max_mb=0.02"] if tokenizer else [])]
    shown = [shlex.split(use.command)[1:] for use in describe(Path("my model.gguf"), load()).uses]
    assert [words[0] for words in shown] == [
        "recipe=lora", "recipe=full", "recipe=warm", "eval", "generate", "export",
    ]  # fmt: skip
    for words in shown[:3]:
        assert main([*words, *quick, "steps=1", "batch_size=2", "eval_every=0"]) == 0, capsys.readouterr().err
    assert main([*shown[3], *quick]) == 0, capsys.readouterr().err
