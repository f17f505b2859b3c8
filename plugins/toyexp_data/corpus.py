"""Find text files, and read them in chunks without holding a whole file in memory."""

from __future__ import annotations

import codecs
import collections
import hashlib
import itertools
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from toyexp import UserError
from toyexp.base import HEAD_SIZE, not_text_error, open_file, print_note, show_status, system_message
from toyexp.base import numpy as np
from toyexp.formats import iter_records
from toyexp_data.cache import recall, remember
from toyexp_data.columns import read_text_column
from toyexp_data.files import FoundFiles

CHUNK = 1 << 20  # bytes per read
NO_LIMIT = 1 << 62
SETTLE_TIME = 2.0  # seconds; some file systems round modification times to 2 s


def chunks(path: Path) -> Iterator[str]:
    """Yield a file's text in chunks; raise UserError with file and byte offset for a NUL or invalid UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_file(path) as file:
        # Ignore later writes: read only the present size. Reject files in /proc, because some never end.
        size, bytes_read, start = os.fstat(file.fileno()).st_size, 0, b""
        if not size and path.resolve().is_relative_to("/proc"):
            raise UserError(f"{path}: is a system file in /proc, not a text file on a disk")
        while bytes_read < size:
            try:
                raw = file.read(min(CHUNK, size - bytes_read))
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {system_message(error)}") from None
            start, offset = start or raw[:HEAD_SIZE], bytes_read
            bytes_read += len(raw)
            before_nul, nul, _ = raw.partition(b"\0")
            try:
                text = decoder.decode(before_nul, final=bool(nul) or bytes_read >= size or not raw)
            except UnicodeDecodeError as error:
                position = offset + len(before_nul) - len(error.object) + error.start
                raise not_text_error(path, position, error.object[error.start], start) from None
            if nul:
                raise not_text_error(path, offset + len(before_nul), 0, start)
            yield text
            if not raw:
                return


def slice_text(texts: Iterator[str], start: int, stop: int) -> Iterator[str]:
    """Yield the characters `start` to `stop` of a chunked text."""
    for text in texts:
        if start < len(text) and stop > 0:
            yield text[max(start, 0) : stop]
        start, stop = start - len(text), stop - len(text)
        if stop <= 0:
            return


@dataclass(frozen=True)
class Facts:
    """Size and digest of the text that a run uses. The cache stores them."""

    digest: str  # SHA-256 of the documents, joined by NUL
    documents: int
    taken: int  # bytes that are used
    size: int  # bytes of all usable files
    skipped: list[str]  # unusable files, each with the reason

    def omissions(self) -> list[str]:
        """Return notes about text that the run does not use, and about skipped files; empty if there are none."""
        part = [f"{megabytes(self.taken, self.size)}: data.max_mb"] if self.taken < self.size else []
        count = len(self.skipped)
        return part + ([f"{count} skipped (data.on_error), such as {self.skipped[0]}"] if count else [])


def megabytes(part: float, total: float) -> str:
    """Format two sizes in MB with enough digits to tell them apart: 4.0 of 10.6 MB."""
    for digits in range(1, 7):
        shown = [f"{size / 1e6:.{digits}f}" for size in (part, total)]
        if shown[0] != shown[1] and float(shown[0]):
            break
    return " of ".join(shown) + " MB"


class Corpus:
    """Documents of several files, with a training part and a held-out part.

    A text file is one document, whose end is held out. In a file of records each record is a document, and the last
    ones are held out. If `found` has held-out files, they are the held-out part, instead of the share `fraction`.

    At most `limit` characters are used in all. With `skip`, unusable files and records are left out; otherwise reading
    them raises UserError.
    """

    def __init__(self, found: FoundFiles, limit: int | None, fraction: float, skip: bool = False):
        self.found, self._limit, self._fraction, self._skip = found, limit, fraction, skip
        self._files, self._columns = [*found.files, *found.held_out], found.columns
        self._valid, self._is_noted = set[Path](), False
        self._began, self._stats = time.time(), {path: _stat(path) for path in self._files}
        is_split = found.held_out or found.columns is not None
        split = (len(found.files), len(found.held_out), found.columns) if is_split else ()
        self._key = repr(([(str(p), status) for p, status in self._stats.items()], limit, skip, *split))
        # Corpora of equal text and `val_fraction` but different `parts_key` hold out different text.
        self.parts_key = f"-{split}-{[str(path) for path in found.held_out]}" if split else ""

    @cached_property
    def facts(self) -> Facts:
        """Size and digest of the text. If they are not in the cache, this property reads the text."""
        cached = recall("text", self._key)
        return Facts(**cached) if cached else self._survey[0]

    @cached_property
    def _survey(self) -> tuple[Facts, list[tuple[Path, array[int], bool]]]:
        """Return the facts, and for each file: the used characters of each document, and whether it is held out."""
        show_status("reading the text")
        digest, room = hashlib.sha256(), self._limit or NO_LIMIT
        parts: list[tuple[Path, array[int], bool]] = []
        used_bytes, size, skipped = 0, sum(status.size for status in self._stats.values()), list[str]()
        for number, path in enumerate(self._files):
            lengths, taken = array("q"), 0
            try:
                for text in self.documents(path, skipped):
                    digest.update(b"\0" if parts or lengths else b"")
                    lengths.append(0)
                    for chunk in slice_text(text, 0, room):
                        digest.update(raw := chunk.encode())
                        lengths[-1], taken = lengths[-1] + len(chunk), taken + len(raw)
                    room -= lengths[-1]
                    if room <= 0:
                        break
            except UserError as reason:
                more = " (data.on_error=skip leaves such files out)" if len(self._files) > 1 else ""
                raise UserError(f"{reason}{more}") from None
            if lengths:
                parts.append((path, lengths, number >= len(self.found.files)))
            used_bytes += taken
            if not lengths or (self._columns is not None and room > 0):
                size += taken - self._stats[path].size  # all usable text is used, whatever the size of the file
            if room <= 0:
                break
        facts = Facts(digest.hexdigest(), sum(len(lengths) for _, lengths, _ in parts), used_bytes, size, skipped)
        if all(status.change_time < self._began - SETTLE_TIME for status in self._stats.values()):
            remember("text", self._key, asdict(facts))
        return facts, parts

    def documents(self, path: Path, skipped: list[str]) -> Iterator[Iterator[str]]:
        """Yield each document of a file, in chunks of text.

        With `skip`, leave out unusable files and records, and add the reasons to `skipped`; otherwise raise UserError.
        """
        try:
            if self._columns is None:
                if self._skip and path not in self._valid:
                    collections.deque(chunks(path), 0)  # raises an error before any of the text is used
                    self._valid.add(path)
                yield chunks(path)
                return
            for location, record in iter_records(path):
                try:
                    text = read_text_column(record, self._columns)
                except UserError as reason:
                    if not self._skip:
                        raise UserError(f"{location}: {reason}") from None
                    skipped.append(f"{location}: {reason}")
                else:
                    yield iter([text])
        except UserError as reason:
            if not self._skip:
                raise
            skipped.append(str(reason))

    def stream(self, path: Path) -> Iterator[Iterator[str]]:
        """Yield each document of a file, in chunks of text, and print the first reason to leave one out."""
        skipped: list[str] = []
        yield from self.documents(path, skipped)
        for reason in [] if self._is_noted else skipped[:1]:
            self._is_noted = True
            print_note(f"note: {reason}; it is left out (data.on_error)")

    def parts(self, held_out: bool | None) -> Iterator[Iterator[str]]:
        """Yield the documents of the held-out part (True), of the training part (False), or all (None), in chunks."""
        for path, lengths, is_held_out in self._survey[1]:
            documents = zip(self.documents(path, []), lengths, strict=False)
            if held_out is None or (self.found.held_out and is_held_out == held_out):
                yield from (slice_text(text, 0, length) for text, length in documents)
            elif not self.found.held_out and self._columns is not None:
                first, last = (self._cut(len(lengths)), None) if held_out else (0, self._cut(len(lengths)))
                yield from (slice_text(text, 0, n) for text, n in itertools.islice(documents, first, last))
            elif not self.found.held_out:
                for text, n in documents:
                    yield slice_text(text, *((self._cut(n), n) if held_out else (0, self._cut(n))))

    def first_file_containing(self, character: str) -> Path | None:
        """Return the first file with this character in the text that the run uses; None if there is none."""
        for path, lengths, _ in self._survey[1]:
            for text, length in zip(self.documents(path, []), lengths, strict=False):
                if any(character in chunk for chunk in slice_text(text, 0, length)):
                    return path
        return None

    def train_size(self) -> int:
        """Return about how many characters all training parts have."""
        sizes = (sum(lengths) for _, lengths, is_held_out in self._survey[1] if not is_held_out)
        return sum(size if self.found.held_out else self._cut(size) for size in sizes)

    def _cut(self, count: int) -> int:
        return count - int(count * self._fraction)

    def check_unchanged(self) -> None:
        """Raise UserError if a file changed since this object was made."""
        for path, status in self._stats.items():
            if status.size and _stat(path) != status:  # skip /proc: size 0, and its times always change
                raise UserError(f"{path}: changed while it was read; start again when it is complete")


class Stat(NamedTuple):
    """Size, times and identity of a file, to detect whether the file has changed."""

    size: int
    change_time: float  # seconds: the later of mtime and ctime
    marks: tuple[int, ...]  # device, inode, and both times in nanoseconds


def _stat(path: Path) -> Stat:
    try:
        status = path.stat()
    except OSError:  # reading it will report the error
        return Stat(0, 0.0, ())
    marks = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    return Stat(status.st_size, max(status.st_mtime, status.st_ctime), marks)


def characters(texts: Iterator[Iterator[str]]) -> list[str]:
    """Return the distinct characters of the texts, sorted by code point."""
    is_present = np.zeros(0x110000, bool)
    for text in itertools.chain.from_iterable(texts):
        is_present[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    return [chr(code) for code in np.flatnonzero(is_present)]


def sample_pieces(pieces: Iterable[str], size: int, limit: int) -> Iterator[str]:
    """Yield some of the pieces of a text, spread evenly over the text, with about `limit` characters in all.

    `size` is the number of characters of the whole text.
    """
    size_read = sample_size = 0
    for piece in pieces:
        size_read += len(piece)
        if sample_size + len(piece) <= max(size_read * limit / size, len(piece)):
            sample_size += len(piece)
            yield piece
