"""llama.cpp's own converter makes of a directory for transformers the GGUF that it was exported from.

TOYEXP_LLAMA_CPP names a checkout of llama.cpp: convert_hf_to_gguf.py, its packages, and for byte-level BPE the
published vocabularies in models/. The converter wants the package sentencepiece.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from texts import NASTY, hard_pieces

from toyexp import Model, Tokenizer
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import write_model
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.sentencepiece import SentencePiece
from toyexp.tokenizers.tokenizer import UNUSED, USER_DEFINED
from toyexp_models.gpt2 import GPT2
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3

CHECKOUT = Path(os.environ.get("TOYEXP_LLAMA_CPP", ""))
pytestmark = [
    pytest.mark.full,
    pytest.mark.judge,
    pytest.mark.skipif(not (CHECKOUT / "convert_hf_to_gguf.py").is_file(), reason="TOYEXP_LLAMA_CPP names no checkout"),
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"the converter or the judge needs {name}")
        for name in ("sentencepiece", "torch", "transformers", "xllamacpp")
    ),
]

JUDGE, TURN = Path(__file__).with_name("judge.py"), "{% for m in messages %}{{ m.content }}{% endfor %}"
SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 4, "context": 24, "norm_eps": 3e-3}
ROPE = {"head_dim": 12, "rope_base": 500.0, "rope_scale": 2.5}
BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
# What Llama 3's scaling gives where base 500, factor 8 and an original context of 40 are meant.
FACTORS = [1.0, 4.424772, 8.0, 8.0]
MODELS: dict[str, Model] = {
    "llama": Llama(**SIZES, **ROPE, **BIASES, d_ff=48),
    "llama_tied": Llama(**SIZES, rope_factors=FACTORS, rope_base=500.0, qkv_bias=True, tied=True, n_kv_heads=1),
    "qwen2": Qwen2(**SIZES, d_ff=48, rope_scale=3.0, tied=True),
    "qwen2_without_biases": Qwen2(**SIZES, d_ff=48, qkv_bias=False),
    "qwen3": Qwen3(**SIZES, **ROPE, d_ff=48),
    "gemma": Gemma(**SIZES, d_ff=48, n_kv_heads=1, head_dim=16),
    "gpt2": GPT2(**SIZES, d_ff=128),
    "gpt2_untied": GPT2(**SIZES, d_ff=128, tied=False),
}
# What the converter does in its own way, none of which changes an id or a number: it leaves out what stands for
# itself, or says it; padding is the end where there is none, which transformers wants.
NAMED = {
    "general.file_type", "general.name", "general.quantization_version", "general.size_label", "general.type",
    *(f"tokenizer.ggml.{key}_token_id" for key in ("padding", "unknown", "eot")),
    *(f"tokenizer.ggml.add_{key}" for key in ("sep_token", "bos_token", "eos_token", "space_prefix")),
    "tokenizer.ggml.pre",
    *(f"{arch}.{key}" for arch in ("llama", "qwen2", "qwen3", "gemma", "gpt2") for key in (
        "vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length", "rope.freq_base")),
}  # fmt: skip
MEANT = (
    "tokenizer.ggml.pre",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
)  # the same where both say


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def spm(prefix: bool = True) -> SentencePiece:
    """Words of the texts with scores of their own, all bytes, two tokens that are found as they are spelled."""
    made = hard_pieces(prefix)
    made.bos, made.add_bos, made.chat_template = 1, prefix, TURN
    return made


def vocabulary(name: str) -> Tokenizer:
    """A published one, from the checkout."""
    path = CHECKOUT / "models" / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with GGUFFile(path) as file:
        return read_tokenizer(file)


def exported(name: str, tokenizer: Tokenizer, spare: int = 0) -> Path:
    """m.gguf of random numbers, and what toyexp export says of it."""
    model, rng = replace(MODELS[name], vocab=tokenizer.vocab + spare), np.random.default_rng(0)
    values = {
        t.name: (rng.normal(0, 0.2, t.shape) + t.name.endswith("norm.weight")).astype(np.float32)
        for t in model.tensors()
    }
    write_model(Path("m.gguf"), model, values, tokenizer)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    return Path("m.gguf")


def converted() -> subprocess.CompletedProcess[str]:
    """m-hf as back.gguf."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT / "gguf-py"), os.environ.get("PYTHONPATH", "")]))
    words = [str(CHECKOUT / "convert_hf_to_gguf.py"), "m-hf", "--outfile", "back.gguf", "--outtype", "f32"]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)


def ask(**question: object) -> list[dict]:
    """llama.cpp's answers of both files; see judge.py."""
    asked = dict.fromkeys(("texts", "special", "prompts", "chats", "draw"), ()) | question
    run = subprocess.run(
        [sys.executable, str(JUDGE)],
        input=json.dumps([{**asked, "model": path} for path in ("m.gguf", "back.gguf")]),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-1500:]
    return json.loads(run.stdout)


