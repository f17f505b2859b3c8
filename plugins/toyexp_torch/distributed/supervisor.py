"""The other ranks as rank 0 sees them: their processes, its calls to them, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from toyexp import UserError
from toyexp.base import RankFailed, complain
from toyexp_torch.distributed.rpc import Link, written

PATIENCE = "TOYEXP_RANKS_PATIENCE"  # seconds without a sign of life until a rank counts as failed
BEAT = 0.5  # seconds between signs of life
START = 300.0  # seconds until the first one, and until a rank is ready: it loads PyTorch, then the plugins
SOON = 5.0  # seconds until a wait at the start is reported
WORD = 1.0  # seconds for the other ranks to report when one has failed: they may know the cause
STUCK = 5.0  # seconds until a computation that waits for a failed rank has to end
FAREWELL = 5.0  # seconds for the ranks to end once their connection is cut

# The program of a rank that is started here: the same sys.path, whatever the environment.
FOLLOW = (
    "import json, sys; told = json.loads(sys.argv[1]); sys.path[:] = told['path']; "
    "from toyexp.base import calm_threads; calm_threads(); "
    "from toyexp_torch.distributed.worker import main; main(told['file'])"
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
def telling(whom: Callable[[], str]) -> Iterator[None]:
    """Print one line that names the missing ranks if what is done inside takes more than a few seconds."""
    timer = threading.Timer(SOON, lambda: complain(f"waiting for {whom()}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class Peer:
    """Another rank."""

    rank: int
    link: Link
    pid: int
    host: str
    process: subprocess.Popen[bytes] | None = None  # if it was started here
    errors: IO[bytes] | None = None  # its stderr
    seen: bool = False  # whether a sign of life has come
    silent: float = 0.0  # seconds since the last one
    gone: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def ending(self) -> str:
        """Say how the process ended by itself."""
        if self.process is None:
            return "is gone: its connection ended"
        try:
            code = self.process.wait(WORD)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}{self._last_line()}"

    def _last_line(self) -> str:
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""


@dataclass
class Party:
    """The other ranks. A thread watches them, and ends computations that wait for a failed one."""

    peers: Sequence[Peer]
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

    def wait_for_all(self, ready: Callable[[Peer], bool] = lambda peer: peer.seen) -> None:
        """Wait until each is ready (by default: gives a sign of life); RankFailed if one fails or takes too long."""
        until = time.monotonic() + START
        missing = list(self.peers)

        def named() -> str:
            return ", ".join(map(str, missing))

        with telling(named):
            while not all(map(ready, missing)):
                missing = [peer for peer in missing if not ready(peer)]
                self.check()
                if time.monotonic() > until:
                    raise RankFailed(f"{named()}: not ready within {START:.0f} s")
                time.sleep(0.01)

    def tell(self, name: str, arguments: Callable[[int], Sequence[Any]]) -> None:
        """Have each other rank call this method of its session with `arguments(rank)`.

        Raises UserError, and tells no rank, if arguments cannot be sent.
        """
        messages = [written([name, *arguments(peer.rank)]) for peer in self.peers]
        self._told = True
        for peer, message in zip(self.peers, messages, strict=True):
            peer.link.send(message)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise RankFailed for what goes wrong inside, which all ranks take part in, because one of them failed."""
        self.check()
        self._inside, self._told = True, False
        try:
            yield
        except (RuntimeError, OSError) as error:
            until = time.monotonic() + 2 * WORD + 1  # this thread may be the first to notice
            while time.monotonic() < until and not self.failed:
                time.sleep(0.02)
            self._broken = True
            if self.failed:
                raise RankFailed(*self._failure) from error
            raise
        except BaseException:
            self._broken = self._told
            raise
        finally:
            self._inside = False
        self.check()

    def close(self) -> None:
        """End the ranks, whatever they do; tell those that stay that this session is over."""
        self.abort = lambda: None
        whole = not (self.failed or self._broken)
        if whole and self.stays:
            with contextlib.suppress(OSError):
                self.tell("close", lambda rank: ())
            return
        self._closing = True
        until = time.monotonic() + (FAREWELL if whole else 0)
        for peer in self.peers:
            peer.link.cut()
        for peer in self.peers:
            if peer.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    peer.process.wait(max(until - time.monotonic(), 0))
        self._end()
        self._watcher.join()
        for peer in self.peers:
            peer.link.close()
            if peer.process is not None:
                peer.process.wait()
            if peer.errors is not None:
                peer.errors.close()

    def _end(self) -> None:
        """Kill the processes that were started here; cut the connections of the others."""
        for peer in self.peers:
            peer.link.cut()
            if peer.process is not None and peer.process.poll() is None:
                peer.process.kill()

    # -- the thread that watches --

    def _watch(self) -> None:
        while not self._closing:
            told = self._look(BEAT)
            if told and not self._closing:
                until = time.monotonic() + WORD
                while (left := until - time.monotonic()) > 0:
                    told += self._look(left)
                self._fail(min(told)[1:])
                return

    def _look(self, seconds: float) -> list[tuple[int, str, str]]:
        """Read messages, and return each failure: its order (0 is the likeliest cause), a line, and a traceback."""
        told: list[tuple[int, str, str]] = []
        alive = [peer for peer in self.peers if not peer.gone]
        if not alive:
            time.sleep(seconds)
        ready = select.select([peer.link for peer in alive], [], [], seconds)[0] if alive else []
        for peer in (peer for peer in alive if peer.link in ready):
            try:
                message = peer.link.receive()
                peer.seen, peer.silent = True, 0.0
                if message is not None:  # an error
                    peer.gone = True
                    order, trace = 2 if message["lost"] else 0, message.get("trace", "")
                    told.append((order, f"{peer} failed: {message['failed']}", trace))
            except EOFError:
                if not peer.gone and not self._closing:
                    told.append((1, f"{peer} {peer.ending()}", ""))
                peer.gone = True
        now = time.monotonic()
        # If this thread was kept waiting, by a suspended process or a crowded machine, so were the ranks.
        passed, self._looked = min(now - self._looked, 2 * BEAT), now
        for peer in self.peers:
            peer.silent += passed
            if not peer.gone and peer.silent > (self._patience if peer.seen else START):
                peer.gone = True
                told.append((1, f"{peer} has given no sign of life for {peer.silent:.0f} s", ""))
        return told

    def _fail(self, failure: tuple[str, str]) -> None:
        self._failure, self.failed = failure, True
        self._end()
        threading.Thread(target=self.abort, name="abort", daemon=True).start()  # it may wait itself
        until = time.monotonic() + STUCK
        while self._inside:
            if time.monotonic() > until:  # in native code that nothing ends
                complain(f"error: {failure[0]}")
                os._exit(1)
            time.sleep(0.05)


def start_here(count: int) -> Party:
    """Start ranks 1 to `count` - 1 on this machine, each a process that ends with this one."""
    peers: list[Peer] = []
    seconds = patience()
    try:
        for rank in range(1, count):
            ours, theirs = socket.socketpair()
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the party
            told = json.dumps({"path": sys.path, "file": theirs.fileno()})
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", FOLLOW, told],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's signals reach rank 0 alone
                )  # fmt: skip
            peers.append(Peer(rank, Link(ours), process.pid, platform.node(), process, errors))
    except BaseException:
        for peer in peers:
            assert peer.process is not None
            peer.process.kill()
        raise
    return Party(peers, _patience=seconds)
