"""Whose files are in a directory: a run begins in an empty one, and replaces what it wrote itself, nothing else."""

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
SWEEP_FILE = "sweep.json"  # of the directory of a sweep
LEDGER_LIMIT = 1 << 20  # bytes that are read of it
# What systems and people put into a directory that they call empty. No run writes under these names.
IGNORED_NAMES = (".DS_Store", ".localized", "Thumbs.db", "desktop.ini", "lost+found", ".gitkeep", ".gitignore")
GROWING_FILES = (LOCK_FILE, "log.txt", "events.jsonl", "sweep.jsonl", "study.log")  # what changes where it is
RUN_DIRECTORIES = ("checkpoints", "logs", "plots", "tensorboard")  # that toyexp fills
RUN_FILES = ("config.yaml", "events.jsonl", LEDGER)  # of a run
TEMPORARY_NAME = re.compile(r"\.tmp-\d+(-\d+)?|\..+\.(yaml|json)\.\d+\.tmp")  # what a killed process had not finished


class DirectoryLocked(UserError):
    """Another process writes there."""


def lock(path: Path) -> int:
    """Lock a directory for this process and return the file to close; Owned if another process has the lock."""
    file = open_for_writing(path / LOCK_FILE)
    try:
        _lock(file, path)
        with contextlib.suppress(OSError):  # the owner's name is a courtesy, and the disk may be full
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()} on {platform.node()}\n".encode())
    except BaseException:
        os.close(file)
        raise
    return file


def require_unlocked(path: Path) -> None:
    """Raise Owned if another process writes in the directory `path`."""
    if (path / LOCK_FILE).is_file():
        with open_file(path / LOCK_FILE) as file:
            _lock(file.fileno(), path, shared=True)


def _lock(file: int, path: Path, shared: bool = False) -> None:
    try:
        if fcntl:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            windows: Any = importlib.import_module("msvcrt")
            os.lseek(file, LEDGER_LIMIT, os.SEEK_SET)  # behind the owner's name, which others are to read
            windows.locking(file, windows.LK_NBLCK, 1)
            os.lseek(file, 0, os.SEEK_SET)
    except (BlockingIOError, PermissionError):
        os.lseek(file, 0, os.SEEK_SET)
        name = printable(os.read(file, 100).decode(errors="replace").strip()) or "another process"
        raise DirectoryLocked(f"{path}: is being written by process {name}; wait for it, or stop it") from None


def require_empty(path: Path, key: str) -> None:
    """Raises UserError, which says what to type, unless `path` is missing or empty; `key` is what chose it."""
    other = f"choose another directory: {key}=..."
    runs = (p for p in path.absolute().parents if key == "hydra.sweep.dir" and (p / LOCK_FILE).exists())
    if run := next((p for p in runs if (p / "config.yaml").exists()), None):
        raise UserError(f"{path} is inside {run}, which is the directory of a run; {other}")
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        found = [entry.name for entry in entries if not _is_ignorable(entry)]
    except FileNotFoundError:
        if (link := dangling_link(path)) is not None:
            raise UserError(f"{link}: is a link to {link.readlink()}, which is not there; {other}") from None
        return
    except OSError as error:  # it is a file, or its name is too long
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose: {key}=...") from None
    begun = "log.txt" in found and any(
        entry.name == LOCK_FILE for entry in entries
    )  # another process is a moment ahead
    begun = begun or any(name in RUN_FILES or TEMPORARY_NAME.fullmatch(name) for name in found)
    if begun or SWEEP_FILE in found:
        try:
            require_unlocked(path)
        except DirectoryLocked as error:
            raise DirectoryLocked(f"{error}, or {other}") from None
    if SWEEP_FILE in found:
        raise UserError(f"{path} already holds a sweep; go on with it: sweep.resume={path}, or {other}")
    if begun:
        saved = any((path / "checkpoints").glob("step-*"))
        go_on = f"go on with it: resume={path}, or" if saved else "without a checkpoint to go on from; remove it, or"
        raise UserError(f"{path} already holds a run{';' if saved else ''} {go_on} {other}")
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{path} is not empty ({printable(found[0])}{more}), and nothing there is replaced; {other}")


