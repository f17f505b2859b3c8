"""What checkpoints cost: the small preset with one every 50 steps, and without, taking turns in one process.

Usage: checkpoints.py [engine [rounds]]. The figure is the ratio of the median seconds that 150 steps take, from the
first to the last, the snapshots in between included; the last checkpoint, after the loop, is not.
"""

import contextlib
import io
import statistics
import sys
import tempfile
from pathlib import Path

from toyexp.config.request import Request
from toyexp.contract.registry import load
from toyexp.training.experiment import execute, prepare

STEPS = 150


def seconds(engine: str, every: int, registry) -> float:
    """How long the steps of one run take."""
    overrides = ["model=small", f"engine={engine}", f"steps={STEPS}", "eval_every=0", f"checkpoint_every={every}",
                 "batch_size=2", "~callbacks.gguf_export"]  # fmt: skip
    prepared = prepare(Request([], registry).parts(*overrides))
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        return execute(prepared, Path(directory) / "run").outcome.seconds


def main(engine: str = "cpu", rounds: str = "7") -> None:
    """Prints each round and the ratio of the medians."""
    registry = load()
    seconds(engine, 0, registry)  # caches, kernels
    taken: dict[int, list[float]] = {50: [], 0: []}
    for number in range(int(rounds)):
        for every in (50, 0) if number % 2 else (0, 50):
            taken[every].append(seconds(engine, every, registry))
        print(f"round {number}: with {taken[50][-1]:.2f} s, without {taken[0][-1]:.2f} s", flush=True)
    ratio = statistics.median(taken[0]) / statistics.median(taken[50])
    print(f"{engine}: throughput with checkpoints {ratio:.3f} of without")


if __name__ == "__main__":
    main(*sys.argv[1:])
