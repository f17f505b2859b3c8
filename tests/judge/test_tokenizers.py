"""Tokenizers read from GGUF files have llama.cpp's ids, for every pre-tokenizer and for SentencePiece."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from texts import NASTY, PROSE, TALK, scramble_texts, write_untrained
from transformers_ids import answer_all

from toyexp import Tokenizer
from toyexp.cli.main import main
from toyexp.formats.gguf.header import GGUFError
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import family, read_tokenizer
from toyexp.tokenizers.byte_level import BPE
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp.tokenizers.tokenizer import BYTE, CONTROL, END_OF_TEXT, NORMAL, SYMBOLS, UNKNOWN, USER_DEFINED
from toyexp_data.chat import Message, tokenize
from toyexp_data.template import ChatTemplate

pytestmark = [pytest.mark.judge, pytest.mark.slow]

pytest.importorskip("xllamacpp", reason="the judge is llama.cpp, from the wheel xllamacpp: pip install 'toyexp[test]'")
pytest.importorskip("tokenizers", reason="byte-level BPE is the tokenizers library's: pip install 'toyexp[data]'")

JUDGE = Path(__file__).with_name("judge.py")
MAIN = ("gpt-2", "llama-bpe", "qwen2", "smollm", "default")
USED = ["<|im_start|>", "<|im_end|>", "<tool>", "<tool", " \t ", "\r\r", "☃é", "a<"]  # the first two are control tokens


ATOMS = [  # pieces that pre-tokenizers separate or join
    *(
        "'s",
        "'S",
        "'ll",
        "'vE",
        "'",
        "A",
        "b",
        "Ab",
        "aB",
        "CD",
        "ef",
        "\u00c9",
        "\u00e9",
        "\u017f",
        "\u4e2d",
        "\u3042",
        "\ud55c",
        "\u0646",
        "\u0e01",
        "\u2173",
    ),
    *(
        "1",
        "23",
        "456",
        "78901",
        "\u0663",
        "\u00bd",
        "!",
        "?!",
        "/",
        "_",
        "$",
        "+",
        "`",
        "(",
        ".",
        "\uff0c",
        "\u3002",
        "\u2026",
        "\u0301",
        "\u093f",
    ),
    *(
        " ",
        " ",
        "  ",
        "     ",
        " " * 9,
        "\t",
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x01",
        "\u200b",
        "\U0001f642",
    ),
    *("IMGIMGABZ", "<sentinel:12>"),
]


@cache
def make_texts(count: int) -> list[str]:
    """Return texts of all sorts: a list of difficult ones, characters mixed at random, and texts of hypothesis.

    Characters that Python calls unassigned are excluded, as in `scramble_texts`: from Unicode 16 on the tables of
    llama.cpp and of the tokenizers library differ.
    """
    generated: list[str] = []
    character = st.characters(exclude_categories=("Cn", "Cs"))
    piece = st.sampled_from([*USED, *ATOMS]) | st.text(character, max_size=4)

    @settings(
        max_examples=count // 4, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.lists(piece, max_size=8).map("".join))
    def make(text: str) -> None:
        generated.append(text)

    make()
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ATOMS, k=rng.randrange(2, 9))) for _ in range(count // 2)]
    return [*NASTY, *mixed, *generated, *scramble_texts(seed=2, count=count)][:count]


def ask(questions: Sequence[dict[str, Any]]) -> list[dict[str, list[list[int]]]]:
    """Return llama.cpp's ids for each file; see judge.py."""
    run = subprocess.run(
        [sys.executable, str(JUDGE)],
        input=json.dumps([dict.fromkeys(("texts", "special", "prompts", "chats", "draw"), ()) | q for q in questions]),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    assert run.returncode == 0, f"llama.cpp ended with {run.returncode}:\n" + "\n".join(run.stderr.splitlines()[-15:])
    return json.loads(run.stdout)


def write_and_read(path: Path, tokenizer: Tokenizer, name: str = "", **keys: Any) -> Tokenizer:
    """Write a file with the general name `name` and these `tokenizer.ggml.*` keys (None removes one); read its
    tokenizer.
    """
    tokenizer.family = family(name)
    metadata = tokenizer.gguf_metadata() | {f"ggml.{k}": v for k, v in keys.items()}
    tokenizer.source = {k: v for k, v in metadata.items() if v is not None}
    write_untrained(path, tokenizer, tokenizer.vocab, name)
    with GGUFFile(path) as file:
        return read_tokenizer(file)


def compare(tokenizers: dict[Path, Tokenizer], count: int, prompts: int = 20) -> None:
    """Fail with the first of `count` texts whose ids differ: as they are, with special tokens, and as prompts."""
    plain = make_texts(count)
    spelled = [f"{text}{USED[n % 3]}{text[:2]}" for n, text in enumerate(plain[: count // 10])]
    questions = [{"model": str(p), "texts": plain, "special": spelled, "prompts": plain[:prompts]} for p in tokenizers]
    for (path, tokenizer), answer in zip(tokenizers.items(), ask(questions), strict=True):
        ours = {
            "tokens": [ids.tolist() for ids in tokenizer.encode_pieces(plain, [True] * len(plain))],
            "special": [tokenizer.encode(text, special=True).tolist() for text in spelled],
            "prompts": [tokenizer.prompt(text).tolist() for text in plain[:prompts] if text],
        }
        theirs = answer | {
            "prompts": [ids for text, ids in zip(plain[:prompts], answer["prompts"], strict=True) if text]
        }
        for kind, asked_texts in (
            ("tokens", plain),
            ("special", spelled),
            ("prompts", [t for t in plain[:prompts] if t]),
        ):
            for text, our_ids, their_ids in zip(asked_texts, ours[kind], theirs[kind], strict=True):
                assert (path.stem, kind, text, our_ids) == (path.stem, kind, text, their_ids)


# -- byte-level BPE ---------------------------------------------------------------------------------------------------


@cache
def bpe_tokens(count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges that reveal boundaries: all groups of three adjacent bytes, then all pairs.

    Some complete words are tokens too, without a merge that makes them.
    """
    rng, fixed_tokens = random.Random(0), {*SYMBOLS, *USED}
    forms = ["".join(SYMBOLS[b] for b in text.encode()) for text in make_texts(count)]
    two = sorted({(f[n], f[n + 1]) for f in forms for n in range(len(f) - 1)})
    three = sorted({(f[n : n + 2], f[n + 2]) for f in forms for n in range(len(f) - 2)})
    words = sorted(
        {word for text in make_texts(count) for word, _ in PRE_TOKENIZERS["qwen2"].build().pre_tokenize_str(text)}
    )
    rng.shuffle(two)
    rng.shuffle(three)
    tokens = dict.fromkeys([*(a + b for a, b in three + two), *rng.sample(words, len(words) // 3)])
    return [token for token in tokens if token not in fixed_tokens], three + two


def boundary_tokenizer(path: Path, name: str, count: int) -> Tokenizer:
    """Return a tokenizer with the pre-tokenizer `name`, read from a file, that reveals boundaries in `count` texts."""
    tokens, merges = bpe_tokens(count)
    pieces = [*USED, *SYMBOLS, *tokens, END_OF_TEXT]
    types = np.full(len(pieces), NORMAL, np.int32)
    types[: len(USED)], types[:2], types[-1] = USER_DEFINED, CONTROL, CONTROL
    keys = {"pre": name, "token_type": types, "add_bos_token": None}
    return write_and_read(path / f"{name}.gguf", BPE(pieces, merges, len(pieces) - 1), **keys)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in MAIN[:2])) for n in MAIN])
def test_a_bpe_trained_with_a_pre_tokenizer_has_llama_cpps_ids(name, tmp_path):
    """The training texts are the test's, so that merges extend to every boundary between words."""
    trained = BPE.train([*make_texts(3000), PROSE], 3000, PRE_TOKENIZERS[name])
    compare({tmp_path / "model.gguf": write_and_read(tmp_path / "model.gguf", trained, pre=name)}, count=3000)


def test_every_pre_tokenizer_pattern_has_llama_cpps_ids(tmp_path):
    names = {pre: name for name, pre in PRE_TOKENIZERS.items()}.values()
    compare({tmp_path / f"{name}.gguf": boundary_tokenizer(tmp_path, name, 200) for name in names}, count=200)


@pytest.mark.full
def test_every_pre_tokenizer_name_has_llama_cpps_ids(tmp_path):
    compare(
        {tmp_path / f"{name}.gguf": boundary_tokenizer(tmp_path, name, 60) for name in PRE_TOKENIZERS},
        count=60,
        prompts=3,
    )


def test_a_file_without_a_pre_tokenizer_has_the_default_one(tmp_path):
    path = tmp_path / "model.gguf"
    tokenizer = write_and_read(path, boundary_tokenizer(tmp_path, "default", 200), pre=None)
    assert "ggml.pre" not in tokenizer.source
    compare({path: tokenizer}, count=200)


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def make_sentencepiece(seed: int, pieces: int, levels: int, excluded: Sequence[str] = ()) -> SentencePiece:
    """Return a tokenizer with pieces of the texts and `levels` different scores (few levels give many ties).

    No piece contains a string of `apart`.
    """
    rng = random.Random(seed)
    corpus = [(" " + text).replace(" ", BLANK).replace("\0", "") for text in make_texts(3000)]
    candidates = dict.fromkeys(c for text in corpus for c in text if rng.random() < 0.7)
    for _ in range(pieces):
        text = rng.choice(corpus)
        start = rng.randrange(len(text))
        candidates[text[start : start + rng.randrange(2, 8)]] = None
    fixed_pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *USED]
    # llama.cpp merges up to a control token if parts of it are tokens; another test covers this.
    controls = ("<unk>", "<s>", "</s>", *USED[:2])
    pieces_of_texts = [
        p for p in candidates if p not in fixed_pieces and (len(p) < 2 or not any(p in control for control in controls))
    ]
    pieces_of_texts = [p for p in pieces_of_texts if not any(text in p for text in excluded)]
    rng.shuffle(pieces_of_texts)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, CONTROL, CONTROL, *[USER_DEFINED] * (len(USED) - 2)]
    types = np.array([*kinds, *[NORMAL] * len(pieces_of_texts)], np.int32)
    scores = np.array([0.0] * len(fixed_pieces) + [-rng.randrange(levels) / 3 for _ in pieces_of_texts], np.float32)
    tokenizer = SentencePiece([*fixed_pieces, *pieces_of_texts], scores, types, eos=2)
    tokenizer.bos, tokenizer.add_bos = 1, True
    return tokenizer


def test_sentencepiece_with_distinct_and_equal_scores_has_llama_cpps_ids(tmp_path):
    kinds = {
        "own": make_sentencepiece(0, 6000, 10**9),
        "few": make_sentencepiece(1, 6000, 4),
        "none": make_sentencepiece(2, 2000, 1),
    }
    compare(
        {tmp_path / name: write_and_read(tmp_path / name, tokenizer) for name, tokenizer in kinds.items()}, count=3000
    )


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
def test_tokens_added_by_export_have_llama_cpps_and_transformers_ids(kind, tmp_path, capsys):
    tokenizer = boundary_tokenizer(tmp_path, "qwen2", 200) if kind == "bpe" else make_sentencepiece(5, 500, 9)
    write_untrained(tmp_path / "base.gguf", tokenizer, tokenizer.vocab)
    base, larger = (str(tmp_path / f"{name}.gguf") for name in ("base", "larger"))
    words = ["--type", "f32", "--new-tokens", "<|im_sep|>,<|cat", "--to", larger]
    assert main(["export", base, *words]) == 0, capsys.readouterr().err
    with GGUFFile(larger) as file:
        new = read_tokenizer(file)
    texts = ["<|im_sep|>", "b<|cat b", " <|im_sep|>\n<|cat<|cat", *make_texts(60)]
    (answer,) = ask([{"model": larger, "texts": texts}])
    ours = [new.encode(text).tolist() for text in texts]
    assert answer["tokens"] == ours and {i for ids in ours for i in ids} >= {tokenizer.vocab, tokenizer.vocab + 1}
    assert main(["export", larger, "--type", "hf", "--to", str(tmp_path / "hf")]) == 0, capsys.readouterr().err
    question = {"path": str(tmp_path / "hf"), "texts": texts[:3], "chat": None, "options": {}}
    assert answer_all([question])["answers"][0]["ids"] == ours[:3]


def test_sentencepiece_follows_the_keys_of_the_file_as_llama_cpp_does(tmp_path):
    changes = {
        "bare": {"add_space_prefix": False},
        "whole numbers": {"scores": -np.arange(make_sentencepiece(3, 500, 9).vocab, dtype=np.int32)},
        "around": {"add_bos_token": False, "add_eos_token": True},
    }
    compare(
        {
            tmp_path / n: write_and_read(tmp_path / n, make_sentencepiece(3, 500, 9), **keys)
            for n, keys in changes.items()
        },
        count=200,
    )
    left_out = ("scores", "add_bos_token", "add_space_prefix", "bos_token_id", "eos_token_id")
    path = tmp_path / "defaults"
    compare({path: write_and_read(path, make_sentencepiece(4, 500, 9), **dict.fromkeys(left_out))}, count=200)


def test_unlike_llama_cpp_text_never_merges_into_a_control_token(tmp_path):
    """This is the only difference; the SentencePiece library and the models' training texts agree with toyexp."""
    path = tmp_path / "model.gguf"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), BLANK, "<", "s", ">", "s>", "x"]
    types = np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6], np.int32)
    tokenizer = write_and_read(path, SentencePiece(pieces, np.zeros(len(pieces), np.float32), types, eos=2))
    (answer,) = ask([{"model": str(path), "texts": ["x<s>"]}])
    assert [tokenizer.pieces[i] for i in answer["tokens"][0]] == [BLANK, "x", "<s>"]
    assert [tokenizer.pieces[i] for i in tokenizer.encode("x<s>")] == [BLANK, "x", "<", "s>"]


