"""A callback with which runs go wrong: how, their number of steps says, so that one key makes all kinds of jobs."""

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
    "Goes wrong in several ways."

    name: ClassVar[str] = "mishap"

    raises: int = -1  # of a run of so many steps: before its last one
    killed: int = -1
    exits: int = -1
    leaves: int = -1
    slow: int = 10**9  # those of so many and more take their time, unless they go on from a checkpoint
    wait: float = 0.0
    told: bool = False  # writes down what its process was given

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
            subprocess.Popen(["sleep", "5"])  # which keeps this process's output open
"""
