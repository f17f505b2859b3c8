"""Byte, character and BPE tokenizers that toyexp makes; all are exported as byte-level BPE.

`byte` has no merges, `char` merges the bytes of each character, and `bpe` has trained merges.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from toyexp.base.errors import UnknownCharacter, UserError
from toyexp.base.lazy import tokenizers as hf
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from toyexp.tokenizers.tokenizer import END_OF_TEXT, SYMBOL_BYTES, SYMBOLS, Tokenizer

MOST_LEARNED = 1 << 20  # largest vocabulary to train; the library allocates memory for the requested size


class Bytes(Tokenizer):
    """Tokenizer with one token per byte, and end-of-text as id 256."""

    kind = "byte"

    def __init__(self) -> None:
        self.pieces = [*SYMBOLS, END_OF_TEXT]
        self.bos = self.eos = 256

    def _encode(self, texts: Sequence[str], starts: Sequence[bool]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _places(self, text: str) -> Iterator[int]:
        return iter([len(text)])

    def _library(self) -> Any:
        return BPE(self.pieces, [], self.eos)._library()


class Characters(Tokenizer):
    """Tokenizer with one token per character of a corpus, and end-of-text as the last id."""

    kind = "char"

    def __init__(self, characters: Sequence[str]):
        self._characters = characters
        forms = ["".join(SYMBOLS[b] for b in c.encode()) for c in characters]
        self.pieces = [*forms, END_OF_TEXT]
        # é is two bytes: merging them rebuilds the character. Pairs begin with a first byte, so no merge spans two.
        chains = {(f[:n], f[n]): None for f in forms for n in range(1, len(f))}
        self.merges = list(chains)
        self.bos = self.eos = len(forms)
        self._ids = np.full(0x110000, -1, np.int32)
        self._ids[[ord(c) for c in characters]] = np.arange(len(characters))

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Characters:
        """Return a tokenizer whose vocabulary is all characters of the texts, in code-point order."""
        return cls(sorted(set().union(*map(set, texts))))

    def _encode(self, texts: Sequence[str], starts: Sequence[bool]) -> list[np.ndarray]:
        """Return the int32 ids of each text, one per character. Raise UnknownCharacter if a character has no id."""
        encoded = [self._ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)] for text in texts]
        for text, ids in zip(texts, encoded, strict=True):
            if (ids < 0).any():
                raise UnknownCharacter(text[int(np.argmin(ids))], "character tokenizer")
        return encoded

    def _places(self, text: str) -> Iterator[int]:
        return iter([len(text)])

    def _library(self) -> Any:
        vocab = {c: i for i, c in enumerate([*self._characters, END_OF_TEXT])}
        engine = hf.Tokenizer(hf.models.WordLevel(vocab=vocab, unk_token=END_OF_TEXT))
        engine.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")
        engine.decoder = hf.decoders.Fuse()
        return engine


def check_bpe_vocab(vocab: int) -> None:
    """Raise UserError if BPE cannot learn a vocabulary of `vocab` tokens."""
    if not 258 <= vocab <= MOST_LEARNED:
        least = "at least 258 (256 bytes, end, one merge)"
        raise UserError(f"data.bpe_vocab={vocab}: must be {least} and at most {MOST_LEARNED}")


class BPE(Tokenizer):
    """Byte-level BPE tokenizer. It uses the tokenizers library and, by default, GPT-2's pre-tokenizer."""

    kind = "bpe"

    def __init__(
        self,
        pieces: Sequence[str],
        merges: Sequence[tuple[str, str]],
        eos: int,
        pre: PreTokenizer = PRE_TOKENIZERS["gpt-2"],
        unreachable: Collection[int] = (),  # tokens that no text may produce
    ):
        self.pieces, self.merges, self.bos, self.eos = list(pieces), list(merges), eos, eos
        self._pre, self._unreachable = pre, unreachable

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, pre: PreTokenizer = PRE_TOKENIZERS["gpt-2"]) -> BPE:
        """Learn a vocabulary of `vocab` tokens from texts (Sennrich et al. 2016); equal texts give equal tokens."""
        check_bpe_vocab(vocab)
        engine = hf.Tokenizer(hf.models.BPE())
        engine.pre_tokenizer = pre.build()
        trainer = hf.trainers.BpeTrainer(
            vocab_size=vocab - 1, initial_alphabet=SYMBOLS, show_progress=False, special_tokens=[]
        )
        engine.train_from_iterator(texts, trainer)
        model = json.loads(engine.to_str())["model"]
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
        return cls([*pieces, END_OF_TEXT], merges, len(pieces), pre)

    def _encode(self, texts: Sequence[str], starts: Sequence[bool]) -> list[np.ndarray]:
        """Return the int32 ids of each text; several texts are encoded on all cores.

        Raise UnknownCharacter for a byte that has no token.
        """
        if self._missing:
            self._check(texts)
        if len(texts) == 1:
            encoded = [self._engine.encode(texts[0], add_special_tokens=False)]
        else:
            encoded = self._engine.encode_batch(texts, add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in encoded]

    def _places(self, text: str) -> Iterator[int]:
        return self._pre.cuts(text)

    @cached_property
    def _engine(self) -> Any:
        return self._build({p: i for i, p in enumerate(self.pieces) if i not in self._unreachable})

    def _build(self, vocab: dict[str, int]) -> Any:
        engine = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=self.merges, ignore_merges=self._pre.ignore_merges))
        engine.pre_tokenizer, engine.decoder = self._pre.build(), hf.decoders.ByteLevel()
        return engine

    def _library(self) -> Any:
        return self._build({p: i for i, p in enumerate(self.pieces)})

    @cached_property
    def _missing(self) -> frozenset[int]:
        """Bytes that have no token."""
        return frozenset(SYMBOL_BYTES[symbol] for symbol in set(SYMBOLS).difference(self.pieces))

    def _check(self, texts: Iterable[str]) -> None:
        for text in texts:
            if not self._missing.isdisjoint(text.encode()):
                character = next(c for c in text if not self._missing.isdisjoint(c.encode()))
                raise UnknownCharacter(character, "tokenizer")

    def _rules(self) -> dict[str, Any]:
        rules = super()._rules()
        if self._pre != PRE_TOKENIZERS["gpt-2"]:
            rules["pre"] = [self._pre.patterns, self._pre.ignore_merges]
        return rules
