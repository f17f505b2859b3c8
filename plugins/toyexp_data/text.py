"""Text data: the standard library's source, and text files."""

from __future__ import annotations

import math
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import toyexp.formats
import toyexp.tokenizers
from toyexp import TOKENS, Kind, RunPreview, UserError, is_changed, suggest
from toyexp.base import UnknownCharacter, iter_files, print_error, require_choice, require_range, run_interruptibly
from toyexp.base import numpy as np
from toyexp.formats import record_suffix
from toyexp_data.cache import load_or_pack, recall, remember
from toyexp_data.corpus import Corpus, characters, megabytes, sample_pieces
from toyexp_data.files import FoundFiles, find_files, find_records, is_record, match_paths, require_one_format
from toyexp_data.held_out import ON_ERROR, SplitData

KINDS = ("auto", "byte", "char", "bpe")
SMALL = 2000  # a vocabulary of at most this size may lack characters of ANY_TEXT
ANY_TEXT = "".join(map(chr, [*range(1, 256), 0x4E2D, 0x1F642]))
LONG = 20_000_000  # bytes of text above which tokenizing is announced
ALL = "*"  # suffix that matches all files
NOT_CODE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo", "ensurepip"}


@dataclass
class TokenizedData(SplitData):
    """Base of data sets that are read as text, with the settings of the tokenizer and the held-out part."""

    gives: ClassVar[Kind] = TOKENS
    setting_names: ClassVar[Mapping[str, Sequence[str]]] = {"tokenizer": KINDS}  # other values are paths

    tokenizer: str = "auto"  # auto (base's or donor's, else byte) | byte | char | bpe (trained on the text) | model
    bpe_vocab: int = 1024  # vocabulary size of tokenizer=bpe
    val_fraction: float = 0.05  # share of each document held out for validation, from its end; (0, 1]
    eval_batches: int = 16  # held-out batches per evaluation

    def check(self) -> None:
        """Raise UserError for invalid settings and a missing tokenizer."""
        if self.tokenizer.isalnum() and self.tokenizer not in KINDS and not os.path.lexists(self.tokenizer):
            raise UserError(f"data.tokenizer={self.tokenizer}: {suggest(self.tokenizer, (*KINDS, 'a model file'))}")
        self.source(None)
        if self.tokenizer == "bpe":
            toyexp.tokenizers.check_bpe_vocab(self.bpe_vocab)
        super().check()

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning for each setting that has no effect."""
        if is_changed(self, "bpe_vocab") and self.tokenizer != "bpe":
            yield f"data.bpe_vocab={self.bpe_vocab}: has no effect with data.tokenizer={self.tokenizer}"
        yield from super().warnings(preview)

    def source(self, vocabulary: Path | None) -> Path | None:
        """Return the model file with the tokenizer, or None if no file is used.

        If the setting `tokenizer` is auto, this is `vocabulary`, the file that the recipe suggests, if any.
        """
        if self.tokenizer not in KINDS:
            return toyexp.find_model_file(Path(self.tokenizer))
        return vocabulary if self.tokenizer == "auto" else None

    def read_tokenizer(self, vocabulary: Path | None) -> toyexp.Tokenizer:
        """Return the tokenizer of the model file, or the byte tokenizer if no file is used."""
        source = self.source(vocabulary)
        if source is None:
            return toyexp.tokenizers.Bytes()
        return toyexp.formats.read_tokenizer(toyexp.formats.open_gguf(str(source)))

    def bpe_notes(self, tokenizer: toyexp.Tokenizer) -> list[str]:
        """Return a list with a note if the BPE tokenizer has fewer tokens than requested; otherwise an empty list."""
        if self.tokenizer != "bpe" or tokenizer.vocab == self.bpe_vocab:
            return []
        return [f"only {tokenizer.vocab} of data.bpe_vocab={self.bpe_vocab} tokens learned: the text has no more pairs"]


@dataclass
class TextData(TokenizedData):
    """Base of plain text data, read and tokenized in pieces; the token ids are cached in memory-mapped files."""

    max_mb: float = 0.0  # use only this many million characters, from the start of the text; 0: all
    bpe_mb: float = 100.0  # train tokenizer=bpe on at most this many million characters, evenly spread; 0: all
    on_error: str = "refuse"  # for a file that is not UTF-8 text: refuse (stop the run) | skip (and count it)

    @abstractmethod
    def files(self) -> FoundFiles:
        """Return the text files to read, each of which is a document, in a fixed order."""

    def check(self) -> None:
        """Raise UserError for invalid settings and a missing tokenizer."""
        super().check()
        require_range("data", self, max_mb="[0,inf)", bpe_mb="[0,inf)")
        require_choice("data", self, on_error=ON_ERROR)

    def open(self, vocabulary: Path | None) -> toyexp.Dataset:
        """Read, split and tokenize the text. The token ids are cached, keyed by the digests of text and tokenizer."""
        found, limit = self.files(), math.ceil(self.max_mb * 1e6) or None
        corpus = Corpus(found, limit, self.val_fraction, self.on_error == "skip")
        text = corpus.facts
        if not text.taken:
            files = f"{found.files[0]}{f' and {len(found.files) - 1} more' if len(found.files) > 1 else ''}"
            skipped = f" ({text.skipped[0]})" if text.skipped else ""
            raise UserError(f"data={self.name}: found no text in {files}{skipped}")
        tokenizer, limits = self._tokenizer(corpus, vocabulary)
        facts = {"documents": text.documents, "text_sha256": text.digest} | tokenizer_facts(tokenizer) | found.facts()
        key = f"{text.digest}-{facts['tokenizer_digest']}-{self.val_fraction!r}{corpus.parts_key}"
        try:
            ids = load_or_pack(key, tokenizer.vocab, partial(_encode_corpus, corpus, tokenizer))
        except UnknownCharacter as error:
            raise self._unknown(error.character, corpus, vocabulary) from None
        train, held_out = ids.parts
        if found.columns is not None and not len(held_out):
            problem = f"holds out none of the records ({text.documents})"
            raise UserError(f"data.val_fraction={self.val_fraction}: {problem}; use more records, or data.val_path=...")
        train = train if self.val_fraction < 1 else train[:0]  # drop the begin and end tokens of empty training parts
        left_out = [*text.omissions(), *limits, *found.omissions("data.suffixes")]
        return toyexp.TokenDataset(
            train, held_out, tokenizer, tokenizer.vocab, self.eval_batches, facts, ids.sha256, left_out,
            self.bpe_notes(tokenizer), self.val_fraction,
        )  # fmt: skip

    def _unknown(self, character: str, corpus: Corpus, vocabulary: Path | None) -> UserError:
        corpus.check_unchanged()  # a tokenizer made from this text lacks a character only if the text changed since
        file = corpus.first_file_containing(character) or "its text"  # no file if the tokenizer itself added it
        return UserError(
            f"data={self.name}: {file} holds the character {character!r}, which is not in the tokenizer of "
            f"{self.source(vocabulary)}; use other text: data=text data.path=..."
        )

    def _tokenizer(self, corpus: Corpus, vocabulary: Path | None) -> tuple[toyexp.Tokenizer, list[str]]:
        """Return the tokenizer, and a list with a note if bpe was trained on only a part of the text.

        Tokenizers that are made from the text (char and bpe) are cached.
        """
        if self.tokenizer not in ("char", "bpe"):
            return self.read_tokenizer(vocabulary), []
        settings = (self.bpe_vocab, self.bpe_mb) if self.tokenizer == "bpe" else ()
        key = f"{corpus.facts.digest}-{self.val_fraction!r}-{self.tokenizer}-{settings}"
        cached = recall("tokenizer", key)
        if cached is None:
            cached = self._learn_bpe(corpus) if settings else {"characters": characters(corpus.parts(None))}
            remember("tokenizer", key, cached)
        if not settings:
            return toyexp.tokenizers.Characters(cached["characters"]), []
        merges = [(a, b) for a, b in cached["merges"]]
        return toyexp.tokenizers.BPE(cached["pieces"], merges, len(cached["pieces"]) - 1), cached["left_out"]

    def _learn_bpe(self, corpus: Corpus) -> dict[str, Any]:
        size, limit = corpus.train_size(), math.ceil(self.bpe_mb * 1e6)
        cuts, cut_up = toyexp.tokenizers.PRE_TOKENIZERS["gpt-2"].cuts, toyexp.tokenizers.split_text
        pieces: Iterator[str] = (part.text for document in corpus.parts(False) for part in cut_up(document, cuts))
        is_sampled = 0 < limit < size
        sample = sample_pieces(pieces, size, limit) if is_sampled else pieces
        bpe = run_interruptibly(lambda: toyexp.tokenizers.BPE.train(sample, self.bpe_vocab))
        left_out = [f"bpe learned from {megabytes(limit, size)}: data.bpe_mb"] if is_sampled else []
        return {"pieces": bpe.pieces, "merges": bpe.merges, "left_out": left_out}


def tokenizer_facts(tokenizer: toyexp.Tokenizer) -> dict[str, str]:
    """Return kind and digest of a tokenizer for a run's record."""
    return {"tokenizer": tokenizer.kind, "tokenizer_digest": tokenizer.fingerprint()}


