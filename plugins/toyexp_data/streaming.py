"""Text that is tokenized while the run trains, for texts that are too large to tokenize first.

Batch k depends only on the files, the seed and k. Rows are shuffled within blocks of about half a million tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np

from toyexp import (
    TOKENS,
    Batch,
    Dataset,
    EpochBatches,
    TokenDataset,
    Tokenizer,
    UserError,
    shift_windows,
)
from toyexp.base import open_file, show_status
from toyexp.tokenizers import encode_documents
from toyexp_data.cache import recall, remember
from toyexp_data.corpus import Corpus

BLOCK = 1 << 19  # tokens whose rows are shuffled together
GROUP = 64  # documents that are tokenized together
HEAD = 1 << 16  # bytes of a file that the digest covers, besides its size

T = TypeVar("T")
Mark = tuple[int, int, int]  # number of a file, of a group in the file, and of a token in the group


class StreamedText(Dataset):
    """Documents of a corpus, read in order and tokenized as they are needed.

    Held out are the documents of the corpus's held-out files or, if there are none, one document in `one_in`.
    """

    def __init__(
        self, corpus: Corpus, one_in: int, tokenizer: Tokenizer, eval_batches: int, facts: Mapping[str, Any],
        left_out: Sequence[str],
    ):  # fmt: skip
        files, held_out = corpus.found.files, corpus.found.held_out
        self._files, self._held_out, self._documents, self._one_in = files, held_out, corpus.stream, one_in
        self.tokenizer = self._tokenizer = tokenizer
        self.vocab, self._eval_batches = tokenizer.vocab, eval_batches
        digest = hashlib.sha256(repr((len(held_out), one_in, tokenizer.fingerprint())).encode())
        for path in (*files, *held_out):
            with open_file(path) as file:
                digest.update(f"{path.name}{path.stat().st_size}".encode() + file.read(HEAD))
        self.digest = digest.hexdigest()
        note = f"text is tokenized during training; rows are shuffled within blocks of {BLOCK:,} tokens (data.stream)"
        self._facts = {**facts, "files": len(files) + len(held_out), "files_sha256": self.digest}
        self._left_out, self._remarks = left_out, [note]

    def batches(self, context: int, rows: int, seed: int) -> StreamBatches:
        """Return batches of `rows` windows of `context` tokens. Raise UserError if too little text is held out."""
        return StreamBatches(self, context, rows, seed, self._held_out_batches(context, rows))

    def _held_out_batches(self, context: int, rows: int) -> Sequence[Batch]:
        """Return the first held-out windows, at most `eval_batches` batches."""
        sources = self._held_out or self._files
        documents = (
            text
            for number, path in enumerate(sources)
            for index, text in enumerate(self._documents(path))
            if self._held_out or self._is_held_out(number, index)
        )
        ids, needed = [np.empty(0, np.int32)], self._eval_batches * rows * context + 1
        for piece in map(self._encode, _in_groups(documents)):
            ids.append(piece)
            needed -= len(piece)
            if needed <= 0:
                break
        part = np.concatenate(ids)[: self._eval_batches * rows * context + 1]
        if not len(part):
            for path in sources:  # if a file is not text, say that
                next(chain.from_iterable(self._documents(path)), "")
            problem = f"holds out one document in {self._one_in}, and the text has fewer (a text file is one document)"
            raise UserError(f"data.stream=true: {problem}; name held-out text with data.val_path=FILE")
        return TokenDataset(part, part, None, self.vocab, self._eval_batches, {}).batches(context, rows, 0).held_out()

    def _is_held_out(self, number: int, index: int) -> bool:
        return not self._held_out and (number + index) % self._one_in == self._one_in - 1

    def _encode(self, documents: Iterable[Iterator[str]]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int32), *encode_documents(self._tokenizer, documents)])

    def groups(self, file: int, group: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield number of the file, number of the group and token ids of all groups from a group on, again and again.

        Raise UserError if there is no text to train on.
        """
        while True:
            is_empty = not (file or group)
            for number in range(file, len(self._files)):
                documents = enumerate(self._documents(self._files[number]))
                for position, members in enumerate(_in_groups(documents)):
                    if position >= group:
                        training = [text for index, text in members if not self._is_held_out(number, index)]
                        ids = self._encode(training)
                        is_empty = is_empty and not len(ids)
                        yield number, position, ids
                group = 0
            if is_empty:
                raise UserError(f"{self._files[0]}: has no text to train on")
            file = 0


def _in_groups(documents: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(documents)
    return iter(lambda: list(islice(iterator, GROUP)), [])


class StreamBatches(EpochBatches):
    """Batches of windows of `context` tokens, shuffled within blocks: a block takes the place of an epoch."""

    def __init__(self, source: StreamedText, context: int, rows: int, seed: int, held_out: Sequence[Batch]):
        super().__init__(max(BLOCK // context, 1), 0, rows, seed)
        self._source, self._context, self._held_out, self.rows_per_epoch = source, context, held_out, None
        self._key = f"{source.digest}-{self._count}-{context}"
        known = recall("stream", self._key) or {"marks": [(0, 0, 0)]}
        self._marks: list[Mark] = [(file, group, token) for file, group, token in known["marks"]]  # one per block
        self._position = 0  # number of the block that the reader yields next
        self._reader: Iterator[tuple[np.ndarray, Mark]] = iter(())
        self._thread = ThreadPoolExecutor(1, "text")  # reads and tokenizes the next block during training
        self._next: Future[tuple[np.ndarray, Mark]] | None = None
        weakref.finalize(self, _end, self._thread)
        self.inputs = TOKENS.inputs(context)

    def _take(self, items: np.ndarray, is_held_out: bool) -> dict[str, np.ndarray]:
        return shift_windows(items)

    def held_out(self) -> Sequence[Batch]:
        """Return the held-out batches."""
        return self._held_out

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the windows of a block, [windows, context + 1], in random order, and begin to read the next block."""
        nearest = min(epoch, len(self._marks) - 1)
        if self._next is None or not nearest <= self._position <= epoch:
            self._position = nearest
            self._reader = _read_blocks(self._source, self._count * self._context, self._marks[nearest])
            self._next = self._thread.submit(next, self._reader)
        while self._position <= epoch:
            if self._position < epoch:
                show_status(f"reading the text up to block {epoch}: block {self._position}")
            ids, mark = self._next.result()
            self._next = self._thread.submit(next, self._reader)
            self._position += 1
            if self._position == len(self._marks):
                self._marks.append(mark)
                remember("stream", self._key, {"marks": self._marks})
        starts = super()._epoch_order(epoch) * self._context
        return ids[starts[:, None] + np.arange(self._context + 1)]


def _end(thread: ThreadPoolExecutor) -> None:
    """Wait until the thread has ended, unless the garbage collector calls this function in that thread itself."""
    with contextlib.suppress(RuntimeError):
        thread.shutdown(cancel_futures=True)


def _read_blocks(source: StreamedText, size: int, mark: Mark) -> Iterator[tuple[np.ndarray, Mark]]:
    """Yield the `size` token ids of each block from a mark on, with one more, and the mark of the block after it."""
    file, group, skipped = mark
    parts, count = list[np.ndarray](), 0
    for number, position, ids in source.groups(file, group):
        offset, skipped = skipped, 0
        while count + len(ids) - offset > size:
            end = offset + size - count
            yield np.concatenate([*parts, ids[offset : end + 1]]), (number, position, end)
            offset, parts, count = end, [], 0
        parts.append(ids[offset:])
        count += len(ids) - offset
