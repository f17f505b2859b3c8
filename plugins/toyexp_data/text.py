"""Text, tokenized: the standard library's own source, and anybody's files."""

from __future__ import annotations

import math
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import toyexp.formats
import toyexp.tokenizers
from toyexp import TOKENS, Kind, RunPreview, UserError, is_changed, suggest
from toyexp.base import UnknownCharacter, print_error, require_choice, require_file, require_range, run_interruptibly
from toyexp_data.cache import load_or_pack, recall, remember
from toyexp_data.corpus import Corpus, FoundFiles, characters, find_files, match_paths, megabytes, sample_pieces
from toyexp_data.held_out import ON_ERROR, SplitData

if TYPE_CHECKING:
    import numpy as np

KINDS = ("auto", "byte", "char", "bpe")
SMALL = 2000  # tokens of a vocabulary that may lack characters, and a text with many of them:
ANY_TEXT = "".join(map(chr, [*range(1, 256), 0x4E2D, 0x1F642]))
LONG = 20_000_000  # bytes of text from which on tokenizing is announced
NOT_CODE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo", "ensurepip"}


@dataclass
class TokenizedData(SplitData):
    """What everything that begins as text shares: a tokenizer, and a part that is held out."""

    gives: ClassVar[Kind] = TOKENS

    tokenizer: str = "auto"  # auto (the donor's or base's) | byte | char | bpe (trained on this text) | a GGUF file
    bpe_vocab: int = 1024  # tokens that tokenizer=bpe learns
    val_fraction: float = 0.05  # the last part of every document, held out from training
    eval_batches: int = 16  # held-out batches that one eval takes

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a tokenizer that is not there."""
        if self.tokenizer not in KINDS and not self.tokenizer.endswith(".gguf"):
            raise UserError(f"data.tokenizer={self.tokenizer}: {suggest(self.tokenizer, (*KINDS, 'a .gguf file'))}")
        if self.tokenizer.endswith(".gguf"):
            require_file(self.tokenizer, f"data.tokenizer={self.tokenizer}")
        if self.tokenizer == "bpe":
            toyexp.tokenizers.check_bpe_vocab(self.bpe_vocab)
        super().check()

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That no bpe is trained, and what is held out."""
        if is_changed(self, "bpe_vocab") and self.tokenizer != "bpe":
            yield f"data.bpe_vocab={self.bpe_vocab}: is of data.tokenizer=bpe, and data.tokenizer={self.tokenizer}"
        yield from super().warnings(preview)

    def source(self, vocabulary: Path | None) -> Path | None:
        """The GGUF whose tokenizer is used, if it is one's."""
        if self.tokenizer.endswith(".gguf"):
            return Path(self.tokenizer)
        return vocabulary if self.tokenizer == "auto" else None

    def read_tokenizer(self, vocabulary: Path | None) -> toyexp.Tokenizer:
        """The tokenizer that is not made from the text."""
        source = self.source(vocabulary)
        if source is None:
            return toyexp.tokenizers.Bytes()
        return toyexp.formats.read_tokenizer(toyexp.formats.open_gguf(str(source)))

    def bpe_notes(self, tokenizer: toyexp.Tokenizer) -> list[str]:
        """That bpe learned fewer tokens than it was to."""
        if self.tokenizer != "bpe" or tokenizer.vocab == self.bpe_vocab:
            return []
        return [f"{tokenizer.vocab} of data.bpe_vocab={self.bpe_vocab} tokens learned: the text has no more pairs"]