# -- behaviour that no key describes ----------------------------------------------------------------------------------

PHI = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<tool>"]  # the last is user-defined
AROUND = ("", " ", "  \n", "\t\v\f\r x ", "\u00a0", "\u3000 ")


def surround_with_spaces(tokens: Sequence[str]) -> list[str]:
    """Return texts with special tokens next to white space of all sorts, and next to each other."""
    pairs = [(a, b) for a in tokens for b in (*tokens[-2:], "") if a]
    return [f"{w}a{w}{a}{w}{b}{w}b{w}{a}{w}" for a, b in pairs for w in AROUND]


def make_phi_tokenizer(path: Path, kind: str, name: str) -> Tokenizer:
    """Return a tokenizer with phi-3's special tokens, read from a file with the general name `name`."""
    if kind == "spm":
        pieces = [*PHI, *(f"<0x{b:02X}>" for b in range(256)), BLANK, "a", "b", "x", f"{BLANK}b", f"{BLANK}{BLANK}"]
        kinds = [UNKNOWN, *[CONTROL] * 4, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * 6]
        types = np.array(kinds, np.int32)
        return write_and_read(path, SentencePiece(pieces, np.zeros(len(pieces), np.float32), types, eos=3), name)
    pieces = [*PHI, *SYMBOLS, "\u0120b", END_OF_TEXT + END_OF_TEXT]
    types = np.array([UNKNOWN, *[CONTROL] * 4, USER_DEFINED, *[NORMAL] * 258], np.int32)
    return write_and_read(path, BPE(pieces, [("\u0120", "b")], 3), name, token_type=types)


