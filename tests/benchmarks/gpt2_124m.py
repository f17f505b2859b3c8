"""tokens/s of GPT-2 124M on a GPU: toyexp's engine and a plain nanoGPT-style loop, in one process.

    python tests/benchmarks/gpt2_124m.py [rows]

Both use bf16 autocast, torch.compile, fused AdamW, context 1024, gradient clipping at 1, TF32, new random batches from
the host every step, and read the loss every step. They take turns, and the medians are compared.
"""

import statistics
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

from toyexp import AdamW, Setup
from toyexp.batching.tokens import TokenBatches
from toyexp.interfaces.recipe import start_session
from toyexp_models.gpt2 import GPT2
from toyexp_recipes.scratch import Scratch
from toyexp_torch.engines import TorchCUDA

CONTEXT, VOCAB, WIDTH, LAYERS, HEADS = 1024, 50304, 768, 12, 12
ROUNDS, STEPS = 5, 10


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = torch.nn.ModuleList(Block() for _ in range(LAYERS)), torch.nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def make_plain_loop(rows, batches):
    """Return a function that takes steps of the plain loop."""
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Plain().cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)

    def take_steps(count, first):
        for k in range(first, first + count):
            batch = batches.batch(k)
            x, y = (
                torch.from_numpy(batch[n]).long().pin_memory().cuda(non_blocking=True) for n in ("tokens", "targets")
            )
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            loss.item()

    return take_steps


def make_toyexp_loop(rows, batches):
    """Return a function that takes steps of toyexp's engine."""
    model = GPT2(d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, d_ff=4 * WIDTH, context=CONTEXT, vocab=VOCAB)
    plan = Scratch().plan(model, Setup(batches.inputs, rows=rows, grad_clip=1.0))
    session = start_session(Scratch(), TorchCUDA(dtype="bfloat16", compile=True, tf32=True), plan)
    adamw = AdamW(lr=6e-4, beta2=0.95, weight_decay=0.1, mode="lora")

    def take_steps(count, first):
        for k in range(first, first + count):
            session.step(batches.batch(k), adamw.hp_for_step(k))

    return take_steps


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    ids = np.random.default_rng(0).integers(0, 50257, 5_000_000, dtype=np.int32)
    batches = TokenBatches(ids, ids[:10_000], CONTEXT, rows, 0, 1)
    loops = {"toyexp": make_toyexp_loop(rows, batches), "plain loop": make_plain_loop(rows, batches)}
    for steps in loops.values():
        steps(5, 0)
    times = {name: [] for name in loops}
    for r in range(ROUNDS):
        for name, steps in loops.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            steps(STEPS, 10 * (r + 1))
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / STEPS)
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name}: {1e3 * middle:.1f} ms a step, {rows * CONTEXT / middle:.0f} tokens/s "
              f"({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f} ms)")  # fmt: skip
    ratio = statistics.median(times["plain loop"]) / statistics.median(times["toyexp"])
    print(f"ratio of median tokens/s, toyexp / plain: {ratio:.3f}")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"{rows} x {CONTEXT} tokens")


if __name__ == "__main__":
    main()
