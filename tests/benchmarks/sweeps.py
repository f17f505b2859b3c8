"""The overhead of a sweep's job by launcher and engine, and the time until the first of many jobs starts.

    python tests/benchmarks/sweeps.py [jobs=200] [launchers=serial,processes,submitit] [engines=ggml,cpu] [PYTHON]

With the python of another toyexp installation, both are measured in turns. A job takes 5 steps of the nano model with
its default callbacks and without evaluations; result.json has its training time, from its first step to its last.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LISTED = 10_000
OTHERS = {"processes": ["sweep.jobs=2"], "submitit": ["sweep.submitit.cluster=local", "sweep.jobs=2"]}


def sweep(python, folder, launcher, engine, jobs):
    """Return the wall-clock seconds, and the seconds in which jobs trained."""
    words = [f"seed=range({jobs})", f"engine={engine}", "steps=5", "eval_every=0", f"hydra.sweep.dir={folder}"]
    command = [python, "-m", "toyexp", "-m", *words, f"sweep.launcher={launcher}", *OTHERS.get(launcher, [])]
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    wall = time.perf_counter() - began
    results = [json.loads(path.read_text()) for path in Path(folder).glob("*/result.json")]
    assert len(results) == jobs, f"{len(results)} of {jobs} jobs left a result"
    return wall, sum(result["seconds"] for result in results)


def first_job(python, folder):
    """Return the seconds until the first of many jobs starts, and until its first step."""
    words = [f"seed=range({LISTED})", "engine=ggml", "steps=5", "eval_every=0", f"hydra.sweep.dir={folder}"]
    began, begins, steps = time.perf_counter(), None, None
    command = [python, "-m", "toyexp", "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            if line.startswith("[0]"):
                begins = time.perf_counter() - began
            if line.startswith("step 1/"):
                steps = time.perf_counter() - began
                break
        process.terminate()
    return begins, steps


def main(words):
    """Print a line for each combination."""
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    pythons = [sys.executable, *(word for word in words if "=" not in word)]
    jobs = int(settings.get("jobs", 200))
    with tempfile.TemporaryDirectory() as place:
        for number, python in enumerate(pythons):
            begins, steps = first_job(python, f"{place}/many-{number}")
            print(
                f"{python}: of {LISTED} jobs the first begins after {begins:.2f} s, its first step after {steps:.2f} s"
            )
        for launcher in settings.get("launchers", "serial,processes,submitit").split(","):
            for engine in settings.get("engines", "ggml,cpu").split(","):
                for number, python in enumerate(pythons):
                    wall, trained = sweep(python, f"{place}/{launcher}-{engine}-{number}", launcher, engine, jobs)
                    beside = (wall - trained) / jobs
                    print(f"{python}: {launcher} {engine}, {jobs} jobs: {wall / jobs:.3f} s each, {beside:.3f} beside "
                          f"training", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