@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_special_tokens_of_a_model_named_phi_3_swallow_white_space_as_in_llama_cpp(kind, tmp_path):
    names = {"Phi3": True, "a PHI-3.5 model": True, "phi-4": False, "": False}
    tokenizers = {name: make_phi_tokenizer(tmp_path / f"{n}.gguf", kind, name) for n, name in enumerate(names)}
    make_texts = surround_with_spaces(PHI)
    answers = ask(
        [{"model": str(tmp_path / f"{n}.gguf"), "texts": make_texts, "special": make_texts} for n in range(len(names))]
    )
    for (name, swallows), answer in zip(names.items(), answers, strict=True):
        tokenizer = tokenizers[name]
        assert [tokenizer.encode(text).tolist() for text in make_texts] == answer["tokens"], name
        assert [tokenizer.encode(text, special=True).tolist() for text in make_texts] == answer["special"], name
        swallowing = {tokenizer.pieces[i] for i in tokenizer.swallow_after}
        assert swallowing == ({"</s>", "<|user|>", "<tool>"} if swallows else set()), name


def test_a_mask_token_swallows_the_white_space_before_it_as_in_llama_cpp(tmp_path):
    cases = [("<mask>", "jina-v2-code", ""), ("<mask>", "gpt-2", ""), ("[MASK]", "gpt-2", "modern-bert small"),
             ("[MASK]", "modern-bert", "x"), ("[MASK]", "jina-v2-de", "modern-bert")]  # fmt: skip
    questions, tokenizers = [], []
    for n, (mask, pre, name) in enumerate(cases):
        types = np.array([CONTROL, *[NORMAL] * 256, CONTROL], np.int32)
        path = tmp_path / f"{n}.gguf"
        tokenizers.append(
            write_and_read(path, BPE([mask, *SYMBOLS, "<end>"], [], 257), name, token_type=types, pre=pre)
        )
        questions.append({"model": str(path), "special": surround_with_spaces([mask])})
    for tokenizer, answer, case in zip(tokenizers, ask(questions), cases, strict=True):
        ours = [tokenizer.encode(text, special=True).tolist() for text in surround_with_spaces([case[0]])]
        assert ours == answer["special"], case


