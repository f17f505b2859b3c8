"""A training step with and without engine.recompute=true: time, and memory beyond the imports.

    python tests/benchmarks/recompute.py [engine] [rounds]

A llama with 12 layers, d 256, context 512, batch 2, by default on `cpu`; `cuda`, `ggml` and others work too. Each
variant has its own process; they take steps in turn. Memory is that of the process, which does not return all freed
memory, and with `cuda` that of the allocator. The memory of a step beyond weights and moments is printed too.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tensor_memory import measure_peak_tensor_bytes

from toyexp import AdamW, Setup, TokenBatches
from toyexp.base.threads import reduce_spinning
from toyexp.interfaces.recipe import start_session
from toyexp.plugins.discovery import load
from toyexp_models.llama import Llama
from toyexp_recipes.scratch import Scratch

MODEL = Llama(d_model=256, n_layers=12, n_heads=4, n_kv_heads=4, d_ff=704, context=512, vocab=256)
ROWS, THREADS = 2, 2


def megabytes(name):
    """Return the memory in use and its peak."""
    if name == "cuda":
        import torch

        return torch.cuda.memory_allocated() / 1e6, torch.cuda.max_memory_allocated() / 1e6
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(words[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "VmHWM"))


def step_bytes(name, session, step):
    """Return the peak of a step's own tensors."""
    if "compute_bytes" in session.describe():
        return session.describe()["compute_bytes"]
    if name == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - held
    return measure_peak_tensor_bytes(step)


def child(name, recompute):
    """Take steps as requested line by line; answer with ms per step and MB beyond the weights."""
    reduce_spinning()
    ids = np.random.default_rng(0).integers(0, MODEL.vocab, 100_000, dtype=np.int32)
    data, adamw, k = TokenBatches(ids, ids[:2000], MODEL.context, ROWS, 0, 1), AdamW.for_lora(), 0
    engine = load().offers["engine"][name].cls(recompute=recompute == "True")
    if "threads" in vars(engine):
        engine.threads = THREADS
    engine.check()
    before, _ = megabytes(name)
    session = start_session(Scratch(), engine, Scratch().plan(MODEL, Setup(data.inputs, rows=ROWS)))
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            session.step(data.batch(k), adamw.hp_for_step(k))
            k += 1
        print(json.dumps([1e3 * (time.perf_counter() - begun) / int(line), megabytes(name)[1] - before]), flush=True)
    step = step_bytes(name, session, lambda: session.step(data.batch(k), adamw.hp_for_step(k)))
    print(json.dumps(step / 1e6), flush=True)


def main(name="cpu", rounds="5"):
    sides = {
        recompute: subprocess.Popen(
            [sys.executable, __file__, "--child", name, str(recompute)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for recompute in (False, True)
    }  # fmt: skip
    times, peaks = {side: [] for side in sides}, {}
    for turn in range(int(rounds) + 1):
        for side, process in sides.items():
            process.stdin.write("2\n")
            process.stdin.flush()
            ms, peaks[side] = json.loads(process.stdout.readline())
            if turn:  # the first turn warms up
                times[side].append(ms)
    for side, process in sides.items():
        own = json.loads(process.communicate()[0])
        print(f"{name}, recompute={side}: {statistics.median(times[side]):.1f} ms a step", end=", ")
        print(f"{peaks[side]:.0f} MB beyond the imports, {own:.0f} MB of them the step's own")
    print(f"{statistics.median(times[True]) / statistics.median(times[False]):.2f} times the step")


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