def log_probabilities(path: str, vocab: int) -> np.ndarray:
    """What llama.cpp computes of one window."""
    question = {"model": path, "adapter": None, "texts": [], "vocab": vocab, "plain": 265, "eos": None, "chats": []}
    run = subprocess.run(
        [sys.executable, str(JUDGE)],
        input=json.dumps({**question, "windows": [[1, 300, 270, 265, 290, 268]]}),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-1500:]
    return np.array(json.loads(run.stdout)["log_probabilities"])


def compare(tokenizer: Tokenizer, pre: str = "") -> None:
    """back.gguf against m.gguf: its keys, its tokenizer as llama.cpp sees it, its tensors, and llama.cpp's ids."""
    with GGUFFile("m.gguf") as ours, GGUFFile("back.gguf") as theirs:
        a, b = ours.metadata, theirs.metadata
        for key in (a.keys() | b.keys()) - NAMED - {f"tokenizer.ggml.{k}" for k in ("tokens", "scores", "token_type")}:
            same = a[key] == pytest.approx(b[key]) if isinstance(a.get(key), float) else a.get(key) == b.get(key)
            assert same, (key, a.get(key), b.get(key))
        for key in MEANT:
            assert a.get(key, b.get(key)) == b.get(key, a.get(key)) or b[key] == pre, key
        _same_vocabulary(tokenizer, ours, theirs)
        for name in theirs.tensors.keys() | ours.tensors.keys():
            if name not in ours.tensors:  # transformers has all biases of a layer, or none
                assert name.endswith(".bias") and not theirs.read(name).any()
            else:  # gemma's norms lose 1 and get it back; the factors of rope are computed from their parameters
                np.testing.assert_allclose(theirs.read(name), ours.read(name), rtol=2e-6, atol=1e-7, err_msg=name)
    talk = [[{"role": "user", "content": "the <tool> cat"}]] if tokenizer.chat_template == TURN else []
    first, second = ask(texts=NASTY, special=[f"{t}<tool>{t}" for t in NASTY[:9]], prompts=NASTY[:5], chats=talk)
    assert first == second


def _same_vocabulary(tokenizer: Tokenizer, ours: GGUFFile, theirs: GGUFFile) -> None:
    back, count = read_tokenizer(theirs), tokenizer.vocab
    assert back.pieces == tokenizer.pieces
    assert (back.bos, back.eos, back.add_bos, back.add_eos) == (
        tokenizer.bos, tokenizer.eos, tokenizer.add_bos, tokenizer.add_eos
    )  # fmt: skip
    types = theirs.metadata["tokenizer.ggml.token_type"]
    assert (types[count:] == UNUSED).all()
    if isinstance(tokenizer, SentencePiece):
        np.testing.assert_array_equal(types[:count], tokenizer.types)
        learned = tokenizer.types != USER_DEFINED  # whose score is never asked for
        np.testing.assert_array_equal(
            theirs.metadata["tokenizer.ggml.scores"][:count][learned], tokenizer.scores[learned]
        )
    else:
        special = back.controls | back.user_defined | {back.eos}
        assert special == tokenizer.controls | tokenizer.user_defined | {tokenizer.eos}


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("llama", True),
        ("llama", False),
        ("llama_tied", True),
        ("qwen2", True),
        ("qwen2_without_biases", True),
        ("qwen3", True),
        ("gemma", False),
    ],
)
def test_a_sentencepiece_model_comes_back(capsys, name, prefix):
    made = spm(prefix)
    exported(name, made, spare=2)
    assert "note: " not in capsys.readouterr().out
    done = converted()
    assert done.returncode == 0, done.stderr[-1500:]
    compare(made)
    ours, theirs = (log_probabilities(path, made.vocab + 2) for path in ("m.gguf", "back.gguf"))
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", "gpt-2"),
        ("gpt2_untied", "gpt-2"),
        ("llama", "llama-bpe"),
        ("llama", "llama-spm"),
        ("llama", "starcoder"),
        ("llama", "deepseek-llm"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen2"),
    ],
)
def test_a_model_with_a_published_vocabulary_comes_back(capsys, name, published):
    made = vocabulary(published)
    exported(name, made)
    assert "note: " not in capsys.readouterr().out
    done = converted()
    assert done.returncode == 0, done.stderr[-1500:]
    compare(made)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_what_it_does_not_take_was_said_at_export(capsys, kind):
    made = {"byte": Bytes, "char": lambda: Characters.from_texts(NASTY), "bpe": lambda: BPE.train(NASTY, 300)}[kind]()
    exported("llama", made)
    assert "note: llama.cpp's convert_hf_to_gguf.py cannot" in capsys.readouterr().out
    assert converted().returncode != 0 and not Path("back.gguf").exists()
