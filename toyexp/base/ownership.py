"""Lock run directories, and record which files a run wrote.

A run starts in an empty directory and replaces only files that it wrote itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.files import dangling_link, open_file
from toyexp.base.writing import (
    make_empty_directory,
    open_for_writing,
    replace_synced,
    require_plain,
    require_plain_path,
    swap,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LEDGER = "written.json"
LOCK_FILE = "run.lock"
SWEEP_FILE = "sweep.json"  # in a sweep's directory
LEDGER_LIMIT = 1 << 20  # bytes
# Files that do not count as content of an empty directory. No run writes under these names.
IGNORED_NAMES = (".DS_Store", ".localized", "Thumbs.db", "desktop.ini", "lost+found", ".gitkeep", ".gitignore")
GROWING_FILES = (LOCK_FILE, "log.txt", "events.jsonl", "sweep.jsonl", "study.log")  # changed in place, not replaced
RUN_DIRECTORIES = ("checkpoints", "logs", "plots", "tensorboard")  # created by toyexp
RUN_FILES = ("config.yaml", "events.jsonl", LEDGER)  # any of these marks a run
TEMPORARY_NAME = re.compile(r"\.tmp-\d+(-\d+)?|\..+\.(yaml|json)\.\d+\.tmp")  # left by a killed process


class DirectoryLocked(UserError):
    """Error: another process is writing in the directory."""


def lock(path: Path) -> int:
    """Lock a directory for this process and return the lock's file descriptor. Raise DirectoryLocked if it is taken."""
    file = open_for_writing(path / LOCK_FILE)
    try:
        _lock(file, path)
        with contextlib.suppress(OSError):  # the owner's name is optional, and the disk may be full
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()} on {platform.node()}\n".encode())
    except BaseException:
        os.close(file)
        raise
    return file


def require_unlocked(path: Path) -> None:
    """Raise DirectoryLocked if another process is writing in the directory `path`."""
    if (path / LOCK_FILE).is_file():
        with open_file(path / LOCK_FILE) as file:
            _lock(file.fileno(), path, shared=True)


def _lock(file: int, path: Path, shared: bool = False) -> None:
    try:
        if fcntl:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            windows: Any = importlib.import_module("msvcrt")
            os.lseek(file, LEDGER_LIMIT, os.SEEK_SET)  # after the owner's name, which must stay readable
            windows.locking(file, windows.LK_NBLCK, 1)
            os.lseek(file, 0, os.SEEK_SET)
    except (BlockingIOError, PermissionError):
        os.lseek(file, 0, os.SEEK_SET)
        name = printable(os.read(file, 100).decode(errors="replace").strip()) or "another process"
        raise DirectoryLocked(f"{path}: is being written by process {name}; wait for it, or stop it") from None


def require_empty(path: Path, key: str) -> None:
    """Raise UserError unless the directory `path` is missing or empty. The message says what to type.

    `key` is the setting that chooses the directory, such as hydra.run.dir. System files such as .DS_Store do not count.
    """
    other = f"choose another directory: {key}=..."
    runs = (p for p in path.absolute().parents if key == "hydra.sweep.dir" and (p / LOCK_FILE).exists())
    if run := next((p for p in runs if (p / "config.yaml").exists()), None):
        raise UserError(f"{path} is inside {run}, which is a run directory; {other}")
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        names = [entry.name for entry in entries if not _is_ignorable(entry)]
    except FileNotFoundError:
        if (link := dangling_link(path)) is not None:
            raise UserError(f"{link}: is a link to {link.readlink()}, which does not exist; {other}") from None
        return
    except OSError as error:  # such as if `path` is a file, or its name is too long
        raise UserError(f"{path}: cannot be written ({error.strerror}); {other}") from None
    # A directory with a lock and a log: another process has just created it.
    is_starting = "log.txt" in names and any(entry.name == LOCK_FILE for entry in entries)
    has_run = is_starting or any(name in RUN_FILES or TEMPORARY_NAME.fullmatch(name) for name in names)
    if has_run or SWEEP_FILE in names:
        try:
            require_unlocked(path)
        except DirectoryLocked as error:
            raise DirectoryLocked(f"{error}, or {other}") from None
    if SWEEP_FILE in names:
        raise UserError(f"{path} already holds a sweep; continue it: sweep.resume={path}, or {other}")
    if has_run:
        saved = any((path / "checkpoints").glob("step-*"))
        go_on = f"continue it: resume={path}, or" if saved else "without a checkpoint to resume; remove it, or"
        raise UserError(f"{path} already holds a run{';' if saved else ''} {go_on} {other}")
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(f"{path} is not empty ({printable(names[0])}{more}); {other}")


