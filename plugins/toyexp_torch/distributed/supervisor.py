"""Supervision of the other ranks by rank 0: their processes, calls to them, failures, and shutdown."""

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
from toyexp_torch.distributed.rpc import Link, encode

PATIENCE = "TOYEXP_RANKS_PATIENCE"  # environment variable: seconds without a heartbeat until a rank counts as failed
HEARTBEAT = 0.5  # seconds between heartbeats
START_TIMEOUT = 300.0  # seconds for a first heartbeat, after loading PyTorch; then for being ready, after plugins
NOTICE_DELAY = 5.0  # seconds of waiting at the start before a line about it is printed
REPORT_TIME = 1.0  # seconds to collect the other ranks' errors after a failure, since another rank may know the cause
STUCK_TIMEOUT = 5.0  # seconds for a computation to end after a rank has failed; then the process is ended
READY = "ready"  # message of a rank that has opened its session
EXIT_TIMEOUT = 5.0  # seconds for the ranks to exit after their connection is cut

# Program of a rank on this machine. It gets this process's sys.path, which the environment may not reproduce.
SERVE = (
    "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments['path']; "
    "from toyexp.base import reduce_spinning; reduce_spinning(); "
    "from toyexp_torch.distributed.worker import serve; serve(arguments['file'])"
)


def silence_limit() -> float:
    """Return the number of seconds without a heartbeat after which a rank counts as failed.

    Raise UserError if the environment variable that sets it has an invalid value.
    """
    text = os.environ.get(PATIENCE) or "20"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e6:
        raise UserError(f"{PATIENCE}={text}: must be a number of seconds, at least 1")
    return seconds


