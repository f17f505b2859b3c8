"""Whether a search finds what a grid finds, for less: TPE with ASHA beside 64 points, one seed after another.

Usage: search.py FOLDER [seed ...]. The question is one that a person has: the learning rate, weight decay and warm-up
of a short run of recipe=warm on ggml, whose embedding comes from the donor that toyexp trained itself. The grid has
four values of each; the search has the intervals between their ends, and at most a third of the grid's steps. For
each seed (0 1 2), which draws the first values, the batches and the search alike, it prints the best of the grid, and
after how many steps, of all its runs, the search had a run at least as good. The sweeps stand in FOLDER; what stands
there already is gone on with.
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
SHARE = 3  # of the grid's steps the search has one in so many


def jobs_of(folder: Path, *words: str) -> list[dict]:
    """The jobs of a sweep that was begun, or is gone on with, in the order in which they ran."""
    trials = [word for word in words if word.startswith("sweep.trials=")]
    begun = (folder / "sweep.json").exists()
    asked = [f"sweep.resume={folder}", *trials] if begun else ["-m", *RUN, *words, f"hydra.sweep.dir={folder}"]
    done = subprocess.run([sys.executable, "-m", "toyexp", *asked], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{' '.join(asked)}: exit code {done.returncode}\n{done.stderr.decode()}")
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def steps_of(jobs: list[dict]) -> int:
    """How many they took together."""
    return sum(job["result"]["steps"] for job in jobs)


def searched(folder: Path, budget: int, *words: str) -> list[dict]:
    """The jobs of a search that begins a point as long as it has steps left for a whole run."""
    jobs: list[dict] = []
    while (more := (budget - steps_of(jobs)) // STEPS) > 0:
        jobs = jobs_of(folder, *SPACE, *words, f"sweep.trials={len(jobs) + more}")
    return jobs


def loss(job: dict) -> float:
    """The held-out loss of a run that came to its end; of one that was stopped it is no result."""
    return job["result"]["eval_loss"] if job["status"] == "completed" else float("inf")


def main(folder: str, *asked: str) -> None:
    """Prints a line for each grid and each search, and one for all."""
    reached, seeds = 0, asked or ("0", "1", "2")
    for seed in seeds:
        grid = jobs_of(Path(folder, f"grid-{seed}"), *GRID, f"seed={seed}")
        best, whole = min(grid, key=loss), steps_of(grid)
        told = f"held-out loss {loss(best):.4f} at {' '.join(best['overrides'])}"
        print(f"seed {seed}: grid    {len(grid)} points, {whole} steps: {told}", flush=True)
        jobs = searched(Path(folder, f"search-{seed}"), whole // SHARE, f"seed={seed}")
        found, ended = min(jobs, key=loss), sum(job["status"] == "completed" for job in jobs)
        told = f"held-out loss {loss(found):.4f} at {' '.join(found['overrides'])}"
        print(f"        search  {len(jobs)} points, {ended} to their end, {steps_of(jobs)} steps: {told}", flush=True)
        first = next((n for n, job in enumerate(jobs) if loss(job) <= loss(best)), None)
        if first is not None:
            reached += 1
            steps = steps_of(jobs[: first + 1])
            print(f"        as good as the grid after {steps} steps, {steps / whole:.2f} of its own", flush=True)
    print(f"as good as the grid: {reached} of {len(seeds)} searches")


if __name__ == "__main__":
    main(*sys.argv[1:])
