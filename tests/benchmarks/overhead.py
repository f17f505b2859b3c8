"""The overhead of toyexp over a bare PyTorch loop: `make bench`.

Both train the same functional model (the model's own function on the same ops) on the same tokens, in one process,
taking turns; the figure is the ratio of the median tokens/s. toyexp runs with its default callbacks, from the first
step to the last, including everything between; the bare loop draws random windows, like nanoGPT, and steps
torch.optim.AdamW.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as toyexp sets it, for both sides

import torch

from toyexp.config.request import Request
from toyexp.plugins.discovery import load
from toyexp.training.experiment import execute, prepare
from toyexp_torch.ops import TorchOps

ROUNDS = 9


def prepare_experiment(model, steps, registry):
    """Compose the measured experiment as the command line does."""
    overrides = [f"model={model}", "engine=cpu", f"steps={steps}", "eval_every=0"]
    return prepare(Request([], registry).build_config(*overrides))


def toyexp_seconds(model, steps, registry):
    """Return the seconds of the training loop of a run with default callbacks."""
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(open(os.devnull, "w")):
        return execute(prepare_experiment(model, steps, registry), Path(directory) / "run").outcome.seconds


def bare_seconds(experiment, steps):
    """Return the seconds of the loop that a user would write for this one experiment."""
    plan, ids = experiment.plan, torch.from_numpy(experiment.dataset.train).long()
    params = {t.name: torch.from_numpy(plan.initial_values(t)).requires_grad_() for t in plan.tensors}
    optimiser = torch.optim.AdamW(params.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    ops, seen = TorchOps(), plan.params(params)
    rows, context = plan.rows, plan.inputs["tokens"].shape[0]
    began = time.perf_counter()
    for _ in range(steps):
        starts = torch.randint(len(ids) - context - 1, (rows,))
        x = torch.stack([ids[i : i + context] for i in starts])
        y = torch.stack([ids[i + 1 : i + context + 1] for i in starts])
        logits = plan.model.forward(ops, seen, {"tokens": x})
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        loss.item()
    return time.perf_counter() - began


def compare(model, steps, registry):
    """Print the ratio for one model."""
    experiment = prepare_experiment(model, steps, registry)
    tokens = steps * experiment.plan.rows * experiment.plan.inputs["tokens"].shape[0]
    toyexp_seconds(model, steps, registry)
    bare_seconds(experiment, steps)
    ours, bare = [], []
    for _ in range(ROUNDS):
        ours.append(tokens / toyexp_seconds(model, steps, registry))
        bare.append(tokens / bare_seconds(experiment, steps))
    ratio = statistics.median(ours) / statistics.median(bare)
    print(
        f"{model}: toyexp {statistics.median(ours):.0f} tokens/s ({min(ours):.0f} to {max(ours):.0f}), "
        f"bare loop {statistics.median(bare):.0f} ({min(bare):.0f} to {max(bare):.0f}), ratio {ratio:.3f}"
    )


def first_step_seconds(*words):
    """Return the seconds from the start of the process to the first line of progress."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "toyexp", *words, f"hydra.run.dir={directory}/run", "eval_every=0"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                if line.startswith("step"):
                    times.append(time.perf_counter() - began)
                    process.kill()
                    break
            process.wait()
    return statistics.median(times)


def main():
    """Print all numbers of the documentation's overhead table."""
    registry = load()
    compare("nano", 200, registry)
    compare("small", 10, registry)
    for words in ("recipe=warm", "engine=cpu"), ("recipe=scratch", "engine=ggml"):
        print(f"process start to first step, nano, {' '.join(words)}: {first_step_seconds(*words):.2f} s")
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "toyexp", "--help"], stdout=subprocess.DEVNULL, check=True)
    print(f"toyexp --help: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
