"""Find text files, and read them in chunks without holding a whole file in memory."""

from __future__ import annotations

import codecs
import glob
import hashlib
import itertools
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from toyexp import UserError
from toyexp.base import HEAD_SIZE, not_text_error, open_file, require_file, show_status, system_message, wrong_kind
from toyexp_data.cache import recall, remember

CHUNK = 1 << 20  # bytes per read
NO_LIMIT = 1 << 62
STATUS_EVERY = 500  # directories between updates of the search's status
ALL = "*"  # suffix that matches all files
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
    """Text of several files; each file is a document with a training part and, at its end, a held-out part.

    At most `limit` characters are used in all, and `fraction` of each document is held out. With `skip`, unusable files
    are left out; otherwise reading them raises UserError.
    """

    def __init__(self, files: Sequence[Path], limit: int | None, fraction: float, skip: bool = False):
        self._files, self._limit, self._fraction, self._skip = files, limit, fraction, skip
        self._began, self._stats = time.time(), {path: _stat(path) for path in files}
        self._key = repr(([(str(p), status) for p, status in self._stats.items()], limit, skip))

    @cached_property
    def facts(self) -> Facts:
        """Size and digest of the text. If they are not in the cache, this property reads the text."""
        cached = recall("text", self._key)
        return Facts(**cached) if cached else self._survey[0]

    @cached_property
    def _survey(self) -> tuple[Facts, list[tuple[Path, int]]]:
        show_status("reading the text")
        digest, room = hashlib.sha256(), self._limit or NO_LIMIT
        documents: list[tuple[Path, int]] = []
        used_bytes, size, skipped = 0, sum(status.size for status in self._stats.values()), list[str]()
        for path in self._files:
            before = digest.copy()
            digest.update(b"\0" if documents else b"")
            try:
                length, count = _digest_text(path, room, digest.update)
            except UserError as reason:
                if not self._skip:
                    more = " (data.on_error=skip leaves such files out)" if len(self._files) > 1 else ""
                    raise UserError(f"{reason}{more}") from None
                digest, size = before, size - self._stats[path].size
                skipped.append(str(reason))
                continue
            documents.append((path, length))
            used_bytes, room = used_bytes + count, room - length
            if room <= 0:
                break
        facts = Facts(digest.hexdigest(), len(documents), used_bytes, size, skipped)
        if all(status.change_time < self._began - SETTLE_TIME for status in self._stats.values()):
            remember("text", self._key, asdict(facts))
        return facts, documents

    def texts(self) -> Iterator[Iterator[str]]:
        """Yield, for each document, the text that the run uses, in chunks."""
        return (slice_text(chunks(path), 0, count) for path, count in self._survey[1])

    def train(self) -> Iterator[Iterator[str]]:
        """Yield the training part of each document, in chunks."""
        return (slice_text(chunks(path), 0, self._cut(count)) for path, count in self._survey[1])

    def held_out(self) -> Iterator[Iterator[str]]:
        """Yield the held-out part of each document, in chunks."""
        return (slice_text(chunks(path), self._cut(count), count) for path, count in self._survey[1])

    def first_file_containing(self, character: str) -> Path | None:
        """Return the first file with this character in the text that the run uses; None if there is none."""
        texts = zip(self._survey[1], self.texts(), strict=True)
        return next((path for (path, _), text in texts if any(character in chunk for chunk in text)), None)

    def train_size(self) -> int:
        """Return the number of characters in all training parts."""
        return sum(self._cut(count) for _, count in self._survey[1])

    def _cut(self, count: int) -> int:
        return count - int(count * self._fraction)

    def check_unchanged(self) -> None:
        """Raise UserError if a file changed since this object was made."""
        for path, status in self._stats.items():
            if status.size and _stat(path) != status:  # skip /proc: size 0, and its times always change
                raise UserError(f"{path}: changed while it was read; start again when it is complete")


