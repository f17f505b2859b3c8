"""Jobs on a cluster of Ray's, one that is there or one of our own on this machine, with their cores and GPUs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import counted, typed
from toyexp.base.signals import ending, handled
from toyexp.base.terminal import say
from toyexp.base.threads import CORES
from toyexp.config.top_level import RAY_ADDRESS, Sweep
from toyexp.sweeps.directory import Ended, Job, Order
from toyexp.sweeps.job_configs import JobConfigs
from toyexp.sweeps.launchers.cluster import POLL, Cluster, Lost, OnNode, last_line
from toyexp.sweeps.launchers.gpus import visible
from toyexp.sweeps.launchers.job_process import NOT_STARTED
from toyexp.sweeps.launchers.launcher import Resources

ANSWERS = 5.0  # seconds that the head of a cluster has for taking a connection; Ray alone would try for two minutes
LOOK = 5.0  # seconds between looks at the nodes of a cluster, which may grow
STORE = 100 << 20  # bytes of memory for what tasks hand over, of which ours is next to nothing
# Of the environment, what a job has wherever it runs; all else is its node's own.
TRAVELS = ("PYTHONPATH", "TOYEXP_")
# Nothing of what we do is sent to its makers, unless somebody asked for that.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
# Of a cluster of our own, beside a token that is not written into the home: jobs are no less urgent than others, and
# save when the sweep is killed, where Ray would kill them with their worker.
LOCAL = {"RAY_worker_niceness": "0", "RAY_kill_child_processes_on_worker_exit": "false"}


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

    def __init__(self, settings: Sweep, jobs: Sequence[Job], total: int, configs: JobConfigs):
        """See Launcher."""
        super().__init__(settings, jobs, total, configs)
        self.retries = settings.ray.retries
        self._open = contextlib.ExitStack()
        self._nodes: Sequence[Node] = []
        self._looked = -math.inf

    def resources(self, jobs: Sequence[Job]) -> Resources:
        """See Launcher."""
        if self.settings.ray.cluster():
            return self.demand(jobs, 0)
        return self.on_this_machine(self.demand(jobs, len(visible())))

    def connect(self) -> None:
        """Connect to a cluster, or start one in which jobs have their share of this machine.

        Raises UserError for a cluster that is not there, or cannot take any job.
        """
        settings, own = self.settings, self.share
        address = settings.ray.cluster()
        try:
            ours = QUIET if address else {**QUIET, **LOCAL, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            for name in ours.keys() - os.environ.keys():  # for Ray and what it starts
                os.environ[name] = ours[name]
                self._open.callback(os.environ.pop, name, None)
            names = visible()
            if address:
                _connect(address, self._open)
            else:
                limit, self._cores = own.jobs, settings.ray.cpus or own.cores
                _start(limit * self._cores, len(names), self._open)
            nodes = self._look()
            most = int(max((node.gpus for node in nodes), default=0))
            gpus = settings.ray.gpus or own.gpus_of(most)
            if address:
                limit, self._cores = share(nodes, settings.jobs, own.processes, gpus, settings.ray.cpus)
                self._require_room(address, gpus)
            else:
                shared = gpus == 1 and limit > most > 0
                gpus = 1 / math.ceil(limit / most) if shared else gpus if gpus <= most else 0
            self._gpus, self.share = gpus, own._replace(jobs=limit)
            each = counted(self._cores, "core") + (f" and {typed(gpus)} GPU{'s' if gpus > 1 else ''}" if gpus else "")
            where = f"{address}, {counted(len(nodes), 'node')}" if address else "a cluster of its own on this machine"
            say(f"ray     {where}: {counted(self.limit(), 'job')} at once, {each} each")
        except BaseException:
            self.close()
            raise

    def _require_room(self, address: str, gpus: float) -> None:
        """Raises UserError where no node can take a job; a cluster that grows is told how many are wanted."""
        if self.settings.jobs or any(node.fits(self._cores, gpus) for node in self._nodes):
            return
        wants = counted(self._cores, "core") + (f" and {typed(gpus)} GPUs" if gpus else "")
        there = "; ".join(sorted({f"{typed(n.cores)} cores, {typed(n.gpus)} GPUs" for n in self._nodes})) or "none"
        raise UserError(
            f"sweep.ray.address={address}: no node can take a job of {wants} (nodes of {there}); "
            "a cluster that grows when jobs wait is told how many may: sweep.jobs=8"
        )

    def begin(self, folder: Path) -> None:
        """Names what a worker runs."""
        import ray

        self._task = ray.remote(num_cpus=self._cores, num_gpus=self._gpus, max_retries=0, max_calls=0)(_at_node)

    def _look(self) -> Sequence[Node]:
        """The nodes as they are, or were a moment ago."""
        if time.monotonic() - self._looked > LOOK:
            import ray

            found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._nodes = [Node(one.get("CPU", 0.0), one.get("GPU", 0.0)) for one in found]
            self._looked = time.monotonic()
        return self._nodes

    def limit(self) -> int:
        """As many as were asked for, or as there is room for now."""
        if self.settings.jobs or not self.settings.ray.cluster() or not self._nodes:
            return self.share.jobs
        return sum(node.fits(self._cores, self._gpus) for node in self._look())

    def work(self, order: Order) -> OnNode:
        """With its cores, and what of our environment goes with it."""
        ours = {k: v for k, v in os.environ.items() if k.startswith(TRAVELS) and k != CORES}
        return OnNode(replace(order, cores=self._cores, environment={**ours, **order.environment}))

    def submit(self, works: Sequence[OnNode]) -> Sequence[tuple[str, Any]]:
        """A task each."""
        return [("", self._task.remote(work, str(Path.cwd()))) for work in works]

    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        """Those whose task is over."""
        import ray

        over: Sequence[Any] = ray.wait(list(handles), num_returns=1, timeout=POLL)[0] if handles else []
        return over

    def result(self, handle: Any) -> Ended | Lost:
        """What the task returned; one whose worker or node is gone returned nothing."""
        import ray
        from ray import exceptions

        gone = (
            exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.LocalRayletDiedError,
            exceptions.OutOfMemoryError, exceptions.ObjectLostError, exceptions.RaySystemError,
        )  # fmt: skip
        try:
            ended: Ended = ray.get(handle)
        except exceptions.TaskCancelledError:
            return Ended(128 + signal.SIGTERM, "interrupted")
        except gone as error:
            return Lost(GONE.get(type(error).__name__, "its node is gone"))
        except Exception as error:  # what keeps a task from its start: no toyexp there, another disk
            return Ended(NOT_STARTED, f"ray: {printable(last_line(error), 300)}")
        return ended

    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Tasks that wait leave; workers hear of it as of Ctrl-C, and hand it on to the process of their job."""
        import ray

        for handle in handles:
            ray.cancel(handle, force=False)

    def close(self) -> None:
        """Lets go of the cluster, and ends one of our own."""
        self._open.close()


