"""The commands of Slurm that submitit calls, for this machine: two jobs at once, as if each had a node of its own.

Run under their names (sbatch, srun, sacct, scancel, scontrol), with the directory FAKE_SLURM for what they remember.
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
    """Puts the commands there; what stands in the environment of who uses them."""
    (folder / "bin").mkdir(parents=True)
    for name in COMMANDS:
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        command.chmod(0o755)
    return {"FAKE_SLURM": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def sbatch(folder: Path, script: str) -> None:
    """Takes a script down, and has what runs it go on in the background."""
    number = 1 + len([*folder.glob("*.sh")])
    (folder / f"{number}.sh").write_text(Path(script).read_text())
    subprocess.Popen(
        [sys.executable, __file__, "runs", str(number)],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    print(f"Submitted batch job {number}")


def runs(folder: Path, number: str) -> None:
    """Runs the tasks of an array, or the one job; one that is to be queued again runs again."""
    script = folder / f"{number}.sh"
    array = re.search(r"--array=0-(\d+)", script.read_text())
    tasks = [str(task) for task in range(int(array[1]) + 1)] if array else [""]

    def run(task: str) -> None:
        name = f"{number}_{task}" if task else number
        of_array = {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task} if task else {}
        state, again = folder / f"{name}.state", folder / f"{name}.again"
        for restarts in range(9):
            if state.exists() and state.read_text() == "CANCELLED":
                return
            state.write_text("RUNNING")
            environment = {**os.environ, **of_array, "SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": str(restarts)}
            code = subprocess.run(["bash", str(script)], env=environment, check=False).returncode
            if not again.exists():
                state.write_text("FAILED" if code else "COMPLETED")
                return
            again.unlink()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, tasks))


def main(name: str, *words: str) -> None:
    """One of the commands."""
    folder = Path(os.environ["FAKE_SLURM"])
    if name == "sbatch":
        sbatch(folder, words[0])
    if name == "runs":
        runs(folder, words[0])
    if name == "srun":  # which has options of its own before the command
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
        (folder / f"{words[1]}.again").touch()
    if name == "scancel":
        (folder / f"{words[0]}.state").write_text("CANCELLED")


if __name__ == "__main__":
    main(*sys.argv[1:])
