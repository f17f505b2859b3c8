"""A run of a million steps: constant memory, a complete record, and last steps as fast as the first.

    python tests/benchmarks/long_run.py                 1,000,000 steps on the engine that computes nothing
    python tests/benchmarks/long_run.py ggml 20000      20,000 steps of a microscopic model on another engine

The exit code is 1 if memory, the time of a step or that of the loop around it grows by more than 5 % from the first
tenth to the last. Times are those of the quickest tenth, as other users of the machine affect the median, printed too.
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
        waits, periods = read_times(Path(root, "run", "events.jsonl"), int(steps))
    print(f"{int(steps):,} steps on {engine}, events complete")
    grown = [compare("memory after the first tenth, MB", memory[len(memory) // 10 :], lambda part: part[-1] / 1e6)]
    for what, values in (("a step", waits), ("from step to step", periods)):
        compare(f"{what}, microseconds, median", values, statistics.median)
        grown.append(compare(f"{what}, microseconds, quickest tenth", values, tenth_percentile))
    return 1 if max(grown) > LIMIT else 0


def run(root, settings):
    """Train in a separate process; return samples of its memory."""
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


def read_times(path, steps):
    """Return the microseconds of each step, and between steps; all steps must be recorded in order."""
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


def tenth_percentile(values):
    """Return the tenth percentile."""
    return statistics.quantiles(values, n=10)[0]


def compare(title, values, summarise):
    """Print the figure of each tenth; return the relative increase from the first to the last."""
    tenth = len(values) // 10
    figures = [summarise(values[i * tenth : (i + 1) * tenth]) for i in range(10)]
    change = figures[-1] / figures[0] - 1
    print(f"{title}: {' '.join(f'{x:.3g}' for x in figures)}  ({change:+.1%})")
    return change


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
