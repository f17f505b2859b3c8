"""Collectives between the ranks of a run, with torch.distributed: NCCL on NVIDIA GPUs, gloo elsewhere."""

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
from toyexp_torch.distributed.supervisor import START_TIMEOUT

COLLECTIVE_TIMEOUT = timedelta(hours=1)  # long, since a rank may have to compile; a lost rank is noticed sooner
POLL_INTERVAL = timedelta(seconds=0.5)  # interval between checks that the other ranks are alive
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class RankConfig:
    """Settings of one rank: its number, the number of ranks, and the port of the store through which they connect."""

    rank: int
    count: int
    shard: bool  # split the optimiser state over the ranks
    number: int  # number of the session, since a process may have several sessions
    port: int  # port of the store on this machine; 0: use torchrun's store


class Group:
    """Collective operations of the ranks of one session. All ranks must call them in the same order.

    On the CPU, an operation calls `check` while it waits; `check` raises an error if another rank has failed.
    """

    def __init__(self, config: RankConfig, store: dist.Store, device: str, check: Callable[[], None] = lambda: None):
        self._check, self._on_gpu = check, device == "cuda"
        session_store = dist.PrefixStore(f"toyexp/{config.number}", store)
        self._group = (_nccl if self._on_gpu else _gloo)(session_store, config)

    def sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start to replace `tensor` by its sum over all ranks; return a function that waits for the sum."""
        return self._make_wait(self._group.allreduce([tensor], dist.AllreduceOptions()))

    def broadcast(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Start to copy `tensor` from rank `rank` to all others; return a function that waits for the copy."""
        options = dist.BroadcastOptions()
        options.rootRank = rank
        return self._make_wait(self._group.broadcast([tensor], options))

    def abort(self) -> None:
        """Abort the GPU's operations that wait for other ranks; any thread may call this.

        On the CPU nothing is done, because there each operation calls `check` while it waits.
        """
        if self._on_gpu:
            self._group.abort()

    def _make_wait(self, work: Any) -> Callable[[], None]:
        # The GPU's stream waits; the host does not.
        return work.wait if self._on_gpu else lambda: self._until_done(work)

    def _until_done(self, work: Any) -> None:
        while True:
            try:
                work.wait(POLL_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():  # it has failed; otherwise only POLL_INTERVAL is over
                    raise
            self._check()


def _gloo(store: dist.Store, config: RankConfig) -> Any:
    if not config.port:
        return dist.ProcessGroupGloo(store, config.rank, config.count, COLLECTIVE_TIMEOUT)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Without this gloo resolves the machine's own name, which may fail.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCALHOST)]
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupGloo(store, config.rank, config.count, options)


def _nccl(store: dist.Store, config: RankConfig) -> Any:
    # By default, torch ends this process when another rank is lost, so that rank 0 could not save the run.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    return dist.ProcessGroupNCCL(store, config.rank, config.count, options)


def open_store(count: int) -> tuple[dist.Store, int]:
    """Open a torch store for `count` ranks that all run on this machine; return the store and its port."""
    with socket.socket() as listening:
        listening.bind((LOCALHOST, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(LOCALHOST, port, count, True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, port


@functools.cache
def torchrun_store() -> dist.Store:
    """Connect to the torch store of the ranks that `torchrun` has started, and return it.

    The store is torchrun's own if torchrun provides one; otherwise rank 0 opens it. Raise UserError if the host name in
    MASTER_ADDR is unknown or if rank 0 cannot open the store. Raise RunFailed if another rank cannot connect to it.
    """
    ranks, limit = started_ranks(), timedelta(seconds=START_TIMEOUT)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def connect() -> dist.Store:
        return dist.TCPStore(host, port, ranks.count, serves, limit, wait_for_workers=False)

    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={printable(host)}: the name of this host cannot be resolved ({error.strerror}); set the "
            "address of rank 0's machine"
        ) from None
    try:
        return run_interruptibly(connect)  # connecting waits in native code
    except (RuntimeError, OSError) as error:
        why = str(error).strip().partition("\n")[0]
        if serves:
            raise UserError(
                f"MASTER_ADDR={host}, MASTER_PORT={port}: cannot listen there ({why}); set another port"
            ) from None
        raise RunFailed(f"rank {ranks.rank}: cannot connect to rank 0 at {host}:{port} ({why})") from None


def connect_store(config: RankConfig) -> dist.Store:
    """Return a connection to the store of a run: one that rank 0 has opened on this machine, or torchrun's."""
    return dist.TCPStore(LOCALHOST, config.port, config.count, False) if config.port else torchrun_store()


def select_gpu(config: RankConfig) -> None:
    """Make this rank's GPU the current CUDA device."""
    number = config.rank if config.port else int(os.environ.get("LOCAL_RANK", config.rank))
    torch.cuda.set_device(number % torch.cuda.device_count())