GONE = {"WorkerCrashedError": "its worker was killed", "OutOfMemoryError": "its node ran out of memory"}


def _at_node(work: OnNode, cwd: str) -> Ended:
    """What a task runs: signals that end go on to the job, those of ray.cancel too."""
    try:
        os.chdir(cwd)
    except OSError as error:
        return Ended(NOT_STARTED, f"{cwd}: {error.strerror} on {socket.gethostname()}; all nodes have to see this disk")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending())  # a worker blocks SIGINT, which the job would take over
    with work.stop.handling():
        return work()


def _start(cores: int, gpus: int, stack: contextlib.ExitStack) -> None:
    """Start a cluster on this machine. It writes where any Ray does: RAY_TMPDIR, by default /tmp/ray."""
    import ray

    stack.callback(ray.shutdown)
    try:
        _init(address="local", num_cpus=cores, num_gpus=gpus, include_dashboard=False, object_store_memory=STORE)
    except (Exception, SystemExit) as error:
        why = printable(last_line(error), 300)
        raise UserError(f"sweep.launcher=ray: no cluster can be started here ({why})") from None


def _connect(address: str, stack: contextlib.ExitStack) -> None:
    """Joins a cluster that is there; UserError for one that is not."""
    import ray

    given = f"sweep.ray.address={address}"
    if os.environ.get(RAY_ADDRESS) == address:
        given = f"{RAY_ADDRESS}={address}"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            where = "HOST:PORT of a cluster's head node, such as 10.0.0.1:6379; a port is from 1 to 65535"
            raise UserError(f"{printable(given)}: takes auto, or {where}")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWERS).close()
        except OSError as error:
            why = printable(str(error), 100)
            raise UserError(f"{given}: nothing answers there ({why}); start one: ray start --head") from None
    stack.callback(ray.shutdown)
    try:
        _init(address=address)
    except (Exception, SystemExit) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise UserError(f"{given}: no cluster runs on this machine; start one: ray start --head") from None
        raise UserError(f"{given}: cannot be joined ({printable(last_line(error), 300)})") from None


def _init(**settings: Any) -> None:
    """ray.init, with its words kept off the terminal and its hands off SIGTERM."""
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    ray._private.worker._worker_logs_enabled = False  # it would print what becomes of a worker, which we tell
    ours: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with handled(ours):
        ray.init(**settings, log_to_driver=False, configure_logging=False)
