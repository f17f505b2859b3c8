"""Connections between the ranks of a run, and the process of a worker rank.

Rank 0 starts the other ranks on its machine, or `torchrun` starts all ranks on several machines. A worker rank does
what rank 0 calls, and ends with rank 0. It has no run directory, data or callbacks, and prints nothing.
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
from toyexp_torch.distributed.group import torchrun_store
from toyexp_torch.distributed.rpc import Link, encode
from toyexp_torch.distributed.session import open_rank  # loads PyTorch before the first heartbeat
from toyexp_torch.distributed.supervisor import (
    HEARTBEAT,
    READY,
    REPORT_TIME,
    START_TIMEOUT,
    Rank,
    Supervisor,
    report_missing,
    silence_limit,
    start_local_ranks,
)

KEY = "toyexp/first"  # key of rank 0's address in the store
GREETING_BYTES = 1024  # most bytes of a rank's greeting
ERROR_LENGTH = 500  # most characters of an error message
LOST = ("gloo", "NCCL", "Connection", "store")  # words in torch's errors that another rank has caused


def gather_ranks(count: int) -> Supervisor:
    """Return a supervisor of the other ranks: those of `torchrun`, or `count` - 1 new processes on this machine."""
    ranks = started_ranks()
    if ranks.rank:
        raise UserError(f"rank {ranks.rank}: only rank 0 can start a run; this rank takes part in it")
    return _connect_torchrun_ranks() if ranks.count > 1 else start_local_ranks(count)


@functools.cache
def _connect_torchrun_ranks() -> Supervisor:
    """Publish rank 0's address in torchrun's store and wait until the other ranks connect."""
    count, token = started_ranks().count, secrets.token_hex(16)
    address = os.environ["MASTER_ADDR"]
    with closing(socket.create_server(("", 0), backlog=count)) as server:
        ranks: list[Rank] = []
        until = time.monotonic() + START_TIMEOUT

        def missing() -> str:
            return _describe_ranks({*range(1, count)} - {rank.rank for rank in ranks})

        with report_missing(missing):
            torchrun_store().set(KEY, f"{address} {server.getsockname()[1]} {token}")
            while len(ranks) < count - 1:
                if not select.select([server], [], [], max(until - time.monotonic(), 0))[0]:
                    raise RunFailed(f"{missing()} did not connect within {START_TIMEOUT:.0f} s")
                connection, _ = server.accept()
                with suppress(ValueError, EOFError, OSError):  # not a rank of this run
                    ranks.append(_accept(connection, token, {rank.rank for rank in ranks}, count))
    return Supervisor(sorted(ranks, key=lambda rank: rank.rank), is_persistent=True)


def _describe_ranks(ranks: Iterable[int]) -> str:
    """Describe these ranks, the number of all ranks, and the address at which they connect."""
    numbers, count = sorted(ranks), started_ranks().count
    names = f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))} of {count}"
    return f"{names} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _accept(connection: socket.socket, token: str, connected: set[int], count: int) -> Rank:
    """Return the rank that has just connected. Raise ValueError if it is not a missing rank of this run."""
    connection.settimeout(10)
    key, rank, pid, host = connection.makefile("rb").readline(GREETING_BYTES).decode().split(maxsplit=3)
    if not hmac.compare_digest(key, token) or int(rank) in connected or not 0 < int(rank) < count:
        connection.close()
        raise ValueError(rank)
    _configure(connection)
    connection.sendall(b"+")
    return Rank(int(rank), Link(connection), int(pid), host.strip(), seen=True)


def _configure(connection: socket.socket) -> None:
    """Send data without delay, and notice data that is not acknowledged: a host may disappear silently."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_limit()))


def follow() -> None:
    """Take part in the runs of rank 0, as a rank that `torchrun` has started, until this process ends."""
    rank = started_ranks().rank
    try:
        with report_missing(lambda: _describe_ranks([0])) if rank == 1 else nullcontext():  # one rank prints it
            address, port, token = run_interruptibly(lambda: torchrun_store().get(KEY)).decode().split()
            connection = socket.create_connection((address, int(port)), timeout=START_TIMEOUT)
            connection.sendall(f"{token} {rank} {os.getpid()} {platform.node()}\n".encode())
            accepted = connection.recv(1)
            _configure(connection)
    except (RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise RunFailed(f"rank {rank}: lost the connection to rank 0, or found none ({why})") from None
    if accepted:
        serve(connection.detach())


def serve(file: int) -> None:
    """Take part in what rank 0 runs; `file` is the descriptor of this process's end of the connection."""
    _Server(Link(socket.socket(fileno=file))).serve()


class _Server:
    """Loop of a worker rank: it serves one session after the other until rank 0 is gone, then ends the process.

    The exit code is 0 if no session was open. It exits at once, without waiting for threads, graphs or other ranks.
    """

    def __init__(self, link: Link):
        self._link = link
        self._session: Any = None

    def serve(self) -> NoReturn:
        """Do what rank 0 calls, and send it any error."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end, and may save the run before
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            while True:
                self._do(*self._link.receive())
        except EOFError:
            self._end()
        except Exception as error:
            with suppress(OSError):
                self._link.send(encode(_describe_error(error)))
                time.sleep(2 * REPORT_TIME)  # rank 0 must read the message before it notices the end of the process
        os._exit(1)

    def _do(self, name: str, *arguments: Any) -> None:
        if name == "open":
            self._session = True  # being opened
            self._session = open_rank(*arguments)
            self._link.send(encode(READY))
        elif name != "close":
            getattr(self._session, name)(*arguments)
        elif self._session is not None:
            self._session.do_close()
            self._session = None

    def _beat(self) -> None:
        """Send heartbeats until the connection or the parent is gone (its other children may hold the connection)."""
        parent = os.getppid()
        with suppress(OSError):
            while parent == os.getppid():
                self._link.beat()
                time.sleep(HEARTBEAT)
        self._end()

    def _end(self) -> NoReturn:
        os._exit(0 if self._session is None else 1)


def _describe_error(error: Exception) -> dict[str, str | bool]:
    """Return an error for rank 0: one line, the traceback, and whether another rank probably caused it."""
    words = " ".join(str(error).split())[:ERROR_LENGTH]
    line = words if isinstance(error, ToyexpError) else f"{type(error).__name__}: {words}{error_location(error)}"
    lost = any(word in str(error) for word in LOST)
    return {"failed": line, "trace": traceback.format_exc().rstrip(), "lost": lost}
