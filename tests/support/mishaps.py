"""A callback that makes runs fail. A run's number of steps selects the failure, so one sweep can have all."""

MISHAP = """
import os, signal, subprocess, time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toyexp import Callback, hookimpl


@hookimpl
def register_callbacks(register):
    register(Mishap)


@dataclass(eq=False)
class Mishap(Callback):
    "Fails in several ways."

    name: ClassVar[str] = "mishap"

    raises: int = -1  # a run with this number of steps raises before its last step
    killed: int = -1  # ... gets SIGKILL
    exits: int = -1  # ... calls os._exit
    leaves: int = -1  # ... leaves a child process
    slow: int = 10**9  # runs with at least this many steps sleep 0.05 s per step, unless they were resumed
    wait: float = 0.0  # seconds of sleep per step
    told: bool = False  # write the environment and the working directory to the file `told`

    @hookimpl
    def on_start(self, run):
        summary = run.dir.parent / "summary.csv"
        if summary.exists():
            (run.dir / "seen.csv").write_bytes(summary.read_bytes())
        if self.told:
            names = ("CUDA_VISIBLE_DEVICES", "TOYEXP_CORES", "TOYEXP_NOTED")
            (run.dir / "told").write_text(repr([os.environ.get(name) for name in names] + [os.getcwd()]))

    @hookimpl
    def on_step(self, run, step):
        if Path("mended").exists():
            return
        time.sleep(self.wait)
        if run.steps >= self.slow and not run.resumed_step:
            time.sleep(0.05)
        if run.resumed_step or step != run.steps - 1:
            return
        if run.steps == self.raises:
            raise ZeroDivisionError("on purpose")
        if run.steps == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.steps == self.exits:
            os._exit(7)
        if run.steps == self.leaves:
            subprocess.Popen(["sleep", "5"])  # the child keeps this process's output open
"""
