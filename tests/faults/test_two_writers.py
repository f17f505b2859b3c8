"""Only one process at a time writes a run directory; the lock of a dead process does not block others."""

import os
import signal
import subprocess
import time
import warnings

import pytest
from faults import FIGURES, environment, python, toyexp, words

from toyexp import UserError
from toyexp.cli.main import main
from toyexp.training import checkpoint
from toyexp.training.rundir import lock

WORDS = [*words("scratch", "gpt2", "ggml"), "checkpoint_every=50"]


def start(here, *args):
    return subprocess.Popen(
        python("-m", "toyexp", *args), cwd=here, env=environment(here), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.faults
def test_a_run_has_one_writer_until_it_dies(here, capsys):
    directory = here / "one-writer"
    with start(here, *WORDS, "steps=100000000", f"hydra.run.dir={directory}") as first:
        try:
            wait_for(lambda: checkpoint.list_checkpoints(directory / "checkpoints"))
            owner = f"is being written by process {first.pid} on "
            assert main([f"resume={directory}"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert owner in line
            assert line.endswith("; wait for it, or stop it")
        finally:
            first.send_signal(signal.SIGKILL)
    reached = max(checkpoint.list_checkpoints(directory / "checkpoints"))
    assert main([f"resume={directory}", f"steps={reached + 1}"]) == 0
    FIGURES["locks: second writer rejected, lock of a killed one free"] += 1


@pytest.mark.faults
def test_only_one_of_several_simultaneous_starts_writes_the_run(here):
    for round_ in range(4):
        directory = here / "race" / str(round_)
        runs = [start(here, *WORDS, f"seed={seed}", f"hydra.run.dir={directory}") for seed in range(4)]
        errors = [run.communicate(timeout=120)[1] for run in runs]
        codes = sorted(run.returncode for run in runs)
        assert codes == [0, 2, 2, 2], errors
        for error in filter(None, errors):
            assert "is being written by process" in error or "already holds a run" in error
            assert len(error.splitlines()) == 1
        assert (directory / "events.jsonl").read_text().count('"run_start"') == 1
        FIGURES["locks: four started at once, one wrote"] += 1


@pytest.mark.faults
def test_only_one_of_several_simultaneous_resumes_continues_the_run(here):
    directory = here / "resumed-by-four"
    assert toyexp([*WORDS, "steps=300", f"hydra.run.dir={directory}"], here).returncode == 0
    runs = [start(here, f"resume={directory}", "steps=5000") for _ in range(4)]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2, 2, 2], errors
    lines = (directory / "events.jsonl").read_text().splitlines()
    assert sum('"kind": "step"' in line for line in lines) == 5000
    FIGURES["locks: four started at once, one wrote"] += 1


def test_a_lock_is_released_when_its_process_is_killed(tmp_path):
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which this child does not use
            child = os.fork()
        if child == 0:
            try:
                lock(tmp_path)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        own_lock = lock(tmp_path)
        with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on "):
            lock(tmp_path)
        os.close(own_lock)
