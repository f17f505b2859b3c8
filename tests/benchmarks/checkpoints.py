"""What checkpoints cost: the small preset with one every 50 steps, and without, taking turns in one process.

Usage: checkpoints.py [engine [rounds [steps]]]. The figure is the ratio of the median seconds that so many steps (150)
take, from the first to the last, the snapshots in between included; the last checkpoint, after the loop, is not. A GPU
takes more steps than that (3000) before the first snapshot, for which memory is locked, no longer counts. Beside it
stands how long the loop stood still for a checkpoint, in the median and at most.
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
    """How long the steps of one run take."""
    overrides = ["model=small", f"engine={engine}", f"steps={steps}", "eval_every=0", f"checkpoint_every={every}",
                 "batch_size=2", "~callbacks.gguf_export"]  # fmt: skip
    prepared = prepare(Request([], registry).build_config(*overrides))
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        return execute(prepared, Path(directory) / "run").outcome.seconds


def main(engine: str = "cpu", rounds: str = "7", steps: str = "150") -> None:
    """Prints each round and the ratio of the medians."""
    registry, stood_still, save = load(), [], CheckpointKeeper.save

    def timed(*arguments) -> None:
        began = time.perf_counter()
        save(*arguments)
        stood_still.append(time.perf_counter() - began)

    CheckpointKeeper.save = timed
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
