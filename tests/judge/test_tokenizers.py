"""The tokenizers of GGUF files give llama.cpp's own ids, for every pre-tokenizer and for SentencePiece."""

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

from toyexp import Tokenizer
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


ATOMS = [  # what pre-tokenizers tell apart, and what they take together
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
def texts(count: int) -> list[str]:
    """Texts of all sorts: a list of nasty ones, classes of characters mixed at random, and hypothesis' own.

    Characters that Python calls unassigned are left out, as in `scramble_texts`: from Unicode 16 on the tables of
    llama.cpp and of the tokenizers library differ.
    """
    made: list[str] = []
    character = st.characters(exclude_categories=("Cn", "Cs"))
    piece = st.sampled_from([*USED, *ATOMS]) | st.text(character, max_size=4)

    @settings(
        max_examples=count // 4, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.lists(piece, max_size=8).map("".join))
    def make(text: str) -> None:
        made.append(text)

    make()
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ATOMS, k=rng.randrange(2, 9))) for _ in range(count // 2)]
    return [*NASTY, *mixed, *made, *scramble_texts(seed=2, count=count)][:count]


def ask(questions: Sequence[dict[str, Any]]) -> list[dict[str, list[list[int]]]]:
    """llama.cpp's ids, file by file; see judge.py."""
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


def stored(path: Path, tokenizer: Tokenizer, name: str = "", **keys: Any) -> Tokenizer:
    """The tokenizer as it is read from the file `name`d so, with these `tokenizer.ggml.*` keys; None: without it."""
    tokenizer.family = family(name)
    changed = tokenizer.gguf_metadata() | {f"ggml.{k}": v for k, v in keys.items()}
    tokenizer.source = {k: v for k, v in changed.items() if v is not None}
    write_untrained(path, tokenizer, tokenizer.vocab, name)
    with GGUFFile(path) as file:
        return read_tokenizer(file)


def compare(tokenizers: dict[Path, Tokenizer], count: int, prompts: int = 20) -> None:
    """Fails with the first text whose ids differ, of `count` texts as they are, with special tokens, and as prompts."""
    plain = texts(count)
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
        for what, asked in (("tokens", plain), ("special", spelled), ("prompts", [t for t in plain[:prompts] if t])):
            for text, one, other in zip(asked, ours[what], theirs[what], strict=True):
                assert (path.stem, what, text, one) == (path.stem, what, text, other)


# -- byte-level BPE ---------------------------------------------------------------------------------------------------


@cache
def cuts(count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges that show where texts are cut: every three bytes side by side, then every two.

    Some whole words are tokens too, without a merge that makes them.
    """
    rng, known = random.Random(0), {*SYMBOLS, *USED}
    forms = ["".join(SYMBOLS[b] for b in text.encode()) for text in texts(count)]
    two = sorted({(f[n], f[n + 1]) for f in forms for n in range(len(f) - 1)})
    three = sorted({(f[n : n + 2], f[n + 2]) for f in forms for n in range(len(f) - 2)})
    words = sorted(
        {word for text in texts(count) for word, _ in PRE_TOKENIZERS["qwen2"].build().pre_tokenize_str(text)}
    )
    rng.shuffle(two)
    rng.shuffle(three)
    tokens = dict.fromkeys([*(a + b for a, b in three + two), *rng.sample(words, len(words) // 3)])
    return [token for token in tokens if token not in known], three + two


def cutter(path: Path, name: str, count: int) -> Tokenizer:
    """A tokenizer read from a file with the pre-tokenizer `name`, which shows where it cuts `count` texts."""
    found, merges = cuts(count)
    pieces = [*USED, *SYMBOLS, *found, END_OF_TEXT]
    types = np.full(len(pieces), NORMAL, np.int32)
    types[: len(USED)], types[:2], types[-1] = USER_DEFINED, CONTROL, CONTROL
    keys = {"pre": name, "token_type": types, "add_bos_token": None}
    return stored(path / f"{name}.gguf", BPE(pieces, merges, len(pieces) - 1), **keys)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in MAIN[:2])) for n in MAIN])
def test_a_bpe_that_learned_with_the_pre_tokenizer(name, tmp_path):
    """Trained on the texts themselves, so that merges reach right up to wherever a text is cut into words."""
    trained = BPE.train([*texts(3000), PROSE], 3000, PRE_TOKENIZERS[name])
    compare({tmp_path / "model.gguf": stored(tmp_path / "model.gguf", trained, pre=name)}, count=3000)


def test_every_pattern_of_the_table(tmp_path):
    names = {pre: name for name, pre in PRE_TOKENIZERS.items()}.values()
    compare({tmp_path / f"{name}.gguf": cutter(tmp_path, name, 200) for name in names}, count=200)


@pytest.mark.full
def test_every_name_of_the_table_means_its_pattern(tmp_path):
    compare({tmp_path / f"{name}.gguf": cutter(tmp_path, name, 60) for name in PRE_TOKENIZERS}, count=60, prompts=3)


def test_a_file_without_a_pre_tokenizer_has_the_default_one(tmp_path):
    path = tmp_path / "model.gguf"
    tokenizer = stored(path, cutter(tmp_path, "default", 200), pre=None)
    assert "ggml.pre" not in tokenizer.source
    compare({path: tokenizer}, count=200)


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def vocabulary(seed: int, pieces: int, levels: int, apart: Sequence[str] = ()) -> SentencePiece:
    """Pieces of the texts with scores of so many levels: few of them make many ties; none has one of `apart` in it."""
    rng = random.Random(seed)
    corpus = [(" " + text).replace(" ", BLANK).replace("\0", "") for text in texts(3000)]
    found = dict.fromkeys(c for text in corpus for c in text if rng.random() < 0.7)
    for _ in range(pieces):
        text = rng.choice(corpus)
        start = rng.randrange(len(text))
        found[text[start : start + rng.randrange(2, 8)]] = None
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *USED]
    # llama.cpp merges up to a control token where parts of it are tokens: a test of its own.
    controls = ("<unk>", "<s>", "</s>", *USED[:2])
    rest = [p for p in found if p not in fixed and (len(p) < 2 or not any(p in control for control in controls))]
    rest = [p for p in rest if not any(text in p for text in apart)]
    rng.shuffle(rest)
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, CONTROL, CONTROL, *[USER_DEFINED] * (len(USED) - 2)]
    types = np.array([*kinds, *[NORMAL] * len(rest)], np.int32)
    scores = np.array([0.0] * len(fixed) + [-rng.randrange(levels) / 3 for _ in rest], np.float32)
    tokenizer = SentencePiece([*fixed, *rest], scores, types, eos=2)
    tokenizer.bos, tokenizer.add_bos = 1, True
    return tokenizer


def test_sentencepiece_with_scores_of_its_own_for_each_token_and_with_ties(tmp_path):
    kinds = {
        "own": vocabulary(0, 6000, 10**9),
        "few": vocabulary(1, 6000, 4),
        "none": vocabulary(2, 2000, 1),
    }
    compare({tmp_path / name: stored(tmp_path / name, tokenizer) for name, tokenizer in kinds.items()}, count=3000)


def test_sentencepiece_as_the_keys_of_a_file_change_it(tmp_path):
    changes = {
        "bare": {"add_space_prefix": False},
        "whole numbers": {"scores": -np.arange(vocabulary(3, 500, 9).vocab, dtype=np.int32)},
        "around": {"add_bos_token": False, "add_eos_token": True},
    }
    compare(
        {tmp_path / n: stored(tmp_path / n, vocabulary(3, 500, 9), **keys) for n, keys in changes.items()}, count=200
    )
    left_out = ("scores", "add_bos_token", "add_space_prefix", "bos_token_id", "eos_token_id")
    path = tmp_path / "defaults"
    compare({path: stored(path, vocabulary(4, 500, 9), **dict.fromkeys(left_out))}, count=200)


def test_where_parts_of_a_control_token_are_tokens_llama_cpp_makes_it_of_text_and_we_do_not(tmp_path):
    """The one difference: SentencePiece itself never does it, nor did the texts that models learned from."""
    path = tmp_path / "model.gguf"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), BLANK, "<", "s", ">", "s>", "x"]
    types = np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6], np.int32)
    tokenizer = stored(path, SentencePiece(pieces, np.zeros(len(pieces), np.float32), types, eos=2))
    (answer,) = ask([{"model": str(path), "texts": ["x<s>"]}])
    assert [tokenizer.pieces[i] for i in answer["tokens"][0]] == [BLANK, "x", "<s>"]
    assert [tokenizer.pieces[i] for i in tokenizer.encode("x<s>")] == [BLANK, "x", "<", "s>"]


# -- what no key says -------------------------------------------------------------------------------------------------

PHI = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<tool>"]  # the last is user-defined
AROUND = ("", " ", "  \n", "\t\v\f\r x ", "\u00a0", "\u3000 ")


def around(tokens: Sequence[str]) -> list[str]:
    """Texts in which special tokens stand beside white space of all sorts, and beside one another."""
    pairs = [(a, b) for a in tokens for b in (*tokens[-2:], "") if a]
    return [f"{w}a{w}{a}{w}{b}{w}b{w}{a}{w}" for a, b in pairs for w in AROUND]


def with_phi_tokens(path: Path, kind: str, name: str) -> Tokenizer:
    """A tokenizer with phi-3's special tokens, read from a file called `name`."""
    if kind == "spm":
        pieces = [*PHI, *(f"<0x{b:02X}>" for b in range(256)), BLANK, "a", "b", "x", f"{BLANK}b", f"{BLANK}{BLANK}"]
        kinds = [UNKNOWN, *[CONTROL] * 4, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * 6]
        types = np.array(kinds, np.int32)
        return stored(path, SentencePiece(pieces, np.zeros(len(pieces), np.float32), types, eos=3), name)
    pieces = [*PHI, *SYMBOLS, "\u0120b", END_OF_TEXT + END_OF_TEXT]
    types = np.array([UNKNOWN, *[CONTROL] * 4, USER_DEFINED, *[NORMAL] * 258], np.int32)
    return stored(path, BPE(pieces, [("\u0120", "b")], 3), name, token_type=types)


@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_special_tokens_of_a_file_called_phi_3_swallow_white_space_as_in_llama_cpp(kind, tmp_path):
    names = {"Phi3": True, "a PHI-3.5 model": True, "phi-4": False, "": False}
    known = {name: with_phi_tokens(tmp_path / f"{n}.gguf", kind, name) for n, name in enumerate(names)}
    texts = around(PHI)
    answers = ask([{"model": str(tmp_path / f"{n}.gguf"), "texts": texts, "special": texts} for n in range(len(names))])
    for (name, swallows), answer in zip(names.items(), answers, strict=True):
        tokenizer = known[name]
        assert [tokenizer.encode(text).tolist() for text in texts] == answer["tokens"], name
        assert [tokenizer.encode(text, special=True).tolist() for text in texts] == answer["special"], name
        found = {tokenizer.pieces[i] for i in tokenizer.swallow_after}
        assert found == ({"</s>", "<|user|>", "<tool>"} if swallows else set()), name


def test_a_mask_swallows_the_white_space_before_it_where_llama_cpp_says_so(tmp_path):
    cases = [("<mask>", "jina-v2-code", ""), ("<mask>", "gpt-2", ""), ("[MASK]", "gpt-2", "modern-bert small"),
             ("[MASK]", "modern-bert", "x"), ("[MASK]", "jina-v2-de", "modern-bert")]  # fmt: skip
    questions, tokenizers = [], []
    for n, (mask, pre, name) in enumerate(cases):
        types = np.array([CONTROL, *[NORMAL] * 256, CONTROL], np.int32)
        path = tmp_path / f"{n}.gguf"
        tokenizers.append(stored(path, BPE([mask, *SYMBOLS, "<end>"], [], 257), name, token_type=types, pre=pre))
        questions.append({"model": str(path), "special": around([mask])})
    for tokenizer, answer, case in zip(tokenizers, ask(questions), cases, strict=True):
        ours = [tokenizer.encode(text, special=True).tolist() for text in around([case[0]])]
        assert ours == answer["special"], case


def test_a_token_that_is_not_written_in_byte_symbols_is_in_no_text(tmp_path):
    pieces = [*SYMBOLS, "\u2603", "a\u2603", "a b", "ab", END_OF_TEXT]
    merges = [("a", "\u2603"), ("a", "b")]
    tokenizer = stored(tmp_path / "model.gguf", BPE(pieces, merges, 260), pre="llama-bpe", add_bos_token=False)
    texts = ["\u2603", "a\u2603 a b ab", "\u2603a", "\u0120", *NASTY]
    (answer,) = ask([{"model": str(tmp_path / "model.gguf"), "texts": texts}])
    assert [tokenizer.encode(text).tolist() for text in texts] == answer["tokens"]
    assert {256, 257, 258}.isdisjoint(i for ids in answer["tokens"] for i in ids)
    assert [tokenizer.token_bytes(i) for i in (256, 257, 258)] == ["\u2603".encode(), "a\u2603".encode(), b"a b"]


def checkout(folder: str) -> Path:
    """A folder of a checkout of llama.cpp; skips without one."""
    root = os.environ.get("TOYEXP_LLAMA_CPP")
    if not root:
        pytest.skip("no checkout of llama.cpp is named: TOYEXP_LLAMA_CPP=...")
    return Path(root) / folder


@pytest.mark.full
def test_every_vocabulary_of_llama_cpps_sources(tmp_path):
    """Its own files with their own texts and ids, and llama.cpp asked about texts of ours."""
    supported, ours, questions = ("gpt2", "llama"), [], []
    plain = texts(400)
    for path in sorted(checkout("models").glob("ggml-vocab-*.gguf")):
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
            said = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
            found = [tokenizer.encode(text).tolist() for text in said]
            assert (path.name, found) == (path.name, theirs[: len(said)])
        # A character without a token is refused here; llama.cpp leaves it out.
        missing = tokenizer._missing if isinstance(tokenizer, BPE) else frozenset()
        special = around([tokenizer.pieces[i] for i in sorted(tokenizer._special)[:12]])
        known, spelled = ([t for t in part if t and missing.isdisjoint(t.encode())] for part in (plain, special))
        copy = tmp_path / path.name
        write_untrained(copy, tokenizer, len(tokenizer.source["ggml.tokens"]), name)
        questions.append({"model": str(copy), "texts": known, "special": spelled, "prompts": known[:20]})
        tells = [tokenizer.prompt(text).tolist() for text in known[:20]]
        found = [tokenizer.encode(t) for t in known], [tokenizer.encode(t, special=True) for t in spelled]
        ours.append([*([ids.tolist() for ids in part] for part in found), tells])
    assert questions, "there is no vocabulary in it"
    for question, found, answer in zip(questions, ours, ask(questions), strict=True):
        for part, what in zip(found, ("tokens", "special", "prompts"), strict=True):
            for one, other in zip(part, answer[what], strict=True):
                assert (question["model"], what, one) == (question["model"], what, other)


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
def test_a_chat_is_asked_with_the_ids_that_training_read(kind, template, tmp_path):
    pytest.importorskip("jinja2", reason="a GGUF's own chat template needs jinja2: pip install 'toyexp[data]'")
    path = tmp_path / "chat.gguf"
    # llama.cpp reads an earlier answer together with what stands before it, training apart: no token may cross.
    # Which texts hypothesis makes, and so which pieces there are, depends on the modules that were imported before.
    tokenizer = (
        vocabulary(5, 3000, 10**9, ["\n" + BLANK, "]" + BLANK]) if kind == "spm" else cutter(tmp_path, kind, 200)
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


def test_llama_cpp_stops_where_we_stop(tmp_path):
    pieces = [*SYMBOLS, "<|im_end|>", "<|eot_id|>", "[PAD]", "<|file_sep|>", "<|fim_prefix|>", "turn", "<other>"]
    tokenizer = stored(tmp_path / "model.gguf", BPE(pieces, [], 262), eot_token_id=261)
    (answer,) = ask([{"model": str(tmp_path / "model.gguf"), "plain": 65, "draw": [*range(256, 263)]}])
    assert {i for i, why in answer["stopped_by"].items() if why == "eos"} == {str(i) for i in tokenizer.end_ids}


def test_llama_cpp_generates_ids_without_text(tmp_path):
    write_untrained(tmp_path / "model.gguf", None, 100)
    (answer,) = ask([{"model": str(tmp_path / "model.gguf"), "plain": 65, "draw": [7, 99]}])
    assert answer["stopped_by"] == {"7": "limit", "99": "eos"}
