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

from toyexp import Callback, RunFailed, ToyexpError, hookimpl
from toyexp.base.errors import UserError
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.formats.gguf.read import GGUFFile
from toyexp.plugins.discovery import load
from toyexp.training import checkpoint, experiment
from toyexp.training.resume import load_resume_state as load_run

REGISTRY = load()
SIZE = 2_000_000  # bytes of the disk: a run of WORDS takes 0.9 MB at its most
WORDS = [*words("scratch", "gpt2", "ggml"), "callbacks.gguf_export.every=5"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A small file system of its own."""
    place = tmp_path_factory.mktemp("disk")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place], capture_output=True, text=True
    )
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
        os.posix_fallocate(
            file.fileno(), os.fstat(file.fileno()).st_size, max(shutil.disk_usage(disk).free - leaving, 1)
        )


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
    return Request([], REGISTRY).build_config(*WORDS)


def execute(directory, *more, resume=False, say=lambda line: None):
    fresh = {name: replace(callback) for name, callback in configured().callbacks.items()}
    fresh |= {callback.name: callback for callback in more}
    prepared = experiment.prepare(replace(configured(), callbacks=fresh))
    resumed = load_run(directory, prepared) if resume else None
    return experiment.execute(prepared, directory, say, resumed)


def require_readable(directory):
    """Whatever has a final name is whole."""
    for path in checkpoint.list_checkpoints(directory / "checkpoints").values():
        checkpoint.read_checkpoint(path)
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
    found = Trace.read(directory)
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
    if not checkpoint.list_checkpoints(directory / "checkpoints"):
        assert not directory.exists() or (directory / "config.yaml").exists(), f"{what}: a directory half made"
        again = False
    else:
        again = True
        with contextlib.suppress(UserError):  # all is done
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
    wanted = Trace.read(disk / "run-xxx")
    shutil.rmtree(disk / "run-xxx")
    dice = random.Random(seed)
    for number in range(moments):
        fill_up(disk, wanted, dice, number, capfd)


def test_some_moments(here, empty, capfd):
    survive(empty, 4, capfd, 1)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_many_moments(here, empty, capfd):
    survive(empty, 150, capfd, 2)


# -- other disks, and other troubles with files -----------------------------------------------------------------------


@pytest.mark.faults
def test_a_disk_that_can_only_be_read(here, empty, capsys):
    run = empty / "run"
    execute(run)
    capsys.readouterr()
    subprocess.run(["mount", "-o", "remount,ro", empty], check=True)
    try:
        before = {path: path.stat().st_mtime_ns for path in empty.rglob("*")}
        for args in ([*WORDS, f"hydra.run.dir={empty}/new"], [f"resume={run}", "steps=24"]):
            assert main(args) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "cannot be written (Read-only file system); choose another: hydra.run.dir=..." in line
        assert {path: path.stat().st_mtime_ns for path in empty.rglob("*")} == before
    finally:
        subprocess.run(["mount", "-o", "remount,rw", empty], check=True)


@dataclass(eq=False)
class Stopper(Callback):
    """Lets no file of this process grow after step 7."""

    name: ClassVar[str] = "stopper"

    @hookimpl
    def on_step(self, step):
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.faults
def test_files_that_may_no_longer_grow(here, capsys):
    directory, before = here / "frozen", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            capsys.disabled(),
            pytest.raises(RunFailed, match=r"checkpoint of step 12: not written \(.*\); the last one"),
        ):
            execute(directory, Stopper())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    require_readable(directory)
    assert max(checkpoint.list_checkpoints(directory / "checkpoints")) in (3, 6)
    execute(directory, resume=True)
    assert [e["step"] for e in Trace.read(directory).events if e["kind"] == "step"] == list(range(1, STEPS + 1))


@pytest.mark.faults
@pytest.mark.parametrize("limit", [0, 1, 1000, 3000, 8000, 40_000, 100_000, 300_000])
def test_files_that_may_not_grow(limit, here):
    """ulimit -f, which makes a write fail with another number."""
    directory = here / "limits" / str(limit)
    limited = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    done = toyexp([*WORDS, f"hydra.run.dir={directory}"], here, preexec_fn=limited)
    lines = done.stderr.splitlines()
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert lines[-1].startswith("toyexp: error: ")
    assert len(lines) <= 3, done.stderr
    if done.returncode == 2:
        assert not directory.exists()
        return
    require_readable(directory)


@pytest.mark.faults
def test_output_that_goes_to_a_full_disk(here):
    with open("/dev/full", "w") as full:
        command = python("-m", "toyexp", *WORDS, "callbacks=[default]", "steps=3", f"hydra.run.dir={here}/quiet")
        done = subprocess.run(command, cwd=here, env=environment(here), stdout=full, stderr=full, timeout=60)
    assert done.returncode == 0
    require_readable(here / "quiet")


@dataclass(eq=False)
class Vandal(Callback):
    """Removes something of the run after one step."""

    name: ClassVar[str] = "vandal"

    def prepare(self, at, what):
        self.at, self.what = at, what
        return self

    @hookimpl
    def on_step(self, step):
        while step == self.at and self.what.exists():
            shutil.rmtree(self.what, ignore_errors=True)  # a checkpoint may be in the making there


def test_a_run_whose_directory_is_removed(here, capfd):
    directory, said = here / "removed", []
    with pytest.raises(RunFailed, match="checkpoint of step 12: not written") as failure:
        execute(directory, Vandal().prepare(4, directory), say=said.append)
    assert "\n" not in str(failure.value)
    warned = [
        line for line in said if "warning" in line and "callbacks=[" not in line
    ]  # which it has fewer of than usual
    assert len(warned) == 2, "of the export on the way, and of checkpoints"
    assert "Traceback" not in capfd.readouterr().err
    assert not directory.exists(), "it is not made anew"


@pytest.mark.faults
def test_a_run_whose_checkpoints_are_removed(here):
    directory = here / "bare"
    execute(directory, Vandal().prepare(7, directory / "checkpoints"))
    assert list(checkpoint.list_checkpoints(directory / "checkpoints")) == [12, 9]


def test_a_log_that_cannot_be_written_costs_no_step(here, capfd):
    directory = here / "loggy"

    @dataclass(eq=False)
    class Breaker(Callback):
        name: ClassVar[str] = "breaker"

        @hookimpl
        def on_step(self):
            handler = next(h for h in experiment.log.handlers if h.baseFilename == str(directory / "log.txt"))
            os.dup2(os.open("/dev/full", os.O_WRONLY), handler.stream.fileno())
            experiment.log.warning("something")

    execute(directory, Breaker())
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "log.txt" in line]
    assert line.endswith("log.txt: not written (No space left on device); the run continues")


@pytest.mark.faults
@pytest.mark.parametrize("limit", [6, 8, 10, 12, 14, 16, 20, 24, 32])
@pytest.mark.parametrize("engine", ["ggml", "cpu"])
def test_few_open_files(limit, engine, here):
    directory = here / "files" / f"{engine}-{limit}"
    code = (
        "import sys, resource; from toyexp.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); sys.exit(main(sys.argv[1:]))"
    )
    command = python("-c", code, *WORDS, f"engine={engine}", f"hydra.run.dir={directory}")
    done = subprocess.run(command, cwd=here, env=environment(here), capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert len(done.stderr.splitlines()) <= 3, done.stderr
    if directory.exists():
        require_readable(directory)


NAMES = [
    "with space", "a=b", "ü ñ 漢字 🦆", "it's", 'say "x"', "{brace},[list]", "$HOME ${name}", "back\\slash", "#1", "~",
    "x" * 200,
]  # fmt: skip


def test_a_directory_of_an_odd_name(here, capsys):
    require_a_run_in(here / "names" / "a = 'ü'", capsys)


@pytest.mark.faults
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_directory_of_any_name(name, here, capsys):
    require_a_run_in(here / "names" / name, capsys)


def require_a_run_in(directory, capsys):
    """Quoted as Hydra wants it, a name is a name; and resume takes it as it is."""
    quoted = str(directory).replace("'", "\\'").replace("${", "\\${")
    assert main([*WORDS, "steps=4", f"hydra.run.dir='{quoted}'"]) == 0
    assert (directory / "model.gguf").exists(), capsys.readouterr().err
    assert main([f"resume={directory}", "steps=6"]) == 0, capsys.readouterr().err
    assert max(checkpoint.list_checkpoints(directory / "checkpoints")) == 6


@pytest.mark.parametrize("name", ["x" * 256, "x/" * 3000])
def test_a_name_that_is_too_long(name, here, capsys):
    assert main([*WORDS, f"hydra.run.dir={here}/long/{name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "File name too long" in line
    assert not (here / "long").exists()
