"""Collectives between the ranks of a run, by torch.distributed: NCCL on NVIDIA GPUs, gloo elsewhere."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toyexp import RunFailed, UserError, printable
from toyexp.base import run_interruptibly, started_ranks
from toyexp_torch.distributed.supervisor import START

LIMIT = timedelta(hours=1)  # until a collective fails: a rank may have to compile; one that is gone is noticed at once
SLICE = timedelta(seconds=0.5)  # between checks whether the other ranks are alive
HERE = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """The number of a rank, and where all of them meet."""

    rank: int
    count: int
    shard: bool  # whether each keeps the optimiser's state of its own part alone
    number: int  # of the session, in a process that has several
    port: int  # of the store on this machine; 0: torchrun's store


class Group:
    """Collectives, which all ranks call in the same order."""

    def __init__(self, place: Place, store: dist.Store, device: str, check: Callable[[], None] = lambda: None):
        self._check, self._on_gpu = check, device == "cuda"
        own = dist.PrefixStore(f"toyexp/{place.number}", store)
        self._group = (_nccl if self._on_gpu else _gloo)(own, place)

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to replace `tensor` by the sum over all ranks; return a function that waits for it."""
        return self._waiting(self._group.allreduce([tensor], dist.AllreduceOptions()))

    def broadcast(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Begin to replace the other ranks' values by that rank's; return a function that waits for it."""
        options = dist.BroadcastOptions()
        options.rootRank = rank
        return self._waiting(self._group.broadcast([tensor], options))

    def abort(self) -> None:
        """End what waits for other ranks, from any thread. On the CPU a wait checks by itself."""
        if self._on_gpu:
            self._group.abort()

    def _waiting(self, work: Any) -> Callable[[], None]:
        # The GPU's stream waits; the host does not.
        return work.wait if self._on_gpu else lambda: self._until_done(work)

    def _until_done(self, work: Any) -> None:
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed():  # and has failed
                    raise
            self._check()


def _gloo(store: dist.Store, place: Place) -> Any:
    if not place.port:
        return dist.ProcessGroupGloo(store, place.rank, place.count, LIMIT)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HERE)]  # whatever the machine's name resolves to
    options._timeout = LIMIT
    return dist.ProcessGroupGloo(store, place.rank, place.count, options)


def _nccl(store: dist.Store, place: Place) -> Any:
    # Otherwise a thread of torch's ends this process when another rank is gone, before the run is saved.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LIMIT
    return dist.ProcessGroupNCCL(store, place.rank, place.count, options)


def open_store(count: int) -> tuple[dist.Store, int]:
    """Open a store that only this machine reaches; return it and its port."""
    with socket.socket() as listening:
        listening.bind((HERE, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(HERE, port, count, True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, port


@functools.cache
def torchruns_store() -> dist.Store:
    """Return the store of the ranks that `torchrun` has started: its own, or else one that rank 0 opens.

    Raises UserError for an unknown host and on rank 0 if it cannot be opened, RunFailed on a rank that cannot reach it.
    """
    ranks, limit = started_ranks(), timedelta(seconds=START)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def found() -> dist.Store:
        return dist.TCPStore(host, port, ranks.count, serves, limit, wait_for_workers=False)

    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={printable(host)}: no host of that name is known here ({error.strerror})"
        ) from None
    try:
        return run_interruptibly(found)  # it waits in native code
    except (RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        if serves:
            raise UserError(f"MASTER_ADDR={host}, MASTER_PORT={port}: cannot be opened here ({why})") from None
        raise RunFailed(f"rank {ranks.rank}: nobody answers at {host}:{port} ({why})") from None


def meet(place: Place) -> dist.Store:
    """Return the store of a rank that rank 0 has started, or else torchrun's."""
    return dist.TCPStore(HERE, place.port, place.count, False) if place.port else torchruns_store()


def take_gpu(place: Place) -> None:
    """Make the rank's GPU the one that `cuda` means."""
    number = place.rank if place.port else int(os.environ.get("LOCAL_RANK", place.rank))
    torch.cuda.set_device(number % torch.cuda.device_count())
