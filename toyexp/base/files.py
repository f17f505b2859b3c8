"""Open and check files that users name; pipes, devices and directories are rejected without being opened."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.terminal import show_status

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
READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # opening a pipe never waits
STATUS_EVERY = 500  # directories between updates of the status of a search
HEAD_SIZE = 512  # leading bytes of a file, from which its format is guessed
# Magic bytes of formats that users pass instead of text, and how to convert them.
NOT_TEXT_HINTS: dict[bytes | tuple[bytes, ...], str] = {
    b"\x1f\x8b": "it is compressed: gunzip it first",
    b"BZh": "it is compressed: bunzip2 it first",
    (b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"): "it is compressed: unxz or unzstd it first",
    b"PK\x03\x04": "it is a zip archive: unzip it first, or save a spreadsheet as CSV",
    b"version https://git-lfs": "it is a Git LFS pointer: git lfs pull fetches the file",
    b"GGUF": "it is a GGUF model, not data; to train it: recipe.base=FILE",
    b"PAR1": "it is Parquet: let its name end in .parquet",
    b"%PDF": "it is a PDF: take the text out of it first (pdftotext)",
    (b"\xff\xfe", b"\xfe\xff"): "it is UTF-16: save it as UTF-8 in a text editor, or type iconv -f UTF-16 -t UTF-8",
}


def wrong_kind(mode: int, expected: int = stat.S_IFREG) -> str | None:
    """Return None if the file mode `mode` is of the `expected` kind (by default a regular file).

    Otherwise return a phrase that says what the file is instead, such as "is a folder, not a file".
    """
    kind = stat.S_IFMT(mode)
    if kind == expected:
        return None
    if kind == stat.S_IFIFO and expected == stat.S_IFREG:  # such as <(command), or /dev/stdin behind `command |`
        return "is a pipe, which can be read only once; write its output to a file and name that file"
    return f"is {KINDS.get(kind, 'something else')}, not {KINDS[expected]}"


def working_directory() -> Path:
    """Return the current directory; raise UserError if it was deleted."""
    try:
        return Path.cwd()
    except OSError:
        raise UserError("the working directory was deleted; cd to an existing one") from None


ADDRESS_MESSAGE = "is an address, and only local files can be read; download it and name the file"


def is_address(path: Path) -> bool:
    """Return True if a path was made from a URL; pathlib shortens its https:// to https:/."""
    return re.match(r"(https?|ftp|s3|gs|hf):/", str(path)) is not None


def explain_missing(path: Path) -> str:
    """Return a phrase that says why a path does not exist, for example that it is a dangling link or a URL."""
    if (link := dangling_link(path)) is not None:
        return f"{'' if link == path else f'{link} '}is a link to {link.readlink()}, which does not exist"
    if is_address(path):
        return ADDRESS_MESSAGE
    if not path.is_absolute():
        return f"not found (looked in {working_directory()})"
    parent = next(p for p in path.parents if p.exists())
    return f"not found ({parent} holds no {path.relative_to(parent).parts[0]})"


def iter_files(folder: Path, unreadable: list[str] | None = None) -> Iterator[Path]:
    """Yield the files below a directory, also broken links, except hidden files and those in hidden directories.

    Add links to directories, and directories that cannot be read, to the list `unreadable`, each with the reason.
    """
    reasons = [] if unreadable is None else unreadable
    walk = os.walk(folder, onerror=lambda error: reasons.append(f"{error.filename}: {system_message(error)}"))
    for number, (directory, folders, names) in enumerate(walk, 1):
        if number % STATUS_EVERY == 0:
            show_status(f"looking for files below {folder}: in {number} folders")
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(directory, name) for name in folders]
        reasons += [f"{path}: is a link to a directory" for path in paths if path.is_symlink()]
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def dangling_link(path: Path) -> Path | None:
    """Return the first of `path` and its parents that is a link to a missing target, or None."""
    return next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)


