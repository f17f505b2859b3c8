"""LoRA on a Q8_0 base of SmolLM2-135M's shape (random weights): step time and memory by engine.

    python tests/benchmarks/qlora_135m.py [rounds]

Context 256, batch 1, rank 8 on every attn_q, two threads. Each engine has its own process, which holds the base's
mapped file, the libraries and the working memory; the processes take steps in turn. PEFT, if installed, gets the same
shape in float32, as `get_peft_model` makes it from a LlamaForCausalLM.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from toyexp import AdamW, Setup, TokenBatches
from toyexp.base.threads import reduce_spinning
from toyexp.formats.gguf.write import write_model
from toyexp.interfaces.recipe import start_session
from toyexp_models.llama import Llama

SHAPE = {"d_model": 576, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "d_ff": 1536, "vocab": 49152}
CONTEXT, RANK, LR, THREADS = 256, 8, 1e-4, 2
SIDES = ["ggml, recompute", "ggml", "cpu, packed", "cpu", "peft"]


def batches():
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab"], 100_000, dtype=np.int32)
    return TokenBatches(ids, ids[:1000], CONTEXT, 1, 0, 1)


def engine_steps(side, base):
    from toyexp_recipes.lora import Lora

    name, _, setting = side.partition(", ")
    if name == "ggml":
        from toyexp_ggml.engines import GGMLCPU

        engine = GGMLCPU(threads=THREADS, recompute=setting == "recompute")
    else:
        from toyexp_torch.engines import TorchCPU

        engine = TorchCPU(threads=THREADS, packed=setting == "packed")
    recipe = Lora(base=base, rank=RANK, targets=["q"])
    data, adamw = batches(), AdamW.for_lora()
    plan = recipe.plan(Llama(**SHAPE, context=CONTEXT, tied=True), Setup(data.inputs, rows=1))
    session = start_session(recipe, engine, plan)
    k = 0
    while True:
        hp = adamw.hp_for_step(k)
        hp[0] = LR
        session.step(data.batch(k), hp)
        k += 1
        yield


def peft_steps():
    import peft
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    config = transformers.LlamaConfig(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["d_model"], intermediate_size=SHAPE["d_ff"],
        num_hidden_layers=SHAPE["n_layers"], num_attention_heads=SHAPE["n_heads"],
        num_key_value_heads=SHAPE["n_kv_heads"], tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    data, k = batches(), 0
    while True:
        tokens = torch.from_numpy(data.batch(k)["tokens"]).long()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        loss.item()
        k += 1
        yield


def status(key):
    """Return MB of this process, as Linux reports them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(key))


def child(side, base):
    """Take steps as requested line by line; answer with ms per step and the peak memory."""
    reduce_spinning()
    steps = peft_steps() if side == "peft" else engine_steps(side, base)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            next(steps)
        print(json.dumps([1e3 * (time.perf_counter() - begun) / int(line), status("VmHWM")]), flush=True)


def main(rounds):
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.gguf"
        model = Llama(**SHAPE, context=CONTEXT, tied=True)
        write_model(base, model, {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}, None, "q8_0")
        mapped = base.stat().st_size / 1e6
        running = {}
        for side in SIDES:
            words = [sys.executable, __file__, "--child", side, str(base)]
            running[side] = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        times, peaks = {side: [] for side in SIDES}, {}
        for turn in range(rounds + 1):
            for side in list(running):
                process = running[side]
                process.stdin.write("2\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    print(f"{side}: left out, it ended with {process.wait()}")
                    del running[side]
                    continue
                ms, peaks[side] = json.loads(answer)
                if turn:  # the first turn warms up
                    times[side].append(ms)
        for process in running.values():
            process.stdin.close()
            process.wait()
    print(f"base {mapped:.0f} MB, mapped by ggml and part of its peak")
    for side in running:
        print(f"{side:<18} {statistics.median(times[side]):7.0f} ms a step   peak {peaks[side]:5.0f} MB")


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[2:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