def test_a_token_outside_the_byte_symbols_never_matches_text(tmp_path):
    pieces = [*SYMBOLS, "\u2603", "a\u2603", "a b", "ab", END_OF_TEXT]
    merges = [("a", "\u2603"), ("a", "b")]
    tokenizer = write_and_read(tmp_path / "model.gguf", BPE(pieces, merges, 260), pre="llama-bpe", add_bos_token=False)
    make_texts = ["\u2603", "a\u2603 a b ab", "\u2603a", "\u0120", *NASTY]
    (answer,) = ask([{"model": str(tmp_path / "model.gguf"), "texts": make_texts}])
    assert [tokenizer.encode(text).tolist() for text in make_texts] == answer["tokens"]
    assert {256, 257, 258}.isdisjoint(i for ids in answer["tokens"] for i in ids)
    assert [tokenizer.token_bytes(i) for i in (256, 257, 258)] == ["\u2603".encode(), "a\u2603".encode(), b"a b"]


def checkout_folder(folder: str) -> Path:
    """Return a directory of a checkout of llama.cpp; skip without one."""
    root = os.environ.get("TOYEXP_LLAMA_CPP")
    if not root:
        pytest.skip("no checkout of llama.cpp is named: TOYEXP_LLAMA_CPP=...")
    return Path(root) / folder


