"""`toyexp export --ollama` and `toyexp serve`: what other programs get, and what is never replaced."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import chat_tokenizer, split_gguf, write_base

from toyexp.base.files import read_head
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.write import write_model
from toyexp.tokenizers.byte_level import Bytes
from toyexp_models.vit import ViT


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def run_rejected(capsys, *words):
    """Return the one line of the error with which the command is rejected."""
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


# -- Ollama -----------------------------------------------------------------------------------------------------------


def test_the_modelfile_of_a_chat_model_leaves_the_template_to_the_gguf(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=chat_tokenizer(), context=20_000)
    before = Path("m.gguf").read_bytes()
    assert main(["export", "m.gguf", "--ollama"]) == 0
    assert capsys.readouterr().out == "Modelfile  to load it: ollama create my-model -f Modelfile\n"
    with GGUFFile("m.gguf") as file:
        end = file.metadata["tokenizer.ggml.tokens"][file.metadata["tokenizer.ggml.eos_token_id"]]
    assert Path("Modelfile").read_text().splitlines() == [
        "# Written by toyexp. To load the model: ollama create my-model -f Modelfile",
        "FROM ./m.gguf", "PARAMETER num_ctx 8192", "PARAMETER temperature 0.8", "PARAMETER top_k 40",
        "PARAMETER top_p 0.95", "PARAMETER min_p 0.0", f'PARAMETER stop "{end}"', 'PARAMETER stop "<|im_end|>"',
        "# Ollama 0.30 and later use the chat template in the GGUF file.",
    ]  # fmt: skip
    assert Path("m.gguf").read_bytes() == before and sorted(p.name for p in Path().iterdir()) == ["Modelfile", "m.gguf"]


def test_a_model_without_a_chat_template_continues_the_prompt():
    write_base(Path('a "b".gguf'), "gpt2", tokenizer=Bytes(), context=48)
    assert main(["export", 'a "b".gguf', "--ollama"]) == 0
    text = Path("Modelfile").read_text()
    assert 'FROM ./a "b".gguf\nPARAMETER num_ctx 48\n' in text and text.endswith("\nTEMPLATE {{ .Prompt }}\n")
    assert "stop" not in text
    assert main(["export", 'a "b".gguf', "--ollama", "--force", "--system", "Be brief."]) == 2


def test_the_system_message_of_the_runs_data_is_that_of_the_modelfile():
    write_base(Path("m.gguf"), "llama", tokenizer=chat_tokenizer(), context=64)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 40)
    words = ["recipe=full", "recipe.base=m.gguf", "data.path=chats.jsonl", "steps=1", "batch_size=1", "lr=1e-3"]
    assert main([*words, "data=examples", "data.system=Speak as a pirate.", "hydra.run.dir=run", "engine=ggml"]) == 0
    assert main(["export", "run", "--ollama"]) == 0
    assert 'SYSTEM """Speak as a pirate."""\n' in Path("run/Modelfile").read_text()
    assert main(["export", "run", "--ollama", "--force", "--system", "Be brief."]) == 0
    assert 'SYSTEM """Be brief."""\n' in (text := Path("run/Modelfile").read_text()) and "pirate" not in text
    assert main(["export", "run", "--type", "f16", "--system", "Be brief."]) == 2
    assert main(["export", "run", "--ollama", "--force", "--system", 'say """\nPARAMETER seed 1']) == 2
    Path("run/model.gguf").rename("moved.gguf")
    assert main(["export", "moved.gguf", "--ollama"]) == 0
    assert "SYSTEM" not in Path("Modelfile").read_text()


