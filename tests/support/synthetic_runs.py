"""Write run directories as a sweep would, without training: loss curves are computed from the settings."""

import json
import math
from pathlib import Path

import numpy as np

from toyexp.training.rundir import runnable_yaml

CONFIG = {
    "name": "scratch-llama", "seed": 0, "steps": 100, "batch_size": 8, "lr": 0.003, "eval_every": 25,
    "checkpoint_every": "10min", "checkpoint_keep": 2, "checkpoint_best": None, "nonfinite": "stop", "resume": None,
    "plugins": [], "model": {"name": "llama", "d_model": 32, "n_layers": 1}, "data": {"name": "stdlib", "max_mb": 1.0},
    "recipe": {"name": "scratch", "init": "default"},
    "objective": {"name": "cross_entropy"}, "engine": {"name": "ggml", "threads": 1},
    "optim": {"name": "adamw", "weight_decay": 0.0, "grad_clip": 0.0, "beta2": None},
    "callbacks": {"cosine": {"name": "cosine", "warmup": 5}, "events": {"name": "events", "every": 1}},
}  # fmt: skip


def run_config(**settings):
    """Return the configuration of a run; keywords are setting names with __ for a dot."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in settings.items():
        part, _, name = key.partition("__")
        if name:
            config[part][name] = value
        elif isinstance(config.get(part), dict):
            config[part]["name"] = value
        else:
            config[part] = value
    config["name"] = settings.get("name", f"{config['recipe']['name']}-{config['model']['name']}")
    return config


def write_run(path, reason="completed", until=None, held_out=None, samples=False, scores=None, spike=None, sources=None,
         **settings):  # fmt: skip
    """Write one run to `path`; `until` is the step at which it stopped, `held_out` its last held-out loss.

    `spike` is the loss of step 140, `sources` are the digests of the files that the run read.
    """
    path, config = Path(path), run_config(**settings)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(runnable_yaml(config))
    steps, lr, seed = config["steps"] if until is None else until, config["lr"], config["seed"]
    draw = np.random.default_rng(seed)
    floor = 2.0 + 0.3 * abs(math.log10(lr / 3e-3)) + (0.0 if config["recipe"]["name"] == "warm" else 0.4)
    backend = {"kind": config["engine"]["name"], "framework": "ggml 0.15.3", "threads": 1}
    lines = [{"kind": "run_start", "t": 0.0, "schema": "toy/v1", "run_id": path.name, "name": config["name"],
              "phase": "train", "started_at": f"2026-11-22T10:{seed % 60:02}:00.000+00:00", "git": {"sha": "0" * 40},
              "host": {"name": "here", "os": "Linux", "arch": "x86_64", "python": "3.11.7"}, "backend": backend,
              "model": {"arch": "llama", "parameters": 57568},
              "data": {"name": "stdlib", "tokenizer": "bpe", "tokens_sha256": "ab", "held_out_tokens": 100},
              "config": {"steps": config["steps"], "lr": lr, "seed": seed, "batch": 8},
              "optim": {"name": "adamw", "lr": lr}, **({"sources": sources} if sources else {})}]  # fmt: skip
    last = None
    for step in range(1, steps + 1):
        loss = floor + 4.5 * math.exp(-12 * step * lr / 0.003 / config["steps"]) + 0.1 * float(draw.normal())
        loss = spike if spike and step == 140 else loss
        lines.append({"kind": "step", "t": step * 0.01, "phase": "train", "step": step, "loss": loss, "lr": lr,
                      "grad_norm": 1 + float(draw.random()), "tokens": 128, "wall_us": 8000 + int(draw.integers(2000)),
                      "batch": "0011223344556677"})  # fmt: skip
        if step % config["eval_every"] == 0 or step == config["steps"]:
            last = loss + 0.1 if held_out is None or step < config["steps"] else held_out
            lines.append({"kind": "eval", "t": step * 0.01, "phase": "eval", "name": "held_out", "step": step,
                          "loss": last, "ppl": math.exp(min(last, 700.0)), **(scores or {})})  # fmt: skip
            if samples:
                lines.append(
                    {"kind": "sample", "t": step * 0.01, "step": step, "prompt": "def ", "text": "<b>x</b>():"}
                )
    if config["lr"] > 0.05:
        lines.append({"kind": "warning", "t": 1.0, "about": "spike", "step": 7, "text": "the loss climbs"})
    if reason:
        lines.append({"kind": "run_end", "t": steps * 0.01, "reason": reason, "exit_code": 0})
        result = {"steps": steps, "reason": reason, "train_loss": loss if steps else None, "eval_loss": last,
                  "first_eval_loss": 6.5, "seconds": steps * 0.01, "training_seconds": steps * 0.008,
                  "tokens": 128 * steps, "skipped": 0, "why": None, "eval_step": steps, "eval_scores": scores or {},
                  "first_eval_scores": {}, "tokens_per_second": 16000.0, "artifacts": [], "best": None}  # fmt: skip
        (path / "result.json").write_text(json.dumps(result))
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_sweep(root):
    """Write runs of 2 recipes, 3 learning rates and 4 seeds, with samples and warnings, and a killed run."""
    combinations = [(r, lr, s) for r in ("scratch", "warm") for lr in (1e-3, 3e-3, 0.1) for s in range(4)]
    for number, (recipe, lr, seed) in enumerate(combinations):
        write_run(Path(root) / f"runs/{number}", recipe=recipe, lr=lr, seed=seed, steps=300, samples=True,
             scores={"accuracy": number / 30}, spike=30.0 if number == 0 else None)  # fmt: skip
    write_run(
        Path(root) / "runs/killed", reason=None, until=40, seed=7, steps=300, data__name="<img src=x onerror=alert(1)>"
    )
    return Path(root)