@dataclass
class TextData(TokenizedData):
    """What all plain text shares: it is read and tokenized piece by piece, and kept as ids that are mapped."""

    max_mb: float = 0.0  # million characters of text to learn from at most, from the start; 0: all
    bpe_mb: float = 100.0  # million characters, evenly spread, that tokenizer=bpe learns from at most; 0: all
    on_error: str = "refuse"  # what a file that is no UTF-8 text does: refuse (ends the run) | skip (is counted)

    @abstractmethod
    def files(self) -> FoundFiles:
        """The documents, in a fixed order."""

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a tokenizer that is not there."""
        super().check()
        require_range("data", self, max_mb="[0,inf)", bpe_mb="[0,inf)")
        require_choice("data", self, on_error=ON_ERROR)

    def open(self, vocabulary: Path | None) -> toyexp.TokenDataset:
        """Reads, splits and tokenizes the text; tokens are cached by the digest of text and tokenizer."""
        found = self.files()
        corpus = Corpus(found.files, math.ceil(self.max_mb * 1e6) or None, self.val_fraction, self.on_error == "skip")
        text = corpus.facts
        if not text.taken:
            files = f"{found.files[0]}{f' and {len(found.files) - 1} more' if len(found.files) > 1 else ''}"
            skipped = f" ({text.skipped[0]})" if text.skipped else ""
            raise UserError(f"data={self.name}: there is no text to learn from in {files}{skipped}")
        tokenizer, limits = self._tokenizer(corpus, vocabulary)
        facts = {"documents": text.documents, "text_sha256": text.digest, **tokenizer_facts(tokenizer)}
        key = f"{text.digest}-{facts['tokenizer_digest']}-{self.val_fraction!r}"
        try:
            ids = load_or_pack(key, tokenizer.vocab, partial(_encode_corpus, corpus, tokenizer))
        except UnknownCharacter as error:
            raise self._unknown(error.character, corpus, vocabulary) from None
        train, held_out = ids.parts
        train = train if self.val_fraction < 1 else train[:0]  # what tokenizers begin and end a document with
        return toyexp.TokenDataset(
            train, held_out, tokenizer, tokenizer.vocab, self.eval_batches, facts, ids.sha256,
            [*text.omissions(), *limits, *found.omissions()], self.bpe_notes(tokenizer),
        )  # fmt: skip

    def _unknown(self, character: str, corpus: Corpus, vocabulary: Path | None) -> UserError:
        corpus.check_unchanged()  # a tokenizer made from this text has them all
        file = corpus.first_with(character) or "its text"  # where a tokenizer writes it otherwise, as a blank
        return UserError(
            f"data={self.name}: {file} holds the character {character!r}, which is not in the tokenizer of "
            f"{self.source(vocabulary)}; give text of the characters that it knows: data=text data.path=..."
        )

    def _tokenizer(self, corpus: Corpus, vocabulary: Path | None) -> tuple[toyexp.Tokenizer, list[str]]:
        """The tokenizer, and what of the text it was not made from; one that is made from a text is made once."""
        if self.tokenizer not in ("char", "bpe"):
            return self.read_tokenizer(vocabulary), []
        settings = (self.bpe_vocab, self.bpe_mb) if self.tokenizer == "bpe" else ()
        key = f"{corpus.facts.digest}-{self.val_fraction!r}-{self.tokenizer}-{settings}"
        known = recall("tokenizer", key)
        if known is None:
            known = self._learn_bpe(corpus) if settings else {"characters": characters(corpus.texts())}
            remember("tokenizer", key, known)
        if not settings:
            return toyexp.tokenizers.Characters(known["characters"]), []
        merges = [(a, b) for a, b in known["merges"]]
        return toyexp.tokenizers.BPE(known["pieces"], merges, len(known["pieces"]) - 1), known["left_out"]

    def _learn_bpe(self, corpus: Corpus) -> dict[str, Any]:
        size, limit = corpus.train_size(), math.ceil(self.bpe_mb * 1e6)
        cuts, cut_up = toyexp.tokenizers.PRE_TOKENIZERS["gpt-2"].cuts, toyexp.tokenizers.split_text
        pieces: Iterator[str] = (part.text for document in corpus.train() for part in cut_up(document, cuts))
        partly = 0 < limit < size
        learned = sample_pieces(pieces, size, limit) if partly else pieces
        made = run_interruptibly(lambda: toyexp.tokenizers.BPE.train(learned, self.bpe_vocab))
        left_out = [f"bpe learned from {megabytes(limit, size)}: data.bpe_mb"] if partly else []
        return {"pieces": made.pieces, "merges": made.merges, "left_out": left_out}


def tokenizer_facts(tokenizer: toyexp.Tokenizer) -> dict[str, str]:
    """Which tokenizer it is, as a run's record says it."""
    return {"tokenizer": tokenizer.kind, "tokenizer_digest": tokenizer.fingerprint()}


def _encode_corpus(corpus: Corpus, tokenizer: toyexp.Tokenizer) -> Iterator[Iterator[np.ndarray]]:
    if corpus.facts.taken > LONG:
        print_error(f"tokenizing {corpus.facts.taken / 1e6:.0f} MB of text, once: the next run finds the ids")
    yield toyexp.tokenizers.encode_documents(tokenizer, corpus.train())
    yield toyexp.tokenizers.encode_documents(tokenizer, corpus.held_out())
    corpus.check_unchanged()


@dataclass
class Stdlib(TextData):
    """The source of this Python's standard library: real text on every machine."""

    name: ClassVar[str] = "stdlib"

    max_mb: float = 4.0  # million characters of text to learn from at most, from the start; 0: all

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """For a model whose tokenizer takes any text."""
        try:
            if tokenizer and tokenizer.vocab <= SMALL:
                tokenizer.encode(ANY_TEXT)
        except UserError:
            return None
        return "" if tokenizer else None

    def files(self) -> FoundFiles:
        """Every .py file of the library but its tests, in path order."""
        root = sysconfig.get_path("stdlib")
        found = []
        for folder, folders, names in os.walk(root):  # pruned: site-packages may hold a hundred times as many files
            folders[:] = [f for f in folders if f not in NOT_CODE]
            found += [os.path.join(folder, n) for n in names if n.endswith(".py")]  # noqa: PTH118 - Path is slow here
        return FoundFiles([Path(f) for f in sorted(found, key=lambda f: f.replace(os.sep, "/"))])


@dataclass
class Text(TextData):
    """Text files of your own: one file, a folder of them, or a pattern."""

    name: ClassVar[str] = "text"

    path: str = ""  # a text file, a folder, or a pattern such as 'books/*.txt'
    suffixes: str = ".txt .md .py"  # which files of a folder; '*': all

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """For a model with a tokenizer."""
        return "data.path=TEXT.txt" if tokenizer else None

    @classmethod
    def recognises(cls, path: Path) -> int:
        """A file of text, a folder that has some, and any other file."""
        suffixes = cls.suffixes.split()
        if path.is_dir():
            return 2 if any(f.suffix in suffixes for f in path.rglob("*")) else 0
        return 2 if path.suffix in suffixes else 1

    def check(self) -> None:
        """Raises UserError when there is no such file or folder."""
        super().check()
        if not self.path:
            raise UserError("data=text needs a file or folder: data.path=...")
        match_paths(self.path)

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That a file is read whatever its name ends in."""
        yield from super().warnings(preview)
        if is_changed(self, "suffixes") and Path(self.path).is_file():
            yield f"data.suffixes={self.suffixes}: chooses files of a folder; data.path={self.path} is a file"

    def files(self) -> FoundFiles:
        """The file, or the folder's files in path order."""
        return find_files(self.path, self.suffixes.split())
