"""tokens/s of GPT-2 124M on one NVIDIA GPU and on several, in turns in one process; peak memory of each.

    python tests/benchmarks/ranks.py [devices] [rows of a GPU] [key=value of the engine ...]

bf16, torch.compile, context 1024, gradient clipping at 1, TF32 allowed, new random batches from the host every step,
the next step queued while one is taken, as a run does. The medians are compared: of one GPU, of all of them, and of all
of them with the optimiser's state in shards; then 50 steps of a small float32 model, whose losses are those of one GPU.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from toyexp import AdamW, Setup, Stack
from toyexp.batching.tokens import TokenBatches
from toyexp.interfaces.recipe import start_session
from toyexp_models.gpt2 import GPT2
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCUDA

CONTEXT, VOCAB = 1024, 50304
ROUNDS, STEPS = 5, 20
ADAMW = AdamW(lr=6e-4, beta2=0.95, weight_decay=0.1, mode="lora")
SHAPE = GPT2(d_model=768, n_layers=12, n_heads=12, d_ff=3072, context=CONTEXT, vocab=VOCAB)


def open_session(engine, rows, model=SHAPE):
    ids = np.random.default_rng(0).integers(0, min(model.vocab, 50257), 5_000_000, dtype=np.int32)
    batches = TokenBatches(ids, ids[:10_000], model.context, rows, 0, 1)
    plan = Scratch().plan(model, Setup(batches.inputs, rows=rows, grad_clip=1.0))
    return start_session(Scratch(), engine, plan), batches


def take_steps(session, batches, count, first):
    """Take steps with the next one queued behind the current one, as the training loop does."""
    losses, under_way, stack = [], [], Stack([session])
    for k in range(first, first + count):
        given = session.step_input(batches.batch(k), ADAMW.hp_for_step(k))
        under_way.append(stack.step({0: given})[0])
        if len(under_way) == 2:
            losses.append(under_way.pop(0)().loss)
    return [*losses, *(wait().loss for wait in under_way)]


def read_used_memory():
    """Return MB in use on every GPU, by all processes."""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return ", ".join(told.stdout.split()) or "?"


def main():
    sizes = [int(word) for word in sys.argv[1:] if "=" not in word]
    count, rows = (*sizes, *(2, 32)[len(sizes) :])
    own = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    typed = {key: {"true": True, "false": False}.get(value, value) for key, value in own.items()}
    fast = TorchCUDA(**{"dtype": "bfloat16", "compile": True, "tf32": True, **typed})
    wanted = {
        "1 GPU": (fast, rows),
        f"{count} GPUs": (replace(fast, devices=str(count)), rows * count),
        f"{count} GPUs, shards": (replace(fast, devices=str(count), shard=True), rows * count),
    }
    sessions, times = {}, {name: [] for name in wanted}
    for name, (engine, size) in wanted.items():
        sessions[name] = open_session(engine, size)
        take_steps(*sessions[name], 5, 0)
        captured = sessions[name][0].describe()["captured"]
        print(f"{name}: captured {captured}, GPUs hold {read_used_memory()} MB after it opened")
    for number in range(1, ROUNDS + 1):
        for name, (session, batches) in sessions.items():
            began = time.perf_counter()
            take_steps(session, batches, STEPS, number * STEPS)
            times[name].append((time.perf_counter() - began) / STEPS)
    rates = {}
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rates[name] = wanted[name][1] * CONTEXT / middle
        ratio = rates[name] / rates["1 GPU"]
        print(f"{name}: {1e3 * middle:.1f} ms a step, {rates[name]:.0f} tokens/s, {ratio:.3f} of one "
              f"({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f} ms)")  # fmt: skip
    for session, _ in sessions.values():
        session.close()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, {rows} x {CONTEXT} tokens a GPU, NCCL {nccl},",
          f"NCCL_NVLS_ENABLE={os.environ.get('NCCL_NVLS_ENABLE')}")  # fmt: skip
    small = replace(SHAPE, d_model=128, n_layers=4, n_heads=4, d_ff=512, context=64, vocab=256)
    curves = []
    for devices in ("1", str(count)):
        session, batches = open_session(TorchCUDA(devices=devices), 8 * count, small)
        curves.append(np.array(take_steps(session, batches, 50, 0)))
        session.close()
    apart = np.abs(curves[1] / curves[0] - 1).max()
    print(f"50 steps in float32: losses at most {apart:.1e} apart, relative; {curves[0][0]:.4f} -> {curves[0][-1]:.4f}")


if __name__ == "__main__":
    main()
