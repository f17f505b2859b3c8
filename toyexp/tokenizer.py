"""Text to token ids and back, in forms that GGUF and llama.cpp know.

All three kinds are byte-level BPE to llama.cpp: `bytes` has no merges, `characters` has merges only inside the
UTF-8 form of one character, and `bpe` has what training found. So one export serves them all.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from toyexp.errors import UserError

END_OF_TEXT = "<|endoftext|>"
NORMAL, CONTROL, UNUSED = 1, 3, 5  # token types of llama.cpp; no text produces an UNUSED token


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable Latin-1, else U+0100 and up (Radford 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


SYMBOLS = byte_symbols()
BYTE_OF = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}


class Tokenizer(ABC):
    """Ids 0..vocab-1; `eos` separates documents and starts generation."""

    kind: str
    pieces: Sequence[str]  # each token's text in byte symbols, except control tokens, which are literal
    merges: Sequence[tuple[str, str]]
    eos: int
    bos: int | None = None  # the token a model of this tokenizer expects first, if `add_bos`
    add_bos: bool = False
    controls: frozenset[int] = frozenset()  # control tokens beside `eos`, such as those of a chat template; in no text
    chat_template: str = ""  # how a conversation becomes text, in Jinja; the export passes it on

    @property
    def vocab(self) -> int:
        """How many ids there are."""
        return len(self.pieces)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """int32 ids of the text, without any special token."""

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """All texts in one array, each followed by the end-of-text id."""
        end = np.array([self.eos], np.int32)
        return np.concatenate([part for text in texts if text for part in (self.encode(text), end)] or [end[:0]])

    def prompt(self, text: str) -> np.ndarray:
        """int32 ids of a text that a model is to continue: what it expects first, then the text; never none."""
        start = self.bos if self.bos is not None else self.eos
        ids = self.encode(text)
        return np.concatenate([np.array([start], np.int32), ids]) if self.add_bos or not len(ids) else ids

    def bytes_of(self, i: int) -> bytes:
        """What token `i` stands for in a text: a control token for nothing, another perhaps for part of a character."""
        return b"" if i == self.eos or i in self.controls else bytes(BYTE_OF[c] for c in self.pieces[i])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; control tokens are skipped and broken UTF-8 becomes the replacement character."""
        return b"".join(self.bytes_of(int(i)) for i in ids).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """16 hex digits that identify the vocabulary and its merges."""
        text = json.dumps([self.kind, list(self.pieces), [list(m) for m in self.merges]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def gguf_metadata(self) -> dict[str, Any]:
        """The `tokenizer.ggml.*` keys, without that prefix."""
        # llama.cpp wants a merge list and gguf-py cannot write an empty one. No UTF-8 holds the byte 0xFF, so this
        # pair never meets: a merge that wins without being a token would lose its bytes in llama.cpp.
        merges = self.merges or [(SYMBOLS[0xFF], SYMBOLS[0xFF])]
        return {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": list(self.pieces),
            "token_type": [CONTROL if i == self.eos or i in self.controls else NORMAL for i in range(self.vocab)],
            "merges": [f"{a} {b}" for a, b in merges],
            "bos_token_id": self.eos,
            "eos_token_id": self.eos,
            "add_bos_token": False,
        }


class Bytes(Tokenizer):
    """One token per byte, and end-of-text as id 256."""

    kind = "byte"

    def __init__(self) -> None:
        self.pieces = [*SYMBOLS, END_OF_TEXT]
        self.merges = []
        self.eos = 256

    def encode(self, text: str) -> np.ndarray:
        """The bytes of the text's UTF-8 form."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class Characters(Tokenizer):
    """One token per character of a corpus, and end-of-text as the last id."""

    kind = "char"

    def __init__(self, characters: Sequence[str]):
        self._characters = characters
        forms = ["".join(SYMBOLS[b] for b in c.encode()) for c in characters]
        self.pieces = [*forms, END_OF_TEXT]
        # é is two bytes: merging them rebuilds the character. Only a first byte starts a pair, so no merge crosses.
        chains = {(f[:n], f[n]): None for f in forms for n in range(1, len(f))}
        self.merges = list(chains)
        self.eos = len(forms)
        self._ids = np.full(0x110000, -1, np.int32)
        self._ids[[ord(c) for c in characters]] = np.arange(len(characters))

    @classmethod
    def of(cls, texts: Sequence[str]) -> Characters:
        """The vocabulary of all characters in the texts, in code-point order."""
        return cls(sorted(set().union(*map(set, texts))))

    def encode(self, text: str) -> np.ndarray:
        """One id per character; UserError for a character the corpus did not have."""
        ids = self._ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)]
        if (ids < 0).any():
            raise UserError(f"the character {text[int(np.argmin(ids))]!r} is not in this character tokenizer")
        return ids


class BPE(Tokenizer):
    """Byte-level BPE with GPT-2's pre-tokenizer, through the tokenizers library."""

    kind = "bpe"

    def __init__(self, pieces: Sequence[str], merges: Sequence[tuple[str, str]], eos: int):
        from tokenizers import Tokenizer as Engine  # deferred: only runs that use BPE need the library
        from tokenizers import models, pre_tokenizers

        self.pieces, self.merges, self.eos = list(pieces), list(merges), eos
        vocab = {piece: i for i, piece in enumerate(self.pieces)}
        self._engine = Engine(models.BPE(vocab=vocab, merges=self.merges))
        self._engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    @classmethod
    def train(cls, texts: Sequence[str], vocab: int) -> BPE:
        """Learns `vocab` tokens from the texts (Sennrich et al. 2016); the same texts give the same tokens."""
        from tokenizers import Tokenizer as Engine
        from tokenizers import models, pre_tokenizers, trainers

        if vocab < 258:
            raise UserError(f"data.bpe_vocab={vocab}: a byte-level BPE needs at least 258 (256 bytes, end, one merge)")
        engine = Engine(models.BPE())
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - 1, initial_alphabet=SYMBOLS, show_progress=False, special_tokens=[]
        )
        engine.train_from_iterator(texts, trainer)
        model = json.loads(engine.to_str())["model"]
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
        return cls([*pieces, END_OF_TEXT], merges, len(pieces))

    def encode(self, text: str) -> np.ndarray:
        """BPE ids of the text."""
        return np.array(self._engine.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_documents(self, texts: Sequence[str]) -> np.ndarray:
        """All texts at once, on all cores, each followed by the end-of-text id."""
        encoded = self._engine.encode_batch([t for t in texts if t], add_special_tokens=False)
        return np.array([i for e in encoded for i in (*e.ids, self.eos)], np.int32)
