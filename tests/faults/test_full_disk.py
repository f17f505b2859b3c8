"""Full or read-only disks: losses are reported, complete files stay intact, and the run can be resumed."""

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
SIZE = 2_000_000  # bytes; a run of WORDS needs at most 0.9 MB
WORDS = [*words("scratch", "gpt2", "ggml"), "callbacks.gguf_export.every=5"]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Mount a small tmpfs."""
    path = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def empty_disk(disk):
    yield disk
    for entry in disk.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def fill(disk, leaving):
    """Fill the disk up to `leaving` free bytes, rounded to pages."""
    with contextlib.suppress(OSError), open(disk / "filler", "ab") as file:
        os.posix_fallocate(
            file.fileno(), os.fstat(file.fileno()).st_size, max(shutil.disk_usage(disk).free - leaving, 1)
        )


@dataclass(eq=False)
class Filler(Callback):
    """Callback that fills the disk after step `at` and frees it after step `until`."""

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
def build_config():
    return Request([], REGISTRY).build_config(*WORDS)


def execute(directory, *more, resume=False, say=lambda line: None):
    callbacks = {name: replace(callback) for name, callback in build_config().callbacks.items()}
    callbacks |= {callback.name: callback for callback in more}
    prepared = experiment.prepare(replace(build_config(), callbacks=callbacks))
    resumed = load_run(directory, prepared) if resume else None
    return experiment.execute(prepared, directory, say, resumed)


def check_files_complete(directory):
    """Check that every file with a final name is complete."""
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


def check_equal(directory, expected, what):
    """Check that a run equals the expected one; periodic exports may be missing, since their failure is a warning."""
    actual = Trace.read(directory)
    assert actual.events == expected.events, what
    missing = expected.files.keys() - actual.files.keys()
    assert missing <= {"model-5.gguf", "model-10.gguf"}, what
    assert actual.files.items() <= expected.files.items(), what


def train_on_full_disk(disk, expected, rng, number, capfd):
    """Train on a disk that is full from a random step, for a while or permanently; then resume with free space."""
    directory = disk / f"run-{number:03}"
    fill_step = rng.randrange(STEPS)
    leaving = rng.choice([0, rng.randrange(20_000), rng.randrange(SIZE // 2), rng.randrange(SIZE)])
    free_step = rng.choice([None, rng.randint(fill_step + 1, STEPS + 2)])
    case = (number, fill_step, leaving, free_step)
    if fill_step == 0:
        fill(disk, leaving)
    lines = []
    try:
        execute(directory, Filler().prepare(disk, fill_step, leaving, free_step), say=lines.append)
    except ToyexpError as error:
        assert "\n" not in str(error), case
        assert "No space left" in str(error) or "disk may be full" in str(error) or "disk was full" in str(error), case
        outcome = "failed with a one-line error"
    else:
        outcome = "completed"
    warnings = [line for line in [*lines, *capfd.readouterr().err.splitlines()] if "warning" in line]
    assert len([w for w in warnings if "checkpoint of step" in w]) <= (1 if free_step is None else 2), warnings
    assert len([w for w in warnings if "log.txt" in w]) <= 1, warnings
    if directory.exists():
        check_files_complete(directory)
    if outcome == "completed":
        check_equal(directory, expected, case)
    (disk / "filler").unlink(missing_ok=True)
    if not checkpoint.list_checkpoints(directory / "checkpoints"):
        assert not directory.exists() or (directory / "config.yaml").exists(), f"{case}: incomplete run directory"
        is_resumed = False
    else:
        is_resumed = True
        with contextlib.suppress(UserError):  # the run is complete
            execute(directory, resume=True)
    if is_resumed:
        check_equal(directory, expected, case)
        assert not [f.name for f in [*directory.iterdir(), *(directory / "checkpoints").iterdir()] if "tmp" in f.name]
    if directory.exists():
        shutil.rmtree(directory)
    FIGURES[f"full disk: runs, {outcome}"] += 1
    FIGURES["full disk: resumed bit-identically with free space"] += is_resumed


def fill_at_random_steps(disk, moments, capfd, seed):
    execute(disk / "run-xxx")
    expected = Trace.read(disk / "run-xxx")
    shutil.rmtree(disk / "run-xxx")
    rng = random.Random(seed)
    for number in range(moments):
        train_on_full_disk(disk, expected, rng, number, capfd)


def test_a_run_on_a_full_disk_fails_clearly_and_resumes(here, empty_disk, capfd):
    fill_at_random_steps(empty_disk, 4, capfd, 1)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_runs_on_a_full_disk_fail_clearly_and_resume_at_many_moments(here, empty_disk, capfd):
    fill_at_random_steps(empty_disk, 150, capfd, 2)


# -- other failures of files and disks ---------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_read_only_disk_is_rejected_without_changes(here, empty_disk, capsys):
    run = empty_disk / "run"
    execute(run)
    capsys.readouterr()
    subprocess.run(["mount", "-o", "remount,ro", empty_disk], check=True)
    try:
        before = {path: path.stat().st_mtime_ns for path in empty_disk.rglob("*")}
        for args in ([*WORDS, f"hydra.run.dir={empty_disk}/new"], [f"resume={run}", "steps=24"]):
            assert main(args) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "cannot be written (Read-only file system); choose another: hydra.run.dir=..." in line
        assert {path: path.stat().st_mtime_ns for path in empty_disk.rglob("*")} == before
    finally:
        subprocess.run(["mount", "-o", "remount,rw", empty_disk], check=True)


@dataclass(eq=False)
class Stopper(Callback):
    """Callback that forbids files of this process to grow after step 7."""

    name: ClassVar[str] = "stopper"

    @hookimpl
    def on_step(self, step):
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.faults
def test_a_run_whose_files_cannot_grow_fails_and_resumes(here, capsys):
    directory, before = here / "frozen", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            capsys.disabled(),
            pytest.raises(RunFailed, match=r"checkpoint of step 12: not written \(.*\); the last one"),
        ):
            execute(directory, Stopper())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_files_complete(directory)
    assert max(checkpoint.list_checkpoints(directory / "checkpoints")) in (3, 6)
    execute(directory, resume=True)
    assert [e["step"] for e in Trace.read(directory).events if e["kind"] == "step"] == list(range(1, STEPS + 1))


@pytest.mark.faults
@pytest.mark.parametrize("limit", [0, 1, 1000, 3000, 8000, 40_000, 100_000, 300_000])
def test_a_file_size_limit_ends_a_run_without_a_traceback(limit, here):
    """With `ulimit -f`, a write fails with another errno than on a full disk."""
    directory = here / "limits" / str(limit)
    set_limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    done = toyexp([*WORDS, f"hydra.run.dir={directory}"], here, preexec_fn=set_limit)
    lines = done.stderr.splitlines()
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert lines[-1].startswith("toyexp: error: ")
    assert len(lines) <= 3, done.stderr
    if done.returncode == 2:
        assert not directory.exists()
        return
    check_files_complete(directory)


@pytest.mark.faults
def test_a_run_completes_when_its_output_cannot_be_printed(here):
    with open("/dev/full", "w") as full:
        command = python("-m", "toyexp", *WORDS, "callbacks=[default]", "steps=3", f"hydra.run.dir={here}/quiet")
        done = subprocess.run(command, cwd=here, env=environment(here), stdout=full, stderr=full, timeout=60)
    assert done.returncode == 0
    check_files_complete(here / "quiet")


@dataclass(eq=False)
class Vandal(Callback):
    """Callback that removes a file or directory of the run after one step."""

    name: ClassVar[str] = "vandal"

    def prepare(self, at, what):
        self.at, self.what = at, what
        return self

    @hookimpl
    def on_step(self, step):
        while step == self.at and self.what.exists():
            shutil.rmtree(self.what, ignore_errors=True)  # a checkpoint may be written there meanwhile


def test_a_run_whose_directory_is_removed_fails_and_does_not_recreate_it(here, capfd):
    directory, lines = here / "removed", []
    with pytest.raises(RunFailed, match="checkpoint of step 12: not written") as failure:
        execute(directory, Vandal().prepare(4, directory), say=lines.append)
    assert "\n" not in str(failure.value)
    warnings = [
        line for line in lines if "warning" in line and "callbacks=[" not in line
    ]  # without the warning about missing default callbacks
    assert len(warnings) == 2, "one about the periodic export, one about checkpoints"
    assert "Traceback" not in capfd.readouterr().err
    assert not directory.exists(), "the directory is not created again"


@pytest.mark.faults
def test_a_run_recreates_its_removed_checkpoint_directory(here):
    directory = here / "bare"
    execute(directory, Vandal().prepare(7, directory / "checkpoints"))
    assert list(checkpoint.list_checkpoints(directory / "checkpoints")) == [12, 9]


def test_a_run_continues_when_its_log_cannot_be_written(here, capfd):
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
def test_a_limit_of_open_files_ends_a_run_without_a_traceback(limit, engine, here):
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
        check_files_complete(directory)


NAMES = [
    "with space", "a=b", "ü ñ 漢字 🦆", "it's", 'say "x"', "{brace},[list]", "$HOME ${name}", "back\\slash", "#1", "~",
    "x" * 200,
]  # fmt: skip


def test_a_run_in_a_directory_with_quotes_and_spaces_can_be_resumed(here, capsys):
    check_run_and_resume(here / "names" / "a = 'ü'", capsys)


@pytest.mark.faults
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_run_in_a_directory_with_special_characters_can_be_resumed(name, here, capsys):
    check_run_and_resume(here / "names" / name, capsys)


def check_run_and_resume(directory, capsys):
    """Train in a directory with a name quoted for Hydra, and resume it by its plain name."""
    quoted = str(directory).replace("'", "\\'").replace("${", "\\${")
    assert main([*WORDS, "steps=4", f"hydra.run.dir='{quoted}'"]) == 0
    assert (directory / "model.gguf").exists(), capsys.readouterr().err
    assert main([f"resume={directory}", "steps=6"]) == 0, capsys.readouterr().err
    assert max(checkpoint.list_checkpoints(directory / "checkpoints")) == 6


@pytest.mark.parametrize("name", ["x" * 256, "x/" * 3000])
def test_a_directory_name_that_is_too_long_is_rejected(name, here, capsys):
    assert main([*WORDS, f"hydra.run.dir={here}/long/{name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "File name too long" in line
    assert not (here / "long").exists()
