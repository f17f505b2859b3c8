"""Jobs on a cluster of Ray's, one that is there or one that Ray starts on this machine, with their cores and GPUs."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import format_value, pluralise
from toyexp.base.signals import ending_signals, handle_signals
from toyexp.base.terminal import print_line
from toyexp.base.threads import CORES_VARIABLE, available_cores
from toyexp.config.top_level import RAY_ADDRESS
from toyexp.sweeps.directory import Ended, Job, Order
from toyexp.sweeps.launchers.cluster import POLL, Cluster, Lost, OnNode, last_line
from toyexp.sweeps.launchers.gpus import visible
from toyexp.sweeps.launchers.job_process import NOT_STARTED
from toyexp.sweeps.launchers.launcher import Resources

ANSWERS = 5.0  # seconds that the head of a cluster has for taking a connection; Ray alone would try for two minutes
# Of the environment, what a job has wherever it runs; all else is its node's own.
TRAVELS = ("PYTHONPATH", "TOYEXP_")
# For Ray and what it starts: no usage is reported to its makers, unless somebody asked for that, and jobs save when the
# sweep is killed, where Ray would kill them with their worker.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_kill_child_processes_on_worker_exit": "false"}


@dataclass(frozen=True)
class Node:
    """A machine of a cluster."""

    cores: float
    gpus: float

    def fits(self, cores: float, gpus: float) -> int:
        """How many jobs of so many there is room for."""
        of_gpus = self.gpus // gpus if gpus else math.inf
        if 0 < gpus < 1:  # a part is of one GPU
            of_gpus = int(self.gpus) * int(1 / gpus + 1e-9)
        return int(min(self.cores // cores, of_gpus))


def share(nodes: Sequence[Node], jobs: int, least: int, gpus: float, cpus: int | None) -> tuple[int, int]:
    """Jobs at once, and cores for each: all the cores there are where so many jobs, 0: as many as fit, run at once.

    A job has at least `least` cores, or `cpus` where that is said, and so many GPUs, which may be a part of one.
    """

    def fits(cores: int) -> int:
        return sum(node.fits(cores, gpus) for node in nodes)

    if cpus:
        return jobs or fits(cpus), cpus
    limit = jobs or fits(least)
    largest = int(max((node.cores for node in nodes), default=0))
    return limit, next((cores for cores in range(largest, least, -1) if fits(cores) >= limit > 0), least)


class OnRay(Cluster):
    """Jobs as tasks, which ask for their cores and GPUs; in each there waits a worker for the process of a job."""

    name = package = "ray"
    shares_gpus_by = "; a job of ray takes a part of one with sweep.ray.gpus=0.25"
    _cores: int
    _gpus: float
    _nodes: Sequence[Node] = ()  # of the cluster, once it was joined

    def resources(self, jobs: Sequence[Job]) -> Resources:
        self.retries = self.settings.ray.retries
        if self.settings.ray.cluster():
            return self.demand(jobs, 0)
        return self.on_this_machine(self.demand(jobs, len(visible())))

    def connect(self) -> None:
        """Connect to a cluster, or have Ray start one here.

        Raises UserError for a cluster that is not there, or cannot take any job.
        """
        import ray

        settings, own = self.settings.ray, self.share
        os.environ.update({**SETTINGS, **os.environ})
        address = settings.cluster()
        _join(address, max(available_cores(), own.jobs * own.cores))
        self._nodes = _look()
        self._gpus = gpus = settings.gpus or own.gpus_of(int(max((node.gpus for node in self._nodes), default=0)))
        limit, self._cores = share(self._nodes, self.settings.jobs, own.processes, gpus, settings.cpus)
        each = pluralise(self._cores, "core") + (
            f" and {format_value(gpus)} GPU{'s' if gpus > 1 else ''}" if gpus else ""
        )
        if not limit:
            there = (
                "; ".join(sorted({f"{format_value(n.cores)} cores, {format_value(n.gpus)} GPUs" for n in self._nodes}))
                or "none"
            )
            given = f"sweep.ray.address={address}" if address else "sweep.launcher=ray"
            raise UserError(
                f"{given}: no node can take a job of {each} (nodes of {there}); "
                "a cluster that grows when jobs wait is told how many may: sweep.jobs=8"
            )
        self.share = own._replace(jobs=limit)
        where = (
            f"{address}, {pluralise(len(self._nodes), 'node')}" if address else "a cluster of its own on this machine"
        )
        print_line(f"ray     {where}: {pluralise(limit, 'job')} at once, {each} each")
        self._task = ray.remote(num_cpus=self._cores, num_gpus=gpus, max_retries=0, max_calls=0)(_at_node)

    def limit(self) -> int:
        if self.settings.jobs or not self._nodes:
            return self.share.jobs
        return sum(node.fits(self._cores, self._gpus) for node in _look())

    def work(self, order: Order) -> OnNode:
        ours = {k: v for k, v in os.environ.items() if k.startswith(TRAVELS) and k != CORES_VARIABLE}
        return OnNode(replace(order, cores=self._cores, environment={**ours, **order.environment}))

    def submit(self, works: Sequence[OnNode]) -> Sequence[tuple[str, Any]]:
        return [("", self._task.remote(work, str(Path.cwd()))) for work in works]

    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        import ray

        over: Sequence[Any] = ray.wait(list(handles), num_returns=1, timeout=POLL)[0] if handles else []
        return over

    def result(self, handle: Any) -> Ended | Lost:
        import ray
        from ray import exceptions

        try:
            ended: Ended = ray.get(handle)
        except exceptions.TaskCancelledError:
            return Ended(128 + signal.SIGTERM, "interrupted")
        except exceptions.RayTaskError as error:  # what keeps a task from its start: no toyexp there, another disk
            return Ended(NOT_STARTED, f"ray: {printable(last_line(error), 300)}")
        except exceptions.RayError as error:
            return Lost(GONE.get(type(error).__name__, "its node is gone"))
        return ended

    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Tasks that wait leave; workers hear of it as of Ctrl-C, and hand it on to the process of their job."""
        import ray

        for handle in handles:
            ray.cancel(handle, force=False)

    def close(self) -> None:
        import ray

        if self._nodes:
            ray.shutdown()


