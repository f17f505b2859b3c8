"""A run of a million steps: is its memory flat, its record complete, are its last steps as fast as its first?

    python tests/benchmarks/long_run.py                 1,000,000 steps on the engine that computes nothing
    python tests/benchmarks/long_run.py ggml 20000      and so many of a microscopic model on another

Beyond 5 % from the first tenth to the last, in memory or in the time of a step or of the loop around it, the exit code
is 1. Times are the quickest tenth's: on a machine that others use the median, shown too, says more of them than of us.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 0.05
SETTINGS = [
    "recipe=scratch", "model=llama", "model.d_model=8", "model.n_layers=1", "model.n_heads=1", "model.n_kv_heads=1",
    "model.d_ff=8", "model.context=4", "batch_size=1", "data=text", "data.path=book.txt", "data.tokenizer=byte",
    "callbacks=[cosine,events,progress]", "checkpoint_every=10000", "hydra.run.dir=run",
]  # fmt: skip
NOOP = ["plugins=[toyexp.testing.null]"]


def main(engine="noop", steps="1000000"):
    settings = [*SETTINGS, f"engine={engine}", f"steps={steps}", f"eval_every={int(steps) // 20}"]
    settings += NOOP if engine == "noop" else ["engine.threads=1"]
    with tempfile.TemporaryDirectory() as root:
        Path(root, "book.txt").write_text("It was a bright cold day in April, and the clocks were striking. " * 200)
        memory = run(root, settings)
        waits, periods = times(Path(root, "run", "events.jsonl"), int(steps))
    print(f"{int(steps):,} steps on {engine}, events complete")
    grown = [compare("memory after the first tenth, MB", memory[len(memory) // 10 :], lambda part: part[-1] / 1e6)]
    for what, values in (("a step", waits), ("from step to step", periods)):
        compare(f"{what}, microseconds, median", values, statistics.median)
        grown.append(compare(f"{what}, microseconds, quickest tenth", values, quick))
    return 1 if max(grown) > LIMIT else 0


def run(root, settings):
    """Trains in a process of its own; returns what memory it held, sampled along the way."""
    memory = []
    with subprocess.Popen(
        [sys.executable, "-m", "toyexp", *settings], cwd=root, stdout=subprocess.DEVNULL, text=True
    ) as process:
        while process.poll() is None:
            if Path(root, "run", "events.jsonl").exists():
                status = Path(f"/proc/{process.pid}/statm").read_text().split()
                memory.append(4096 * int(status[1]) if len(status) > 1 else 0)
            time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return [size for size in memory if size]


def times(path, steps):
    """The microseconds of each step, and from each to the next; every step has to be there, in its order."""
    waits, moments = [], []
    with open(path) as file:
        for line in file:
            event = json.loads(line)
            if event["kind"] == "step":
                assert event["step"] == len(waits) + 1, event
                waits.append(event["wall_us"])
                moments.append(event["t"])
    assert len(waits) == steps, f"{len(waits)} of {steps} steps"
    return waits, [1e6 * (b - a) for a, b in itertools.pairwise(moments)]


def quick(values):
    """The tenth percentile."""
    return statistics.quantiles(values, n=10)[0]


def compare(what, values, of):
    """Prints the figure of each tenth; returns how much the last is above the first."""
    tenth = len(values) // 10
    figures = [of(values[i * tenth : (i + 1) * tenth]) for i in range(10)]
    change = figures[-1] / figures[0] - 1
    print(f"{what}: {' '.join(f'{x:.3g}' for x in figures)}  ({change:+.1%})")
    return change


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
