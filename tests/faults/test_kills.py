"""Runs killed at random moments resume to results bit-identical with an uninterrupted run."""

import itertools
import json
import random
import signal
import time

import pytest
from faults import FIGURES, Trace, interrupt_run, shell_code, toyexp, words

from toyexp import Unavailable
from toyexp.cli.main import main
from toyexp.plugins.discovery import load
from toyexp.training.checkpoint import list_checkpoints

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PAIRS = [
    ("scratch", "llama"), ("scratch", "gpt2"), ("scratch", "vit"), ("vit_tiny", "vit"), ("warm", "llama"),
    ("warm", "gpt2"), ("lora", "llama"), ("lora", "gpt2"), ("full", "llama"), ("full", "gpt2"),
]  # fmt: skip
ALL = [*itertools.product(PAIRS, ("ggml", "cpu")), (("scratch", "qwen3"), "ggml")]
KILLS = 11  # per case of ALL
KILLS_ON_A_GPU = 4  # these processes take seconds to start
STEPS = 60  # so that half of a process's time is training and saving


def kill_until_done(here, name, settings, limit, seconds, rng, signals, capsys):
    """Kill a run up to `limit` times and resume it each time; return its directory and the number of kills."""
    kills, number, directory = 0, 0, None
    while True:
        number += 1
        auto = ["resume=auto"] if rng.random() < 0.3 else []
        if directory is None:  # a first start, or a new start without a checkpoint
            directory = here / "runs" / name / f"run-{number:02}"
            args = [*settings, f"hydra.run.dir={directory}", *auto]
        else:
            args = [*settings, f"hydra.run.dir={directory}", *auto] if auto else [f"resume={directory}"]
        if kills >= limit:
            done = toyexp(args, here)
            assert done.returncode == 0 or "is complete" in done.stderr, (
                done.stderr
            )  # the last kill came after completion
            return directory, kills
        sent_signal = next(signals)
        moment = rng.uniform(0.02 if rng.random() < 0.4 else 0.5, 1.0)  # the first half is mostly imports
        before = read_events(directory)
        end = interrupt_run(args, here, sent_signal, moment * seconds)
        if end.is_completed():
            return directory, kills
        kills += 1
        FIGURES[f"kills: tried, {sent_signal.name}"] += 1
        assert end.is_killed(sent_signal), (end.code, end.errors)
        assert "Traceback" not in end.errors or sent_signal == signal.SIGINT, (
            end.errors
        )  # Python's own exit may print one
        if sent_signal != signal.SIGKILL:
            assert end.after < max(10, 3 * seconds)
            check_end_event(directory, before, sent_signal)
        if list_checkpoints(directory / "checkpoints"):
            FIGURES["kills: after the first checkpoint"] += 1
            continue
        FIGURES["kills: before the first checkpoint"] += 1
        capsys.readouterr()
        assert main([f"resume={directory}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "not found" in line or "holds no run" in line or "has no checkpoint" in line
        directory = None


def read_events(directory):
    events = directory / "events.jsonl"
    return events.read_text() if events.is_file() else ""


def check_end_event(directory, before, sent):
    """Check that a run stopped by a signal recorded its end, unless the signal came before its first event."""
    events = read_events(directory)
    if events == before:
        return
    last = json.loads(events.splitlines()[-1])
    if last["kind"] == "run_end" and last["reason"] == "completed":
        return  # the signal came after completion
    assert (last["kind"], last["reason"], last["exit_code"]) == ("run_end", "interrupted", shell_code(sent)), last


def compare_killed_run(here, recipe, model, engine, kills, capsys, seed=0):
    settings = [*words(recipe, model, engine), f"steps={STEPS}"]
    name = f"{recipe}-{model}-{engine}-{seed}"
    uninterrupted = here / "runs" / name / "run-00"
    began = time.monotonic()
    done = toyexp([*settings, f"hydra.run.dir={uninterrupted}"], here)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    expected = Trace.read(uninterrupted, STEPS)
    assert [e["step"] for e in expected.events if e["kind"] == "step"] == list(range(1, STEPS + 1))
    rng = random.Random(f"{name} {seed}")
    signals = itertools.cycle(rng.sample(SIGNALS, len(SIGNALS)))  # every signal occurs
    so_far, attempt = 0, 0
    while so_far < kills:
        attempt += 1
        limit = min(rng.randint(2, 5), kills - so_far)
        directory, survived = kill_until_done(here, f"{name}-{attempt}", settings, limit, seconds, rng, signals, capsys)
        assert Trace.read(directory, STEPS) == expected
        so_far += survived
        FIGURES["kills: resumed to the same events and bytes"] += survived


@pytest.mark.slow
def test_a_killed_run_resumes_to_bit_identical_results(here, capsys):
    compare_killed_run(here, "lora", "llama", "ggml", len(SIGNALS), capsys)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("pair", "engine"), ALL, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value
)
def test_killed_runs_of_every_recipe_resume_bit_identically(pair, engine, here, capsys):
    compare_killed_run(here, *pair, engine, KILLS, capsys, seed=1)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.device(name)) for name in ("cuda", "ggml_cuda")]
)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_killed_runs_of_every_recipe_resume_bit_identically_on_a_gpu(pair, engine, here, capsys):
    try:
        load().offers["engine"][engine].cls().check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    compare_killed_run(here, *pair, engine, KILLS_ON_A_GPU, capsys, seed=2)
