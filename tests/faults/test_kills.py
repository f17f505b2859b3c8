"""Real processes, killed at random moments, go on to the very bits of a run that was never stopped."""

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
KILLS = 11  # of each of ALL
KILLS_ON_A_GPU = 4  # whose processes take seconds to start
STEPS = 60  # enough that half of a process's time is training and saving


def kill_until_done(here, name, settings, limit, seconds, dice, signals, capsys):
    """Kills a run up to `limit` times, each time going on with it; returns its directory and the kills."""
    kills, number, directory = 0, 0, None
    while True:
        number += 1
        auto = ["resume=auto"] if dice.random() < 0.3 else []
        if directory is None:  # begun, or begun again
            directory = here / "runs" / name / f"run-{number:02}"
            args = [*settings, f"hydra.run.dir={directory}", *auto]
        else:
            args = [*settings, f"hydra.run.dir={directory}", *auto] if auto else [f"resume={directory}"]
        if kills >= limit:
            done = toyexp(args, here)
            assert done.returncode == 0 or "is complete" in done.stderr, done.stderr  # killed after its last word
            return directory, kills
        sent = next(signals)
        moment = dice.uniform(0.02 if dice.random() < 0.4 else 0.5, 1.0)  # the first half is mostly imports
        before = events_of(directory)
        ended = interrupt_run(args, here, sent, moment * seconds)
        if ended.is_completed():
            return directory, kills
        kills += 1
        FIGURES[f"kills: tried, {sent.name}"] += 1
        assert ended.is_killed(sent), (ended.code, ended.errors)
        assert "Traceback" not in ended.errors or sent == signal.SIGINT, ended.errors  # while Python itself ends
        if sent != signal.SIGKILL:
            assert ended.after < max(10, 3 * seconds)
            require_an_end(directory, before, sent)
        if list_checkpoints(directory / "checkpoints"):
            FIGURES["kills: after the first checkpoint"] += 1
            continue
        FIGURES["kills: before the first checkpoint"] += 1
        capsys.readouterr()
        assert main([f"resume={directory}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "not found" in line or "holds no run" in line or "has no checkpoint" in line
        directory = None


def events_of(directory):
    events = directory / "events.jsonl"
    return events.read_text() if events.is_file() else ""


def require_an_end(directory, before, sent):
    """A run that was asked to end says so in its events, unless the signal came before it wrote to them."""
    events = events_of(directory)
    if events == before:
        return
    last = json.loads(events.splitlines()[-1])
    if last["kind"] == "run_end" and last["reason"] == "completed":
        return  # the signal came when it was over
    assert (last["kind"], last["reason"], last["exit_code"]) == ("run_end", "interrupted", shell_code(sent)), last


def survives(here, recipe, model, engine, kills, capsys, seed=0):
    settings = [*words(recipe, model, engine), f"steps={STEPS}"]
    name = f"{recipe}-{model}-{engine}-{seed}"
    whole = here / "runs" / name / "run-00"
    began = time.monotonic()
    done = toyexp([*settings, f"hydra.run.dir={whole}"], here)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    wanted = Trace.read(whole, STEPS)
    assert [e["step"] for e in wanted.events if e["kind"] == "step"] == list(range(1, STEPS + 1))
    dice = random.Random(f"{name} {seed}")
    signals = itertools.cycle(dice.sample(SIGNALS, len(SIGNALS)))  # each of them
    so_far, attempt = 0, 0
    while so_far < kills:
        attempt += 1
        limit = min(dice.randint(2, 5), kills - so_far)
        directory, survived = kill_until_done(
            here, f"{name}-{attempt}", settings, limit, seconds, dice, signals, capsys
        )
        assert Trace.read(directory, STEPS) == wanted
        so_far += survived
        FIGURES["kills: survived, to the same events and bytes"] += survived


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_same_bits(here, capsys):
    survives(here, "lora", "llama", "ggml", len(SIGNALS), capsys)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("pair", "engine"), ALL, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value
)
def test_every_recipe_survives_being_killed(pair, engine, here, capsys):
    survives(here, *pair, engine, KILLS, capsys, seed=1)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.device(name)) for name in ("cuda", "ggml_cuda")]
)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_recipe_survives_being_killed_on_a_gpu(pair, engine, here, capsys):
    try:
        load().offers["engine"][engine].cls().check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    survives(here, *pair, engine, KILLS_ON_A_GPU, capsys, seed=2)
