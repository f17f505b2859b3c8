"""Connections between the processes (ranks) of a run, and the main loop of a worker rank.

Rank 0 starts the other ranks on its machine, or `torchrun` starts all ranks on several machines. All ranks but rank 0
are workers. A worker executes the calls that rank 0 sends, and ends when rank 0 ends. It has no run directory, data or
callbacks, and prints nothing.
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
LOST = ("gloo", "NCCL", "Connection", "store")  # if one of these is in torch's error, another rank probably caused it


def gather_ranks(count: int) -> Supervisor:
    """Return a supervisor of the other ranks, after connecting to them. Raise UserError if this is not rank 0.

    The other ranks are processes that `torchrun` has started, or else `count` - 1 new processes on this machine.
    """
    ranks = started_ranks()
    if ranks.rank:
        raise UserError(f"rank {ranks.rank}: only rank 0 can start a run; this rank takes part in it")
    return _connect_torchrun_ranks() if ranks.count > 1 else start_local_ranks(count)


@functools.cache
def _connect_torchrun_ranks() -> Supervisor:
    """Publish rank 0's address in torchrun's store, wait until the other ranks connect, and return their supervisor.

    Raise RunFailed if a rank does not connect in time.
    """
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
                with suppress(ValueError, EOFError, OSError):  # the process is not a rank of this run
                    ranks.append(_accept(connection, token, {rank.rank for rank in ranks}, count))
    return Supervisor(sorted(ranks, key=lambda rank: rank.rank), is_persistent=True)


def _describe_ranks(ranks: Iterable[int]) -> str:
    """Return a phrase for messages, such as "ranks 1, 2 of 4 at node1:29500", with the address of torchrun's store."""
    numbers, count = sorted(ranks), started_ranks().count
    names = f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))} of {count}"
    return f"{names} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _accept(connection: socket.socket, token: str, connected: set[int], count: int) -> Rank:
    """Read the greeting of a process that has connected, answer it, and return the process as a Rank.

    Raise ValueError if the greeting does not contain the run's `token`. Also raise it if the greeting's rank number is
    not between 1 and `count` - 1, or is in `connected` already.
    """
    connection.settimeout(10)
    key, rank, pid, host = connection.makefile("rb").readline(GREETING_BYTES).decode().split(maxsplit=3)
    if not hmac.compare_digest(key, token) or int(rank) in connected or not 0 < int(rank) < count:
        connection.close()
        raise ValueError(rank)
    _configure(connection)
    connection.sendall(b"+")
    return Rank(int(rank), Link(connection), int(pid), host.strip(), seen=True)


def _configure(connection: socket.socket) -> None:
    """Set socket options: send messages without delay, and close a connection to a lost host after some time.

    A host may disappear without closing its connections; the kernel then reports data that is not acknowledged.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_limit()))


def follow() -> None:
    """Work as a worker rank that `torchrun` has started: connect to rank 0 and execute its calls.

    The process ends when rank 0 ends. Return only if rank 0 does not accept this rank. Raise RunFailed if rank 0 cannot
    be reached.
    """
    rank = started_ranks().rank
    try:
        with report_missing(lambda: _describe_ranks([0])) if rank == 1 else nullcontext():  # only rank 1 prints it
            address, port, token = run_interruptibly(lambda: torchrun_store().get(KEY)).decode().split()
            connection = socket.create_connection((address, int(port)), timeout=START_TIMEOUT)
            connection.sendall(f"{token} {rank} {os.getpid()} {platform.node()}\n".encode())
            accepted = connection.recv(1)
            _configure(connection)
    except (RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        raise RunFailed(f"rank {rank}: cannot connect to rank 0, or lost the connection ({why})") from None
    if accepted:
        serve(connection.detach())


def serve(file: int) -> None:
    """Execute the calls of rank 0 until rank 0 ends; then end this process.

    `file` is the file descriptor of this process's end of the connection.
    """
    _Server(Link(socket.socket(fileno=file))).serve()


class _Server:
    """Main loop of a worker rank, which serves one session after the other until rank 0 is gone.

    It then ends the process at once, without waiting for threads, graphs or other ranks. The exit code is 1 if a
    session was open, otherwise 0.
    """

    def __init__(self, link: Link):
        self._link = link
        self._session: Any = None

    def serve(self) -> NoReturn:
        """Execute the calls of rank 0. If a call raises an error, send the error to rank 0 and end this process."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # rank 0 handles the signals, and may save the run before it ends
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
        """Send heartbeats until the connection is closed or the parent process has ended; then end this process.

        The parent is checked too, because its other children may keep the connection open.
        """
        parent = os.getppid()
        with suppress(OSError):
            while parent == os.getppid():
                self._link.beat()
                time.sleep(HEARTBEAT)
        self._end()

    def _end(self) -> NoReturn:
        os._exit(0 if self._session is None else 1)


def _describe_error(error: Exception) -> dict[str, str | bool]:
    """Return the message that reports an error to rank 0.

    `failed` is the error in one line, `trace` the traceback, and `lost` is True if another rank probably caused it.
    """
    words = " ".join(str(error).split())[:ERROR_LENGTH]
    line = words if isinstance(error, ToyexpError) else f"{type(error).__name__}: {words}{error_location(error)}"
    lost = any(word in str(error) for word in LOST)
    return {"failed": line, "trace": traceback.format_exc().rstrip(), "lost": lost}
