"""A run starts in an empty directory and never replaces a file that it did not write."""

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lines import noop, run_failing

import toyexp
from toyexp import RunFailed, UserError
from toyexp.base.drawing import Sheet
from toyexp.base.ownership import (
    LEDGER,
    RUN_DIRECTORIES,
    DirectoryLocked,
    Ledger,
    require_empty,
    require_inside,
    require_unlocked,
)
from toyexp.base.writing import require_writable, swap
from toyexp.cli.main import main
from toyexp.interfaces.run import Run
from toyexp.results.comparison import Comparison
from toyexp.results.report import write_report
from toyexp.training.rundir import RunDir, lock

PLUGINS, *TINY = noop()
NOOP = [PLUGINS, *TINY, "steps=4", "checkpoint_every=2"]


@pytest.fixture(autouse=True)
def change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def contents(folder="."):
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*")}


def rejected_line(capsys, *words):
    """Return the one-line error of a rejected command, which changes no file."""
    before = contents()
    line, _ = run_failing(capsys, *words, codes=(2,))
    assert contents() == before
    return line


def write_file(name, text="mine"):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- where a run begins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.gguf", "model-hf/weights.bin", "notes.txt", ".env", "run.lock"])
def test_a_nonempty_run_directory_is_rejected_with_what_to_type(name):
    write_file(f"D/{name}")
    with pytest.raises(UserError, match=rf"D is not empty \({name.partition('/')[0]}\).*hydra\.run\.dir=\.\.\."):
        require_empty(Path("D"), "hydra.run.dir")


def test_a_base_cannot_be_overwritten_by_the_run_that_starts_from_it(capsys):
    assert main([*NOOP, "hydra.run.dir=first"]) == 0
    Path("D").mkdir()
    shutil.copy("first/model.gguf", "D/model.gguf")
    line = rejected_line(
        capsys, "recipe=full", "recipe.base=D/model.gguf", "model.context=16", *NOOP[:3], "hydra.run.dir=D"
    )
    assert "D is not empty (model.gguf)" in line


@pytest.mark.parametrize("path", ["/", ".", ".."])
def test_the_root_and_the_working_directory_are_no_run_directories(path, capsys):
    write_file("mine.txt")
    assert "is not empty" in rejected_line(capsys, *NOOP, f"hydra.run.dir={path}")


def test_a_link_counts_as_its_target(capsys):
    write_file("full/mine.txt")
    Path("empty").mkdir()
    for name in ("full", "empty", "full/mine.txt", "nowhere"):
        Path(f"to-{Path(name).stem}").symlink_to(Path(name).absolute())
    assert "is not empty (mine.txt)" in rejected_line(capsys, *NOOP, "hydra.run.dir=to-full")
    assert "to-mine: cannot be written" in rejected_line(capsys, *NOOP, "hydra.run.dir=to-mine")
    assert "to-nowhere: is a link to " in rejected_line(capsys, *NOOP, "hydra.run.dir=to-nowhere")
    assert main([*NOOP, "hydra.run.dir=to-empty"]) == 0
    assert Path("empty/model.gguf").exists()


def test_system_files_in_an_empty_directory_are_ignored():
    for name in (".DS_Store", "Thumbs.db", "lost+found", ".gitkeep"):
        write_file(f"D/{name}")
    assert main([*NOOP, "hydra.run.dir=D"]) == 0
    assert all(Path("D", name).read_text() == "mine" for name in (".DS_Store", "Thumbs.db", "lost+found", ".gitkeep"))


def test_the_file_that_stdout_is_redirected_to_is_ignored(tmp_path):
    """`toyexp hydra.run.dir=D > D/out.txt`, and log files of a cluster job."""
    write_file("D/out.txt")
    stderr_copy = os.dup(2)
    with open("D/out.txt", "a") as file:
        os.dup2(file.fileno(), 2)
        try:
            require_empty(Path("D"), "hydra.run.dir")
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
    with pytest.raises(UserError, match=r"is not empty \(out.txt\)"):
        require_empty(Path("D"), "hydra.run.dir")


