"""A search that is killed at random moments, again and again, comes to what the search came to that never was."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import FIGURES

from toyexp.cli.main import main

optuna = pytest.importorskip("optuna")

RUN = ["data=random", "data.vocab=32", "model.n_layers=1", "model.d_model=16", "model.context=8", "model.d_ff=24",
       "batch_size=2", "steps=240", "eval_every=30", "engine=ggml", "engine.threads=1", "callbacks=[cosine,events]",
       "checkpoint_every=40"]  # fmt: skip
SEARCH = ["lr=tag(log, interval(1e-4, 1))", "callbacks.cosine.warmup=int(interval(0, 40))",
          "optim.weight_decay=0,0.1", "sweep.search=tpe", "sweep.prune=asha"]  # fmt: skip
LAUNCHERS = {
    "in one process": ["sweep.isolate=false"],
    "serial": ["sweep.launcher=serial"],
    "processes": ["sweep.launcher=processes", "sweep.jobs=2"],
}


def descendants(pid):
    """The processes that a process started, and theirs."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found


def lines_of(folder):
    """How much a search has noted down."""
    journal = folder / "study.log"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def killed(words, folder, lines, seconds):
    """Runs a search and kills it, with all that it started, so many seconds after its journal has so many lines.

    Returns whether it was still running.
    """
    with open("said.txt", "wb") as said:
        process = subprocess.Popen([sys.executable, "-m", "toyexp", *words], stdout=said, stderr=said)
    while process.poll() is None and lines_of(folder) < lines:
        time.sleep(0.001)
    time.sleep(seconds)
    if process.poll() is None:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def outcome(folder):
    """What came of a search: each point with its state and scores, and each run with the steps that it took."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"{folder}/study.log"))
    trials = [(t.params, t.state.name, t.value, t.intermediate_values) for t in
              optuna.load_study(study_name=None, storage=storage).trials]  # fmt: skip
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    runs = []
    for job in jobs:
        lines = (folder / job["directory"] / "events.jsonl").read_text().splitlines()
        steps = [(e["step"], e["loss"]) for e in map(json.loads, lines) if e["kind"] == "step"]
        runs.append((job["trial"], job["overrides"], job["status"], steps))
    return trials, runs


def survive(kills, launcher, trials, seed):
    """Compares one search, killed so often, with one that was left alone; both are of `trials` points."""
    words, alone, folder = [*RUN, *SEARCH, f"sweep.trials={trials}"], Path("alone"), Path("killed")
    assert main(["-m", *words, f"hydra.sweep.dir={alone}", "sweep.isolate=false"]) == 0
    dice, left = random.Random(seed), kills
    while True:
        begun = (folder / "sweep.json").exists()
        again = (
            [f"sweep.resume={folder}"] if begun else ["-m", *words, *LAUNCHERS[launcher], f"hydra.sweep.dir={folder}"]
        )
        more = dice.randrange(1, lines_of(alone) // kills) if left else sys.maxsize
        if not killed(again, folder, lines_of(folder) + more, dice.uniform(0, 0.05)):
            assert "Traceback" not in Path("said.txt").read_text()
            break
        left -= 1
    FIGURES[f"kills: of a search, {launcher}"] += kills - left
    assert left < kills
    trials_alone, runs_alone = outcome(alone)
    trials_killed, runs_killed = outcome(folder)
    assert len(trials_killed) == len(runs_killed) == trials
    for trial, _, status, steps in runs_killed:
        assert [step for step, _ in steps] == list(range(1, len(steps) + 1))  # none lost, none taken twice
        assert (status == "completed") == (len(steps) == 240) and trials_killed[trial][1] in ("COMPLETE", "PRUNED")
    if launcher != "processes":  # whose points depend on which of two runs ends first
        assert (trials_killed, runs_killed) == (trials_alone, runs_alone)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_search_killed_twice_is_the_search_that_was_left_alone():
    survive(2, "in one process", 5, seed=0)


@pytest.mark.faults
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.timeout(1800)
def test_a_search_killed_eight_times_is_the_search_that_was_left_alone(launcher):
    survive(8, launcher, 14, seed=1)