def require_inside(directory: Path) -> None:
    """Raise UserError if a link leads out of a run's or sweep's directory; hidden links are never written to."""
    for folder in (directory, *(directory / name for name in RUN_DIRECTORIES)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith((".", "study.log.lock")):  # the second is a link that Optuna locks by
                    continue
                kind = (
                    stat.S_IFDIR
                    if entry.name in RUN_DIRECTORIES or entry.is_dir(follow_symlinks=False)
                    else stat.S_IFREG
                )
                require_plain(Path(entry.path), kind, entry.name in GROWING_FILES or folder.name == "logs")


def _is_ignorable(entry: os.DirEntry[str]) -> bool:
    """Whether an entry leaves its directory an empty one: see NOTHING; our own lock; or where our output goes."""
    if entry.name in IGNORED_NAMES or entry.name.startswith(("._", ".nfs")):
        return True
    if entry.name == LOCK_FILE and entry.is_file(follow_symlinks=False):
        with open(entry.path, "rb") as file:
            return re.fullmatch(rb"\d*( o?n? ?\S*\n?)?", file.read(200)) is not None  # or as far as a disk took it
    if entry.name in (*RUN_FILES, "log.txt", "result.json") or entry.name.endswith((".gguf", ".safetensors")):
        return False  # which the run would write over its own output
    with contextlib.suppress(OSError):  # `toyexp > DIR/out.txt`, and what a cluster keeps of a job's output
        there = entry.stat()
        return any(os.path.samestat(os.fstat(number), there) for number in (1, 2))
    return False


class Ledger:
    """Digests of what a run wrote into its directory (written.json): two of a file that is being replaced."""

    def __init__(self, root: Path, known: Mapping[str, list[str]] | None = None):
        self._root, self._known = root, dict(known or {})

    @classmethod
    def open(cls, root: Path) -> Ledger:
        """That of a run which goes on; empty where there is none. UserError for one that is damaged."""
        path = root / LEDGER
        try:
            with open(path, "rb") as file:
                known = json.loads(file.read(LEDGER_LIMIT))
        except FileNotFoundError:
            return cls(root)
        except (OSError, ValueError, RecursionError):
            known = None
        if not isinstance(known, dict) or not all(
            isinstance(v, list) and all(isinstance(digest, str) for digest in v) for v in known.values()
        ):
            raise UserError(f"{path}: is damaged; remove it to go on, and what the run exported")
        return cls(root, known)

    def foreign_paths(self, names: Iterable[str]) -> list[Path]:
        """Those of the names below the run's directory under which something stands that the run did not write."""
        return [path for name in names if os.path.lexists(path := self._root / name) and not self.owns(path)]

    def is_replaced(self, path: Path) -> bool:
        """Return whether the run wrote a file at `path`, and another one is there now."""
        return self._name(path) in self._known and not self.owns(path)

    def owns(self, path: Path) -> bool:
        """Whether what stands at `path` is what the run wrote."""
        known = self._known.get(self._name(path), [])
        try:
            return any((_head_digest(path, entry) if "+" in entry else _digest(path)) == entry for entry in known)
        except (OSError, UserError):
            return False

    @contextlib.contextmanager
    def output(self, path: Path, grows: bool = False) -> Iterator[Path]:
        """Yield a place to write what becomes `path` in one piece; OSError, or FileExistsError for a foreign file."""
        if self.foreign_paths([self._name(path)]):
            raise FileExistsError(errno.EEXIST, "it is there already, and this run did not write it", str(path))
        place = path.parent / f".tmp-{os.getpid()}"
        try:
            require_plain_path(self._root, path.parent)
            make_empty_directory(place)
            yield place / path.name
            self._note(path, _head_digest(place / path.name) if grows else _digest(place / path.name))
            swap(place / path.name, path)
        finally:
            for left in place.glob("[!.]*"):
                if left.name != path.name and not self.foreign_paths([self._name(path.with_name(left.name))]):
                    self._note(path.with_name(left.name), _digest(left))
                    swap(left, path.with_name(left.name))
            shutil.rmtree(place, ignore_errors=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _note(self, path: Path, digest: str) -> None:
        name = self._name(path)
        before = [_digest(path)] if path.exists() else []
        self._known[name] = [*before, *({digest} - {*before})]
        replace_synced(self._root / LEDGER, (json.dumps(self._known, indent=1) + "\n").encode())


def owning_run(path: Path) -> Path | None:
    """Return the run that has `path`, or a directory above it, in its ledger, or `path` below its checkpoints/."""
    path = path.parent.resolve() / path.name
    runs = (folder for folder in path.parents if any((folder / name).is_file() for name in (LOCK_FILE, *RUN_FILES[1:])))
    written = ((run, name) for run in runs for name in ("checkpoints", *Ledger.open(run)._known))
    return next((run for run, name in written if run / name in (path, *path.parents)), None)


def rename_aside(path: Path) -> Path:
    """Renames what stands at `path` to the first of path.1, path.2, ... that is free, and returns it."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(aside)
    return aside


def _head_digest(path: Path, as_in: str = "") -> str:
    """Tells apart how files begin, in as many bytes as an entry is about, or all there are."""
    length = as_in.partition("+")[0]
    with open(path, "rb") as file:
        head = file.read(int(length) if length.isdigit() else -1)
    return f"{len(head)}+{hashlib.sha256(head).hexdigest()[:16]}"


def _digest(path: Path) -> str:
    if not path.is_dir():
        return fingerprint(path)
    files = sorted(p for p in path.rglob("*") if not p.is_dir())
    told = "".join(f"{p.relative_to(path).as_posix()} {fingerprint(p)}\n" for p in files)
    return hashlib.sha256(told.encode(errors="surrogateescape")).hexdigest()[:16]


def cached_fingerprint(path: Path) -> str:
    """Return the fingerprint of a file; one that has not changed is read once in a process."""
    status = path.stat()
    return _fingerprint_version(path.absolute(), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache(maxsize=64)
def _fingerprint_version(path: Path, *_version: int) -> str:
    return fingerprint(path)


def fingerprint(path: Path, samples: int = 64, size: int = 1 << 16) -> str:
    """16 hex digits of a file's length, first megabyte and samples throughout: enough to tell that it was replaced."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        digest.update(f"{length}".encode() + file.read(1 << 20))
        for i in range(samples):
            file.seek(length * i // samples)
            digest.update(file.read(size))
    return digest.hexdigest()[:16]