@contextlib.contextmanager
def report_missing(missing: Callable[[], str]) -> Iterator[None]:
    """If the body takes more than a few seconds, print a line with the text that `missing` returns.

    This text names the ranks that have not connected yet or are not ready.
    """
    timer = threading.Timer(NOTICE_DELAY, lambda: print_error(f"waiting for {missing()}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class Rank:
    """What rank 0 knows about another rank: its process, its connection, and whether it is alive."""

    rank: int
    link: Link
    pid: int
    host: str
    process: subprocess.Popen[bytes] | None = None  # None if `torchrun` has started it
    errors: IO[bytes] | None = None  # its stderr
    seen: bool = False  # whether a message or heartbeat has arrived
    silent: float = 0.0  # seconds since the last message or heartbeat
    ready: bool = False  # whether it has opened its session
    gone: bool = False  # whether it has failed or ended

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def ending(self) -> str:
        """Return a phrase that says how the process ended, such as "was killed by SIGKILL"."""
        if self.process is None or self.errors is None:
            return "is gone: it closed its connection"
        try:
            code = self.process.wait(REPORT_TIME)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}{f': {lines[-1][:300]}' if lines else ''}"

    def kill(self) -> None:
        """Cut the connection to the rank. Also kill the rank's process if this process started it."""
        self.link.cut()
        if self.process is not None:
            self.process.kill()


@dataclass
class Supervisor:
    """Rank 0's control of the other ranks: it calls their methods, notices their failures, and ends their processes.

    A thread watches the ranks. If one fails, the thread aborts computations of rank 0 that wait for this rank.
    """

    ranks: Sequence[Rank]
    is_persistent: bool = False  # the ranks outlive a session, because `torchrun` has started them
    abort: Callable[[], None] = lambda: None  # aborts operations in which this rank waits for other ranks
    failed: bool = False  # a rank has failed
    _failure: tuple[str, str] = ("", "")  # one line about the rank that has failed, and its traceback
    _patience: float = field(default_factory=silence_limit)
    _is_computing: bool = False  # inside a computation that all ranks take part in
    _has_called: bool = False  # the other ranks were called in the present computation
    _is_broken: bool = False  # the other ranks may wait for a call that this rank will not make
    _is_closing: bool = False

    def __post_init__(self) -> None:
        self._last_look = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def check(self) -> None:
        """Raise RankFailed, with the cause, if a rank has failed."""
        if self.failed:
            raise RankFailed(*self._failure)

    def wait_for_all(self) -> None:
        """Wait until each rank has opened its session. Raise RankFailed if one fails or takes too long."""
        until = time.monotonic() + START_TIMEOUT

        def missing() -> str:
            return ", ".join(str(rank) for rank in self.ranks if not rank.ready)

        with report_missing(missing):
            while missing():
                self.check()
                if time.monotonic() > until:
                    raise RankFailed(f"{missing()}: not ready after {START_TIMEOUT:.0f} s")
                time.sleep(0.01)

    def call(self, name: str, arguments: Callable[[int], Sequence[Any]] = lambda rank: ()) -> None:
        """Call the method `name` of the other ranks' sessions, without waiting for the calls to end.

        `arguments(rank)` returns the arguments for one rank. If the arguments cannot be sent, call no rank and raise
        UserError.
        """
        messages = [encode([name, *arguments(rank.rank)]) for rank in self.ranks]
        self._has_called = True
        for rank, message in zip(self.ranks, messages, strict=True):
            rank.link.send(message)

    @contextlib.contextmanager
    def watch_computation(self) -> Iterator[None]:
        """Run the body, which takes part in a computation of all ranks.

        Raise RankFailed if another rank fails in the meantime. If that failure causes an error in the body, RankFailed
        replaces this error.
        """
        self.check()
        self._is_computing, self._has_called = True, False
        try:
            yield
        except BaseException as error:
            lost = isinstance(error, RuntimeError | OSError)
            self._is_broken = self._has_called or lost
            until = time.monotonic() + 2 * REPORT_TIME + 1  # the watching thread may notice the failure later
            while lost and time.monotonic() < until:
                if self.failed:
                    raise RankFailed(*self._failure) from error
                time.sleep(0.02)
            raise
        finally:
            self._is_computing = False
        self.check()

    def close(self) -> None:
        """End the processes of the other ranks.

        If `torchrun` has started them and nothing has failed, end only their sessions, so that they can serve the next
        run.
        """
        self.abort = lambda: None
        broken = self.failed or self._is_broken
        if self.is_persistent and not broken:
            with contextlib.suppress(OSError):
                self.call("close")
            return
        self._is_closing = True
        until = time.monotonic() + (0 if broken else EXIT_TIMEOUT)
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

    # -- the watching thread --

    def _watch(self) -> None:
        while not self._is_closing:
            failures = self._look(HEARTBEAT)
            if failures and not self._is_closing:
                until = time.monotonic() + REPORT_TIME
                while (seconds_left := until - time.monotonic()) > 0:
                    failures += self._look(seconds_left)
                self._fail(min(failures)[1:])
                return

    def _look(self, seconds: float) -> list[tuple[int, str, str]]:
        """Wait up to `seconds` for messages of the ranks and read them; return a tuple for each rank that has failed.

        The tuple consists of a number (0: the rank itself is probably the cause, 1: unknown, 2: another rank probably
        is the cause), a line that describes the failure, and a traceback, which may be empty.
        """
        failures: list[tuple[int, str, str]] = []
        alive: dict[Any, Rank] = {rank.link: rank for rank in self.ranks if not rank.gone}
        for rank in (alive[link] for link in wait([*alive], seconds)):
            try:
                message = rank.link.receive()
                rank.seen, rank.silent = True, 0.0
                if message == READY:
                    rank.ready = True
                elif message is not None:  # an error message
                    rank.gone = True
                    order, trace = 2 if message["lost"] else 0, message.get("trace", "")
                    failures.append((order, f"{rank} failed: {message['failed']}", trace))
            except EOFError:
                if not self._is_closing:
                    failures.append((1, f"{rank} {rank.ending()}", ""))
                rank.gone = True
        now = time.monotonic()
        # A suspended process or a busy machine delays this thread and the ranks alike: count only a short time.
        passed, self._last_look = min(now - self._last_look, 2 * HEARTBEAT), now
        for rank in self.ranks:
            rank.silent += passed
            if not rank.gone and rank.silent > (self._patience if rank.seen else START_TIMEOUT):
                rank.gone = True
                failures.append((1, f"{rank} has sent no heartbeat for {rank.silent:.0f} s", ""))
        return failures

    def _fail(self, failure: tuple[str, str]) -> None:
        self._failure, self.failed = failure, True
        for rank in self.ranks:
            rank.kill()
        threading.Thread(target=self.abort, name="abort", daemon=True).start()  # abort() may block
        until = time.monotonic() + STUCK_TIMEOUT
        while self._is_computing:
            if time.monotonic() > until:  # stuck in native code, which cannot be interrupted
                print_error(f"error: {failure[0]}")
                os._exit(1)
            time.sleep(0.05)


def start_local_ranks(count: int) -> Supervisor:
    """Start ranks 1 to `count` - 1 as processes on this machine, and return their supervisor.

    These processes end when this process ends.
    """
    ranks: list[Rank] = []
    try:
        for number in range(1, count):
            parent_end, child_end = socket.socketpair()
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the supervisor
            arguments = json.dumps({"path": sys.path, "file": child_end.fileno()})
            with child_end:
                process = subprocess.Popen(
                    [sys.executable, "-c", SERVE, arguments],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[child_end.fileno()],
                    start_new_session=True,  # a terminal's signals must reach rank 0 only
                )  # fmt: skip
            ranks.append(Rank(number, Link(parent_end), process.pid, platform.node(), process, errors))
    except BaseException:
        for rank in ranks:
            rank.kill()
        raise
    return Supervisor(ranks)
