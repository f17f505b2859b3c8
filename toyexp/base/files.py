"""What a person names as a file or a folder has to be one; what else stands there is never opened, or waited for."""

from __future__ import annotations

import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
NODE_LIMIT = 20_000  # values in a YAML file; aliased values count each time they are used
READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # never waits for a pipe's writer
HEAD_SIZE = 512  # first bytes of a file, by which is told what it is instead of text
# How files begin that are met in the place of text, and what makes text of them.
NOT_TEXT_HINTS: dict[bytes | tuple[bytes, ...], str] = {
    (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"): "it is compressed: gunzip it (or unxz, ...) first",
    b"PK\x03\x04": "it is a zip archive: unzip it first",
    b"PAR1": "it is Parquet: pandas.read_parquet(FILE).to_json('x.jsonl', orient='records', lines=True) in Python",
    b"%PDF": "it is a PDF: take the text out of it first (pdftotext)",
    (b"\xff\xfe", b"\xfe\xff"): "it is UTF-16: iconv -f UTF-16 -t UTF-8",
}


def wrong_kind(mode: int, wanted: int = stat.S_IFREG) -> str | None:
    """What stands in the place of a file (or of what else is `wanted`), by its mode; None where it is one."""
    kind = stat.S_IFMT(mode)
    if kind == wanted:
        return None
    if kind == stat.S_IFIFO and wanted == stat.S_IFREG:  # as <(command) is, and /dev/stdin behind a |
        return "is a pipe, which can be read only once; write what comes out of it to a file, and name that"
    return f"is {KINDS.get(kind, 'something else')}, not {KINDS[wanted]}"


def working_directory() -> Path:
    """Where the process stands; UserError when that directory was deleted under it."""
    try:
        return Path.cwd()
    except OSError:
        raise UserError("the working directory is no longer there (it was deleted); cd to one that is") from None


ADDRESS_MESSAGE = "is an address, and files are read from this machine alone; download it, and name the file"


def is_address(path: Path) -> bool:
    """Whether what was meant for a path is of the network, https://...: a Path has one / of the two."""
    return re.match(r"(https?|ftp|s3|gs|hf):/", str(path)) is not None


def explain_missing(path: Path) -> str:
    """That nothing is there, and where the way to it ends."""
    if (link := dangling_link(path)) is not None:
        return f"{'' if link == path else f'{link} '}is a link to {link.readlink()}, which is not there"
    if is_address(path):
        return ADDRESS_MESSAGE
    if not path.is_absolute():
        return f"not found (looked in {working_directory()})"
    parent = next(p for p in path.parents if p.exists())
    return f"not found ({parent} holds no {path.relative_to(parent).parts[0]})"


def dangling_link(path: Path) -> Path | None:
    """The link on the way to `path`, or at it, that leads to nothing, if one does."""
    return next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)


def require_file(path: str | Path, asked: str, *wanted: int) -> Path:
    """The path, if there is a file (or one of what is `wanted`); UserError that begins with what was `asked`."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{asked}: {explain_missing(Path(path))}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in it
        raise UserError(f"{asked}: cannot be read: {system_message(error)}") from None
    kinds = wanted or (stat.S_IFREG,)
    if stat.S_IFMT(mode) not in kinds:
        raise UserError(f"{asked}: {wrong_kind(mode, kinds[0])}")
    return Path(path)


def require_directory(path: str | Path, asked: str) -> Path:
    """The path, if there is a folder; UserError that begins with what was `asked`."""
    return require_file(path, asked, stat.S_IFDIR)


def open_file(path: Path) -> BufferedReader:
    """A file for reading; UserError for what is none, or cannot be read. It never waits for a writer."""
    require_file(path, str(path))
    try:
        descriptor = os.open(path, READ_FLAGS)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {system_message(error)}") from None
    if reason := wrong_kind(os.fstat(descriptor).st_mode):  # of what was opened, whatever has happened in between
        os.close(descriptor)
        raise UserError(f"{path}: {reason}")
    return open(descriptor, "rb")


def read_head(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, or none if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(size)
    except (UserError, OSError):
        return b""


def read_file(path: Path, most: int | None = None) -> bytes:
    """The bytes of a file, no more than it says it has; UserError for what is none, cannot be read, or has too many."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise UserError(f"{path}: has more than {most >> 10} KiB, which is too long for what it is read as")
        try:
            return file.read(size)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {system_message(error)}") from None
        except MemoryError:
            raise UserError(f"{path}: is larger than the memory that there is") from None


def read_text(path: Path, most: int | None = None) -> str:
    """A UTF-8 text file; UserError for one of more than `most` bytes, and for a byte that is not UTF-8, or NUL."""
    raw = read_file(path, most)
    text, nul, _ = raw.partition(b"\0")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_text_error(path, error.start, raw[error.start], raw[:HEAD_SIZE]) from None
    if nul:
        raise not_text_error(path, len(text), 0, raw[:HEAD_SIZE])
    return decoded


def not_text_error(path: Path, place: int, byte: int, start: bytes) -> UserError:
    """That a file is no UTF-8 text, or holds a NUL: where, and by its first START bytes, what it is instead."""
    hint = next((hint for magic, hint in NOT_TEXT_HINTS.items() if start.startswith(magic)), None)
    if byte:
        hint = hint or "if it is Latin-1: iconv -f LATIN1 -t UTF-8"
        return UserError(f"{path}: not UTF-8 text (byte {place} is 0x{byte:02x}); {hint}")
    hint = hint or "if it is UTF-16: iconv -f UTF-16LE -t UTF-8; if all else is text: tr -d '\\0' takes NULs out"
    return UserError(f"{path}: no text (byte {place} is NUL); {hint}")


def system_message(error: BaseException) -> str:
    """What the system says."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def check_nodes(root: Any, path: Path) -> None:
    """Raise UserError for a YAML node that contains itself, or that aliases expand to more than NODE_LIMIT values."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if sizes.setdefault(id(node), -1) < 0:  # not measured yet
            sizes[id(node)] = 0
            inside = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + (0 if isinstance(node.value, str) else sum(map(size, inside)))
        elif not sizes[id(node)]:
            raise UserError(f"{path}, line {node.start_mark.line + 1}: a value holds itself")
        return sizes[id(node)]

    if size(root) > NODE_LIMIT:
        raise UserError(f"{path}: holds more than {NODE_LIMIT} values, repeated ones counted again")