def test_a_converted_model_gets_its_modelfile_beside_it(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    Path("out").mkdir()
    assert main(["export", "m.gguf", "--type", "q8_0", "--to", "out/small.gguf", "--ollama", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["model"], answer["modelfile"]) == ("out/small.gguf", "out/Modelfile")
    assert answer["export"]["type"] == "q8_0" and read_head(Path("out/small.gguf"), 4) == b"GGUF"
    assert "FROM ./small.gguf\n" in Path("out/Modelfile").read_text() and not Path("Modelfile").exists()


def test_only_a_modelfile_of_toyexp_is_replaced_and_only_with_force(capsys):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    Path("Modelfile").write_text("FROM ./m.gguf\nSYSTEM mine\n")
    for words in (["--ollama"], ["--ollama", "--force"], ["--ollama", "--type", "f16", "--force"]):
        assert (
            "Modelfile: already exists and is not a Modelfile of toyexp, so --force does not replace it; rename"
            in run_rejected(capsys, "export", "m.gguf", *words)
        )
    assert Path("Modelfile").read_text() == "FROM ./m.gguf\nSYSTEM mine\n" and not Path("m-f16.gguf").exists()
    Path("Modelfile").unlink()
    assert main(["export", "m.gguf", "--ollama"]) == 0
    assert "already exists; choose another path, or replace it with --force" in run_rejected(
        capsys, "export", "m.gguf", "--ollama"
    )
    assert main(["export", "m.gguf", "--type", "f16", "--ollama", "--force"]) == 0
    assert "m-f16.gguf" in Path("Modelfile").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("m.gguf --type hf --ollama", "--type=hf --ollama: Ollama loads a GGUF file; choose one of: bf16, f16"),
        ("m.gguf --type q8 --ollama", "did you mean q8_0?"),
        ("m-hf --ollama", "takes one GGUF file and no --to; add --type f16"),
        ("m.gguf --ollama --to x.gguf", "takes one GGUF file and no --to; add --type f16"),
        ("split-00001-of-00022.gguf --ollama", "takes one GGUF file and no --to; add --type f16"),
        ("ids.gguf --ollama", "ids.gguf: Ollama cannot load it: it runs only language models with a tokenizer"),
        ("vit.gguf --ollama", "vit.gguf: Ollama cannot load it: it runs only language models with a tokenizer"),
        ("nowhere.gguf --ollama", "nowhere.gguf: not found"),
    ],
)
def test_a_model_that_ollama_cannot_load_is_one_error_and_writes_nothing(capsys, words, said):
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    write_base(Path("split.gguf"), "llama", tokenizer=Bytes())
    split_gguf(Path("split.gguf"))
    write_base(Path("ids.gguf"), "llama")
    vit = ViT(d_model=16, n_layers=1, n_heads=2, d_ff=32, image_size=4, channels=1, classes=3)
    write_model(Path("vit.gguf"), vit, {t.name: t.init.draw(t.shape, 7, t.name) for t in vit.tensors()}, None)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    before = sorted(p.name for p in Path().iterdir())
    assert said in run_rejected(capsys, "export", *words.split())
    assert sorted(p.name for p in Path().iterdir()) == before


# -- llama-server -----------------------------------------------------------------------------------------------------


def put_server():
    """Put a llama-server on the PATH that prints its words and its process id, and exits with 3."""
    Path("bin").mkdir()
    Path("bin/llama-server").write_text('#!/bin/sh\necho $$\nfor word; do echo "$word"; done\nexit 3\n')
    Path("bin/llama-server").chmod(0o755)


def test_serve_becomes_llama_server_with_the_words_after_two_dashes():
    put_server()
    Path("run").mkdir()
    write_base(Path("run/model.gguf"), "llama", tokenizer=Bytes())
    words = ["serve", "run", "--", "--port", "9000", "--help", "a b", "--"]
    process = subprocess.Popen([sys.executable, "-m", "toyexp", *words], stdout=subprocess.PIPE, text=True)
    command, *printed = process.communicate()[0].splitlines()
    assert process.returncode == 3 and command.endswith("llama-server -m run/model.gguf --port 9000 --help 'a b' --")
    assert printed == [str(process.pid), "-m", "run/model.gguf", "--port", "9000", "--help", "a b", "--"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve", "serve: needs exactly one file or run directory: toyexp serve model.gguf"),
        ("serve m.gguf --port 1", "options of llama-server come after --: toyexp serve RUN -- --port"),
        ("serve m.gguf lr=1", "lr=1: is a setting of a run"),
        (
            "serve m-hf",
            "serve m-hf: llama-server only loads GGUF files; convert it first: toyexp export m-hf --type f16",
        ),
        ("serve nowhere.gguf", "nowhere.gguf: not found"),
    ],
)
def test_serve_rejects_what_llama_server_cannot_load(capsys, words, said):
    put_server()
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    assert said in run_rejected(capsys, *words.split())


def test_serve_says_how_to_get_llama_server(capsys):
    assert "nowhere.gguf: not found" in run_rejected(capsys, "serve", "nowhere.gguf")
    write_base(Path("m.gguf"), "llama", tokenizer=Bytes())
    assert "no llama-server on the PATH; install llama.cpp: brew" in run_rejected(capsys, "serve", "m.gguf")
