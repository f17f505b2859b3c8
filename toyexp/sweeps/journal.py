"""Journal of a sweep: the changes of jobs that are not in sweep.json yet.

With many jobs, rewriting sweep.json after each change would be slow.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from toyexp.base.writing import dump_json, open_for_writing

JOURNAL = "sweep.jsonl"  # next to sweep.json
FEW = 50  # up to this number of jobs, a throttled callback runs after each job
SHARE = 0.05  # maximum share of the time that throttled callbacks take


class Throttle:
    """Limit on how often a callback runs.

    With at most 50 jobs, the callback runs after every job. With more jobs, it takes at most 5 % of the time.
    """

    def __init__(self, do: Callable[[], None]):
        self._do, self._next = do, 0.0
        self.is_pending = False  # a call was requested and has not run

    def request(self, jobs: int) -> float:
        """Run the callback and return 0. If the callback may not run yet, return the seconds until it may.

        `jobs` is the sweep's number of jobs; with at most FEW jobs, the callback always runs.
        """
        self.is_pending = True
        if jobs > FEW and (wait := self._next - time.monotonic()) > 0:
            return wait
        self.run()
        return 0.0

    def run(self) -> None:
        """Run the callback now, and compute when it may run again."""
        began, self.is_pending = time.monotonic(), False
        try:
            self._do()
        finally:
            end = time.monotonic()
            self._next = end + (end - began) / SHARE


class Journal:
    """File with a JSON line for each change of a job. The last line of a job holds its current state.

    Methods raise OSError if the file cannot be read or written.
    """

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL

    def add(self, jobs: Iterable[Mapping[str, Any]], flush: bool) -> None:
        """Append the state of each job as a line; with `flush`, wait until the lines are on the disk."""
        text = "".join(dump_json(job) + "\n" for job in jobs).encode(errors="backslashreplace")
        with open(open_for_writing(self._path, os.O_APPEND), "a+b", buffering=0) as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                if file.read(1) != b"\n":  # a full disk or a kill has cut off the last line
                    file.truncate(self._path.read_bytes().rfind(b"\n") + 1)
            if file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if flush:
                os.fsync(file.fileno())

    def clear(self) -> None:
        """Delete the journal, after sweep.json was written."""
        self._path.unlink(missing_ok=True)

    def read_into(self, entries: list[Any]) -> None:
        """Update `entries`, the jobs from sweep.json, with the newer states in the journal.

        An incomplete last line is ignored. Raise KeyError, TypeError or ValueError if the journal is damaged.
        """
        if not self._path.is_file():
            return
        complete_lines, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")
        for line in complete_lines.splitlines():
            entry = json.loads(line)
            if not isinstance(entry, Mapping) or not isinstance(number := entry["number"], int):
                raise ValueError(f"{JOURNAL} holds an entry that is not a job")
            if not 0 <= number <= len(entries):
                raise ValueError(f"{JOURNAL} holds job {number}, but the sweep has {len(entries)} jobs")
            entries[number : number + 1] = [entry]