def _digest_text(path: Path, room: int, update: Callable[[bytes], object]) -> tuple[int, int]:
    """Pass at most `room` characters of a file to a digest's method `update`.

    Return the number of characters and the number of bytes that were passed.
    """
    length = size = 0
    for text in slice_text(chunks(path), 0, room):
        raw = text.encode()
        update(raw)
        length, size = length + len(text), size + len(raw)
    return length, size


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
    import numpy as np

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


@dataclass
class FoundFiles:
    """Files of a data set in a fixed order, and the reasons why other files were left out."""

    files: list[Path] = field(default_factory=list)
    others: int = 0  # files with another suffix
    unreadable: list[str] = field(default_factory=list)  # files, links and directories, each with the reason

    def omissions(self) -> list[str]:
        """Return notes about files that `data.suffixes` leaves out, and about unreadable files."""
        count = len(self.files)
        notes = [f"{count} of {count + self.others} files: data.suffixes"] if self.others else []
        return [*notes, *self.unreadable_note()]

    def unreadable_note(self) -> list[str]:
        """Return a list with a note about unreadable files; empty if there are none."""
        return [f"{len(self.unreadable)} skipped, such as {self.unreadable[0]}"] if self.unreadable else []


def find_files(path: str, suffixes: Collection[str]) -> FoundFiles:
    """Return the files at `path`: one file, the files that match a pattern, or a directory's files with these suffixes.

    Raise UserError if there is no such file.
    """
    selection = FoundFiles()
    matches = match_paths(path)
    for match in matches:
        if match.is_dir():
            _add_folder(selection, match, suffixes)
        else:
            selection.files.append(match)
    if not selection.files:
        reason = "".join(f" ({skipped})" for skipped in selection.unreadable_note())
        raise UserError(
            f"data.path={path}: contains no file with the suffix {' '.join(suffixes) or '(none)'}{reason}; "
            "choose others: data.suffixes='.rst .c', or all: data.suffixes='*'"
        )
    return selection


def match_paths(path: str, key: str = "path") -> list[Path]:
    """Return the path itself if it exists, else the paths that match it as a glob pattern, else raise UserError.

    `key` is the setting of the section `data` that has this path, for the message.
    """
    kinds = stat.S_IFREG, stat.S_IFDIR
    if os.path.lexists(path) or not glob.has_magic(path):
        return [require_file(path, f"data.{key}={path}", *kinds)]
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not matches:
        raise UserError(f"data.{key}={path}: matches no file (looked in {Path.cwd()})")
    return [require_file(match, match, *kinds) for match in matches]


def _add_folder(selection: FoundFiles, folder: Path, suffixes: Collection[str]) -> None:
    def note_error(error: OSError) -> None:
        selection.unreadable.append(f"{error.filename}: {system_message(error)}")

    chosen_files: list[Path] = []
    walk = os.walk(folder, onerror=note_error)  # Path.rglob ignores unreadable directories
    for number, (directory, folders, names) in enumerate(walk, 1):
        if number % STATUS_EVERY == 0:
            show_status(f"looking for text below {folder}: {len(chosen_files)} files in {number} folders")
        links = [os.path.join(directory, f) for f in folders if os.path.islink(os.path.join(directory, f))]  # noqa: PTH114, PTH118
        selection.unreadable += [f"{link}: is a link to a directory" for link in links]
        chosen = [n for n in names if ALL in suffixes or os.path.splitext(n)[1] in suffixes]  # noqa: PTH122
        selection.others += len(names) - len(chosen)
        for name in chosen:
            file = Path(directory, name)
            reason = _reason(file)
            if reason:
                selection.unreadable.append(f"{file}: {reason}")
            else:
                chosen_files.append(file)
    selection.files += sorted(chosen_files)


def _reason(path: Path) -> str | None:
    try:
        reason = wrong_kind(path.stat().st_mode)
        return reason and reason.partition(",")[0]  # without the remedy
    except OSError as error:
        return system_message(error)
