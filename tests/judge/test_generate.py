"""`toyexp generate` writes the text that llama.cpp writes from the same file."""

import json

import numpy as np
import pytest
from tiny import plan, write_base

from toyexp.cli.main import main
from toyexp.formats.gguf.write import write_adapter
from toyexp.tokenizers.byte_level import BPE, Bytes
from toyexp_recipes.lora import Lora

pytestmark = [pytest.mark.judge, pytest.mark.slow]

pytest.importorskip("xllamacpp", reason="the judge is llama.cpp, from the wheel xllamacpp: pip install 'toyexp[test]'")
pytest.importorskip("torch", reason="one of the engines is torch's")

PROSE = "The café sold 12 crêpes, didn't it? «Ja», said Zoë: 中文 und 🙂.\n\ndef f(x):\n\treturn x ** 2  # {}\n"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_CPP = "--engine=llama.cpp:threads=1"


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tokenizer():
    trained = BPE.train([PROSE * 3], 330)
    chat = BPE([*trained.pieces, "<|im_start|>", "<|im_end|>"], trained.merges, trained.eos)
    chat.controls, chat.chat_template = frozenset([chat.vocab - 2, chat.vocab - 1]), CHATML
    return chat


@pytest.fixture
def generate(capsys):
    """Return a function that runs `toyexp generate` and returns its JSON."""

    def run(*words):
        capsys.readouterr()
        assert main(["generate", "model.gguf", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_text_equals_llama_cpps(name, generate, tokenizer, tmp_path):
    write_base(tmp_path / "model.gguf", name, tokenizer=tokenizer, context=200)
    for words in (["--prompt", PROSE], ["--prompt", "a <|im_end|> b", "--chat"] if name == "gpt2" else ["--ids=5,6"]):
        theirs, *ours = (
            generate(*words, "--temperature=0", engine)
            for engine in (LLAMA_CPP, "--engine=cpu:threads=1", "--engine=ggml:threads=1")
        )
        assert len(theirs["ids"]) > 20
        for generation in ours:
            assert {k: generation[k] for k in ("prompt_ids", "ids", "text", "reason")} == {
                k: theirs[k] for k in ("prompt_ids", "ids", "text", "reason")
            }


def test_llama_cpp_applies_the_adapter_and_every_sampling_limit(generate, tmp_path):
    write_base(tmp_path / "model.gguf", "llama", tokenizer=Bytes(), context=100)
    lora = plan("llama", recipe=Lora(base=str(tmp_path / "model.gguf"), rank=2, alpha=7, targets=["q", "down"]))
    draw = np.random.default_rng(0)
    values = {t.name: draw.standard_normal(t.shape).astype(np.float32) for t in lora.trainable}
    write_adapter(tmp_path / "adapter.gguf", lora, values)
    words = ["--prompt=Once", "--tokens=40", "--adapter=adapter.gguf"]
    ours = [generate(*words, "--temperature=0", f"--engine={e}:threads=1")["ids"] for e in ("cpu", "ggml")]
    plain = generate(*words[:2], "--temperature=0", "--engine=cpu:threads=1")["ids"]
    assert ours[0] == ours[1] != plain
    # At any temperature, each of these leaves only the most likely token.
    flat = {"--top-k": "0", "--top-p": "1", "--min-p": "0", "--temperature": "50"}
    for cut, value in (("--top-k", "1"), ("--top-p", "0.000001"), ("--min-p", "1")):
        options = [f"{name}={setting}" for name, setting in {**flat, cut: value}.items()]
        assert generate(*words, *options, LLAMA_CPP)["ids"] == ours[0], cut


def test_llama_cpp_gets_the_chat_template_of_the_adapter(generate, tokenizer, tmp_path):
    write_base(tmp_path / "model.gguf", "llama", tokenizer=tokenizer, context=100)
    lora = plan("llama", recipe=Lora(base=str(tmp_path / "model.gguf"), rank=2))
    values = {t.name: lora.initial_values(t) for t in lora.trainable}
    write_adapter(tmp_path / "adapter.gguf", lora, values, chat_template="{{ messages[0]['content'] }}<|im_end|>")
    words = ["--prompt=Once", "--chat", "--tokens=3", "--temperature=0", "--adapter=adapter.gguf"]
    theirs, ours = (generate(*words, engine) for engine in (LLAMA_CPP, "--engine=ggml:threads=1"))
    assert theirs["prompt_ids"] == ours["prompt_ids"] == [*tokenizer.encode("Once"), tokenizer.vocab - 1]
    assert theirs["template"] == ours["template"] == "adapter.gguf" and theirs["ids"] == ours["ids"]


def test_a_seed_makes_llama_cpps_text_reproducible(tokenizer, tmp_path, capfd):
    write_base(tmp_path / "model.gguf", "llama", tokenizer=tokenizer, context=100)
    texts = []
    for seed in "112":
        assert main(["generate", "model.gguf", "--prompt", "x", "--top-k=0", f"--seed={seed}", LLAMA_CPP]) == 0
        out, err = capfd.readouterr()
        assert "llama.cpp (xllamacpp)" in err and err.count("\n") == 1
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]


def test_a_file_that_aborts_llama_cpp_gives_a_one_line_error(tmp_path, capfd):
    tokenizer = Bytes()
    tokenizer.pieces = [*tokenizer.pieces[:-2], tokenizer.pieces[0], tokenizer.pieces[-1]]  # two equal tokens
    write_base(tmp_path / "model.gguf", "llama", tokenizer=tokenizer)
    assert main(["generate", "model.gguf", "--prompt", "x", LLAMA_CPP]) == 1
    out, err = capfd.readouterr()
    assert err.startswith("toyexp: error: llama.cpp: ") and "GGML_ASSERT" in err and err.count("\n") == 1
    assert out == ""
