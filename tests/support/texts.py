"""Texts that are hard to tokenize, and a tiny model file to hold a tokenizer."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np

from toyexp import Tokenizer
from toyexp.formats.gguf.write import write_model
from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp_data.chat import Message
from toyexp_models.llama import Llama

PROSE = "The café sold 12 crêpes, didn't it? «Ja», said Zoë: 中文 und 🙂.\n\ndef f(x):\n\treturn x ** 2  # {}\n"

TALK = [
    Message("system", "Be\nbrief:"),
    Message("user", PROSE),
    Message("assistant", " Yes, \n it's  12!"),
    Message("user", "<b> 中文 </b>?  "),
]

NASTY = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\t\tand\n\n\nnew lines\r\nand\rreturns \n",
    " \n \t \n",
    "\u00a0no\u2009break\u3000wide\u2028line\u0085next\u200bzero\ufeffmark",
    "control \x00 \x01 \x00\x01 \x1c \x1f \x7f",
    "don't I'll we've they're it's I'd I'm 'S 'LL ’s '",
    "0 1 12 123 1234567890 3.14 -1e-5 1,000 0x1F",
    "½ ² Ⅷ ٣٤٥ ۵ 〇 𝟘𝟙",
    "for i in range(10):\n    x[i] += f(a, b=c)['k'] != None  # note\n\treturn {**d}",
    "naïve café Ünïcödé ÅÄÖ ß ﬁ",
    "e\u0301 e\u0302\u0323 combining, Z̷̡a̴l̶g̸o̷",
    "中文分词 日本語のテキスト 한국어 조선말",
    "עברית العربية \u202eright to left\u202c",
    "हिन्दी தமிழ் ไทย ကြီး",
    "🙂 👨‍👩‍👧 🏳️‍🌈 🇩🇪 👍🏽 ❤️",
    "𐐀𐐁 𠀀𠀁 \U0010fffd",
    "<|endoftext|> <unused300> </s> [PAD] <|im_end|> is text here",
    "Ġ Ċ ĉ âĢ Ã©",  # the characters that byte-level BPE uses for blanks and bytes, as literal text
    "!!!???...---___===+++ (((nested))) \\\\ \"'`",
    "a" * 300,
    " " * 70,
]


def scramble_texts(seed: int, count: int) -> list[str]:
    """Return texts that mix the character classes of pre-tokenizers at random.

    llama.cpp and the tokenizers library have tables of different Unicode versions, which disagree from version 16 on.
    Python before 3.14 has at most version 15.1, so characters that it calls unassigned (Cn) are left out.
    """
    rng = random.Random(seed)
    classes = [
        *(
            "abc",
            " ",
            "  ",
            "019",
            "\t\n\r",
            "'s'll't",
            "éüñ",
            "中文が한",
            "½²٣Ⅷ",
            "!?#-_",
            "🙂👨\u200d👩",
            "\u0301\u093f",
        ),
        "\u00a0\u3000\u2028\u0085\x1c",
        "".join(
            c for c in map(chr, rng.sample(range(0x80, 0x2FFFF), 4000)) if unicodedata.category(c) not in ("Cn", "Cs")
        ),
    ]
    return ["".join(rng.choice(rng.choice(classes)) for _ in range(rng.randrange(1, 16))) for _ in range(count)]


def write_untrained(path: Path, tokenizer: Tokenizer | None, vocab: int, name: str | None = None) -> Path:
    """Write a tiny model with this tokenizer and `general.name`; return the path."""
    model = Llama(d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8, context=32, vocab=vocab)
    values = {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}
    write_model(path, model, values, tokenizer, general={"name": name} if name else None)
    return path


def hard_pieces(prefix: bool) -> SentencePiece:
    """Return a SentencePiece tokenizer: substrings of NASTY with distinct scores, all bytes, two user-defined tokens.

    The caller sets the tokens at the beginning and the end of a text.
    """
    text = BLANK + "".join(NASTY[2:14]).replace(" ", BLANK).replace("\0", "")
    words = sorted({text[n : n + k] for n in range(400) for k in (1, 2, 3)} - {""})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<tool>", "\t \t", *words]
    types = np.array([2, 3, 3] + [6] * 256 + [4] * 2 + [1] * len(words), np.int32)
    scores = np.array([0.0] * 261 + [-1.5 * n for n in range(len(words))], np.float32)
    return SentencePiece(pieces, scores, types, eos=2, unreachable=frozenset({0, 1, 2}), prefix=prefix)
