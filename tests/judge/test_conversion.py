"""llama.cpp's converter turns a directory exported for transformers back into an equal GGUF.

TOYEXP_LLAMA_CPP names a checkout of llama.cpp with convert_hf_to_gguf.py, its packages and, for byte-level BPE, the
published vocabularies in models/. The converter needs the package sentencepiece.
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
from toyexp_models.arcee import Arcee
from toyexp_models.gemma3 import Gemma2, Gemma3
from toyexp_models.gpt2 import GPT2
from toyexp_models.granite import Granite
from toyexp_models.lfm2 import Lfm2
from toyexp_models.llama import Gemma, Llama, Qwen2, Qwen3
from toyexp_models.mamba2 import Mamba2
from toyexp_models.moe import Olmoe, Qwen3Moe
from toyexp_models.olmo import Olmo2
from toyexp_models.smollm3 import SmolLM3

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
# The factors of Llama 3's scaling for base 500, factor 8 and an original context of 40.
FACTORS = [1.0, 4.424772, 8.0, 8.0]
MODELS: dict[str, Model] = {
    "llama": Llama(**SIZES, **ROPE, **BIASES, d_ff=48),
    "llama_tied": Llama(**SIZES, rope_factors=FACTORS, rope_base=500.0, qkv_bias=True, tied=True, n_kv_heads=1),
    "qwen2": Qwen2(**SIZES, d_ff=48, rope_scale=3.0, tied=True),
    "qwen2_without_biases": Qwen2(**SIZES, d_ff=48, qkv_bias=False),
    "qwen3": Qwen3(**SIZES, **ROPE, d_ff=48),
    "gemma": Gemma(**SIZES, d_ff=48, n_kv_heads=1, head_dim=16),
    "gemma2": Gemma2(**SIZES, d_ff=48, head_dim=16, window=5, score_softcap=2.0),
    "gemma3": Gemma3(**{**SIZES, "n_layers": 7}, d_ff=48, head_dim=16, window=5, final_softcap=3.0),
    "granite": Granite(**SIZES, d_ff=48, embedding_scale=3.0, residual_scale=0.4, attention_scale=0.2, logit_scale=2.0),
    "olmo2": Olmo2(**SIZES, d_ff=48, rope_scale=2.5),
    "arcee": Arcee(**SIZES, **ROPE, d_ff=48),
    "smollm3": SmolLM3(**{**SIZES, "n_layers": 5}, **ROPE, d_ff=48, tied=True),
    "qwen3moe": Qwen3Moe(**SIZES, **ROPE, d_ff=32, experts=5, experts_used=3),
    "olmoe": Olmoe(**{**SIZES, "norm_eps": 1e-5}, d_ff=32),
    "lfm2": Lfm2(**{**SIZES, "n_layers": 3}, d_ff=48, conv_length=4, attention_layers=[1]),
    "mamba2": Mamba2(**SIZES, d_ff=64, n_groups=2, state=8, conv_length=3),
    "gpt2": GPT2(**SIZES, d_ff=128),
    "gpt2_untied": GPT2(**SIZES, d_ff=128, tied=False),
}
# Keys in which the converter may differ without changing an id or a number: it omits or adds defaults, and sets padding
# to the end token if none is available, as transformers requires.
IGNORED_KEYS = {
    "general.file_type", "general.name", "general.tags", "general.quantization_version", "general.size_label",
    "general.type",
    *(f"tokenizer.ggml.{key}_token_id" for key in ("padding", "unknown", "eot")),
    *(f"tokenizer.ggml.add_{key}" for key in ("sep_token", "bos_token", "eos_token", "space_prefix")),
    "tokenizer.ggml.pre",
    *(f"{arch}.{key}" for arch in {model.name for model in MODELS.values()} for key in (
        "vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length", "rope.freq_base",
        "rope.freq_base_swa", "attention.sliding_window_pattern", "expert_feed_forward_length")),
    "mamba2.context_length",  # a constant, because the model has no limit
}  # fmt: skip
COMPARED_IF_PRESENT = (
    "tokenizer.ggml.pre",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
)  # equal if both files have them


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def make_sentencepiece(prefix: bool = True) -> SentencePiece:
    """Return a SentencePiece tokenizer with pieces of the texts, all bytes, and two tokens matched as spelled."""
    tokenizer = hard_pieces(prefix)
    tokenizer.bos, tokenizer.add_bos, tokenizer.chat_template = 1, prefix, TURN
    return tokenizer


def read_published_vocabulary(name: str) -> Tokenizer:
    """Return a published tokenizer from the checkout; skip if it is missing."""
    path = CHECKOUT / "models" / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with GGUFFile(path) as file:
        return read_tokenizer(file)


def export_model(name: str, tokenizer: Tokenizer, spare_rows: int = 0) -> Path:
    """Write m.gguf with random weights and export it for transformers."""
    model, rng = replace(MODELS[name], vocab=tokenizer.vocab + spare_rows), np.random.default_rng(0)
    values = {
        t.name: (rng.normal(0, 0.2, t.shape) + t.name.endswith("norm.weight")).astype(np.float32)
        for t in model.tensors()
    }
    write_model(Path("m.gguf"), *model.fold(values), tokenizer)
    assert main(["export", "m.gguf", "--type", "hf"]) == 0
    return Path("m.gguf")


def run_converter() -> subprocess.CompletedProcess[str]:
    """Convert m-hf to back.gguf."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT / "gguf-py"), os.environ.get("PYTHONPATH", "")]))
    words = [str(CHECKOUT / "convert_hf_to_gguf.py"), "m-hf", "--outfile", "back.gguf", "--outtype", "f32"]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)