def require_inside(directory: Path) -> None:
    """Raise UserError if a run's or sweep's directory contains a link or a special file such as a pipe.

    Writing through a link would change a file elsewhere. Hidden links are allowed: toyexp never writes to them.
    """
    for folder in (directory, *(directory / name for name in RUN_DIRECTORIES)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith((".", "study.log.lock")):  # Optuna's lock is a link
                    continue
                is_directory = entry.name in RUN_DIRECTORIES or entry.is_dir(follow_symlinks=False)
                kind = stat.S_IFDIR if is_directory else stat.S_IFREG
                require_plain(Path(entry.path), kind, entry.name in GROWING_FILES or folder.name == "logs")


def _is_ignorable(entry: os.DirEntry[str]) -> bool:
    """Return True for a file that does not count when toyexp checks whether a directory is empty.

    Such a file has a name in IGNORED_NAMES, is a lock file, or receives the redirected output of this process.
    """
    if entry.name in IGNORED_NAMES or entry.name.startswith(("._", ".nfs")):
        return True
    if entry.name == LOCK_FILE and entry.is_file(follow_symlinks=False):
        with open(entry.path, "rb") as file:
            return re.fullmatch(rb"\d*( o?n? ?\S*\n?)?", file.read(200)) is not None  # possibly cut off by a full disk
    if entry.name in (*RUN_FILES, "log.txt", "result.json") or entry.name.endswith((".gguf", ".safetensors")):
        return False  # the run would overwrite its own redirected output
    with contextlib.suppress(OSError):  # `toyexp > DIR/out.txt`, or a cluster's log of the job
        status = entry.stat()
        return any(os.path.samestat(os.fstat(number), status) for number in (1, 2))
    return False


class Ledger:
    """Record of the files that a run wrote, with the digest of each. It is stored in the run's written.json.

    While a file is being replaced, the ledger has two digests for it: of the old and of the new content.
    """

    def __init__(self, root: Path, digests: Mapping[str, list[str]] | None = None):
        self._root, self._digests = root, dict(digests or {})

    @classmethod
    def open(cls, root: Path) -> Ledger:
        """Read the ledger of the run in the directory `root`; return an empty one if the file is missing.

        Raise UserError if the file is damaged.
        """
        path = root / LEDGER
        try:
            with open(path, "rb") as file:
                digests = json.loads(file.read(LEDGER_LIMIT))
        except FileNotFoundError:
            return cls(root)
        except (OSError, ValueError, RecursionError):
            digests = None
        if not isinstance(digests, dict) or not all(
            isinstance(v, list) and all(isinstance(digest, str) for digest in v) for v in digests.values()
        ):
            raise UserError(f"{path}: this list of files is damaged; remove it and the files that the run exported")
        return cls(root, digests)

    def foreign_paths(self, names: Iterable[str]) -> list[Path]:
        """Return the paths of the `names` that exist in the run's directory but were not written by this run."""
        return [path for name in names if os.path.lexists(path := self._root / name) and not self.owns(path)]

    def is_replaced(self, path: Path) -> bool:
        """Return True if the run wrote a file at `path`, and another file has replaced it since."""
        return self._name(path) in self._digests and not self.owns(path)

    def owns(self, path: Path) -> bool:
        """Return True if the file at `path` is the one that the run wrote."""
        digests = self._digests.get(self._name(path), [])
        try:
            return any((_head_digest(path, entry) if "+" in entry else _digest(path)) == entry for entry in digests)
        except (OSError, UserError):
            return False

    @contextlib.contextmanager
    def output(self, path: Path, grows: bool = False) -> Iterator[Path]:
        """Yield a temporary path to write to; on success, rename the file to `path` and record its digest.

        If `grows`, the digest covers only the bytes written so far, so it stays valid when bytes are appended to the
        file. Raise FileExistsError if `path` holds a file that this run did not write.
        """
        if self.foreign_paths([self._name(path)]):
            raise FileExistsError(errno.EEXIST, "it exists and was not written by this run", str(path))
        temporary = path.parent / f".tmp-{os.getpid()}"
        try:
            require_plain_path(self._root, path.parent)
            make_empty_directory(temporary)
            yield temporary / path.name
            self._note(path, _head_digest(temporary / path.name) if grows else _digest(temporary / path.name))
            swap(temporary / path.name, path)
        finally:
            for leftover in temporary.glob("[!.]*"):
                if leftover.name != path.name and not self.foreign_paths([self._name(path.with_name(leftover.name))]):
                    self._note(path.with_name(leftover.name), _digest(leftover))
                    swap(leftover, path.with_name(leftover.name))
            shutil.rmtree(temporary, ignore_errors=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _note(self, path: Path, digest: str) -> None:
        name = self._name(path)
        before = [_digest(path)] if path.exists() else []
        self._digests[name] = [*before, *({digest} - {*before})]
        replace_synced(self._root / LEDGER, (json.dumps(self._digests, indent=1) + "\n").encode())


def owning_run(path: Path) -> Path | None:
    """Return the directory of the run that wrote `path`, or None.

    A run wrote the files and directories that its ledger lists, and everything in its checkpoints directory.
    """
    path = path.parent.resolve() / path.name
    runs = (folder for folder in path.parents if any((folder / name).is_file() for name in (LOCK_FILE, *RUN_FILES[1:])))
    outputs = ((run, name) for run in runs for name in ("checkpoints", *Ledger.open(run)._digests))
    return next((run for run, name in outputs if run / name in (path, *path.parents)), None)


def rename_aside(path: Path) -> Path:
    """Rename `path` to the first free name of path.1, path.2, ... and return the new path."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(aside)
    return aside


def _head_digest(path: Path, entry: str = "") -> str:
    """Return LENGTH+DIGEST: the digest of the first LENGTH bytes of a file.

    LENGTH is taken from `entry`, an earlier LENGTH+DIGEST of the file; without `entry` it is the size of the file.
    """
    length = entry.partition("+")[0]
    with open(path, "rb") as file:
        head = file.read(int(length) if length.isdigit() else -1)
    return f"{len(head)}+{hashlib.sha256(head).hexdigest()[:16]}"


def _digest(path: Path) -> str:
    if not path.is_dir():
        return fingerprint(path)
    files = sorted(p for p in path.rglob("*") if not p.is_dir())
    listing = "".join(f"{p.relative_to(path).as_posix()} {fingerprint(p)}\n" for p in files)
    return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]


def cached_fingerprint(path: Path) -> str:
    """Return the `fingerprint` of a file, or a digest of a directory's files except texts (.md) and hidden files.

    If the files do not change, a process reads them only once.
    """
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix not in ("", ".md") and p.is_file())
        listing = "".join(f"{p.name} {cached_fingerprint(p)}\n" for p in files)
        return hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
    status = path.stat()
    return _fingerprint_version(path.absolute(), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=256)
def _fingerprint_version(path: Path, *_version: int) -> str:
    return fingerprint(path)


def fingerprint(path: Path, samples: int = 64, size: int = 1 << 16) -> str:
    """Return a digest of a file as 16 hex digits, reading only part of a large file.

    The digest covers the length, the first MiB, and `samples` blocks of `size` bytes at equal distances.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        digest.update(f"{length}".encode() + file.read(1 << 20))
        for i in range(samples):
            file.seek(length * i // samples)
            digest.update(file.read(size))
    return digest.hexdigest()[:16]
