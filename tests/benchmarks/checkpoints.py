"""The cost of checkpoints: the small preset with one every 50 steps, and without, in turns in one process.

Usage: checkpoints.py [engine [rounds [steps]]]. The figure is the ratio of the median seconds of the steps (150),
including the snapshots between them but not the checkpoint after the last step. A GPU needs more steps (3000) until the
first snapshot, which allocates pinned memory, no longer matters. The median and longest pause of the loop for a
checkpoint are printed too.
"""

import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

from toyexp.config.request import Request
from toyexp.plugins.discovery import load
from toyexp.training.checkpointing import CheckpointKeeper
from toyexp.training.experiment import execute, prepare


def seconds(engine: str, every: int, steps: int, registry) -> float:
    """Return the seconds of the steps of one run."""
    overrides = ["model=small", f"engine={engine}", f"steps={steps}", "eval_every=0", f"checkpoint_every={every}",
                 "batch_size=2", "~callbacks.gguf_export"]  # fmt: skip
    prepared = prepare(Request([], registry).build_config(*overrides))
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        return execute(prepared, Path(directory) / "run").outcome.seconds


def main(engine: str = "cpu", rounds: str = "7", steps: str = "150") -> None:
    """Print each round and the ratio of the medians."""
    registry, stood_still, save = load(), [], CheckpointKeeper.save

    def measure_call(*arguments) -> None:
        began = time.perf_counter()
        save(*arguments)
        stood_still.append(time.perf_counter() - began)

    CheckpointKeeper.save = measure_call
    seconds(engine, 0, int(steps), registry)  # caches, kernels
    taken: dict[int, list[float]] = {50: [], 0: []}
    for number in range(int(rounds)):
        for every in (50, 0) if number % 2 else (0, 50):
            taken[every].append(seconds(engine, every, int(steps), registry))
        print(f"round {number}: with {taken[50][-1]:.2f} s, without {taken[0][-1]:.2f} s", flush=True)
    ratio = statistics.median(taken[0]) / statistics.median(taken[50])
    print(f"{engine}: throughput with checkpoints {ratio:.3f} of without")
    print(f"the loop stood still {1e3 * statistics.median(stood_still):.1f} ms, at most {1e3 * max(stood_still):.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