@pytest.mark.full
def test_every_vocabulary_of_llama_cpps_checkout_has_its_ids(tmp_path):
    """The test uses the checkout's files with their texts and ids, and asks llama.cpp about further texts."""
    supported, ours, questions = ("gpt2", "llama"), [], []
    plain = make_texts(400)
    for path in sorted(checkout_folder("models").glob("ggml-vocab-*.gguf")):
        with GGUFFile(path) as file:
            kind = file.metadata["tokenizer.ggml.model"]
            if kind not in supported:
                with pytest.raises(GGUFError, match=rf"\({kind}, pre-tokenizer .* is not supported"):
                    read_tokenizer(file)
                continue
            tokenizer = read_tokenizer(file)
            name = file.metadata.get("general.name", "")
        expected = path.with_name(f"{path.name}.out")
        if expected.exists():
            theirs = [[int(i) for i in line.split()] for line in expected.read_text().split("\n")]
            published_texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
            our_ids = [tokenizer.encode(text).tolist() for text in published_texts]
            assert (path.name, our_ids) == (path.name, theirs[: len(published_texts)])
        # toyexp rejects a character without a token; llama.cpp omits it.
        missing = tokenizer._missing if isinstance(tokenizer, BPE) else frozenset()
        special = surround_with_spaces([tokenizer.pieces[i] for i in sorted(tokenizer._special)[:12]])
        known_texts, spelled = ([t for t in part if t and missing.isdisjoint(t.encode())] for part in (plain, special))
        copy = tmp_path / path.name
        write_untrained(copy, tokenizer, len(tokenizer.source["ggml.tokens"]), name)
        questions.append({"model": str(copy), "texts": known_texts, "special": spelled, "prompts": known_texts[:20]})
        prompts = [tokenizer.prompt(text).tolist() for text in known_texts[:20]]
        our_ids = [tokenizer.encode(t) for t in known_texts], [tokenizer.encode(t, special=True) for t in spelled]
        ours.append([*([ids.tolist() for ids in part] for part in our_ids), prompts])
    assert questions, "the checkout has no vocabulary"
    for question, our_ids, answer in zip(questions, ours, ask(questions), strict=True):
        for part, kind_of_ids in zip(our_ids, ("tokens", "special", "prompts"), strict=True):
            for our_list, their_list in zip(part, answer[kind_of_ids], strict=True):
                assert (question["model"], kind_of_ids, our_list) == (question["model"], kind_of_ids, their_list)


