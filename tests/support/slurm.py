"""Fake Slurm commands for submitit that run at most two jobs at once on this machine.

The file is run under the name of each command (sbatch, srun, sacct, scancel, scontrol) and keeps the state of all jobs
in the directory FAKE_SLURM.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Write the commands to `folder` and return the environment variables that select them."""
    (folder / "bin").mkdir(parents=True)
    for name in COMMANDS:
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        command.chmod(0o755)
    return {"FAKE_SLURM": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def sbatch(folder: Path, script: str) -> None:
    """Store a script and start a background process that runs it."""
    number = 1 + len([*folder.glob("*.sh")])
    (folder / f"{number}.sh").write_text(Path(script).read_text())
    subprocess.Popen(
        [sys.executable, __file__, "runs", str(number)],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    print(f"Submitted batch job {number}")


def runs(folder: Path, number: str) -> None:
    """Run the tasks of an array, or the only job; rerun a task that was requeued."""
    script = folder / f"{number}.sh"
    array = re.search(r"--array=0-(\d+)", script.read_text())
    tasks = [str(task) for task in range(int(array[1]) + 1)] if array else [""]

    def run(task: str) -> None:
        name = f"{number}_{task}" if task else number
        array_variables = {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task} if task else {}
        state, requeue_mark = folder / f"{name}.state", folder / f"{name}.requeue_mark"
        for restarts in range(9):
            if state.exists() and state.read_text() == "CANCELLED":
                return
            state.write_text("RUNNING")
            environment = {
                **os.environ,
                **array_variables,
                "SLURM_JOB_ID": number,
                "SLURM_RESTART_COUNT": str(restarts),
            }
            code = subprocess.run(["bash", str(script)], env=environment, check=False).returncode
            if not requeue_mark.exists():
                state.write_text("FAILED" if code else "COMPLETED")
                return
            requeue_mark.unlink()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, tasks))


def main(name: str, *words: str) -> None:
    """Run the command `name`."""
    folder = Path(os.environ["FAKE_SLURM"])
    if name == "sbatch":
        sbatch(folder, words[0])
    if name == "runs":
        runs(folder, words[0])
    if name == "srun":  # its own options come before the command
        command = [*words]
        while command[0].startswith("--"):
            command = command[2 if command[0] in ("--output", "--error") else 1 :]
        os.execvp(command[0], command)
    if name == "sacct":
        print("JobID|State|NodeList")
        for state in folder.glob("*.state"):
            print(f"{state.stem}|{state.read_text()}|here")
    if name == "scontrol":
        assert words[0] == "requeue", words
        (folder / f"{words[1]}.requeue_mark").touch()
    if name == "scancel":
        (folder / f"{words[0]}.state").write_text("CANCELLED")


if __name__ == "__main__":
    main(*sys.argv[1:])
