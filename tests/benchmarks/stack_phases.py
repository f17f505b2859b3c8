"""Time of a stacked sweep, from the command to the last GGUF, by process and phase.

python tests/benchmarks/stack_phases.py experiment=bench_100k engine=cuda steps=2000 'seed=range(128)'

Each process of the sweep prints a table of the seconds that its main thread spent in each phase (without nested
phases), the number of calls, and the times of the first call and the last return since the command. `--profile` adds
cProfile's output and slows everything down.
"""

import atexit
import cProfile
import functools
import importlib.abc
import importlib.util
import io
import json
import os
import pstats
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ENVIRONMENT_KEY = "STACK_PHASES"  # holds the directory for the tables and the time of the command
# Timed functions: module, name in it, and the phase that it belongs to.
PHASES = [
    # of the process that trains
    ("toyexp.sweeps.launchers.stack_process", "JobConfigs.run_config", "configurations composed"),
    ("toyexp.config.compose", "Composition.build_config", "parts made"),
    ("toyexp.training.experiment", "prepare", "planned"),
    ("toyexp.interfaces.data", "open_data", "data opened"),
    ("toyexp.training.experiment", "check_forward", "models checked"),
    ("toyexp.sweeps.launchers.stack_process", "Member.stack_conflict", "programs compared"),
    ("toyexp.sweeps.launchers.stack_process", "StackProcess._next_stack", "stacks made up"),
    ("toyexp.sweeps.launchers.stack_process", "choose_size", "what pays measured"),
    ("toyexp.training.experiment", "RunDir", "directories made"),
    ("toyexp.training.experiment", "introduction", "introductions"),
    ("toyexp.sweeps.launchers.stack_process", "bind_sessions", "sessions bound"),
    ("toyexp.interfaces.plan", "Plan.initial_values", "initial values"),
    ("toyexp.interfaces.session", "Session.build", "built"),
    ("toyexp.training.experiment", "facts", "facts of a run"),
    ("toyexp_torch.stacks.stack", "StackedResident", "captured"),
    ("toyexp_torch.stacks.stack", "StackedStep", "program made"),
    ("toyexp_torch.stacks.stack", "TorchStack.do_step", "steps begun"),
    ("toyexp_torch.stacks.stack", "TorchStack.losses", "held-out losses begun"),
    ("toyexp.training.loop", "NextSteps.batch", "batches"),
    ("toyexp.interfaces.session", "Session.step_input", "inputs checked"),
    ("toyexp.interfaces.plan", "Plan.numbers", "numbers of a step"),
    ("toyexp.training.bus", "Bus.lr", "callbacks: lr"),
    ("toyexp.training.bus", "Bus.call_on_step", "callbacks: on_step"),
    ("toyexp.training.bus", "Bus.end", "callbacks: on_end, with exports"),
    ("toyexp.interfaces.session", "Session.snapshot", "snapshots"),
    ("toyexp.training.experiment", "RunSaver.after", "checkpoints begun"),
    ("toyexp.training.checkpointing", "CheckpointKeeper.wait", "waits for checkpoints"),
    ("toyexp.training.experiment", "conclude", "results"),
    ("toyexp.interfaces.session", "Session.close", "sessions closed"),
    ("toyexp.sweeps.launchers.stack_process", "print_result", "lines"),
    ("toyexp.training.driver", "drive", "loops"),
    # of the sweep itself
    ("toyexp.sweeps.runner", "Runner.prepare", "sweep prepared"),
    ("toyexp.sweeps.runner", "Runner._assign_directory", "directories assigned"),
    ("toyexp.sweeps.runner", "Runner._end", "ends noted"),
    ("toyexp.sweeps.runner", "Runner._update_report", "report.html"),
    ("toyexp.sweeps.runner", "Runner._summarise", "summary"),
]


