"""Disks that fill up, or cannot be written: what is lost is told, what was good stays, and a run goes on afterwards."""

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from faults import FIGURES, STEPS, Trace, environment, python, toyexp, words

from toyexp import Callback, RunFailed, ToyexpError, checkpoint, config, experiment, hookimpl, schema
from toyexp.cli import main
from toyexp.gguf.read import GGUFFile
from toyexp.registry import load
from toyexp.resume import load as load_run

REGISTRY = load()
SIZE = 2_000_000  # bytes of the disk: a run of WORDS takes 0.9 MB at its most
WORDS = [*words("scratch", "gpt2", "ggml"), "callbacks.gguf_export.every=5"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small file system of its own."""
    place = tmp_path_factory.mktemp("disk")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def empty(disk):
    yield disk
    for entry in disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def fill(disk, leaving):
    """Leaves so many bytes free, or whole pages of them."""
    with contextlib.suppress(OSError), open(disk / "filler", "ab") as file:
        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, max(shutil.disk_usage(disk).free - leaving, 1))


@dataclass(eq=False)
class Filler(Callback):
    """Fills the disk after one step, and gives the room back after another."""

    name: ClassVar[str] = "filler"

    def prepare(self, disk, at, leaving, until):
        self.disk, self.at, self.leaving, self.until = disk, at, leaving, until
        return self

    @hookimpl
    def on_step(self, step):
        if step == self.at:
            fill(self.disk, self.leaving)
        if step == self.until:
            (self.disk / "filler").unlink()


@functools.cache
def configured():
    schema.store_schemas(REGISTRY)
    return config.build(config.compose(WORDS, REGISTRY, schema.Source.of()), REGISTRY)


def execute(directory, *more, resume=False, say=lambda line: None):
    fresh = {name: replace(callback) for name, callback in configured().callbacks.items()}
    fresh |= {callback.name: callback for callback in more}
    prepared = experiment.prepare(replace(configured(), callbacks=fresh))
    resumed = load_run(directory, prepared) if resume else None
    return experiment.execute(prepared, directory, say, resumed)


def require_readable(directory):
    """Whatever has a final name is whole."""
    for path in checkpoint.steps(directory / "checkpoints").values():
        checkpoint.read(path)
    for path in directory.glob("*.gguf"):
        with GGUFFile(path) as file:
            for name in file.tensors:
                file.read(name)
    if (directory / "result.json").exists():
        json.loads((directory / "result.json").read_text())
    events = directory / "events.jsonl"
    if events.exists():
        text = events.read_text()
        assert text.endswith("\n") or not text
        for line in text.splitlines():
            json.loads(line)


def require_same(directory, wanted, what):
    """As on a disk with room, but for extra files of the export on the way, which are told and cost no run."""
    found = Trace.of(directory)
    assert found.events == wanted.events, what
    missing = wanted.files.keys() - found.files.keys()
    assert missing <= {"model-5.gguf", "model-10.gguf"}, what
    assert found.files.items() <= wanted.files.items(), what


def fill_up(disk, wanted, dice, number, capfd):
    """One run on a disk that is full at some moment, for a while or for good."""
    directory = disk / f"run-{number:03}"
    at = dice.randrange(STEPS)
    leaving = dice.choice([0, dice.randrange(20_000), dice.randrange(SIZE // 2), dice.randrange(SIZE)])
    until = dice.choice([None, dice.randint(at + 1, STEPS + 2)])
    what = (number, at, leaving, until)
    if at == 0:
        fill(disk, leaving)
    said = []
    try:
        execute(directory, Filler().prepare(disk, at, leaving, until), say=said.append)
    except ToyexpError as error:
        assert "\n" not in str(error), what
        assert "No space left" in str(error) or "disk may be full" in str(error) or "disk was full" in str(error), what
        ended = "failed in one line"
    else:
        ended = "completed"
    warnings = [line for line in [*said, *capfd.readouterr().err.splitlines()] if "warning" in line]
    assert len([w for w in warnings if "checkpoint of step" in w]) <= (1 if until is None else 2), warnings
    assert len([w for w in warnings if "log.txt" in w]) <= 1, warnings
    if directory.exists():
        require_readable(directory)
    if ended == "completed":
        require_same(directory, wanted, what)
    (disk / "filler").unlink(missing_ok=True)
    if not checkpoint.steps(directory / "checkpoints"):
        assert not directory.exists() or (directory / "config.yaml").exists(), f"{what}: a directory half made"
        again = False
    else:
        again = True
        with contextlib.suppress(config.UserError):  # all is done
            execute(directory, resume=True)
    if again:
        require_same(directory, wanted, what)
        assert not [f.name for f in [*directory.iterdir(), *(directory / "checkpoints").iterdir()] if "tmp" in f.name]
    if directory.exists():
        shutil.rmtree(directory)
    FIGURES[f"full disk: moments, {ended}"] += 1
    FIGURES["full disk: moments survived, the same bits with room again"] += again


def survive(disk, moments, capfd, seed):
    execute(disk / "run-xxx")
    wanted = Trace.of(disk / "run-xxx")
    shutil.rmtree(disk / "run-xxx")
    dice = random.Random(seed)
    for number in range(moments):
        fill_up(disk, wanted, dice, number, capfd)


def test_some_moments(here, empty, capfd):
    survive(empty, 8, capfd, 1)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_many_moments(here, empty, capfd):
    survive(empty, 150, capfd, 2)
