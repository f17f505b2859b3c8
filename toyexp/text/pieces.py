"""Long texts in pieces: their ids, one after another, are those of the whole text, and memory holds a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from toyexp.base.errors import UserError
from toyexp.base.memory import available_bytes
from toyexp.base.signals import interruptible
from toyexp.base.terminal import complain
from toyexp.text.tokenizer import Tokenizer

PIECE = 1 << 15  # characters of a piece at least, and twice as many unless it can only be cut later
BATCH = 1 << 21  # characters that are tokenized at once, on all cores
LARGE = PIECE << 9  # characters of a piece that is worth a word
EACH = 100  # bytes that a character takes while it is tokenized


def cut_up(chunks: Iterable[str], cuts: Callable[[str], Iterator[int]], size: int = PIECE) -> Iterator[str]:
    """A text that comes in chunks, in pieces of at most 2 x `size` characters that end where `cuts` allows it.

    `cuts` is given text that goes on, and says where it may be cut, the last place first. Where it finds none, a piece
    grows, in the end to the whole text.
    """
    text, wanted = "", size
    for chunk in chunks:
        text += chunk
        while len(text) > 2 * wanted:
            place = next(cuts(text[: 2 * wanted]), 0)
            if place:
                yield text[:place]
                text, wanted = text[place:], size
            else:
                wanted *= 2
                _check_memory(wanted)
    if text:
        yield text


def _check_memory(size: int) -> None:
    """Raises UserError for a piece that takes more memory than there is; one that takes much is announced."""
    left = available_bytes() if size >= LARGE else None
    if left is not None and size * EACH > left:
        raise UserError(
            f"{size / 1e6:.0f} million characters in a row have no place where this tokenizer lets them be cut, and in "
            f"one piece take {size * EACH / 1e9:.3g} GB, of {left / 1e9:.3g} GB: give another data.tokenizer"
        )
    if size == LARGE:
        complain("this tokenizer finds no place to cut the text: it is tokenized in one piece, which takes memory")


def encoded(tokenizer: Tokenizer, documents: Iterable[Iterable[str]]) -> Iterator[np.ndarray]:
    """int32 ids of documents that come in chunks: each begun as `add_bos` says, and followed by the end-of-text id."""
    start = np.array([tokenizer.bos] if tokenizer.add_bos else [], np.int32)
    end = np.array([tokenizer.eos], np.int32)
    for batch in _batches(tokenizer, documents):
        texts, begins = [part.text for part in batch], [part.begins for part in batch]
        found = interruptible(partial(tokenizer.encode_pieces, texts, begins))
        for part, ids in zip(batch, found, strict=True):
            yield np.concatenate([start[: part.begins], ids, end[: part.ends]])


class Part(NamedTuple):
    """A piece of a document, and whether it is the first and the last."""

    text: str
    begins: bool
    ends: bool


def _batches(tokenizer: Tokenizer, documents: Iterable[Iterable[str]]) -> Iterator[list[Part]]:
    """The documents' pieces, as many at a time as are tokenized at once."""
    batch: list[Part] = []
    held = 0
    for chunks in documents:
        for part in _framed(cut_up(chunks, tokenizer.cuts)):
            batch.append(part)
            held += len(part.text)
            if held >= BATCH:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _framed(pieces: Iterable[str]) -> Iterator[Part]:
    before, begins = "", True
    for piece in pieces:
        if before:
            yield Part(before, begins, ends=False)
            begins = False
        before = piece
    if before:
        yield Part(before, begins, ends=True)