def require_file(path: str | Path, subject: str, *kinds: int) -> Path:
    """Return the path if it is a regular file or, if `kinds` are given, a file of one of these kinds.

    A kind is a constant such as stat.S_IFDIR. Otherwise raise a UserError whose message starts with `subject`.
    """
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{subject}: {explain_missing(Path(path))}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise UserError(f"{subject}: cannot be read: {system_message(error)}") from None
    kinds = kinds or (stat.S_IFREG,)
    if stat.S_IFMT(mode) not in kinds:
        raise UserError(f"{subject}: {wrong_kind(mode, kinds[0])}")
    return Path(path)


def require_directory(path: str | Path, subject: str) -> Path:
    """Return the path if it is a directory; if not, raise a UserError whose message starts with `subject`."""
    return require_file(path, subject, stat.S_IFDIR)


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; raise UserError for anything else. A pipe never blocks this call."""
    require_file(path, str(path))
    try:
        descriptor = os.open(path, READ_FLAGS)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {system_message(error)}") from None
    if reason := wrong_kind(os.fstat(descriptor).st_mode):  # check again: the path may have changed since
        os.close(descriptor)
        raise UserError(f"{path}: {reason}")
    return open(descriptor, "rb")


def read_head(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of a file; b"" if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(size)
    except (UserError, OSError):
        return b""


def read_file(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a file; raise UserError if it is unreadable or has more than `limit` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise UserError(f"{path}: is larger than the limit of {limit >> 10} KiB")
        try:
            return file.read(size)  # no bytes that were appended meanwhile
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {system_message(error)}") from None
        except MemoryError:
            raise UserError(f"{path}: does not fit into memory") from None


def read_text(path: Path, limit: int | None = None) -> str:
    """Return the content of a UTF-8 text file.

    Raise UserError if it has more than `limit` bytes, a NUL, or a byte that is not valid UTF-8.
    """
    raw = read_file(path, limit)
    text, nul, _ = raw.partition(b"\0")
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_text_error(path, error.start, raw[error.start], raw[:HEAD_SIZE]) from None
    if nul:
        raise not_text_error(path, len(text), 0, raw[:HEAD_SIZE])
    return decoded


def not_text_error(path: Path, position: int, byte: int, start: bytes) -> UserError:
    """Return the UserError for a file that is not UTF-8 text.

    The message shows the invalid `byte` and its `position`. If the file's first bytes, `start`, show another format,
    the message names it.
    """
    hint = next((hint for magic, hint in NOT_TEXT_HINTS.items() if start.startswith(magic)), None)
    if byte:
        hint = hint or "save it as UTF-8 in a text editor; if it is Latin-1: iconv -f LATIN1 -t UTF-8"
        return UserError(f"{path}: not UTF-8 text (byte {position} is 0x{byte:02x}); {hint}")
    hint = hint or (
        "save it as UTF-8 in a text editor; if it is UTF-16: iconv -f UTF-16LE -t UTF-8; if the rest is text: "
        "tr -d '\\0' removes the NULs"
    )
    return UserError(f"{path}: not text (byte {position} is NUL); {hint}")


def system_message(error: BaseException) -> str:
    """Return the operating system's message for an OSError, or the error as text."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def check_nodes(root: Any, path: Path) -> None:
    """Raise UserError if a YAML value contains itself, or if the file has more than NODE_LIMIT values.

    `root` is the root node of the parsed YAML file `path`. A value that a YAML alias repeats counts again for each
    alias.
    """
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if sizes.setdefault(id(node), -1) < 0:  # not measured yet
            sizes[id(node)] = 0
            inside = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + (0 if isinstance(node.value, str) else sum(map(size, inside)))
        elif not sizes[id(node)]:
            raise UserError(f"{path}, line {node.start_mark.line + 1}: a value contains itself; remove its YAML alias")
        return sizes[id(node)]

    if size(root) > NODE_LIMIT:
        raise UserError(f"{path}: contains more than the limit of {NODE_LIMIT} values (YAML aliases count each time)")
