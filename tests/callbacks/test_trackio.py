"""The trackio callback with a stand-in for trackio 0.43, and with trackio itself if it is installed."""

import contextlib
import importlib.util
import io
import json
import shutil
import sqlite3
import sys
import threading
from types import SimpleNamespace

import pytest

from toyexp.cli.main import main


@pytest.fixture
def trackio_runs(monkeypatch):
    """Install a stand-in for trackio; return the arguments of each init with the points logged to that run."""
    runs = []

    class Record:
        url = None

        def __init__(self, arguments):
            self.arguments, self.points = arguments, arguments["points"]

        def log(self, metrics, step=None):
            self.points.append((step, metrics))

        def finish(self):
            print("* Run finished.")
            self.points.append("finished")

    def init(project, name=None, group=None, space_id=None, *, config=None, resume="never", embed=True,
             auto_log_gpu=None, auto_log_cpu=None):  # fmt: skip
        print("* Created new run")
        if project == "broken":
            raise OSError("database is locked")
        hardware = auto_log_gpu, auto_log_cpu
        arguments = {"project": project, "name": name, "group": group, "space_id": space_id, "config": config}
        runs.append(
            {**arguments, "resume": resume, "embed": embed, "hardware": hardware, "points": [], "deleted": False}
        )
        return Record(runs[-1])

    class Api:
        def runs(self, project):
            return [SimpleNamespace(name=r["name"], delete=lambda r=r: r.update(deleted=True)) for r in runs]

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, Api=Api, __spec__=SimpleNamespace()))
    return runs


def test_a_run_logs_all_its_numbers_and_a_resumed_run_keeps_its_name(train, tmp_path, trackio_runs):
    run = train("callbacks=[default,trackio]", "checkpoint_every=5", "checkpoint_keep=9", engine="noop")
    assert run.code == 0 and "* " not in run.out
    steps, notes = {e["step"]: e["loss"] for e in run.select("step")}, [e["text"] for e in run.select("note")]
    shutil.rmtree(run.dir / "checkpoints" / "step-12")  # as if the run had been killed after its last step
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").touch()
    words = ["callbacks=[default,trackio]", "callbacks.trackio.space=us/curves"]
    job = train(*words, engine="noop", to="swept/other")
    first, second, other = trackio_runs
    assert first["name"] == second["name"] != other["name"]
    assert (first["resume"], second["resume"], other["resume"]) == ("never", "allow", "never")
    assert (first["group"], other["group"]) == (None, "swept")
    assert (first["space_id"], other["space_id"]) == (None, "us/curves")
    earlier = [point for point in first["points"][:-1] if point[0] <= 10]
    losses = {point[0]: point[1]["train/loss"] for point in first["points"][:-1] if "train/loss" in point[1]}
    assert losses == steps and first["points"][-1] == "finished"
    assert any("held_out/loss" in point[1] for point in first["points"][:-1])
    logged_steps = [point[0] for point in second["points"][:-1] if "train/loss" in point[1]]
    assert logged_steps == list(range(1, 16)), "a resumed run must log all steps again"
    assert second["points"][: len(earlier)] == earlier, "repeated points must be identical"
    assert (first["deleted"], second["deleted"]) == (True, False)
    (note,) = notes
    assert "trackio show --project toyexp" in note and "trackio sync --project toyexp" in note
    assert [e["text"] for e in job.select("note")] == ["trackio  view: https://huggingface.co/spaces/us/curves"]
    assert not first["embed"] and first["hardware"] == (False, False)
    assert json.dumps(first["config"]) and first["config"]["steps"] == 12


def test_points_that_events_do_not_have_are_not_deleted_from_trackio(train, trackio_runs):
    run = train("callbacks=[default,trackio]", "callbacks.events.every=2", "checkpoint_every=5", engine="noop")
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    first, _ = trackio_runs
    assert not first["deleted"] and sum("train/loss" in point[1] for point in first["points"][:-1]) == 12


def test_output_of_trackio_is_muted_and_that_of_other_threads_is_kept(capsys):
    from toyexp_callbacks.dashboard import mute_thread

    started, printed = [threading.Event() for _ in range(2)], threading.Event()

    def print_muted(has_started):
        with mute_thread():
            has_started.set()
            print("* Trackio project initialized")
            printed.wait(10)

    before = sys.stdout
    others = [threading.Thread(target=print_muted, args=(has_started,)) for has_started in started]
    for other, has_started in zip(others, started, strict=True):
        other.start()
        assert has_started.wait(10)
    print("step 1/12")
    with contextlib.redirect_stdout(io.StringIO()) as bar:  # ends after the threads
        printed.set()
        for other in others:
            other.join()
        print("a bar")
    print("step 2/12")
    assert bar.getvalue() == "a bar\n" and capsys.readouterr().out == "step 1/12\nstep 2/12\n"
    with mute_thread():
        pass
    assert sys.stdout is before, "sys.stdout must be restored"


def test_a_space_without_a_user_is_rejected_before_anything_is_written(train, trackio_runs):
    run = train("callbacks=[default,trackio]", "callbacks.trackio.space=curves", engine="noop")
    assert run.code == 2 and not run.dir.exists()
    assert "callbacks.trackio.space=curves: must be a Hugging Face Space" in run.err


def test_an_error_of_trackio_is_reported_and_does_not_fail_the_run(train, trackio_runs):
    run = train("callbacks=[default,trackio]", "callbacks.trackio.project=broken", engine="noop")
    assert run.code == 0 and (run.dir / "model.gguf").exists()
    assert [e["text"] for e in run.select("note")] == [
        "trackio stopped, the run continues: OSError: database is locked"
    ]


def test_without_trackio_the_run_is_rejected_with_the_package_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    run = train("callbacks=[default,trackio]")
    assert run.code == 2
    assert run.err == "toyexp: error: callbacks.trackio: trackio is not installed: pip install 'toyexp[trackio]'\n"
    assert not run.dir.exists()


@pytest.mark.skipif(
    not importlib.util.find_spec("trackio"), reason="trackio, which brings a web server, is not installed"
)
def test_trackio_itself_shows_a_resumed_run_as_one_and_prints_nothing(settings, spawn, tmp_path):
    environment = {"TRACKIO_DIR": str(tmp_path / "kept")}
    words = ["callbacks=[default,trackio]", f"hydra.run.dir={tmp_path / 'run'}"]
    overrides = [w for w in settings("checkpoint_every=5", engine="noop") if "hydra.run" not in w]
    for words_of_command in (
        [*overrides, *words],
        [f"resume={tmp_path / 'run'}", "plugins=[toyexp.testing.null]", "steps=15"],
    ):
        process = spawn("-m", "toyexp", *words_of_command, env=environment)
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out
        assert "trackio stopped" not in out and "* " not in out, out
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-12", ignore_errors=True)
    with contextlib.closing(sqlite3.connect(tmp_path / "kept" / "toyexp.db")) as database:
        rows = database.execute("select run_id, step, metrics from metrics").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    assert [step for _, step, m in rows if "train/loss" in json.loads(m)] == list(range(1, 16))
