"""How the ranks of a run find each other, and the process of a rank other than rank 0.

Rank 0 starts the others on its machine, or `torchrun` starts all of them on several. Another rank does what rank 0
calls, and ends with rank 0. It has no run directory, no data and no callbacks, and prints nothing.
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
from toyexp.base import error_location, run_interruptibly, started_ranks
from toyexp_torch.distributed.group import torchruns_store
from toyexp_torch.distributed.rpc import Link, written
from toyexp_torch.distributed.session import open_rank  # loads PyTorch before the first sign of life
from toyexp_torch.distributed.supervisor import BEAT, READY, START, WORD, Rank, Supervisor, naming, patience, start_here

KEY = "toyexp/first"  # of the store: where rank 0 listens
HELLO = 1024  # bytes at most of what a rank says first
WORDS = 500  # characters of an error message
LOST = ("gloo", "NCCL", "Connection", "store")  # in torch's errors about another rank that is gone


def gather_ranks(count: int) -> Supervisor:
    """Return the other ranks: those that `torchrun` has started, or `count` - 1 that are started here."""
    ranks = started_ranks()
    if ranks.rank:
        raise UserError(f"rank {ranks.rank}: takes part in what the first rank runs, and runs nothing itself")
    return _meet_torchruns() if ranks.count > 1 else start_here(count)


@functools.cache
def _meet_torchruns() -> Supervisor:
    """Publish rank 0's address in torchrun's store and wait until the other ranks connect."""
    count, token = started_ranks().count, secrets.token_hex(16)
    address = os.environ["MASTER_ADDR"]
    with closing(socket.create_server(("", 0), backlog=count)) as server:
        ranks: list[Rank] = []
        until = time.monotonic() + START

        def missing() -> str:
            return _named({*range(1, count)} - {rank.rank for rank in ranks})

        with naming(missing):
            torchruns_store().set(KEY, f"{address} {server.getsockname()[1]} {token}")
            while len(ranks) < count - 1:
                if not select.select([server], [], [], max(until - time.monotonic(), 0))[0]:
                    raise RunFailed(f"{missing()} did not come within {START:.0f} s")
                connection, _ = server.accept()
                with suppress(ValueError, EOFError, OSError):  # of a stranger
                    ranks.append(_accept(connection, token, {rank.rank for rank in ranks}, count))
    return Supervisor(sorted(ranks, key=lambda rank: rank.rank), stays=True)


def _named(ranks: Iterable[int]) -> str:
    """Name these ranks, their number, and the address at which they meet."""
    missing, count = sorted(ranks), started_ranks().count
    who = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))} of {count}"
    return f"{who} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _accept(connection: socket.socket, token: str, known: set[int], count: int) -> Rank:
    """Return the rank that has just connected; ValueError for a stranger."""
    connection.settimeout(10)
    given, rank, pid, host = connection.makefile("rb").readline(HELLO).decode().split(maxsplit=3)
    if not hmac.compare_digest(given, token) or int(rank) in known or not 0 < int(rank) < count:
        connection.close()
        raise ValueError(rank)
    _configure(connection)
    connection.sendall(b"+")
    return Rank(int(rank), Link(connection), int(pid), host.strip(), seen=True)


def _configure(connection: socket.socket) -> None:
    """Send without delay, and notice data that nobody takes: a host may disappear without a word."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience()))


def follow() -> None:
    """Take part, as a rank that `torchrun` has started, in what rank 0 runs, to the end of this process."""
    rank = started_ranks().rank
    try:
        with naming(lambda: _named([0])) if rank == 1 else nullcontext():  # rank 1 speaks for all of them
            address, port, token = run_interruptibly(lambda: torchruns_store().get(KEY)).decode().split()
            connection = socket.create_connection((address, int(port)), timeout=START)
            connection.sendall(f"{token} {rank} {os.getpid()} {platform.node()}\n".encode())
            taken = connection.recv(1)
            _configure(connection)
    except (RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise RunFailed(f"rank {rank}: the first rank did not come, or went again ({why})") from None
    if taken:
        serve(connection.detach())


def serve(file: int) -> None:
    """Take part in what rank 0 runs; `file` is this end of their connection."""
    _Server(Link(socket.socket(fileno=file))).serve()


class _Server:
    """Takes part in one session after the other until rank 0 is gone; then the process ends, with code 0 between two.

    It ends at once: no thread, graph or other rank is worth a wait.
    """

    def __init__(self, link: Link):
        self._link = link
        self._session: Any = None

    def serve(self) -> NoReturn:
        """Do what rank 0 calls, and report an error to it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 ends a run, and may want to save it before
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            while True:
                self._do(*self._link.receive())
        except EOFError:
            self._end()
        except Exception as error:
            with suppress(OSError):
                self._link.send(written(_report(error)))
                time.sleep(2 * WORD)  # rank 0 looks at how this process ended if it ends before
        os._exit(1)

    def _do(self, name: str, *arguments: Any) -> None:
        if name == "open":
            self._session = True  # half open
            self._session = open_rank(*arguments)
            self._link.send(written(READY))
        elif name != "close":
            getattr(self._session, name)(*arguments)
        elif self._session is not None:
            self._session.do_close()
            self._session = None

    def _beat(self) -> None:
        """Send signs of life until nobody takes one, or the parent is gone: its children may hold the connection."""
        parent = os.getppid()
        with suppress(OSError):
            while parent == os.getppid():
                self._link.beat()
                time.sleep(BEAT)
        self._end()

    def _end(self) -> NoReturn:
        os._exit(0 if self._session is None else 1)


def _report(error: Exception) -> dict[str, str | bool]:
    """Return an error for rank 0: one line, the traceback, and whether another rank is likelier to be the cause."""
    words = " ".join(str(error).split())[:WORDS]
    line = words if isinstance(error, ToyexpError) else f"{type(error).__name__}: {words}{error_location(error)}"
    lost = any(word in str(error) for word in LOST)
    return {"failed": line, "trace": traceback.format_exc().rstrip(), "lost": lost}