# -- conversations ----------------------------------------------------------------------------------------------------

TEMPLATES = {
    "in the manner of Llama 3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_end|>\\n\\n' + m['content'] }}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\\n\\n' }}{% endif %}"
    ),
    "in the manner of Llama 2": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% else %}"
        "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
}
ANSWER = Message("assistant", "No, 12!")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "spm"])
def test_a_chat_prompt_has_the_ids_used_in_training(kind, template, tmp_path):
    pytest.importorskip("jinja2", reason="a GGUF's own chat template needs jinja2: pip install 'toyexp[data]'")
    path = tmp_path / "chat.gguf"
    # llama.cpp tokenizes an earlier answer together with the text before it; training tokenizes them separately, so no
    # token may cross the boundary. The pieces depend on the texts of hypothesis, and these on the modules imported
    # before.
    tokenizer = (
        make_sentencepiece(5, 3000, 10**9, ["\n" + BLANK, "]" + BLANK])
        if kind == "spm"
        else boundary_tokenizer(tmp_path, kind, 200)
    )
    tokenizer.chat_template = TEMPLATES[template]
    write_untrained(path, tokenizer, tokenizer.vocab)
    with GGUFFile(path) as file:
        tokenizer = read_tokenizer(file)
    (prompt,) = ask([{"model": str(path), "chats": [[m.fields() for m in TALK]]}])[0]["chats"]
    example = tokenize(
        ChatTemplate(tokenizer.chat_template, tokenizer, path).rows([*TALK, ANSWER]).rows[0], tokenizer, False
    )
    assert example.ids[: len(prompt)].tolist() == prompt
    assert prompt[:2].count(tokenizer.bos) <= 1
    answer = example.ids[len(prompt) :].tolist()
    assert answer[-1] in tokenizer.end_ids and b"".join(map(tokenizer.token_bytes, answer)).strip() == b"No, 12!"
    assert example.learned[len(prompt) :].all() and not example.learned[len(prompt) - 3 : len(prompt)].any()


# -- generation -------------------------------------------------------------------------------------------------------


def test_llama_cpp_has_the_same_end_tokens(tmp_path):
    pieces = [*SYMBOLS, "<|im_end|>", "<|eot_id|>", "[PAD]", "<|file_sep|>", "<|fim_prefix|>", "turn", "<other>"]
    tokenizer = write_and_read(tmp_path / "model.gguf", BPE(pieces, [], 262), eot_token_id=261)
    (answer,) = ask([{"model": str(tmp_path / "model.gguf"), "plain": 65, "draw": [*range(256, 263)]}])
    assert {i for i, why in answer["stopped_by"].items() if why == "eos"} == {str(i) for i in tokenizer.end_ids}


def test_llama_cpp_generates_with_a_model_without_a_tokenizer(tmp_path):
    write_untrained(tmp_path / "model.gguf", None, 100)
    (answer,) = ask([{"model": str(tmp_path / "model.gguf"), "plain": 65, "draw": [7, 99]}])
    assert answer["stopped_by"] == {"7": "limit", "99": "eos"}
