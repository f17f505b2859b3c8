"""What has changed in a sweep since its files were last written: they take a while where there are many jobs."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from toyexp.base.writing import dump_json, open_for_writing

JOURNAL = "sweep.jsonl"  # beside sweep.json
FEW = 50  # jobs
SHARE = 0.05  # of the time may be spent on what is to be done after each job and grows with their number


class Seldom:
    """Something that is up to date after each of a few jobs, and after each of many as far as there is time for it."""

    def __init__(self, do: Callable[[], None]):
        self._do, self._next = do, 0.0
        self.waits = False  # it was asked for and is not done

    def ask(self, jobs: int) -> float:
        """One of so many jobs has changed: does it, or returns in how many seconds there is time for it."""
        self.waits = True
        if jobs > FEW and (wait := self._next - time.monotonic()) > 0:
            return wait
        self.now()
        return 0.0

    def now(self) -> None:
        """Does it."""
        began, self.waits = time.monotonic(), False
        try:
            self._do()
        finally:
            ended = time.monotonic()
            self._next = ended + (ended - began) / SHARE


class Journal:
    """A file of jobs as they change, a line each; the last of a job counts. Raises OSError."""

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL

    def add(self, jobs: Iterable[Mapping[str, Any]], flush: bool) -> None:
        """Takes down how they stand now, on the disk if so."""
        text = "".join(dump_json(job) + "\n" for job in jobs).encode(errors="backslashreplace")
        with open(open_for_writing(self._path, os.O_APPEND), "a+b", buffering=0) as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                if file.read(1) != b"\n":  # a line that a full disk or a kill has cut off
                    file.truncate(self._path.read_bytes().rfind(b"\n") + 1)
            if file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if flush:
                os.fsync(file.fileno())

    def clear(self) -> None:
        """All of it stands in sweep.json."""
        self._path.unlink(missing_ok=True)

    def read_into(self, entries: list[Any]) -> None:
        """Puts what it holds in place of the entries of sweep.json; raises KeyError, TypeError or ValueError.

        A last line that a process was killed over does not count.
        """
        if not self._path.is_file():
            return
        whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")
        for line in whole.splitlines():
            entry = json.loads(line)
            if not isinstance(entry, Mapping) or not isinstance(number := entry["number"], int):
                raise ValueError(f"{JOURNAL} holds what is no job")
            if not 0 <= number <= len(entries):
                raise ValueError(f"{JOURNAL} holds job {number} of {len(entries)}")
            entries[number : number + 1] = [entry]
