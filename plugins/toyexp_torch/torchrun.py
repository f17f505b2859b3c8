"""How the ranks of a run come together, and what a rank other than the first does.

The first rank starts the others on its machine, or `torchrun` starts all of them on several. Another rank does what the
first one says, and ends when that one is gone. It has no run directory, no data and no callbacks, and prints nothing.
"""

from __future__ import annotations

import functools
import hmac
import os
import platform
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import closing, nullcontext, suppress
from typing import Any, NoReturn

from toyexp import RunFailed, ToyexpError, UserError
from toyexp.base import place, started_ranks
from toyexp_torch.group import torchruns_store
from toyexp_torch.party import BEAT, START, WORD, Party, Peer, patience, start_here, telling
from toyexp_torch.ranks import opened_as  # loads PyTorch: before the first sign of life, which may take long to come
from toyexp_torch.wire import Link, written

KEY = "toyexp/first"  # under which the first rank says where it can be reached
HELLO = 1024  # bytes at most of what a rank says first
WORDS = 500  # characters of what an error says
LOST = ("gloo", "NCCL", "Connection", "store")  # in what torch says of a rank that is not there any more


def gathered(count: int) -> Party:
    """The other ranks: those that `torchrun` has started, or else so many less one that are started here."""
    if started_ranks().rank:
        raise UserError(f"rank {started_ranks().rank}: takes part in what the first rank runs, and runs nothing itself")
    return _meeting() if started_ranks().count > 1 else start_here(count)


@functools.cache
def _meeting() -> Party:
    """The first rank waits for the others, which find in the store where it is."""
    count, token = started_ranks().count, secrets.token_hex(16)
    address = os.environ["MASTER_ADDR"]
    with closing(socket.create_server(("", 0), backlog=count)) as server:
        peers: list[Peer] = []
        until = time.monotonic() + START

        def missing() -> str:
            return _named({*range(1, count)} - {peer.rank for peer in peers})

        with telling(missing):
            torchruns_store().set(KEY, f"{address} {server.getsockname()[1]} {token}")
            while len(peers) < count - 1:
                if not select.select([server], [], [], max(until - time.monotonic(), 0))[0]:
                    raise RunFailed(f"{missing()} did not come within {START:.0f} s")
                connection, _ = server.accept()
                with suppress(ValueError, EOFError, OSError):  # of someone else
                    peers.append(_peer(connection, token, {peer.rank for peer in peers}, count))
    return Party(sorted(peers, key=lambda peer: peer.rank), stays=True, _patience=patience())


def _named(ranks: Iterable[int]) -> str:
    """These, of how many, and where they are awaited."""
    told, count = sorted(ranks), started_ranks().count
    who = f"rank{'' if len(told) == 1 else 's'} {', '.join(map(str, told))} of {count}"
    return f"{who} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _peer(connection: socket.socket, token: str, known: set[int], count: int) -> Peer:
    """A rank that has just connected; ValueError where it is none."""
    connection.settimeout(10)
    given, rank, pid, host = connection.makefile("rb").readline(HELLO).decode().split(maxsplit=3)
    if not hmac.compare_digest(given, token) or int(rank) in known or not 0 < int(rank) < count:
        connection.close()
        raise ValueError(rank)
    connection.settimeout(None)
    _configure(connection)
    connection.sendall(b"+")
    return Peer(int(rank), Link(connection), int(pid), host.strip(), seen=True)


def follow() -> None:
    """The whole part of another rank than the first, to the end of its process."""
    rank = started_ranks().rank
    try:
        with telling(lambda: _named([0])) if rank == 1 else nullcontext():  # one speaks for all of them
            address, port, token = _found().split()
            connection = socket.create_connection((address, int(port)), timeout=START)
            _configure(connection)
            connection.sendall(f"{token} {rank} {os.getpid()} {platform.node()}\n".encode())
            taken = connection.recv(1)
    except (RuntimeError, OSError) as error:
        told = str(error).strip().partition("\n")[0]
        raise RunFailed(f"rank {rank}: the first rank did not come, or went again ({told})") from None
    connection.settimeout(None)
    if taken:
        Follower(Link(connection)).follow()


def _found() -> str:
    """What the first rank has put into the store, once it has; RuntimeError where it does not."""
    store, until = torchruns_store(), time.monotonic() + START
    while not store.check([KEY]):
        if time.monotonic() > until:
            raise RuntimeError(f"not within {START:.0f} s")
        time.sleep(0.05)
    return store.get(KEY).decode()


def _configure(connection: socket.socket) -> None:
    """What is sent goes out at once, and what nobody takes is noticed: a host may go without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience()))


def main(file: int) -> None:
    """The whole life of a process that the first rank has started; `file` is its end of their connection."""
    Follower(Link(socket.socket(fileno=file))).follow()


class Follower:
    """Takes part in one session after another until the first rank is gone; then its process ends, with it.

    It ends as it stands: nothing in it is worth a wait for threads, graphs or other ranks.
    """

    def __init__(self, link: Link):
        self._link = link
        self._session: Any = None

    def follow(self) -> NoReturn:
        """All of it. Its exit code is 0 where nothing was left half done."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the first rank ends a run, and may want to save it before
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            self._serve()
        except EOFError:
            self._end()
        except Exception as error:
            with suppress(OSError):
                self._link.send(written(_told(error)))
                time.sleep(2 * WORD)  # to be asked how it ended, not whether
        os._exit(1)

    def _end(self) -> NoReturn:
        os._exit(0 if self._session is None else 1)

    def _beat(self) -> None:
        """Signs of life. The first one that nobody takes is the end, whatever the process waits for.

        So is a parent that is gone: a child of the first rank may hold what that one has left open.
        """
        parent = os.getppid()
        while parent == os.getppid():
            try:
                self._link.beat()
            except OSError:
                break
            time.sleep(BEAT)
        self._end()

    def _serve(self) -> None:
        while True:
            name, *arguments = self._link.receive()
            if name == "open":
                self._session = True  # half open
                self._session = opened_as(*arguments)
            elif name == "close":
                if self._session is not None:
                    self._session.do_close()
                self._session = None
            else:
                getattr(self._session, name)(*arguments)


def _told(error: Exception) -> dict[str, str | bool]:
    """An error as the first rank is told of it: in a line, in full, and whether another rank is likelier to blame."""
    words = " ".join(str(error).split())[:WORDS]
    line = words if isinstance(error, ToyexpError) else f"{type(error).__name__}: {words}{place(error)}"
    lost = any(word in str(error) for word in LOST)
    return {"failed": line, "trace": traceback.format_exc().rstrip(), "lost": lost}
