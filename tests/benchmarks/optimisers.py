"""The number of steps that each optimiser needs to reach AdamW's final held-out loss.

`python tests/benchmarks/optimisers.py model=small steps=200 engine=cuda`: the arguments are settings. Each optimiser is
run with several learning rates, and its best run counts.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RATES = {"adamw": (0.001, 0.003, 0.006), "muon": (0.003, 0.006, 0.012), "lion": (0.0003, 0.001), "sgd": (0.1, 0.5),
         "adafactor": (0.01, 0.03)}  # fmt: skip


def curve(optim, lr, words, directory):
    """Return the held-out loss by step."""
    run = directory / f"{optim}-{lr}"
    command = [sys.executable, "-m", "toyexp", *words, f"optim={optim}", f"lr={lr}", f"hydra.run.dir={run}",
               "callbacks=[cosine,events]", "eval_every=10", "checkpoint_every=0"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {e["step"]: e["loss"] for e in events if e["kind"] == "eval"}


def main():
    words = sys.argv[1:] or ["model=small", "steps=200"]
    with tempfile.TemporaryDirectory() as folder:
        curves = {(o, lr): curve(o, lr, words, Path(folder)) for o, rates in RATES.items() for lr in rates}
    whole = {key: losses for key, losses in curves.items() if losses}
    best = {o: min((k for k in whole if k[0] == o), key=lambda k: whole[k][max(whole[k])]) for o in RATES}
    goal = whole[best["adamw"]][max(whole[best["adamw"]])]
    for key, losses in whole.items():
        reached = next((step for step, loss in losses.items() if loss <= goal), None)
        star = "*" if key in best.values() else " "
        print(
            f"{star} {key[0]:<9} lr {key[1]:<6g} held-out {losses[max(losses)]:.4f}  reaches {goal:.4f} at: {reached}"
        )


if __name__ == "__main__":
    main()
