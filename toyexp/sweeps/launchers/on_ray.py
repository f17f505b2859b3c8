"""Run jobs on a Ray cluster: a running one, or one that Ray starts on this machine."""

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
from toyexp.sweeps.directory import Job, JobExit, LaunchSpec
from toyexp.sweeps.launchers.cluster import POLL, Cluster, LostJob, NodeJob, last_line
from toyexp.sweeps.launchers.gpus import visible_gpus
from toyexp.sweeps.launchers.job_process import NOT_STARTED
from toyexp.sweeps.launchers.launcher import Resources

CONNECT_TIMEOUT = 5.0  # seconds to connect to the head node; Ray itself would try for two minutes
# Environment variables that begin with these texts are passed on to jobs. Other variables are those of the node.
FORWARDED_VARIABLES = ("PYTHONPATH", "TOYEXP_")
# Defaults for Ray: send no usage statistics, and do not kill a job's process when its worker is killed: the job saves
# a checkpoint first.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_kill_child_processes_on_worker_exit": "false"}


@dataclass(frozen=True)
class Node:
    """A machine of a cluster."""

    cores: float
    gpus: float

    def fits(self, cores: float, gpus: float) -> int:
        """Return how many jobs can run on this node at once if each needs `cores` cores and `gpus` GPUs."""
        of_gpus = self.gpus // gpus if gpus else math.inf
        if 0 < gpus < 1:  # a fraction refers to one GPU
            of_gpus = int(self.gpus) * int(1 / gpus + 1e-9)
        return int(min(self.cores // cores, of_gpus))


def divide_cores(nodes: Sequence[Node], jobs: int, least: int, gpus: float, cpus: int | None) -> tuple[int, int]:
    """Return how many jobs run at once, and the number of cores of each.

    `jobs` is the wanted number of jobs; 0 means as many as fit. Each job gets `gpus` GPUs (or a fraction of one) and at
    least `least` cores. A job gets more than `least` cores if that does not reduce the number of jobs. If `cpus` is
    given, each job gets exactly that number of cores.
    """

    def fits(cores: int) -> int:
        return sum(node.fits(cores, gpus) for node in nodes)

    if cpus:
        return jobs or fits(cpus), cpus
    limit = jobs or fits(least)
    largest = int(max((node.cores for node in nodes), default=0))
    return limit, next((cores for cores in range(largest, least, -1) if fits(cores) >= limit > 0), least)


class OnRay(Cluster):
    """Launcher that submits jobs as Ray tasks. In each task a worker starts and watches the job's process."""

    name = "ray"
    shares_gpus_by = "; with sweep.launcher=ray set a fraction: sweep.ray.gpus=0.25"
    _cores: int
    _gpus: float
    _nodes: Sequence[Node] = ()  # nodes of the cluster; empty until it is joined

    def resources(self, jobs: Sequence[Job]) -> Resources:
        self.retries = self.settings.ray.retries
        if self.settings.ray.cluster():
            return self.requested_resources(jobs, 0)
        return self.limit_to_machine(self.requested_resources(jobs, len(visible_gpus())))

    def connect(self) -> None:
        """Join a cluster, or let Ray start one here.

        Raise UserError if there is no cluster, or if none of its nodes can run a job.
        """
        import ray

        settings, resources = self.settings.ray, self.share
        os.environ.update({**SETTINGS, **os.environ})
        address = settings.cluster()
        _join(address, max(available_cores(), resources.jobs * resources.cores))
        self._nodes = _read_nodes()
        node_gpus = int(max((node.gpus for node in self._nodes), default=0))
        self._gpus = gpus = settings.gpus or self.requested_resources(self.samples, node_gpus).gpus
        limit, self._cores = divide_cores(self._nodes, self.settings.jobs, resources.processes, gpus, settings.cpus)
        job_needs = pluralise(self._cores, "core") + (
            f" and {format_value(gpus)} GPU{'s' if gpus > 1 else ''}" if gpus else ""
        )
        if not limit:
            sizes = sorted({f"{format_value(n.cores)} cores, {format_value(n.gpus)} GPUs" for n in self._nodes})
            node_texts = "; ".join(sizes) or "none"
            setting = f"sweep.ray.address={address}" if address else "sweep.launcher=ray"
            raise UserError(
                f"{setting}: no node can run a job of {job_needs} (nodes: {node_texts}); "
                "for a cluster with autoscaling, set the number of parallel jobs: sweep.jobs=8"
            )
        self.share = resources._replace(jobs=limit)
        count = pluralise(len(self._nodes), "node")
        cluster_name = f"{address}, {count}" if address else "a new cluster on this machine"
        print_line(f"ray     {cluster_name}: {pluralise(limit, 'job')} at once, {job_needs} each")
        self._task = ray.remote(num_cpus=self._cores, num_gpus=gpus, max_retries=0, max_calls=0)(_run_on_node)

    def limit(self) -> int:
        if self.settings.jobs or not self._nodes:
            return self.share.jobs
        return sum(node.fits(self._cores, self._gpus) for node in _read_nodes())

    def submit(self, specs: Sequence[LaunchSpec]) -> Sequence[tuple[str, Any]]:
        forwarded = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED_VARIABLES) and k != CORES_VARIABLE}
        works = [
            NodeJob(replace(spec, cores=self._cores, environment={**forwarded, **spec.environment})) for spec in specs
        ]
        return [("", self._task.remote(work, str(Path.cwd()))) for work in works]

    def poll(self, handles: Sequence[Any]) -> Sequence[Any]:
        import ray

        finished: Sequence[Any] = ray.wait(list(handles), num_returns=1, timeout=POLL)[0] if handles else []
        return finished

    def result(self, handle: Any) -> JobExit | LostJob:
        import ray
        from ray import exceptions

        try:
            ended: JobExit = ray.get(handle)
        except exceptions.TaskCancelledError:
            return JobExit(128 + signal.SIGTERM, "interrupted")
        except exceptions.RayTaskError as error:  # the task could not start: no toyexp on the node, another file system
            return JobExit(NOT_STARTED, f"ray: {printable(last_line(error), 300)}")
        except exceptions.RayError as error:
            return LostJob(LOSS_REASONS.get(type(error).__name__, "its node is gone"))
        return ended

    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Cancel all tasks. If a task runs, Ray sends SIGINT to its worker process, which forwards it to the job."""
        import ray

        for handle in handles:
            ray.cancel(handle, force=False)

    def close(self) -> None:
        import ray

        if self._nodes:
            ray.shutdown()


LOSS_REASONS = {"WorkerCrashedError": "its worker was killed", "OutOfMemoryError": "its node ran out of memory"}


def _run_on_node(work: NodeJob, cwd: str) -> JobExit:
    """Run a job in a Ray task, in the directory `cwd`, and return its exit.

    Stop signals, including those that ray.cancel sends, are forwarded to the job.
    """
    try:
        os.chdir(cwd)
    except OSError as error:
        return JobExit(
            NOT_STARTED, f"{cwd}: {error.strerror} on {socket.gethostname()}; all nodes must share this file system"
        )
    # A worker blocks SIGINT, and the job would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
    with work.stop.handle_signals():
        return work()


def _read_nodes() -> Sequence[Node]:
    import ray

    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(node_resources.get("CPU", 0.0), node_resources.get("GPU", 0.0)) for node_resources in resources]


def _join(address: str | None, cores: int) -> None:
    """Join the Ray cluster at `address`; if that is None, let Ray start one here with `cores` cores.

    Raise UserError if that fails.
    """
    import ray

    setting = "sweep.launcher=ray" if address is None else f"sweep.ray.address={address}"
    if address and os.environ.get(RAY_ADDRESS) == address:
        setting = f"{RAY_ADDRESS}={address}"
    if address and address != "auto":
        _require_answer(address, setting)
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    ray._private.worker._worker_logs_enabled = False  # the sweep reports workers itself
    local_options: dict[str, Any] = {} if address else {"num_cpus": cores, "include_dashboard": False}
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with handle_signals(handlers):  # Ray would replace these handlers
            ray.init(address or "local", **local_options, log_to_driver=False, configure_logging=False)
    except (Exception, SystemExit) as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise UserError(f"{setting}: no cluster runs on this machine; start one: ray start --head") from None
        problem = "cannot be joined" if address else "no cluster can be started here"
        raise UserError(f"{setting}: {problem} ({printable(last_line(error), 300)})") from None


def _require_answer(address: str, setting: str) -> None:
    """Raise UserError if `address` is malformed, or if no server answers at this address.

    The error message quotes `setting`, the setting that contains the address.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        expected = "HOST:PORT of a cluster's head node, such as 10.0.0.1:6379; ports are 1 to 65535"
        raise UserError(f"{printable(setting)}: must be auto, or {expected}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except OSError as error:
        why = printable(str(error), 100)
        raise UserError(
            f"{setting}: no Ray cluster answers at this address ({why}); start one: ray start --head"
        ) from None
