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
from typing import IO, Any

from toyexp import UserError
from toyexp.base import cache_dir, open_file, print_note, read_file, system_message
from toyexp.base import numpy as np

BLOCK = 1 << 20  # bytes of ids per checksum
CHECK_BLOCKS = 64  # blocks verified when a file is opened, evenly spread
MAX_AGE = 24 * 3600  # seconds after which a temporary file is deleted


def _cache_path(kind: str, key: str, suffix: str) -> Path | None:
    folder = cache_dir()
    return folder and folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.{suffix}"


@contextlib.contextmanager
def _write_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file; rename it to `path` when the context ends, or remove it after an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(".*.tmp"):  # left by a killed process
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > MAX_AGE:
                leftover.unlink()
    file = open(temporary, "xb+", BLOCK)  # noqa: SIM115
    try:
        yield file
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
        with contextlib.suppress(OSError), _write_file(path) as file:
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
    path, dtype = _cache_path("tokens", key, "ids"), "<u2" if vocab <= 1 << 16 else "<i4"
    if path:
        with contextlib.suppress(OSError, ValueError, UserError):
            if facts := recall("tokens", key):
                return _load(path, facts)
        try:
            with _write_file(path) as file:
                facts = _pack(file, dtype, make())
            remember("tokens", key, facts)
            return _load(path, facts)
        except (OSError, ValueError) as error:  # `make` is called again, and raises errors of its own again
            problem = system_message(error)
    memory = BytesIO()
    facts = _pack(memory, dtype, make())
    if path:  # the error was not one of `make`
        print_note(f"note: no cache in {path.parent}: {problem}; set another TOYEXP_CACHE")
    return _parts(memory.getbuffer(), facts)


def _pack(file: IO[bytes], dtype: str, parts: Iterable[Iterable[np.ndarray]]) -> dict[str, Any]:
    """Write the ids to a file. Return their type, the number of each part, and checksums."""
    digest, counts = hashlib.sha256(), []
    for part in parts:
        counts.append(0)
        for ids in part:
            counts[-1] += len(ids)
            digest.update(ids.astype("<i4").tobytes())
            file.write(ids.astype(dtype).tobytes())
    file.seek(0)
    sums = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
    return {"dtype": dtype, "counts": counts, "sha256": digest.hexdigest(), "sums": sums}


def _load(path: Path, facts: dict[str, Any]) -> PackedIds:
    with open_file(path) as file:
        return _parts(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), facts)


def _parts(view: memoryview, facts: dict[str, Any]) -> PackedIds:
    """Return the parts of the ids in `view`; raise ValueError if they do not have the checksums in `facts`."""
    counts, sums, dtype = facts["counts"], facts["sums"], np.dtype(facts["dtype"])
    if len(view) != dtype.itemsize * sum(counts):
        raise ValueError
    for n in set(np.linspace(0, len(sums) - 1, min(CHECK_BLOCKS, len(sums)), dtype=np.int64).tolist()):
        if zlib.crc32(view[n * BLOCK : (n + 1) * BLOCK]) != sums[n]:
            raise ValueError
    ids = np.ndarray(sum(counts), dtype, view)
    ids.flags.writeable = False
    return PackedIds(np.split(ids, np.cumsum(counts)[:-1]), facts["sha256"])
