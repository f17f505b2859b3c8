"""Cache of token ids, in memory-mapped files, and of facts about texts, such as their digests.

A cache failure never fails a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from toyexp import UserError
from toyexp.base import cache_dir, open_file, read_file

if TYPE_CHECKING:
    import numpy as np

HEADER = 512  # bytes before the ids
BLOCK = 1 << 20  # bytes of ids per checksum
CHECK_BLOCKS = 64  # blocks verified when a file is opened, evenly spread
MAX_AGE = 24 * 3600  # seconds after which a temporary file is deleted


def _cache_path(kind: str, key: str, suffix: str) -> Path | None:
    folder = cache_dir()
    return folder and folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.{suffix}"


class _WriteFailed(Exception):
    """Error in writing the cache. It is a class of its own, to tell it from errors in reading the text."""


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _WriteFailed from error


@contextlib.contextmanager
def _write_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file; rename it to `path` when the context ends, or remove it after an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with _disk_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(".*.tmp"):  # left by a killed process
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > MAX_AGE:
                    leftover.unlink()
        file = open(temporary, "xb+", BLOCK)  # noqa: SIM115
    try:
        yield file
        with _disk_errors():
            file.close()
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # closing writes buffered data, which fails on a full disk
            file.close()
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# -- facts ------------------------------------------------------------------------------------------------------------


def recall(kind: str, key: str) -> dict[str, Any] | None:
    """Return the facts that `remember` stored under `kind` and `key`; None if they are missing or damaged."""
    path = _cache_path(kind, key, "json")
    with contextlib.suppress(OSError, ValueError, UserError):
        digest, _, text = read_file(path).decode().partition("\n") if path else ("", "", "")
        if digest and digest == hashlib.sha256(text.encode()).hexdigest():
            facts: dict[str, Any] = json.loads(text)
            return facts
    return None


def remember(kind: str, key: str, facts: dict[str, Any]) -> None:
    """Store facts, which must be JSON data, in the cache under `kind` and `key`."""
    path = _cache_path(kind, key, "json")
    text = json.dumps(facts)
    if path:
        with contextlib.suppress(_WriteFailed), _write_file(path) as file, _disk_errors():
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())


# -- token ids --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedIds:
    """Token ids of a text: a read-only array for each part (training, held-out), and the SHA-256 of the int32 ids."""

    parts: list[np.ndarray]
    sha256: str


def load_or_pack(key: str, vocab: int, make: Callable[[], Iterable[Iterable[np.ndarray]]]) -> PackedIds:
    """Return the token ids cached under `key`. If there are none, cache and return the ids that `make` yields.

    `make` yields the parts of the text (training, held-out), each as arrays of ids. If `vocab` is at most 65,536, the
    cache file holds 16-bit ids. The result is memory-mapped from the file, or kept in memory if the file cannot be
    written.
    """
    path = _cache_path("tokens", key, "ids")
    if path:
        damaged = (OSError, ValueError, LookupError, TypeError, UserError, _WriteFailed)
        with contextlib.suppress(*damaged), open_file(path) as file:
            return _parts(_map_file(file))
    dtype = "<u2" if vocab <= 1 << 16 else "<i4"
    if path:
        with contextlib.suppress(_WriteFailed), _write_file(path) as file:
            _pack(file, dtype, make())
            return _parts(_map_file(file))
    memory = BytesIO()
    _pack(memory, dtype, make())
    return _parts(memory.getbuffer())


def _map_file(file: IO[bytes]) -> memoryview:
    with _disk_errors():
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _pack(file: IO[bytes], dtype: str, parts: Iterable[Iterable[np.ndarray]]) -> None:
    import numpy as np

    digest, counts = hashlib.sha256(), []
    with _disk_errors():
        file.write(bytes(HEADER))
    for part in parts:
        counts.append(0)
        for ids in part:
            counts[-1] += len(ids)
            digest.update(ids.astype("<i4").tobytes())
            with _disk_errors():
                file.write(ids.astype(dtype).tobytes())
    with _disk_errors():
        file.seek(HEADER)
        sums = np.array([zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")], "<u4").tobytes()
        file.write(sums)
        facts = {"dtype": dtype, "counts": counts, "sha256": digest.hexdigest(), "sums": zlib.crc32(sums)}
        text = json.dumps(facts)
        file.seek(0)
        file.write(f"{zlib.crc32(text.encode()):08x}{text}".encode().ljust(HEADER))
        file.flush()


def _parts(view: memoryview) -> PackedIds:
    """Parse the bytes of a cache file; raise ValueError, LookupError or TypeError if it is damaged."""
    import numpy as np

    head = bytes(view[:HEADER]).rstrip()
    if f"{zlib.crc32(head[8:]):08x}".encode() != head[:8]:
        raise ValueError
    facts = json.loads(head[8:])
    dtype, counts = np.dtype(facts["dtype"]), facts["counts"]
    end = HEADER + dtype.itemsize * sum(counts)
    sums = np.frombuffer(view[end:], "<u4")
    starts = range(HEADER, end, BLOCK)
    if len(sums) != len(starts) or zlib.crc32(view[end:]) != facts["sums"]:
        raise ValueError
    for n in set(np.linspace(0, len(starts) - 1, min(CHECK_BLOCKS, len(starts)), dtype=np.int64).tolist()):
        if zlib.crc32(view[starts[n] : min(starts[n] + BLOCK, end)]) != sums[n]:
            raise ValueError
    ids = np.ndarray(sum(counts), dtype, view, HEADER)
    ids.flags.writeable = False
    return PackedIds(np.split(ids, np.cumsum(counts)[:-1]), facts["sha256"])
