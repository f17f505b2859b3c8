"""Text, tokenized: the standard library's own source, and anybody's files."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from toyexp import Data, TokenDataset, Tokenizer, UserError, choose
from toyexp.data import read_text, split_documents, text_files
from toyexp.gguf.read import GGUFFile
from toyexp.gguf.tokenizer import read_tokenizer
from toyexp.signals import interruptible
from toyexp.tokenizer import BPE, Bytes, Characters
from toyexp_data.cache import cached_tokens

KINDS = ("auto", "byte", "char", "bpe")
NOT_CODE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo", "ensurepip"}


@dataclass
class TokenizedData(Data):
    """What everything that begins as text shares: a tokenizer, and a part that is held out."""

    gives: ClassVar[str] = "tokens"

    tokenizer: str = "auto"  # auto (the donor's or base's) | byte | char | bpe (trained on this text) | a GGUF file
    bpe_vocab: int = 1024  # tokens that tokenizer=bpe learns
    val_fraction: float = 0.05  # the last part of every document, held out from training
    eval_batches: int = 16  # batches that one look at the held-out part takes

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a tokenizer that is not there."""
        if self.tokenizer not in KINDS and not self.tokenizer.endswith(".gguf"):
            raise UserError(f"data.tokenizer={self.tokenizer}: {choose(self.tokenizer, (*KINDS, 'a .gguf file'))}")
        if self.tokenizer.endswith(".gguf") and not Path(self.tokenizer).is_file():
            raise UserError(f"data.tokenizer={self.tokenizer}: not found")
        check_split(self.val_fraction, self.eval_batches)

    def source(self, vocabulary: Path | None) -> Path | None:
        """The GGUF whose tokenizer is used, if it is one's."""
        if self.tokenizer.endswith(".gguf"):
            return Path(self.tokenizer)
        return vocabulary if self.tokenizer == "auto" else None

    def make_tokenizer(self, texts: Sequence[str], train: Sequence[str], vocabulary: Path | None) -> Tokenizer:
        """The tokenizer for `texts`; one that learns merges learns them from `train`."""
        if self.tokenizer == "char":
            return Characters.of(texts)
        if self.tokenizer == "bpe":
            return interruptible(lambda: BPE.train(train, self.bpe_vocab))
        source = self.source(vocabulary)
        if source is None:
            return Bytes()
        with GGUFFile(source) as file:
            return read_tokenizer(file)


@dataclass
class TextData(TokenizedData):
    """What all plain text shares: the last part of every document is held out."""

    max_mb: float = 4.0  # million characters of text to learn from at most, from the start; 0: all

    @abstractmethod
    def files(self) -> Iterable[Path]:
        """The documents, in a fixed order."""

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a tokenizer that is not there."""
        super().check()
        if not 0 <= self.max_mb < math.inf:
            raise UserError(f"data.max_mb={self.max_mb}: must be 0 (all) or above")

    def open(self, vocabulary: Path | None) -> TokenDataset:
        """Reads, splits and tokenizes the text; tokens are cached by the digest of text and tokenizer."""
        texts = self._texts()
        train, held_out = split_documents(texts, self.val_fraction)
        tokenizer = self.make_tokenizer(texts, train, vocabulary)
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        key = f"{digest}-{tokenizer.fingerprint()}-{self.val_fraction!r}"
        parts = cached_tokens(
            key, lambda: [interruptible(partial(tokenizer.encode_documents, part)) for part in (train, held_out)]
        )
        facts = {
            "documents": len(texts),
            "text_sha256": digest,
            "tokenizer": tokenizer.kind,
            "tokenizer_digest": tokenizer.fingerprint(),
        }
        return TokenDataset(parts[0], parts[1], tokenizer, tokenizer.vocab, self.eval_batches, facts)

    def _texts(self) -> list[str]:
        room = math.ceil(self.max_mb * 1e6) or None
        texts = []
        files = list(self.files())
        for path in files:
            text = read_text(path)
            texts.append(text if room is None else text[:room])
            if room is not None:
                room -= len(text)
                if room <= 0:
                    break
        if not any(texts):
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise UserError(f"data={self.name}: there is no text to learn from in {files[0]}{more}")
        return texts


def check_split(val_fraction: float, eval_batches: int) -> None:
    """Raises UserError for a split that cannot work."""
    if not 0 < val_fraction < 1:
        raise UserError(f"data.val_fraction={val_fraction}: must be above 0 and below 1")
    if eval_batches < 1:
        raise UserError(f"data.eval_batches={eval_batches}: must be at least 1")


@dataclass
class Stdlib(TextData):
    """The source of this Python's standard library: real text on every machine."""

    name: ClassVar[str] = "stdlib"

    def files(self) -> Iterable[Path]:
        """Every .py file of the library but its tests, in path order."""
        root = sysconfig.get_path("stdlib")
        found = []
        for folder, folders, names in os.walk(root):  # pruned: site-packages may hold a hundred times as many files
            folders[:] = [f for f in folders if f not in NOT_CODE]
            found += [os.path.join(folder, n) for n in names if n.endswith(".py")]  # noqa: PTH118 - Path is slow here
        return [Path(f) for f in sorted(found, key=lambda f: f.replace(os.sep, "/"))]


@dataclass
class Text(TextData):
    """Text files of your own: one file, or a folder of them."""

    name: ClassVar[str] = "text"

    path: str = ""  # a text file, or a folder
    suffixes: str = ".txt .md .py"  # which files of a folder

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
        if not Path(self.path).exists():
            raise UserError(f"data.path={self.path}: not found (looked in {Path.cwd()})")

    def files(self) -> Iterable[Path]:
        """The file, or the folder's files in path order."""
        files = list(text_files(Path(self.path), self.suffixes.split()))
        if not files:
            raise UserError(
                f"data.path={self.path}: no file in there ends in {self.suffixes.replace(' ', ', ')}; "
                "for others: data.suffixes='.rst .c'"
            )
        return files