@pytest.mark.parametrize("name", ["log.txt", "model.gguf", "events.jsonl"])
def test_redirecting_output_to_a_file_of_the_run_is_rejected(name):
    """`mkdir D; toyexp hydra.run.dir=D > D/log.txt`."""
    write_file(f"D/{name}")
    stderr_copy = os.dup(2)
    with open(f"D/{name}", "a") as file:
        os.dup2(file.fileno(), 2)
        try:
            with pytest.raises(UserError, match="D "):
                require_empty(Path("D"), "hydra.run.dir")
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)


def test_a_directory_locked_by_another_process_counts_as_a_run():
    write_file("D/run.lock", "1234 on host\n")
    write_file("D/log.txt", "")
    with pytest.raises(UserError, match="already holds a run"):
        require_empty(Path("D"), "hydra.run.dir")


def test_a_failed_lock_on_a_full_disk_leaves_an_empty_directory():
    for text in ("", "12", "1234 on", "1234 on host"):
        write_file("D/run.lock", text)
        require_empty(Path("D"), "hydra.run.dir")
    write_file("D/run.lock", "mine")
    with pytest.raises(UserError, match=r"is not empty \(run.lock\)"):
        require_empty(Path("D"), "hydra.run.dir")


@pytest.mark.parametrize("name", ["events.jsonl", "log.txt", "result.json", "model.gguf", "written.json"])
def test_a_pipe_at_the_path_of_a_runs_file_is_rejected_without_blocking(name, capsys):
    assert main([*NOOP, "hydra.run.dir=D"]) == 0
    Path("D", name).unlink(missing_ok=True)
    os.mkfifo(f"D/{name}")
    capsys.readouterr()
    assert main(["resume=D", "plugins=[toyexp.testing.null]", "steps=9"]) == 2
    assert f"D/{name}" in (error := capsys.readouterr().err) and "is a pipe" in error


def test_the_error_about_an_existing_run_says_how_to_resume_it(capsys):
    assert main([*NOOP, "hydra.run.dir=D"]) == 0
    line = rejected_line(capsys, *NOOP, "hydra.run.dir=D")
    assert "already holds a run; continue it: resume=" in line and "hydra.run.dir=..." in line
    shutil.rmtree("D/checkpoints")
    line = rejected_line(capsys, *NOOP, "hydra.run.dir=D")
    assert "without a checkpoint" in line and "resume=" not in line


def test_a_directory_with_only_a_stale_lock_may_be_used():
    Path("D").mkdir()
    os.close(lock(Path("D")))
    assert main([*NOOP, "hydra.run.dir=D"]) == 0


