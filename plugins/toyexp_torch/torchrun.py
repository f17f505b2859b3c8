"""How the ranks of a run come together: started by the first one on its machine, or on several by `torchrun`."""

from __future__ import annotations

import functools
import hmac
import os
import platform
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import closing, nullcontext, suppress

from toyexp import RunFailed, UserError
from toyexp.base import started_ranks
from toyexp_torch.follower import Follower
from toyexp_torch.group import torchruns_store
from toyexp_torch.party import START, Party, Peer, patience, start_here, telling
from toyexp_torch.wire import Link

KEY = "toyexp/first"  # under which the first rank says where it can be reached
HELLO = 1024  # bytes at most of what a rank says first


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
