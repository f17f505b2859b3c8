"""A search compared with a grid: TPE with ASHA against 64 combinations, for several seeds.

Usage: search.py FOLDER [seed ...]. It tunes learning rate, weight decay and warmup of a short run of recipe=warm on
ggml, with toyexp's own donor. The grid has four values of each; the search has the intervals between the extremes, and
at most a third of the grid's steps. A seed (0 1 2) sets the initial values, the batches and the search. For each seed
the script prints the grid's best loss, and the number of steps after which the search had a run at least as good. The
sweeps are stored in FOLDER; existing ones are resumed.
"""

import json
import subprocess
import sys
from pathlib import Path

STEPS = 120
RUN = ["recipe=warm", "engine=ggml", "engine.threads=1", f"steps={STEPS}", "eval_every=15", "callbacks=[cosine]",
       "checkpoint_every=0", "sweep.isolate=false"]  # fmt: skip
GRID = ["lr=1e-3,5e-3,2e-2,1e-1", "optim.weight_decay=0,0.1,0.3,1", "callbacks.cosine.warmup=0,4,8,12"]
SPACE = ["lr=tag(log, interval(1e-3, 1e-1))", "optim.weight_decay=interval(0.0, 1.0)",
         "callbacks.cosine.warmup=int(interval(0, 12))", "sweep.search=tpe", "sweep.prune=asha"]  # fmt: skip
SHARE = 3  # the search's share of the grid's steps is one third


def run_sweep(folder: Path, *words: str) -> list[dict]:
    """Start or resume a sweep; return its jobs in the order in which they ran."""
    trials = [word for word in words if word.startswith("sweep.trials=")]
    begun = (folder / "sweep.json").exists()
    asked = [f"sweep.resume={folder}", *trials] if begun else ["-m", *RUN, *words, f"hydra.sweep.dir={folder}"]
    done = subprocess.run([sys.executable, "-m", "toyexp", *asked], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{' '.join(asked)}: exit code {done.returncode}\n{done.stderr.decode()}")
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def count_steps(jobs: list[dict]) -> int:
    """Return the total number of steps of the jobs."""
    return sum(job["result"]["steps"] for job in jobs)


def run_search(folder: Path, budget: int, *words: str) -> list[dict]:
    """Return the jobs of a search that starts trials while enough steps are left for a complete run."""
    jobs: list[dict] = []
    while (more := (budget - count_steps(jobs)) // STEPS) > 0:
        jobs = run_sweep(folder, *SPACE, *words, f"sweep.trials={len(jobs) + more}")
    return jobs


def loss(job: dict) -> float:
    """Return the held-out loss of a completed run; a pruned run has none."""
    return job["result"]["eval_loss"] if job["status"] == "completed" else float("inf")


def main(folder: str, *asked: str) -> None:
    """Print a line for each grid and each search, and a summary."""
    reached, seeds = 0, asked or ("0", "1", "2")
    for seed in seeds:
        grid = run_sweep(Path(folder, f"grid-{seed}"), *GRID, f"seed={seed}")
        best, whole = min(grid, key=loss), count_steps(grid)
        told = f"held-out loss {loss(best):.4f} at {' '.join(best['overrides'])}"
        print(f"seed {seed}: grid    {len(grid)} points, {whole} steps: {told}", flush=True)
        jobs = run_search(Path(folder, f"search-{seed}"), whole // SHARE, f"seed={seed}")
        found, ended = min(jobs, key=loss), sum(job["status"] == "completed" for job in jobs)
        told = f"held-out loss {loss(found):.4f} at {' '.join(found['overrides'])}"
        print(
            f"        search  {len(jobs)} points, {ended} to their end, {count_steps(jobs)} steps: {told}", flush=True
        )
        first = next((n for n, job in enumerate(jobs) if loss(job) <= loss(best)), None)
        if first is not None:
            reached += 1
            steps = count_steps(jobs[: first + 1])
            print(f"        as good as the grid after {steps} steps, {steps / whole:.2f} of its own", flush=True)
    print(f"as good as the grid: {reached} of {len(seeds)} searches")


if __name__ == "__main__":
    main(*sys.argv[1:])