def test_a_failed_start_leaves_the_directory_unchanged(monkeypatch, capsys):
    Path("D").mkdir()
    monkeypatch.setattr("toyexp.base.ownership.swap", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert main([*NOOP, "hydra.run.dir=D"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(Path("D").iterdir())


def test_a_sweep_needs_an_empty_directory_too(capsys):
    write_file("D/0-scratch-llama/mine.txt")
    line = rejected_line(capsys, "-m", *NOOP, "seed=0,1", "hydra.sweep.dir=D")
    assert "D is not empty (0-scratch-llama)" in line and "hydra.sweep.dir=..." in line


# -- what it replaces -------------------------------------------------------------------------------------------------


def test_a_resumed_run_replaces_its_own_files_and_keeps_an_edited_configuration():
    everything = "callbacks=[default,hf_export,safetensors_export,plots]"
    assert main([*NOOP, everything, "hydra.run.dir=D"]) == 0
    before = contents("D")
    Path("D/config.yaml").write_text(Path("D/config.yaml").read_text() + "# of mine\n")
    assert main(["resume=D", PLUGINS, "steps=6"]) == 0
    after = contents("D")
    assert {n for n in before if after.get(n) != before[n]} >= {
        "D/model.gguf", "D/plots/curves.png", "D/plots/curves.svg", "D/events.jsonl", "D/result.json", "D/written.json"
    }  # fmt: skip
    assert Path("D/config.yaml.1").read_text().endswith("# of mine\n")
    assert not [n for n in after if "tmp" in n or n.endswith(".old")]


def test_resume_does_not_replace_foreign_files(capsys):
    assert main([*NOOP, "callbacks=[default,hf_export]", "hydra.run.dir=D"]) == 0
    for name in ("model.gguf", "model-hf/mine.txt", "events.jsonl", "result.json"):
        path = Path("D", name)
        before = path.read_bytes() if path.exists() else b""
        write_file(path)
        line = rejected_line(capsys, "resume=D", PLUGINS, "steps=6")
        assert f"D/{name.partition('/mine')[0]} was changed or cut off since" in line and "move it" in line
        path.write_bytes(before) if before else path.unlink()
    Path("D/model.gguf").unlink()
    assert main(["resume=D", PLUGINS, "steps=6"]) == 0


def test_a_locked_run_is_left_unchanged():
    for name in ("config.yaml", "log.txt", LEDGER):
        write_file(f"D/{name}", "{}")
    held = lock(Path("D"))
    before = contents()
    try:
        with pytest.raises(UserError, match="D: is being written by process"):
            RunDir(Path("D"), {}, resumed=True)
    finally:
        os.close(held)
    assert contents() == before


def test_files_that_only_the_resumed_run_would_write_are_checked_too(capsys):
    assert main([*NOOP, "callbacks=[events]", "hydra.run.dir=D"]) == 0
    write_file("D/model.gguf")
    line = rejected_line(capsys, "resume=D", PLUGINS, "steps=6", "callbacks=[events,gguf_export]")
    assert "D/model.gguf was not written by this run" in line


def test_a_copied_or_renamed_run_still_knows_its_files():
    assert main([*NOOP, "hydra.run.dir=D"]) == 0
    shutil.copytree("D", "E")
    shutil.rmtree("D")
    assert main(["resume=E", PLUGINS, "steps=6"]) == 0


def test_a_file_that_appears_during_a_run_is_kept_and_the_export_fails():
    run = Run("r", Path.cwd(), 0, 1, 1e-3, {}, "noop", plan=None, session=None, dataset=None)
    write_file("model.gguf")
    refusal = r"model.gguf: could not be written: .* was not written by this run"
    with pytest.raises(RunFailed, match=refusal), run.output(Path("model.gguf").absolute()) as path:
        path.write_text("ours")
    assert contents() == {"model.gguf": b"mine"}


def test_an_export_keeps_foreign_files_beside_it():
    run = Run("r", Path.cwd(), 0, 1, 1e-3, {}, "noop", plan=None, session=None, dataset=None)
    write_file("model-f32.gguf")
    with run.output(Path("model.gguf").absolute()) as target:
        for path in (target, target.with_name("model-f32.gguf"), target.with_name("model-f16.gguf")):
            path.write_text("ours")
    del (files := contents())[LEDGER]
    assert files == {"model.gguf": b"ours", "model-f16.gguf": b"ours", "model-f32.gguf": b"mine"}


def test_a_link_to_a_directory_is_replaced_without_leftovers():
    write_file("theirs/mine.txt")
    write_file("new", "ours")
    Path("model.gguf").symlink_to("theirs")
    swap(Path("new"), Path("model.gguf"))
    assert contents() == {"theirs": None, "theirs/mine.txt": b"mine", "model.gguf": b"ours"}


def test_after_a_kill_between_ledger_and_file_both_contents_are_owned(monkeypatch):
    root, name = Path.cwd(), Path.cwd() / "model.gguf"
    for text, dies in (("one", False), ("two", True)):
        ledger = Ledger.open(root)
        with monkeypatch.context() as patch:
            if dies:
                patch.setattr("toyexp.base.ownership.swap", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            try:
                with ledger.output(name) as path:
                    path.write_text(text)
            except KeyboardInterrupt:
                assert dies
    ledger = Ledger.open(root)
    assert name.read_text() == "one" and ledger.owns(name)
    name.write_text("two")
    assert ledger.owns(name)
    name.write_text("six")
    assert not ledger.owns(name) and ledger.foreign_paths(["model.gguf", "nothing"]) == [name]


@pytest.mark.parametrize("text", ["{", "[]", '{"model.gguf": "x"}', '{"model.gguf": [1]}', "[" * 100_000])
def test_a_damaged_ledger_is_named(text):
    write_file(LEDGER, text)
    with pytest.raises(UserError, match=f"{LEDGER}: this list of files is damaged"):
        Ledger.open(Path.cwd())


def test_a_checkpoint_with_a_foreign_file_is_neither_removed_nor_replaced():
    assert main([*NOOP, "hydra.run.dir=D", "checkpoint_keep=1"]) == 0
    write_file("D/checkpoints/step-4/notes.txt")
    assert main(["resume=D", PLUGINS, "steps=12"]) == 0
    assert Path("D/checkpoints/step-4/notes.txt").read_text() == "mine"
    assert sorted(p.name for p in Path("D/checkpoints").iterdir()) == ["step-12", "step-4"]


def test_an_export_replaces_links_only_with_force(capsys):
    assert main([*NOOP, "hydra.run.dir=D"]) == 0
    Path("out.gguf").symlink_to("nowhere.gguf")
    Path("out-hf").symlink_to("nowhere")
    assert "already exists" in rejected_line(capsys, "export", "D", "--type", "q8_0", "--to", "out.gguf")
    assert "already exists" in rejected_line(capsys, "export", "D", "--type", "hf", "--to", "out-hf")


# -- files of others --------------------------------------------------------------------------------------------------


def test_a_shared_experiment_file_cannot_choose_the_output_directory(capsys):
    write_file("theirs/experiment/plain.yaml", "# @package _global_\nhydra: {run: {dir: chosen}}\n")
    write_file("theirs/experiment/swept.yaml", "# @package _global_\nhydra: {sweep: {dir: chosen}}\n")
    for name, key in (("plain", "run"), ("swept", "sweep")):
        line = rejected_line(capsys, "--config-dir", "theirs", f"experiment={name}", *NOOP)
        assert f"{name}.yaml, line 2: a preset cannot set hydra.{key}" in line and f"hydra.{key}.dir=..." in line
    write_file("theirs/experiment/sly.yaml", "# @package _global_\ndefaults: [/model@hydra.run: place]\n")
    write_file("theirs/model/place.yaml", "dir: chosen")
    line = rejected_line(capsys, "--config-dir", "theirs", "experiment=sly", *NOOP)
    assert "sly.yaml, line 2: /model@hydra.run" in line and not Path("chosen").exists()


@pytest.mark.parametrize("name", ["link", "link/below"])
def test_a_dangling_link_is_reported(capsys, name):
    Path("link").symlink_to("gone")
    assert "link: is a link to gone, which does not exist" in rejected_line(capsys, *NOOP, f"hydra.run.dir={name}")
    assert not Path("gone").exists()


# -- links in the directory of a stranger -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_of_a_stranger(tmp_path_factory):
    """A run to copy, with a checkpoint, and a sweep."""
    path = tmp_path_factory.mktemp("stranger")
    assert main([*NOOP, f"hydra.run.dir={path / 'D'}"]) == 0
    return path / "D"


def put_link(path, kind):
    """Replace a file or directory of a run by a link to its contents outside the run."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    Path("outside").mkdir()
    target = Path("outside", {"file": "thesis.txt", "nothing": "gone", "folder": "folder"}[kind]).absolute()
    if kind == "folder":
        write_file("outside/folder/step-2/manifest.json", "mine")
        write_file("outside/folder/mine.txt")
    elif kind == "file":
        write_file("outside/thesis.txt", '{"kind": "run_start"}\n')
    path.symlink_to(target)


LINKED = ("run.lock", "log.txt", "events.jsonl", "config.yaml", "result.json", "written.json", "model.gguf",
          "checkpoints", "checkpoints/step-2", "checkpoints/step-4", "plots", "plots/curves.png", "tensorboard",
          "tensorboard/events.out", "anything")  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "nothing", "folder"])
@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_run_is_rejected_before_anything_is_written(name, kind, run_of_a_stranger, capsys):
    shutil.copytree(run_of_a_stranger, "D")
    put_link(Path("D", name), kind)
    line = rejected_line(capsys, "resume=D", PLUGINS, "steps=9", "checkpoint_every=1")
    assert f"D/{name}: it is a link, not a {'folder' if name in RUN_DIRECTORIES else 'file'}; move it away" in line
    with pytest.raises(UserError, match=f"D/{name}: it is a link"):
        RunDir(Path("D"), {}, resumed=True)


@pytest.mark.parametrize("name", RUN_DIRECTORIES)
def test_a_file_at_the_path_of_a_runs_directory_is_rejected(name, run_of_a_stranger, capsys):
    shutil.copytree(run_of_a_stranger, "D")
    shutil.rmtree(Path("D", name), ignore_errors=True)
    write_file(f"D/{name}")
    line = rejected_line(capsys, "resume=D", PLUGINS, "steps=9")
    assert line == f"D/{name}: it is a file, not a folder; move it away"
    with pytest.raises(UserError, match=f"D/{name}: it is a file"):
        toyexp.run(PLUGINS, resume="D", steps=9, quiet=True)


@pytest.mark.parametrize("name", ["run.lock", "log.txt", "events.jsonl"])
def test_an_appended_file_with_a_hard_link_is_rejected(name, run_of_a_stranger, capsys):
    shutil.copytree(run_of_a_stranger, "D")
    os.link(f"D/{name}", "mine")
    line = rejected_line(capsys, "resume=D", PLUGINS, "steps=9")
    assert f"D/{name}" in line and "hard link" in line


def test_concurrent_lock_checks_do_not_block_each_other():
    Path("D").mkdir()
    os.close(lock(Path("D")))
    with open("D/run.lock") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another process that asks
        require_unlocked(Path("D"))
        with pytest.raises(DirectoryLocked):
            lock(Path("D"))


def test_without_fcntl_a_directory_can_be_locked_and_its_owner_is_known(tmp_path, monkeypatch):
    """There a locked byte can neither be read nor written by others, so it lies behind the name."""
    locks = {}

    def locking(file, mode, count):
        byte = os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR)
        if locks.setdefault(byte, file) != file:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("toyexp.base.ownership.fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    held = lock(tmp_path)
    ((_, path),) = locks
    name = (tmp_path / "run.lock").read_text()
    assert name.startswith(f"{os.getpid()} on ") and path > len(name)
    for ask in (lock, require_unlocked):
        with pytest.raises(DirectoryLocked, match=f"is being written by process {os.getpid()} on "):
            ask(tmp_path)
    locks.clear()
    require_unlocked(tmp_path)
    os.close(held)


@pytest.mark.parametrize("name", ["logs/0.log", "study.log", "sweep.jsonl"])
def test_an_appended_file_of_a_sweep_with_a_hard_link_is_rejected(name):
    Path("S/logs").mkdir(parents=True)
    Path("S/summary.md").write_text("mine")
    os.link("S/summary.md", "copied.md")  # which a sweep replaces, and does not change where it is
    require_inside(Path("S"))
    Path("S", name).write_text("mine")
    os.link(f"S/{name}", "mine")
    with pytest.raises(UserError, match=f"S/{name}: it has a hard link"):
        require_inside(Path("S"))


def test_a_forged_ledger_does_not_allow_truncating_other_files(run_of_a_stranger, capsys):
    shutil.copytree(run_of_a_stranger, "D")
    write_file("thesis.txt", "mine\n" * 1000)
    Path("D/events.jsonl").unlink()
    os.link("thesis.txt", "D/events.jsonl")
    write_file(
        "D/written.json", '{"events.jsonl": ["0+e3b0c44298fc1c14"]}'
    )  # the digest of no bytes, with which all begin
    assert "D/events.jsonl" in rejected_line(capsys, "resume=D", PLUGINS, "steps=9", "callbacks=[events]")


def test_links_with_temporary_names_are_removed_and_not_followed(run_of_a_stranger):
    shutil.copytree(run_of_a_stranger, "D")
    write_file("outside/config.yaml")
    for name in (f".tmp-{os.getpid()}", f".written.json.{os.getpid()}.tmp"):
        Path("D", name).symlink_to(Path("outside").absolute())
    Path("D/.#config.yaml").symlink_to("user@host.1234")  # an editor's lock, which is no harm
    assert main(["resume=D", PLUGINS, "steps=6"]) == 0
    assert contents("outside") == {"outside/config.yaml": b"mine"}


def test_links_in_parent_directories_are_followed(capsys):
    Path("disk").mkdir()
    Path("outputs").symlink_to("disk")
    assert main([*NOOP, "hydra.run.dir=outputs/D"]) == 0
    Path("D").symlink_to("outputs/D")
    assert main(["resume=D", PLUGINS, "steps=6"]) == 0
    assert "6" in Path("disk/D/result.json").read_text()


@pytest.mark.parametrize(
    ("key", "files"),
    [
        ("hydra.run.dir", ("log.txt",)),
        ("hydra.run.dir", ("log.txt", "config.yaml")),
        ("hydra.sweep.dir", ("sweep.json",)),
    ],
)
def test_the_error_about_a_locked_directory_names_the_process_and_not_rm(key, files, capsys):
    for name in files:
        write_file(f"D/{name}")
    held = lock(Path("D"))
    try:
        words = ["-m", "seed=0,1"] if key == "hydra.sweep.dir" else []
        line = rejected_line(capsys, *words, *NOOP, f"{key}=D")
    finally:
        os.close(held)
    assert f"D: is being written by process {os.getpid()} on " in line and f"{key}=..." in line and "remove" not in line


@pytest.mark.parametrize("resume", ["resume=outputs/D", "resume=auto"])
def test_a_checkpoint_of_a_newer_format_is_rejected_and_kept(resume, run_of_a_stranger, capsys):
    shutil.copytree(run_of_a_stranger, "outputs/D")
    manifest = Path("outputs/D/checkpoints/step-4/manifest.json")
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    line = (
        rejected_line(capsys, *NOOP, "hydra.run.dir=outputs/${name}", resume, "steps=9")
        if "auto" in resume
        else rejected_line(capsys, resume, PLUGINS, "steps=9")
    )
    assert "step-4: has format 2" in line and "update toyexp" in line


def test_a_sweep_inside_a_run_directory_is_rejected(run_of_a_stranger, capsys):
    shutil.copytree(run_of_a_stranger, "D")
    for words in ([], ["--dry-run"]):
        line = rejected_line(capsys, "-m", *NOOP, "seed=0,1", "hydra.sweep.dir=D/more/s", *words)
        assert "D/more/s is inside" in line and "hydra.sweep.dir=..." in line
    assert main([*NOOP, "hydra.run.dir=D/more/run"]) == 0  # a single run may be there


def test_an_unreadable_file_of_a_run_is_not_called_foreign(run_of_a_stranger, capsys, monkeypatch):
    shutil.copytree(run_of_a_stranger, "D")
    write_file("D/events.jsonl")

    def denied(path):
        raise UserError(f"{path}: cannot be read: Permission denied")

    monkeypatch.setattr("toyexp.training.resume.open_file", denied)  # a test may run as root, who reads everything
    line = rejected_line(capsys, "resume=D", PLUGINS, "steps=9", "callbacks=[events]")
    assert "D/events.jsonl: cannot be read: Permission denied" in line


@pytest.mark.parametrize("name", ["x" * 300 + ".svg", "loop/x.svg", "closed/x.svg", "none/x.svg"])
def test_an_unwritable_path_is_a_user_error_before_any_work(name, monkeypatch):
    Path("loop").symlink_to("loop")
    Path("closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    with pytest.raises(UserError, match=r"--to x: (cannot be written|there is no directory)"):
        require_writable("--to x", Path(name))
    require_writable("--to x", Path("here.svg"))


def test_a_full_disk_while_writing_a_page_or_plot_is_a_failure(monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in ("results.report", "base.drawing"):
        monkeypatch.setattr(f"toyexp.{module}.write_atomically", full)
    monkeypatch.setattr("toyexp.results.report._fill_page", lambda *_: b"")
    with pytest.raises(RunFailed, match="No space left"):
        write_report(Comparison.build([], "loss"), Path("a.html"), "")
    with pytest.raises(RunFailed, match="No space left"):
        Sheet.write(SimpleNamespace(pictures=lambda suffix, column: {suffix: b""}), Path("a.svg"))
