"""Run jobs on Slurm (or locally) with submitit, as a job array. At the time limit jobs save and are queued again."""

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
from toyexp.sweeps.directory import Job, JobExit, LaunchSpec
from toyexp.sweeps.launchers.cluster import MAX_BATCH, POLL, Cluster, LostJob, NodeJob, last_line
from toyexp.sweeps.launchers.job_process import PATIENCE
from toyexp.sweeps.launchers.launcher import Resources

SAVE_TIMEOUT = 60.0  # seconds to save at the time limit; Slurm signals 90 s before it


class OnSubmitit(Cluster):
    """Launcher that submits jobs with submitit."""

    name = "submitit"
    takes_all = "are in the queue"

    def resources(self, jobs: Sequence[Job]) -> Resources:
        cluster, share = self.settings.submitit.cluster, self.requested_resources(jobs, 0)
        if cluster == "slurm" or (cluster is None and shutil.which("srun")):
            return share
        return self.limit_to_machine(share)

    def connect(self) -> None:
        make_executor(Path(tempfile.gettempdir()), self.settings.submitit, self.share.gpus)

    def begin(self, folder: Path) -> None:
        """Create a new directory for submitit's files.

        submitit unpickles results, and unpickling can run code. The directory must therefore hold no files from
        elsewhere.
        """
        prefix = f"{time.strftime('%Y-%m-%d_%H%M%S')}-"
        directory = Path(tempfile.mkdtemp(dir=make_directory(folder / "submitit"), prefix=prefix))
        self._executor = make_executor(directory, self.settings.submitit, self.share.gpus)
        self._stop_file = directory / "stop"

    def submit(self, specs: Sequence[LaunchSpec]) -> Sequence[tuple[str, Any]]:
        with self._executor.batch():
            jobs = [self._executor.submit(_Requeued(spec, self._stop_file)) for spec in specs]
        return [(f" as {job.job_id}", job) for job in jobs]

    def poll(self, handles: Sequence[Any]) -> Sequence[Any]:
        finished = [handle for handle in handles if handle.done()]
        time.sleep(0 if finished else POLL)
        return finished

    def result(self, handle: Any) -> JobExit | LostJob:
        """Return the job's exit, or LostJob if there is none because the job was cancelled or its node was lost."""
        try:
            ended: JobExit = handle.result()
        except Exception as error:  # submitit's own error, with the end of the job's log
            return LostJob(last_line(error))
        return ended

    def stop(self, handles: Sequence[Any], times: int) -> None:
        """Create the file that makes running jobs save and exit, and cancel waiting jobs.

        The third call cancels all jobs.
        """
        self._stop_file.touch()
        for handle in handles:
            if times >= PATIENCE or handle.state == "PENDING":
                handle.cancel()


class _Requeued(NodeJob):
    def checkpoint(self) -> Any:
        """Make the job save and exit, and return the object that submitit queues again to continue the job.

        submitit calls this method at the time limit.
        """
        from submitit.helpers import DelayedSubmission

        self.stop.end()
        self.stop.wait(SAVE_TIMEOUT)
        return DelayedSubmission(_Requeued(self.spec, self._stop_file))

    __submitit_checkpoint__ = checkpoint  # the name in later versions of submitit


def make_executor(folder: Path, settings: Submitit, gpus: int) -> Any:
    """Return the object with which submitit submits jobs. It keeps its files in `folder`.

    Each job requests `gpus` GPUs unless the settings say otherwise. Raise UserError if the cluster does not exist.
    """
    import submitit

    try:
        new_executor = submitit.AutoExecutor(folder, cluster=settings.cluster, slurm_max_num_timeout=settings.requeues)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"sweep.submitit.cluster={settings.cluster}: {error}") from None
    new_executor.update_parameters(
        name="toyexp", timeout_min=settings.timeout_min, gpus_per_node=settings.gpus or gpus or None,
        cpus_per_task=settings.cpus, mem_gb=settings.mem_gb, slurm_partition=settings.partition,
        slurm_array_parallelism=MAX_BATCH,
    )  # fmt: skip
    return new_executor
