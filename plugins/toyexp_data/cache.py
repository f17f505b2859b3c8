"""A cache of token ids, in files that are mapped, and of what is known of a text; it never fails a run."""

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

HEADER = 512  # bytes in front of the ids
BLOCK = 1 << 20  # bytes of ids that one checksum is of
CHECK_BLOCKS = 64  # blocks that are checked when a file is opened: all of a small file, of a large one evenly spread
MAX_AGE = 24 * 3600  # seconds after which nobody goes on with a temporary file


def _cache_path(kind: str, key: str, suffix: str) -> Path | None:
    folder = cache_dir()
    return folder and folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.{suffix}"


class _WriteFailed(Exception):
    """What is kept cannot be written, which is another thing than a text that cannot be read."""


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _WriteFailed from error


@contextlib.contextmanager
def _write_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there under its name once all of it is written, and else not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with _disk_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(".*.tmp"):  # of a process that was killed
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > MAX_AGE:
                    left.unlink()
        file = open(temporary, "xb+", BLOCK)  # noqa: SIM115
    try:
        yield file
        with _disk_errors():
            file.close()
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # what a full disk did not take
            file.close()
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# -- what is known ----------------------------------------------------------------------------------------------------


def recall(kind: str, key: str) -> dict[str, Any] | None:
    """What was remembered under the key, if it is there and whole."""
    path = _cache_path(kind, key, "json")
    with contextlib.suppress(OSError, ValueError, UserError):
        digest, _, text = read_file(path).decode().partition("\n") if path else ("", "", "")
        if digest and digest == hashlib.sha256(text.encode()).hexdigest():
            found: dict[str, Any] = json.loads(text)
            return found
    return None


def remember(kind: str, key: str, facts: dict[str, Any]) -> None:
    """Keeps plain data under the key."""
    path = _cache_path(kind, key, "json")
    text = json.dumps(facts)
    if path:
        with contextlib.suppress(_WriteFailed), _write_file(path) as file, _disk_errors():
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())


# -- token ids --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedIds:
    """Parts of a text as arrays of ids that cannot be written to, and the SHA-256 of all of them as int32."""

    parts: list[np.ndarray]
    sha256: str


def load_or_pack(key: str, vocab: int, make: Callable[[], Iterable[Iterable[np.ndarray]]]) -> PackedIds:
    """Return mapped parts kept under the key, or what `make` gives, kept in a file or, without room, in memory."""
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
    """The ids in a file of the cache; ValueError, LookupError or TypeError for one that is damaged."""
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
