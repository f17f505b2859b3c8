"""Fixtures that run tiny real trainings for the tests of the callbacks."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from lines import drop_repeated_keys

from toyexp.cli.main import main

MODEL = [
    "model=llama", "model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1", "model.d_ff=32",
    "model.n_layers=1", "model.context=16",
]  # fmt: skip
ENGINES = {
    # One thread: several test processes share a few cores, where more threads are slower.
    "cpu": ["engine=cpu", "engine.threads=1"],
    # For tests that need no numbers, mainly in child processes: torch is slow to import.
    "noop": ["plugins=[toyexp.testing.null]", "engine=noop"],
}
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.\n" * 60
COUNTER = itertools.count()


def reject_nonstandard_number(word):
    raise ValueError(f"{word} is not strict JSON")


@dataclass
class FinishedRun:
    code: int
    dir: Path
    out: str = ""
    err: str = ""

    @property
    def events(self):
        lines = (self.dir / "events.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=reject_nonstandard_number) for line in lines]

    def select(self, kind):
        return [e for e in self.events if e["kind"] == kind]

    @property
    def result(self):
        return json.loads((self.dir / "result.json").read_text())


@pytest.fixture(autouse=True)
def separate_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def settings(tmp_path):
    """Return a function that builds the overrides of a tiny run in directory `to`; the last of repeated keys wins."""
    (tmp_path / "text.txt").write_text(TEXT)

    def build(*overrides, to="run", engine="cpu"):
        data = ["data=text", f"data.path={tmp_path / 'text.txt'}", "data.tokenizer=byte"]
        sizes = ["steps=12", "batch_size=4", "eval_every=4", f"hydra.run.dir={tmp_path / to}"]
        return drop_repeated_keys(*data, *MODEL, *ENGINES[engine], *sizes, *overrides)

    return build


@pytest.fixture
def train(settings, tmp_path, capsys):
    """Return a function that runs a tiny experiment in this process."""

    def run(*overrides, to="run", engine="cpu"):
        capsys.readouterr()
        code = main(settings(*overrides, to=to, engine=engine))
        captured = capsys.readouterr()
        return FinishedRun(code, tmp_path / to, captured.out, captured.err)

    return run


@pytest.fixture
def read_run(tmp_path):
    """Return a function that reads the results of another process's run in directory `to`."""
    return lambda code, to="run": FinishedRun(code, tmp_path / to)


@pytest.fixture
def local_plugin(tmp_path, monkeypatch):
    """Return a function that writes a plugin module. Each has a new name, as a process imports a module once."""
    monkeypatch.chdir(tmp_path)

    def write(source):
        name = f"local_plugin_{next(COUNTER)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def spawn(tmp_path):
    """Return a function that starts `python <words>` with its output in a pipe; kill remaining processes at the end."""
    processes = []

    def start(*words, env=()):
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, **dict(env)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