def _encode_corpus(corpus: Corpus, tokenizer: toyexp.Tokenizer) -> Iterator[Iterator[np.ndarray]]:
    if corpus.facts.taken > LONG:
        size = f"{corpus.facts.taken / 1e6:.0f} MB"
        print_error(f"tokenizing {size} of text; later runs reuse the cached ids (data.stream=true starts at once)")
    for held_out in (False, True):
        yield toyexp.tokenizers.encode_documents(tokenizer, corpus.parts(held_out))
    corpus.check_unchanged()


@dataclass
class Stdlib(TextData):
    """Source code of this Python's standard library: real text on every machine."""

    name: ClassVar[str] = "stdlib"

    max_mb: float = 4.0  # use only this many million characters, from the start of the text; 0: all

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """Return "" (the data fits and needs no settings) if the model's tokenizer accepts any text.

        Otherwise return None: the data does not fit the model.
        """
        try:
            if tokenizer and tokenizer.vocab <= SMALL:
                tokenizer.encode(ANY_TEXT)
        except UserError:
            return None
        return "" if tokenizer else None

    def files(self) -> FoundFiles:
        """Return every .py file of the library except its tests, in path order."""
        root = sysconfig.get_path("stdlib")
        paths = []
        for folder, folders, names in os.walk(root):  # os.walk can leave out site-packages
            folders[:] = [f for f in folders if f not in NOT_CODE]
            paths += [os.path.join(folder, n) for n in names if n.endswith(".py")]  # noqa: PTH118 - Path is slow here
        return FoundFiles([Path(f) for f in sorted(paths, key=lambda f: f.replace(os.sep, "/"))])