class Clock:
    """Seconds of the main thread by phase, without nested phases."""

    def __init__(self, began):
        self.began, self.phases, self._open = began, {}, []
        self._last = time.time()

    def _pass(self):
        now = time.time()
        if self._open:
            self.phases[self._open[-1]][0] += now - self._last
        self._last = now
        return now

    def wrap(self, function, name):
        """Wrap the function so that its calls by the main thread count as a phase."""
        main = threading.main_thread()

        @functools.wraps(function)
        def call(*arguments, **named):
            if threading.current_thread() is not main:
                return function(*arguments, **named)
            now = self._pass()
            phase = self.phases.setdefault(name, [0.0, 0, now - self.began, 0.0])
            phase[1] += 1
            self._open.append(name)
            try:
                return function(*arguments, **named)
            finally:
                phase[3] = self._pass() - self.began
                self._open.pop()

        return call

    def table(self):
        """Yield lines, the longest phase first."""
        yield f"{'seconds':>9} {'times':>8} {'first at':>9} {'until':>9}  phase"
        for name, (seconds, count, first, last) in sorted(self.phases.items(), key=lambda each: -each[1][0]):
            yield f"{seconds:9.3f} {count:8d} {first:9.2f} {last:9.2f}  {name}"


class Watch(importlib.abc.MetaPathFinder):
    """An import hook that times the functions in PHASES once their module is imported; it imports none itself."""

    def __init__(self, clock):
        self._clock, self._left = clock, {module for module, _, _ in PHASES}

    def find_spec(self, name, path=None, target=None):
        """Find a module as Python does, with a loader that wraps its timed functions."""
        if name not in self._left:
            return None
        self._left.discard(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for _, what, phase in (each for each in PHASES if each[0] == name):
                *owner, last = what.split(".")
                place = getattr(module, owner[0]) if owner else module
                setattr(place, last, self._clock.wrap(getattr(place, last), phase))

        spec.loader.exec_module = exec_module
        return spec


def child(words):
    """Run a process of the sweep, which writes its table when it ends."""
    folder, began, is_profiled = json.loads(os.environ[ENVIRONMENT_KEY])
    clock, title, start = Clock(began), "the sweep" if "-m" in words else "what processes are forked from", time.time()
    profile = cProfile.Profile() if is_profiled else None

    def leave():
        if profile:
            profile.disable()
        took = os.times()
        lines = [
            f"{title}: from {start - began:.2f} s to {time.time() - began:.2f} s; of the processor {took.user:.1f} s, "
            f"and {took.system:.1f} s in the system"
        ]
        lines += clock.table()
        if profile:
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(45)
            lines.append(text.getvalue())
        Path(folder, f"{start:.6f}-{os.getpid()}").write_text("\n".join(lines))

    def reset_after_fork():
        nonlocal title, start
        title, start = "a process of stacks", time.time()
        clock.phases.clear()

    atexit.register(leave)
    os.register_at_fork(after_in_child=reset_after_fork)
    sys.meta_path.insert(0, Watch(clock))
    popen = subprocess.Popen

    def spawn_child(command, *arguments, **named):
        if list(command[1:3]) == ["-m", "toyexp"]:
            command = [sys.executable, str(Path(__file__).resolve()), "--child", *command[3:]]
        return popen(command, *arguments, **named)

    subprocess.Popen = spawn_child
    sys.argv = ["toyexp", *words]
    if profile:
        profile.enable()
    runpy.run_module("toyexp", run_name="__main__", alter_sys=False)


def main(words):
    """Run the sweep and print the tables."""
    profiled = "--profile" in words
    words = [word for word in words if word != "--profile"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        environment = {**os.environ, ENVIRONMENT_KEY: json.dumps([folder, began, profiled])}
        command = [sys.executable, str(Path(__file__).resolve()), "--child", "-m", "sweep.launcher=stacked", *words]
        code = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        wall = time.time() - began
        sizes = [line for line in code.stdout.splitlines() if line.startswith("stack ")]
        print("\n".join(sizes))
        for path in sorted(Path(folder).iterdir()):
            print(f"\n{path.read_text()}")
    print(f"\nexit code {code.returncode}; {wall:.2f} s in all")
    return code.returncode


if __name__ == "__main__":
    sys.exit(child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main(sys.argv[1:]))
