"""Jobs on Slurm, or as if, by submitit: as an array, and those whose time is up saved and queued again."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toyexp.base.errors import UserError
from toyexp.base.writing import make_directory
from toyexp.config.top_level import Submitit
from toyexp.sweeps.directory import Ended, Job, Order
from toyexp.sweeps.launchers.cluster import MOST, POLL, Cluster, Lost, OnNode, last_line
from toyexp.sweeps.launchers.job_process import PATIENCE
from toyexp.sweeps.launchers.launcher import Resources

SAVING = 60.0  # seconds that a run has for saving when its time is up; Slurm is asked for 90


class OnSubmitit(Cluster):
    """Jobs that submitit hands over."""

    name = package = "submitit"
    takes_all = "are in the queue"

    def resources(self, jobs: Sequence[Job]) -> Resources:
        cluster, share = self.settings.submitit.cluster, self.demand(jobs, 0)
        if cluster == "slurm" or (cluster is None and shutil.which("srun")):
            return share
        return self.on_this_machine(share)

    def connect(self) -> None:
        executor(Path(tempfile.gettempdir()), self.settings.submitit, self.share.gpus)

    def begin(self, folder: Path) -> None:
        """Its files go to a new folder below the sweep's: submitit unpickles results, and a stranger's is not one."""
        own = Path(
            tempfile.mkdtemp(dir=make_directory(folder / "submitit"), prefix=f"{time.strftime('%Y-%m-%d_%H%M%S')}-")
        )
        self._executor = executor(own, self.settings.submitit, self.share.gpus)
        self._stop_file = own / "stop"

    def work(self, order: Order) -> OnNode:
        return _Requeued(order, self._stop_file)

    def submit(self, works: Sequence[OnNode]) -> Sequence[tuple[str, Any]]:
        with self._executor.batch():
            jobs = [self._executor.submit(work) for work in works]
        return [(f" as {job.job_id}", job) for job in jobs]

    def ended(self, handles: Sequence[Any]) -> Sequence[Any]:
        over = [handle for handle in handles if handle.done()]
        time.sleep(0 if over else POLL)
        return over

    def result(self, handle: Any) -> Ended | Lost:
        """What the work returned; a job that was cancelled, or whose node went away for good, returned nothing."""
        try:
            ended: Ended = handle.result()
        except Exception as error:  # submitit's own, with the end of the job's log
            return Lost(last_line(error))
        return ended

    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Those that run see a file; those that wait are cancelled, and at last all."""
        self._stop_file.touch()
        for handle in handles:
            if times >= PATIENCE or handle.state == "PENDING":
                handle.cancel()


class _Requeued(OnNode):
    def checkpoint(self) -> Any:
        """What submitit calls when the time is up: the run saves, and goes on when there is a node again."""
        from submitit.helpers import DelayedSubmission

        self.stop.end()
        self.stop.wait(SAVING)
        return DelayedSubmission(_Requeued(self.order, self._stop_file))

    __submitit_checkpoint__ = checkpoint  # its name from the next submitit on


def executor(folder: Path, settings: Submitit, gpus: int) -> Any:
    """What jobs are submitted by; UserError for a cluster that is not there.

    Each asks for so many `gpus` where the settings leave that open.
    """
    import submitit

    try:
        made = submitit.AutoExecutor(folder, cluster=settings.cluster, slurm_max_num_timeout=settings.requeues)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"sweep.submitit.cluster={settings.cluster}: {error}") from None
    made.update_parameters(
        name="toyexp", timeout_min=settings.timeout_min, gpus_per_node=settings.gpus or gpus or None,
        cpus_per_task=settings.cpus, mem_gb=settings.mem_gb, slurm_partition=settings.partition,
        slurm_array_parallelism=MOST,
    )  # fmt: skip
    return made