@dataclass
class Text(TextData):
    """Your own text files: a file, a directory or a pattern."""

    name: ClassVar[str] = "text"

    path: str = ""  # text, or records with a column text: file, directory, or pattern such as 'books/*.txt'
    val_path: str = ""  # the same for the held-out text; empty: by names (only of records), or by val_fraction
    columns: dict[str, str] = field(default_factory=dict)  # {text: content} reads the column content as text
    stream: bool = False  # tokenize during training: the first step comes sooner, and no token ids are cached
    suffixes: str = ".txt .md .py"  # suffixes of text files to read in a directory; '*': all

    @classmethod
    def suggest_settings(cls, sizes: Mapping[str, Any], tokenizer: toyexp.Tokenizer | None) -> str | None:
        """Return an override of `data.path` with a placeholder, or None if the model has no tokenizer."""
        return "data.path=TEXT.txt" if tokenizer else None

    @classmethod
    def recognises(cls, path: Path) -> int:
        """Return 2 (a certain match) for files with a text suffix, and for directories of such files.

        Return 1 (a possible match) for other files and for directories that also have files of records, else 0.
        """
        suffixes = cls.suffixes.split()
        if path.is_dir():
            files = list(iter_files(path))
            return any(f.suffix in suffixes for f in files) * (1 if any(map(record_suffix, files)) else 2)
        return 2 if path.suffix in suffixes else 1

    def check(self) -> None:
        """Raise UserError for invalid settings and a missing path."""
        super().check()
        if not self.path:
            raise UserError("data=text needs a file or directory: data.path=...")
        match_paths(self.path)
        if self.stream and (self.tokenizer in ("char", "bpe") or self.max_mb):
            key = "max_mb" if self.max_mb else "tokenizer"
            raise UserError(f"data.{key}={getattr(self, key)}: cannot be used with data.stream=true; leave one out")

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning for each setting that has no effect."""
        yield from super().warnings(preview)
        if is_changed(self, "suffixes") and Path(self.path).is_file() and not record_suffix(Path(self.path)):
            yield f"data.suffixes={self.suffixes}: has no effect; data.path={self.path} is a file, not a directory"

    def open(self, vocabulary: Path | None) -> toyexp.Dataset:
        """Open the text. With the setting `stream`, tokenize it while the run trains."""
        if not self.stream:
            return super().open(vocabulary)
        from toyexp_data.streaming import StreamedText

        found, tokenizer = self.files(), self.read_tokenizer(vocabulary)
        corpus, one_in = Corpus(found, None, 0, self.on_error == "skip"), max(round(1 / self.val_fraction), 1)
        left_out, facts = found.omissions("data.suffixes"), tokenizer_facts(tokenizer) | found.facts()
        return StreamedText(corpus, one_in, tokenizer, self.eval_batches, facts, left_out)

    def files(self) -> FoundFiles:
        """Return the file, or the files of a directory: those of text, or those of records if it has no text.

        Of records in files that are named after splits, leave out splits that are neither trained on nor held out. With
        the setting `suffixes`, all files are text.
        """
        suffixes, only_text = self.suffixes.split(), is_changed(self, "suffixes")

        def is_text(file: Path) -> bool:
            return ALL in suffixes or file.suffix in suffixes

        find = partial(
            find_files, what=f"file with the suffix {self.suffixes or '(none)'}",
            hint="; choose others: data.suffixes='.rst .c', or all: data.suffixes='*'",
        )  # fmt: skip
        found = find(self.path, lambda file: is_text(file) or (is_record(file) and not only_text))
        records = [file for file in found.files if is_record(file) and not only_text]
        texts = [file for file in found.files if only_text or not is_record(file)]
        if not records or any(file.stem != "README" for file in texts):
            found.files, found.others = texts, found.others + len(records)
            if self.val_path:
                found.hold_out(find(self.val_path, is_text, key="val_path"))
            return found
        require_one_format(records, self.path)
        found.files, found.others, found.columns = records, 0, self.columns
        found.hold_out(find_records(self.val_path, "val_path") if self.val_path else None)
        return found
