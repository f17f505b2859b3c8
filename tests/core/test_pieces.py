"""Long texts in pieces: the ids are those of the whole text, for every tokenizer there is."""

import random

import numpy as np
import pytest
from texts import NASTY, PROSE, scramble_texts

from toyexp import UserError
from toyexp.tokenizers import tokenizer as pieces
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp.tokenizers.tokenizer import BYTE, CONTROL, END_OF_TEXT, NORMAL, USER_DEFINED, encode_documents, split_text

NAME_OF = {pre: name for name, pre in reversed(PRE_TOKENIZERS.items())}
RUNS = [
    "\r\n", "\n", " ", "\t", "123", "1", "'s", "…", "。", "字", "字，", "a", "é ", "e\u0301",
    "١", "²", "\u00a0", "- ", "ab",
]  # fmt: skip


def nasty(seed, size):
    """Return a text that is hard to cut into words: runs of characters of all lengths, and prose."""
    rng = random.Random(seed)
    pool = [*NASTY, *scramble_texts(seed, 100), *[PROSE] * 20]
    texts = []
    while sum(map(len, texts)) < size:
        texts.append(rng.choice(pool) if rng.random() < 0.8 else rng.choice(RUNS) * rng.randrange(1, 50))
    return rng.choice(["", " ", "\n"]).join(texts)


def in_chunks(text, seed):
    """The text as it comes from a file."""
    rng, at = random.Random(seed), 0
    while at < len(text):
        size = rng.randrange(1, 3000)
        yield text[at : at + size]
        at += size


@pytest.mark.parametrize("name", NAME_OF.values())
def test_every_pre_tokenizer_finds_the_same_words_in_pieces(name):
    pre = PRE_TOKENIZERS[name]
    text = nasty(f"words {name}", 7_000)
    parts = [part.text for part in split_text(in_chunks(text, name), pre.cuts, size=600)]
    assert "".join(parts) == text
    assert [word for piece in parts for word in pre._words(piece)] == pre._words(text)
    if name != "superbpe":  # whose words are all that stands between two numbers
        assert max(map(len, parts)) < 6000


def byte_level(name):
    """Return a BPE with <b> as a token."""
    trained = BPE.train([PROSE], 300)
    tokenizer = BPE([*trained.pieces[:-1], "<b>", END_OF_TEXT], trained.merges, 300, PRE_TOKENIZERS[name])
    tokenizer.user_defined = frozenset([299])
    return tokenizer


def sentencepiece(prefix=True):
    """A SentencePiece of what stands in some prose, all bytes, and <b> as a token of its own."""
    written = (BLANK + PROSE.replace(" ", BLANK)) * 2
    words = sorted({written[n : n + k] for n in range(len(written) // 2) for k in (1, 2, 3, 5)})
    tokens = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<b>", *words]
    types = np.array([CONTROL] * 2 + [BYTE] * 256 + [USER_DEFINED] + [NORMAL] * len(words), np.int32)
    scores = np.array([0.0] * 259 + [-1.5 * n for n in range(len(words))], np.float32)
    tokenizer = SentencePiece(tokens, scores, types, 1, frozenset([0, 1, 258]), prefix)
    tokenizer.bos, tokenizer.add_bos, tokenizer.user_defined = 0, True, frozenset([258])
    return tokenizer


TOKENIZERS = {
    "byte": Bytes,
    "char": lambda: Characters.from_texts([*NASTY, *RUNS, PROSE, *scramble_texts(1, 100), "<b>"]),
    "qwen2": lambda: byte_level("qwen2"),
    "llama-bpe": lambda: byte_level("llama-bpe"),
    "deepseek-llm": lambda: byte_level("deepseek-llm"),
    "spm": sentencepiece,
    "spm without a prefix": lambda: sentencepiece(prefix=False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_tokenizer_gives_the_same_ids_in_pieces(name):
    tokenizer = TOKENIZERS[name]()
    text = nasty(1, 20_000).replace("12", "<b>")  # a token wherever it occurs
    parts = [part.text for part in split_text(in_chunks(text, 1), tokenizer.cuts, size=600)]
    assert len(parts) > 8 and "".join(parts) == text
    ids = np.concatenate(tokenizer.encode_pieces(parts, [True, *[False] * (len(parts) - 1)]))
    assert ids.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("name", ["qwen2", "spm"])
def test_no_piece_ends_inside_or_after_a_special_token(name):
    tokenizer = TOKENIZERS[name]()
    text = "<b> word\n<b>the café<b>\n" * 400
    offsets = [*tokenizer.cuts(text)]
    assert offsets and not any("<b>" in text[offset - 3 : offset + 2] for offset in offsets)


def test_start_and_end_tokens_are_added_once_per_document(monkeypatch):
    tokenizer = sentencepiece()
    text = PROSE * 100
    ids = tokenizer.encode(text).tolist()
    monkeypatch.setattr(pieces, "BATCH", 3000)
    monkeypatch.setattr(pieces.split_text, "__defaults__", (500,))
    documents = [*encode_documents(tokenizer, [[text[:777], text[777:]], [], [""], [text]])]
    assert len(documents) > 10
    assert np.concatenate(documents).tolist() == [tokenizer.bos, *ids, tokenizer.eos] * 2


def test_a_text_that_cannot_be_cut_is_one_piece_with_a_note(monkeypatch, capsys):
    monkeypatch.setattr(pieces, "LARGE", 1 << 12)
    text, superbpe = "no number in it. " * 3000, PRE_TOKENIZERS["superbpe"]
    assert [part.text for part in split_text(in_chunks(text, 0), superbpe.cuts, size=1 << 10)] == [text]
    assert capsys.readouterr().err.count("cannot split the text") == 1
    monkeypatch.setattr(pieces, "available_bytes", lambda: 10_000)
    with pytest.raises(UserError, match=r"are free; choose another data\.tokenizer"):
        list(split_text(in_chunks(text, 0), superbpe.cuts, size=1 << 10))


def test_pieces_are_small_again_after_an_uncuttable_stretch():
    text = "a" * 20_000 + " word" * 8000
    first, *others = (part.text for part in split_text(in_chunks(text, 0), PRE_TOKENIZERS["gpt-2"].cuts, size=2000))
    assert len(first) > 20_000 and len(others) > 9 and max(map(len, others)) <= 4000
