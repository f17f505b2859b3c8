"""A search that is killed repeatedly at random moments has the same result as an uninterrupted search."""

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
    """Return a process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # the process has ended
                continue
    pids = [pid]
    for ancestor in pids:
        pids += [child for child, parent in parents.items() if parent == ancestor]
    return pids


def count_journal_lines(folder):
    """Return the number of lines in the journal of a search."""
    journal = folder / "study.log"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def kill_search(words, folder, lines, seconds):
    """Run a search and kill it with all its children, `seconds` after its journal has `lines` lines.

    Return True if it was still running.
    """
    with open("output.txt", "wb") as output_file:
        process = subprocess.Popen([sys.executable, "-m", "toyexp", *words], stdout=output_file, stderr=output_file)
    while process.poll() is None and count_journal_lines(folder) < lines:
        time.sleep(0.001)
    time.sleep(seconds)
    if process.poll() is None:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def read_search(folder):
    """Return the trials of a search with states and scores, and its runs with their steps and losses."""
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


def compare_killed_search(kills, launcher, trials, seed):
    """Compare a search that is killed `kills` times with an uninterrupted one."""
    words, uninterrupted, folder = [*RUN, *SEARCH, f"sweep.trials={trials}"], Path("alone"), Path("killed")
    assert main(["-m", *words, f"hydra.sweep.dir={uninterrupted}", "sweep.isolate=false"]) == 0
    rng, remaining = random.Random(seed), kills
    while True:
        is_started = (folder / "sweep.json").exists()
        arguments = (
            [f"sweep.resume={folder}"]
            if is_started
            else ["-m", *words, *LAUNCHERS[launcher], f"hydra.sweep.dir={folder}"]
        )
        new_lines = rng.randrange(1, count_journal_lines(uninterrupted) // kills) if remaining else sys.maxsize
        if not kill_search(arguments, folder, count_journal_lines(folder) + new_lines, rng.uniform(0, 0.05)):
            assert "Traceback" not in Path("output.txt").read_text()
            break
        remaining -= 1
    FIGURES[f"kills: of a search, {launcher}"] += kills - remaining
    assert remaining < kills
    expected_trials, expected_runs = read_search(uninterrupted)
    trials_killed, runs_killed = read_search(folder)
    assert len(trials_killed) == len(runs_killed) == trials
    for trial, _, status, steps in runs_killed:
        assert [step for step, _ in steps] == list(range(1, len(steps) + 1))  # no step is lost or repeated
        assert (status == "completed") == (len(steps) == 240) and trials_killed[trial][1] in ("COMPLETE", "PRUNED")
    if launcher != "processes":  # with two workers, trials depend on which run ends first
        assert (trials_killed, runs_killed) == (expected_trials, expected_runs)


@pytest.fixture(autouse=True)
def _work_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_search_killed_twice_equals_an_uninterrupted_search():
    compare_killed_search(2, "in one process", 5, seed=0)


@pytest.mark.faults
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.timeout(1800)
def test_a_search_killed_eight_times_equals_an_uninterrupted_search(launcher):
    compare_killed_search(8, launcher, 14, seed=1)