def ask(**question: object) -> list[dict]:
    """Return llama.cpp's answers for both files; see judge.py."""
    full_question = dict.fromkeys(("texts", "special", "prompts", "chats", "draw"), ()) | question
    run = subprocess.run(
        [sys.executable, str(JUDGE)],
        input=json.dumps([{**full_question, "model": path} for path in ("m.gguf", "back.gguf")]),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-1500:]
    return json.loads(run.stdout)


def log_probabilities(path: str, vocab: int) -> np.ndarray:
    """Return llama.cpp's log-probabilities for one window."""
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
    """Compare back.gguf with m.gguf: keys, tokenizer, tensors, and llama.cpp's ids."""
    with GGUFFile("m.gguf") as ours, GGUFFile("back.gguf") as theirs:
        a, b = ours.metadata, theirs.metadata
        for key in (
            (a.keys() | b.keys()) - IGNORED_KEYS - {f"tokenizer.ggml.{k}" for k in ("tokens", "scores", "token_type")}
        ):
            own, converted = (np.asarray(keys.get(key)).tolist() for keys in (a, b))
            same = own == pytest.approx(converted) if isinstance(own, float) else own == converted
            assert same, (key, a.get(key), b.get(key))
        for key in COMPARED_IF_PRESENT:
            assert a.get(key, b.get(key)) == b.get(key, a.get(key)) or b[key] == pre, key
        assert_same_vocabulary(tokenizer, ours, theirs)
        for name in theirs.tensors.keys() | ours.tensors.keys():
            if name not in ours.tensors:  # transformers has all biases of a layer or none
                assert name.endswith(".bias") and not theirs.read(name).any()
            else:  # the converter adds 1 to gemma's norms, and computes rope factors from their parameters
                np.testing.assert_allclose(theirs.read(name), ours.read(name), rtol=2e-6, atol=1e-7, err_msg=name)
    talk = [[{"role": "user", "content": "the <tool> cat"}]] if tokenizer.chat_template == TURN else []
    first, second = ask(texts=NASTY, special=[f"{t}<tool>{t}" for t in NASTY[:9]], prompts=NASTY[:5], chats=talk)
    assert first == second


def assert_same_vocabulary(tokenizer: Tokenizer, ours: GGUFFile, theirs: GGUFFile) -> None:
    back, count = read_tokenizer(theirs), tokenizer.vocab
    assert back.pieces == tokenizer.pieces
    assert (back.bos, back.eos, back.add_bos, back.add_eos) == (
        tokenizer.bos, tokenizer.eos, tokenizer.add_bos, tokenizer.add_eos
    )  # fmt: skip
    types = theirs.metadata["tokenizer.ggml.token_type"]
    assert (types[count:] == UNUSED).all()
    if isinstance(tokenizer, SentencePiece):
        np.testing.assert_array_equal(types[:count], tokenizer.types)
        learned = tokenizer.types != USER_DEFINED  # these tokens are found without their score
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
        ("gemma2", False),
        ("gemma3", False),
        ("granite", True),
        ("arcee", True),
        ("smollm3", True),
        ("mamba2", True),
    ],
)
def test_a_sentencepiece_model_is_converted_back(capsys, name, prefix):
    tokenizer = make_sentencepiece(prefix)
    export_model(name, tokenizer, spare_rows=2)
    assert "note: " not in capsys.readouterr().out
    conversion = run_converter()
    assert conversion.returncode == 0, conversion.stderr[-1500:]
    compare(tokenizer)
    ours, theirs = (log_probabilities(path, tokenizer.vocab + 2) for path in ("m.gguf", "back.gguf"))
    # Norms of gemma3 are rounded when 1 is subtracted and added; then llama.cpp's float16 table of GELU may take a
    # neighbouring value (measured: 1.2e-4).
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=5e-4 if name == "gemma3" else 2e-5)


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
        ("qwen3moe", "qwen2"),
        ("granite", "gpt-2"),
        ("olmo2", "gpt-2"),
        ("olmoe", "gpt-2"),
        ("smollm3", "llama-bpe"),
        ("lfm2", "llama-bpe"),
        ("mamba2", "gpt-2"),
    ],
)
def test_a_model_with_a_published_vocabulary_is_converted_back(capsys, name, published):
    tokenizer = read_published_vocabulary(published)
    export_model(name, tokenizer)
    assert "note: " not in capsys.readouterr().out
    conversion = run_converter()
    assert conversion.returncode == 0, conversion.stderr[-1500:]
    compare(tokenizer)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_the_export_notes_tokenizers_that_the_converter_rejects(capsys, kind):
    tokenizer = {"byte": Bytes, "char": lambda: Characters.from_texts(NASTY), "bpe": lambda: BPE.train(NASTY, 300)}[
        kind
    ]()
    export_model("llama", tokenizer)
    assert "note: llama.cpp's convert_hf_to_gguf.py cannot" in capsys.readouterr().out
    assert run_converter().returncode != 0 and not Path("back.gguf").exists()
