"""Rank 0's supervision of the other ranks: their processes, its calls to them, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import IO, Any

from toyexp import UserError
from toyexp.base import RankFailed, print_error
from toyexp_torch.distributed.rpc import Link, written

PATIENCE = "TOYEXP_RANKS_PATIENCE"  # seconds without a sign of life until a rank counts as failed
BEAT = 0.5  # seconds between signs of life
START = 300.0  # seconds until the first one, and until a rank is ready: it loads PyTorch, then the plugins
SOON = 5.0  # seconds until a wait at the start is reported
WORD = 1.0  # seconds for the other ranks to report when one has failed: they may know the cause
STUCK = 5.0  # seconds until a computation that waits for a failed rank has to end
READY = "ready"  # what a rank says when it has opened its session
FAREWELL = 5.0  # seconds for the ranks to end once their connection is cut

# The program of a rank that is started here: the same sys.path, whatever the environment.
SERVE = (
    "import json, sys; told = json.loads(sys.argv[1]); sys.path[:] = told['path']; "
    "from toyexp.base import reduce_spinning; reduce_spinning(); "
    "from toyexp_torch.distributed.worker import serve; serve(told['file'])"
)


def patience() -> float:
    """Return how many seconds a rank may be silent; UserError for a setting that is no such number."""
    given = os.environ.get(PATIENCE) or "20"
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e6:
        raise UserError(f"{PATIENCE}={given}: takes seconds, from 1")
    return seconds


@contextlib.contextmanager
def naming(missing: Callable[[], str]) -> Iterator[None]:
    """Print one line that names the missing ranks if what is done inside takes more than a few seconds."""
    timer = threading.Timer(SOON, lambda: print_error(f"waiting for {missing()}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class Rank:
    """Another rank, as rank 0 sees it."""

    rank: int
    link: Link
    pid: int
    host: str
    process: subprocess.Popen[bytes] | None = None  # if it was started here
    errors: IO[bytes] | None = None  # its stderr
    seen: bool = False  # whether a sign of life has come
    silent: float = 0.0  # seconds since the last one
    ready: bool = False  # whether it has opened its session
    gone: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def ending(self) -> str:
        """Say how the process ended by itself."""
        if self.process is None or self.errors is None:
            return "is gone: its connection ended"
        try:
            code = self.process.wait(WORD)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}{f': {lines[-1][:300]}' if lines else ''}"

    def kill(self) -> None:
        """Kill the process if it was started here; cut the connection."""
        self.link.cut()
        if self.process is not None:
            self.process.kill()


@dataclass
class Supervisor:
    """Rank 0's view of the other ranks. A thread watches them, and ends computations that wait for a failed one."""

    ranks: Sequence[Rank]
    stays: bool = False  # whether they outlive a session: `torchrun` has started them
    abort: Callable[[], None] = lambda: None  # ends what this rank's device waits for
    failed: bool = False
    _failure: tuple[str, str] = ("", "")  # of the rank that has failed: a line, and its traceback
    _patience: float = field(default_factory=patience)
    _inside: bool = False  # a computation that all ranks take part in
    _told: bool = False  # whether the others know of it
    _broken: bool = False  # whether the others wait for what this rank does not do
    _closing: bool = False

    def __post_init__(self) -> None:
        self._looked = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raise RankFailed if a rank has failed."""
        if self.failed:
            raise RankFailed(*self._failure)

    def wait_for_all(self) -> None:
        """Wait until each has opened its session; RankFailed if one fails or takes too long."""
        until = time.monotonic() + START

        def missing() -> str:
            return ", ".join(str(rank) for rank in self.ranks if not rank.ready)

        with naming(missing):
            while missing():
                self.check()
                if time.monotonic() > until:
                    raise RankFailed(f"{missing()}: not ready within {START:.0f} s")
                time.sleep(0.01)

    def call(self, name: str, arguments: Callable[[int], Sequence[Any]] = lambda rank: ()) -> None:
        """Have each other rank call this method of its session with `arguments(rank)`.

        Raises UserError, and calls no rank, if arguments cannot be sent.
        """
        messages = [written([name, *arguments(rank.rank)]) for rank in self.ranks]
        self._told = True
        for rank, message in zip(self.ranks, messages, strict=True):
            rank.link.send(message)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise RankFailed for what goes wrong inside, which all ranks take part in, because one of them failed."""
        self.check()
        self._inside, self._told = True, False
        try:
            yield
        except BaseException as error:
            lost = isinstance(error, RuntimeError | OSError)
            self._broken = self._told or lost
            until = time.monotonic() + 2 * WORD + 1  # this thread may be the first to notice
            while lost and time.monotonic() < until:
                if self.failed:
                    raise RankFailed(*self._failure) from error
                time.sleep(0.02)
            raise
        finally:
            self._inside = False
        self.check()

    def close(self) -> None:
        """End the ranks, whatever they do; tell those that stay that this session is over."""
        self.abort = lambda: None
        broken = self.failed or self._broken
        if self.stays and not broken:
            with contextlib.suppress(OSError):
                self.call("close")
            return
        self._closing = True
        until = time.monotonic() + (0 if broken else FAREWELL)
        for rank in self.ranks:
            rank.link.cut()
        for process in (rank.process for rank in self.ranks if rank.process is not None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))
            process.kill()
            process.wait()
        self._watcher.join()
        for rank in self.ranks:
            rank.link.close()
            if rank.errors is not None:
                rank.errors.close()

    # -- the thread that watches --

    def _watch(self) -> None:
        while not self._closing:
            failures = self._look(BEAT)
            if failures and not self._closing:
                until = time.monotonic() + WORD
                while (left := until - time.monotonic()) > 0:
                    failures += self._look(left)
                self._fail(min(failures)[1:])
                return

    def _look(self, seconds: float) -> list[tuple[int, str, str]]:
        """Read messages, and return each failure: its order (0 is the likeliest cause), a line, and a traceback."""
        failures: list[tuple[int, str, str]] = []
        alive: dict[Any, Rank] = {rank.link: rank for rank in self.ranks if not rank.gone}
        for rank in (alive[link] for link in wait([*alive], seconds)):
            try:
                message = rank.link.receive()
                rank.seen, rank.silent = True, 0.0
                if message == READY:
                    rank.ready = True
                elif message is not None:  # an error
                    rank.gone = True
                    order, trace = 2 if message["lost"] else 0, message.get("trace", "")
                    failures.append((order, f"{rank} failed: {message['failed']}", trace))
            except EOFError:
                if not self._closing:
                    failures.append((1, f"{rank} {rank.ending()}", ""))
                rank.gone = True
        now = time.monotonic()
        # If this thread was kept waiting, by a suspended process or a crowded machine, so were the ranks.
        passed, self._looked = min(now - self._looked, 2 * BEAT), now
        for rank in self.ranks:
            rank.silent += passed
            if not rank.gone and rank.silent > (self._patience if rank.seen else START):
                rank.gone = True
                failures.append((1, f"{rank} has given no sign of life for {rank.silent:.0f} s", ""))
        return failures

    def _fail(self, failure: tuple[str, str]) -> None:
        self._failure, self.failed = failure, True
        for rank in self.ranks:
            rank.kill()
        threading.Thread(target=self.abort, name="abort", daemon=True).start()  # it may wait itself
        until = time.monotonic() + STUCK
        while self._inside:
            if time.monotonic() > until:  # in native code that nothing ends
                print_error(f"error: {failure[0]}")
                os._exit(1)
            time.sleep(0.05)


def start_here(count: int) -> Supervisor:
    """Start ranks 1 to `count` - 1 on this machine, each a process that ends with this one."""
    ranks: list[Rank] = []
    try:
        for number in range(1, count):
            ours, theirs = socket.socketpair()
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the supervisor
            told = json.dumps({"path": sys.path, "file": theirs.fileno()})
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", SERVE, told],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's signals reach rank 0 alone
                )  # fmt: skip
            ranks.append(Rank(number, Link(ours), process.pid, platform.node(), process, errors))
    except BaseException:
        for rank in ranks:
            rank.kill()
        raise
    return Supervisor(ranks)
