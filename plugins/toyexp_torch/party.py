"""The other ranks as the first one sees them: their processes, what it tells them, and how they end."""

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
from toyexp_torch.wire import Link, written

PATIENCE = "TOYEXP_RANKS_PATIENCE"  # seconds without a sign of life after which a rank has failed
BEAT = 0.5  # seconds between signs of life
START = 300.0  # seconds that a rank may take to its first one, and to be ready: it loads PyTorch, then the plugins
SOON = 5.0  # seconds after which a wait for others at the start is told
WORD = 1.0  # seconds for others to say what they know when one has failed
STUCK = 5.0  # seconds in which a computation has to end that waits for a rank which has failed
FAREWELL = 5.0  # seconds that ranks have to end when they are told to

# Found as here, whatever the directory and the environment: the same path, then the module that follows.
FOLLOW = (
    "import json, sys; told = json.loads(sys.argv[1]); sys.path[:] = told['path']; "
    "from toyexp.base import calm_threads; calm_threads(); "
    "from toyexp_torch.torchrun import main; main(told['file'])"
)


def patience() -> float:
    """How long a rank may be silent; UserError where the environment says no number of seconds."""
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
    """Around a wait for others: one line that says for whom, when it has lasted a while."""
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
    process: subprocess.Popen[bytes] | None = None  # of one that was started here
    errors: IO[bytes] | None = None  # what that says on stderr
    seen: bool = False  # whether it has given a sign of life
    silent: float = 0.0  # seconds since the last one
    gone: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    def ending(self) -> str:
        """How its process ended, which nobody had asked for."""
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
    """All of them. A thread watches over them, and ends what waits for one that has failed."""

    peers: Sequence[Peer]
    stays: bool = False  # whether they outlive a session: `torchrun` has started them
    abort: Callable[[], None] = lambda: None  # ends what waits for another rank on this one's device
    _patience: float = field(default_factory=patience)
    _failure: str = ""
    _trace: str = ""  # of the rank that has failed, where it was
    _inside: float | None = None  # since when this rank has been in what all take part in
    _told: bool = False  # whether the others know of it
    _broken: bool = False  # whether they are at another place than this one
    _closing: bool = False

    def __post_init__(self) -> None:
        self._looked = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def failed(self) -> bool:
        """Whether a rank has."""
        return bool(self._failure)

    def check(self) -> None:
        """Raises RankFailed when a rank has failed."""
        if self._failure:
            raise RankFailed(self._failure, self._trace)

    def wait_for_all(self, ready: Callable[[Peer], bool] = lambda peer: peer.seen) -> None:
        """Until each is ready, which is that it has given a sign of life; RankFailed when one fails, or never is."""
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
        """Has each of the others do what is called so, with what `arguments(rank)` gives.

        UserError, and nobody is told anything, where that cannot be sent.
        """
        messages = [written([name, *arguments(peer.rank)]) for peer in self.peers]
        self._told = True
        for peer, message in zip(self.peers, messages, strict=True):
            peer.link.send(message)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around what all take part in: where it cannot end because a rank has failed, that is what is raised."""
        self.check()
        self._inside, self._told = time.monotonic(), False
        try:
            yield
        except (RuntimeError, OSError) as error:
            until = time.monotonic() + 2 * WORD + 1  # it may be the first to notice
            while time.monotonic() < until and not self._failure:
                time.sleep(0.02)
            self._broken = True
            if self._failure:
                raise RankFailed(self._failure, self._trace) from error
            raise
        except BaseException:
            self._broken = self._told  # the others wait for what does not come
            raise
        finally:
            self._inside = None
        self.check()

    def close(self) -> None:
        """Ends them, whatever they do; those that stay are told that this session is over."""
        self.abort = lambda: None
        whole = not (self._failure or self._broken)
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
        """Kills the processes that were started here; the others see that their connection has ended."""
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
                self._fail(*min(told)[1:])
                return

    def _look(self, seconds: float) -> list[tuple[int, str, str]]:
        """What is wrong with them, and where they were: first what is likeliest the cause. Waits so long for a word."""
        told: list[tuple[int, str, str]] = []
        alive = [peer for peer in self.peers if not peer.gone]
        if not alive:
            time.sleep(seconds)
        ready = select.select([peer.link for peer in alive], [], [], seconds)[0] if alive else []
        for peer in (peer for peer in alive if peer.link in ready):
            try:
                message = peer.link.receive()
                peer.seen, peer.silent = True, 0.0
                if message is not None:  # of one that cannot go on
                    peer.gone = True
                    order, trace = 2 if message["lost"] else 0, message.get("trace", "")
                    told.append((order, f"{peer} failed: {message['failed']}", trace))
            except EOFError:
                if not peer.gone and not self._closing:
                    told.append((1, f"{peer} {peer.ending()}", ""))
                peer.gone = True
        now = time.monotonic()
        # Where this thread itself was kept waiting, by a suspended process or a crowded machine, so were they.
        passed, self._looked = min(now - self._looked, 2 * BEAT), now
        for peer in self.peers:
            peer.silent += passed
            if not peer.gone and peer.silent > (self._patience if peer.seen else START):
                peer.gone = True
                told.append((1, f"{peer} has given no sign of life for {peer.silent:.0f} s", ""))
        return told

    def _fail(self, failure: str, trace: str) -> None:
        self._trace, self._failure = trace, failure
        self._end()
        threading.Thread(target=self.abort, name="abort", daemon=True).start()  # which may wait itself
        until = time.monotonic() + STUCK
        while self._inside is not None:
            if time.monotonic() > until:  # native code that nothing reaches any more
                complain(f"error: {failure}")
                os._exit(1)
            time.sleep(0.05)


def start_here(count: int) -> Party:
    """Starts the ranks from 1 below `count` on this machine, each a process that ends when this one does."""
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
                    start_new_session=True,  # what a terminal sends reaches them through the first rank
                )  # fmt: skip
            peers.append(Peer(rank, Link(ours), process.pid, platform.node(), process, errors))
    except BaseException:
        for peer in peers:
            assert peer.process is not None
            peer.process.kill()
        raise
    return Party(peers, _patience=seconds)