GONE = {"WorkerCrashedError": "its worker was killed", "OutOfMemoryError": "its node ran out of memory"}


def _at_node(work: OnNode, cwd: str) -> Ended:
    """What a task runs: signals that end go on to the job, those of ray.cancel too."""
    try:
        os.chdir(cwd)
    except OSError as error:
        return Ended(NOT_STARTED, f"{cwd}: {error.strerror} on {socket.gethostname()}; all nodes have to see this disk")
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, ending_signals()
    )  # a worker blocks SIGINT, which the job would take over
    with work.stop.handling():
        return work()


def _look() -> Sequence[Node]:
    """Return the nodes as they are."""
    import ray

    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(one.get("CPU", 0.0), one.get("GPU", 0.0)) for one in found]


def _join(address: str | None, cores: int) -> None:
    """Join a cluster, or have Ray start one here with so many `cores`; UserError for one that is not there."""
    import ray

    given = "sweep.launcher=ray" if address is None else f"sweep.ray.address={address}"
    if address and os.environ.get(RAY_ADDRESS) == address:
        given = f"{RAY_ADDRESS}={address}"
    if address and address != "auto":
        _require_answer(address, given)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    ray._private.worker._worker_logs_enabled = False  # it would print what becomes of a worker, which we tell
    own: dict[str, Any] = {} if address else {"num_cpus": cores, "include_dashboard": False}
    ours: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with handle_signals(ours):  # Ray would take them over
            ray.init(address or "local", **own, log_to_driver=False, configure_logging=False)
    except (Exception, SystemExit) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise UserError(f"{given}: no cluster runs on this machine; start one: ray start --head") from None
        what = "cannot be joined" if address else "no cluster can be started here"
        raise UserError(f"{given}: {what} ({printable(last_line(error), 300)})") from None


def _require_answer(address: str, given: str) -> None:
    """Raise UserError unless something answers at an address."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        where = "HOST:PORT of a cluster's head node, such as 10.0.0.1:6379; a port is from 1 to 65535"
        raise UserError(f"{printable(given)}: takes auto, or {where}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS).close()
    except OSError as error:
        why = printable(str(error), 100)
        raise UserError(f"{given}: nothing answers there ({why}); start one: ray start --head") from None
