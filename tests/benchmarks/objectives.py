"""Steps of objectives and of a mixture of experts on engine=cpu, against bare PyTorch loops.

    python tests/benchmarks/objectives.py [distil] [moe] [dpo] [rounds=15] [threads=1]

Each pair computes the same loss of the same weights and batches, which is checked first, and takes turns in one
process; the figure is the ratio of the median seconds per step. The bare loops are written for one model: the shipped
nano llama, which learns from `model=small` with random weights (distil) or prefers completions (dpo), and qwen3moe at
its default size, whose experts are all computed (moe). They run the frozen model under no_grad, and step
torch.optim.AdamW.
"""

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as toyexp sets it, for both sides
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.nn.functional as F
from baselines.bare_torch import BareTorch

from toyexp import AdamW
from toyexp.config.request import Request
from toyexp.formats.gguf.write import write_model
from toyexp.plugins.discovery import load
from toyexp.training.experiment import prepare

STEPS = 20  # in a turn
ADAMW = AdamW(lr=1e-3, mode="lora")


class Frozen(BareTorch):
    """A bare llama without training."""

    def __init__(self, plan, engine):
        super().__init__(plan, ADAMW, engine)
        self.weights = {name: weight.detach() for name, weight in self.weights.items()}


class BareDistil(BareTorch):
    """Distillation at temperature 2, half of the loss from the targets."""

    def __init__(self, plan, engine, teacher):
        super().__init__(replace(plan, tensors=plan.trainable), ADAMW, engine)
        self.teacher = teacher

    def loss(self, tokens, targets):
        with torch.no_grad():
            taught = F.log_softmax(self.teacher.logits(tokens).flatten(0, 1) / 2, -1)
        logits = self.logits(tokens).flatten(0, 1)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), taught, reduction="batchmean", log_target=True)
        return 0.5 * 4 * soft + 0.5 * F.cross_entropy(logits, targets.flatten())


class BareDPO(BareTorch):
    """DPO with beta 0.1; rows 2 i and 2 i + 1 of a batch are a pair.

    On both sides the reference's log-probabilities are 0, because runs compute them before training.
    """

    def step(self, batch):
        tokens, targets, mask = (torch.from_numpy(batch[name]) for name in ("tokens", "targets", "mask"))
        ratios = self.completions(self.logits(tokens), targets, mask)
        loss = -F.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.item()

    def completions(self, logits, targets, mask):
        """Return the log-probability of each row's completion, [B]."""
        return (logits.log_softmax(-1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1) * mask).sum(1)


class BareMoE(BareTorch):
    """Qwen 3 MoE with all experts computed."""

    @staticmethod
    def supports(plan):
        return plan.model.name == "qwen3moe"

    def logits(self, tokens):
        w, model = self.weights, self.model
        x = F.embedding(tokens, w["token_embd.weight"])
        for i in range(model.n_layers):
            block = f"blk.{i}."
            h = self.norm(x, w[block + "attn_norm.weight"])
            q, k, v = (F.linear(h, w[f"{block}attn_{n}.weight"]).unflatten(-1, (-1, self.size)) for n in "qkv")
            q, k = self.norm(q, w[block + "attn_q_norm.weight"]), self.norm(k, w[block + "attn_k_norm.weight"])
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            a = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True, enable_gqa=True)
            x = x + F.linear(a.transpose(1, 2).flatten(-2), w[block + "attn_output.weight"])
            h = self.norm(x, w[block + "ffn_norm.weight"])
            shares = F.linear(h, w[block + "ffn_gate_inp.weight"]).softmax(-1)
            best, chosen = shares.topk(model.experts_used)
            weights = torch.zeros_like(shares).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
            gate, up = (F.linear(h, w[f"{block}ffn_{n}_exps.weight"].flatten(0, 1)) for n in ("gate", "up"))
            hidden = (F.silu(gate) * up).unflatten(-1, (model.experts, -1)) * weights.unsqueeze(-1)
            x = x + F.linear(hidden.flatten(2), w[block + "ffn_down_exps.weight"].transpose(0, 1).flatten(1))
        output = w["token_embd.weight" if model.tied else "output.weight"]
        return F.linear(self.norm(x, w["output_norm.weight"]), output)

    def rope(self, x):
        first, second = x.chunk(2, -1)
        return torch.cat((first * self.cos - second * self.sin, first * self.sin + second * self.cos), -1)


def prepare_run(registry, *words):
    """Compose an experiment as the command line does."""
    return prepare(Request([], registry).build_config("engine=cpu", "optim.mode=lora", *words))


def seconds(step, batches):
    """Return the seconds per step over all batches."""
    began = time.perf_counter()
    for batch in batches:
        step(batch)
    return (time.perf_counter() - began) / len(batches)


def compare(name, run, bare, rounds, threads):
    """Check that both compute the same losses, and print the ratio of their speeds."""
    engine, batches = replace(run.config.engine, threads=threads), [run.batches.batch(k) for k in range(STEPS)]
    with engine.realize(run.plan) as session:
        session.build()
        steps = iter(range(10**9))

        def step(batch):
            return session.step(batch, ADAMW.hp_for_step(next(steps))).loss

        losses = np.array([[step(batch), bare.step(batch)] for batch in batches])
        assert np.allclose(losses[:, 0], losses[:, 1], rtol=2e-3), losses
        times = [[seconds(take, batches) for take in (step, bare.step)] for _ in range(rounds)]
    bare.close()
    ours, theirs = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    print(f"{name}: toyexp {ours:.2f} ms, bare loop {theirs:.2f} ms, ratio {ours / theirs:.2f}", flush=True)


def write_pairs(path):
    """Write 200 pairs of completions of random letters, which fill most of a row."""
    draw = np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(97, 123, 40))) for _ in range(600)]
    lines = [
        f'{{"prompt": "{a}", "chosen": "{b}", "rejected": "{c}"}}\n' for a, b, c in zip(*[iter(texts)] * 3, strict=True)
    ]
    path.write_text("".join(lines))


def main(*words):
    settings = dict(word.split("=") for word in words if "=" in word)
    rounds, threads = int(settings.get("rounds", 15)), int(settings.get("threads", 1))
    chosen = [word for word in words if "=" not in word] or ["distil", "moe", "dpo"]
    registry = load()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        plain = prepare_run(registry)
        engine = replace(plain.config.engine, threads=threads)
        if "distil" in chosen:
            small = prepare_run(registry, "model=small").plan
            values = {t.name: small.initial_values(t) for t in small.tensors}
            write_model(path / "teacher.gguf", small.model, values, None, "f32")
            run = prepare_run(registry, "objective=distil", f"objective.teacher={path}/teacher.gguf")
            short = replace(small, model=replace(small.model, context=run.plan.model.context))
            compare("distil", run, BareDistil(run.plan, engine, Frozen(short, engine)), rounds, threads)
        if "moe" in chosen:
            run = prepare_run(registry, "model=qwen3moe")
            compare("moe", run, BareMoE(run.plan, ADAMW, engine), rounds, threads)
        if "dpo" in chosen:
            write_pairs(path / "pairs.jsonl")
            run = prepare_run(registry, "data=preference", f"data.path={path}/pairs.jsonl", "objective=preference")
            compare("dpo", run, BareDPO(run.plan, ADAMW, engine), rounds, threads)


if __name__ == "__main__":
    main(*sys.argv[1:])
