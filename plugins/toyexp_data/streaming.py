"""Text that is tokenized while the run trains, for texts that are too large to tokenize first.

Batch k depends only on the files, the seed and k. Rows are shuffled within blocks of about half a million tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from toyexp import TOKENS, Batch, Batches, Dataset, TokenDataset, Tokenizer, UserError
from toyexp.base import open_file, show_status, stream
from toyexp.tokenizers import encode_documents
from toyexp_data.cache import recall, remember

BLOCK = 1 << 19  # tokens whose rows are shuffled together
GROUP = 64  # documents that are tokenized together
HEAD = 1 << 16  # bytes of a file that the digest covers, besides its size

T = TypeVar("T")
Documents = Callable[[Path], Iterator[Iterator[str]]]
Mark = tuple[int, int, int]  # number of a file, of a group in the file, and of a token in the group


class StreamedText(Dataset):
    """Documents of files, read in order and tokenized as they are needed.

    `documents` returns those of a file. Held out are the documents of the files `held_out` or, if there are none, one
    document in `one_in`.
    """

    def __init__(
        self, files: Sequence[Path], held_out: Sequence[Path], documents: Documents, one_in: int, tokenizer: Tokenizer,
        eval_batches: int, facts: Mapping[str, Any], left_out: Sequence[str],
    ):  # fmt: skip
        self._files, self._held_out, self._documents, self._one_in = files, held_out, documents, one_in
        self.tokenizer = self._tokenizer = tokenizer
        self.vocab = tokenizer.vocab
        self._eval_batches, self._left_out = eval_batches, left_out
        digest = hashlib.sha256(repr((len(held_out), one_in, tokenizer.fingerprint())).encode())
        for path in (*files, *held_out):
            with open_file(path) as file:
                digest.update(f"{path.name}{path.stat().st_size}".encode() + file.read(HEAD))
        self.digest = digest.hexdigest()
        self._facts = {**facts, "files": len(files) + len(held_out), "files_sha256": self.digest}

    def describe(self) -> dict[str, Any]:
        """Return the number of files and a digest of their names, sizes and beginnings."""
        return self._facts

    def omissions(self) -> Sequence[str]:
        """Return notes about files that are left out."""
        return self._left_out

    def remarks(self) -> list[str]:
        """Return a note that the text is streamed."""
        return [f"text is tokenized during training; rows are shuffled within blocks of {BLOCK:,} tokens (data.stream)"]

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


class StreamBatches(Batches):
    """Batches of windows of `context` tokens, shuffled within blocks."""

    def __init__(self, source: StreamedText, context: int, rows: int, seed: int, held_out: Sequence[Batch]):
        self._source, self._context, self._rows, self._seed, self._held_out = source, context, rows, seed, held_out
        self._windows = max(BLOCK // context, 1)  # per block
        self._key = f"{source.digest}-{self._windows}-{context}"
        known = recall("stream", self._key) or {"marks": [(0, 0, 0)]}
        self._marks: list[Mark] = [(file, group, token) for file, group, token in known["marks"]]  # one per block
        self._position = 0  # number of the block that the reader yields next
        self._reader: Iterator[tuple[np.ndarray, Mark]] = iter(())
        self._thread = ThreadPoolExecutor(1, "text")  # reads and tokenizes the next block during training
        self._next: Future[tuple[np.ndarray, Mark]] | None = None
        weakref.finalize(self, _end, self._thread)
        self._block = lru_cache(maxsize=2)(self._load_block)
        self.inputs = TOKENS.inputs(context)

    def batch(self, k: int) -> Batch:
        """Return training batch `k`: tokens, targets and weights, each [rows, context]."""
        places = [divmod(n, self._windows) for n in range(k * self._rows, (k + 1) * self._rows)]
        windows = np.stack([self._block(block)[row] for block, row in places])
        targets, weights = np.ascontiguousarray(windows[:, 1:]), np.ones((self._rows, self._context), np.float32)
        return {"tokens": np.ascontiguousarray(windows[:, :-1]), "targets": targets, "weights": weights}

    def held_out(self) -> Sequence[Batch]:
        """Return the held-out batches."""
        return self._held_out

    def _load_block(self, number: int) -> np.ndarray:
        """Return the windows of a block, [windows, context + 1], in random order, and begin to read the next block."""
        nearest = min(number, len(self._marks) - 1)
        if self._next is None or not nearest <= self._position <= number:
            size, self._position = self._windows * self._context, nearest
            self._reader = _read_blocks(self._source, size, self._marks[nearest])
            self._next = self._thread.submit(next, self._reader)
        while self._position <= number:
            if self._position < number:
                show_status(f"reading the text up to block {number}: block {self._position}")
            ids, mark = self._next.result()
            self._next = self._thread.submit(next, self._reader)
            self._position += 1
            if self._position == len(self._marks):
                self._marks.append(mark)
                remember("stream", self._key, {"marks": self._marks})
        order = np.argsort(stream(self._seed, "data-order", number).random_raw(self._windows), kind="stable")
        return ids[order[:, None] * self._context + np.arange(self._context + 1)]


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
