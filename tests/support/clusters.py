"""Helpers for tests of jobs on clusters: sweeps with failing jobs, their state, and a local Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MODULES = "plugins=[toyexp.testing.null,mishap]"
QUICK = [MODULES, "engine=noop", "data=random", "model.n_layers=1", "model.d_model=16", "model.context=16",
         "checkpoint_every=5", "eval_every=0", "callbacks=[events,mishap]", "hydra.sweep.dir=s"]  # fmt: skip

# A Ray head without cores and two nodes with one core each; a number on standard input removes that node.
NODES = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
print(cluster.address, *(node.raylet_socket_name for node in nodes), flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes[int(line)], allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `toyexp WORDS` as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "toyexp", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
    )  # fmt: skip


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until the condition holds. Raise AssertionError after 120 s or if the process ends."""
    deadline = time.monotonic() + 120
    while not condition():
        if process and (process.poll() is not None or time.monotonic() > deadline):
            process.kill()
            raise AssertionError(process.communicate())
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sweep_jobs() -> list[dict[str, object]]:
    """Return the jobs in `s/sweep.json`."""
    jobs: list[dict[str, object]] = json.loads(Path("s/sweep.json").read_text())["jobs"]
    return jobs


def status_letters() -> str:
    """Return the first letter of each job's status: c, f, k, i, w."""
    return "".join(str(job["status"])[0] for job in sweep_jobs())


def run_dir(number: int) -> Path:
    """Return the run directory of a job."""
    return Path("s") / f"{number}-scratch-llama"


def has_checkpoint(number: int) -> bool:
    """Return True if a job has saved a checkpoint."""
    return any(run_dir(number).glob("checkpoints/step-*"))


def recorded_steps(number: int) -> list[int]:
    """Return the steps in a run's events.jsonl."""
    lines = map(json.loads, (run_dir(number) / "events.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "step"]


def writer_pid(number: int) -> int:
    """Return the process that holds the lock of a run."""
    return int((run_dir(number) / "run.lock").read_text().split()[0])


def parent_pid(process: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def kill(process: int) -> None:
    """Send SIGKILL to a process."""
    os.kill(process, signal.SIGKILL)
