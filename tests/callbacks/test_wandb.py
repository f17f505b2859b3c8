import json
import os
import sys
from types import SimpleNamespace

import pytest

from toyexp.cli.main import main
from toyexp_callbacks.dashboard import Wandb

# A wandb that misbehaves as it is told; it stands first on the path of the child process.
FAKE = """
import os, time

class Settings:
    def __init__(self, **options):
        pass

class Record:
    def log(self, fields, step):
        if os.environ["MISBEHAVE"] == "log":
            raise ValueError("disk quota exceeded")
    def finish(self):
        if os.environ["MISBEHAVE"] == "finish":
            time.sleep(600)
        if os.environ["MISBEHAVE"] == "finish badly":
            raise ValueError("the upload failed")

def init(**options):
    if os.environ["MISBEHAVE"] == "init":
        raise RuntimeError("api.wandb.ai cannot be reached\\nsecond line")
    if os.environ["MISBEHAVE"] == "interrupt":
        raise KeyboardInterrupt
    if os.environ["MISBEHAVE"] == "slow":
        time.sleep(600)
    return Record()
"""

PROGRAM = """
import json, os, sys, time
import toyexp_callbacks.dashboard as ours
from toyexp.cli.main import main
ours.FINISH_SECONDS = 0.5
ours.QUEUE_LIMIT = int(os.environ["QUEUE_LIMIT"])
began = time.monotonic()
for kind in sys.argv[1].split(","):
    os.environ["MISBEHAVE"] = kind
    began = time.monotonic()
    code = main([*sys.argv[2:], f"hydra.run.dir={kind}"])
    print("OUTCOME", json.dumps({"kind": kind, "code": code, "seconds": time.monotonic() - began}))
"""
STALLED = 25  # seconds that no machine is too busy for, neither the fake's sleep nor FINISH_SECONDS keeps to
KINDS = ["init", "log", "finish", "finish badly", "slow", "interrupt", "nothing"]


@pytest.fixture
def misbehave(settings, spawn, tmp_path, trained):
    """Runs beside a fake wandb: the run and the seconds it took for each kind of misbehaviour.

    They share a process, which threads that still hang must not keep alive.
    """

    def run(kinds, *overrides, queue=10_000):
        package = tmp_path / "fake" / "wandb"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(FAKE)
        words = [w for w in settings("callbacks=[default,wandb]", *overrides, engine="noop") if "hydra.run" not in w]
        path = os.pathsep.join(filter(None, [str(tmp_path / "fake"), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": path, "QUEUE_LIMIT": str(queue)}
        process = spawn("-c", PROGRAM, ",".join(kinds), *words, env=environment)
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out
        outcomes = [json.loads(s.removeprefix("OUTCOME ")) for s in out.splitlines() if s.startswith("OUTCOME ")]
        assert [o["kind"] for o in outcomes] == kinds, out
        return {o["kind"]: (trained(o["code"], to=o["kind"]), o["seconds"]) for o in outcomes}

    return run


def test_a_wandb_that_raises_or_hangs_never_fails_or_stalls_a_run(misbehave):
    runs = misbehave(KINDS, "callbacks.wandb.mode=online", "steps=50")
    notes = {kind: [e["text"] for e in run.of("note")] for kind, (run, _) in runs.items()}
    for kind, (run, seconds) in runs.items():
        assert run.code == 0, kind
        assert run.events[-1]["reason"] == "completed" and run.events[-1]["final_step"] == 50
        assert (run.dir / "model.gguf").exists()
        assert run.result["seconds"] < STALLED, "training never waits for wandb"
        assert seconds < STALLED, "nor does the end, beyond FINISH_SECONDS"
    assert notes["nothing"] == []
    assert notes["init"] == [
        "wandb stopped, the run continues: RuntimeError: api.wandb.ai cannot be reached\\nsecond line"
    ]
    assert notes["log"] == ["wandb stopped, the run continues: ValueError: disk quota exceeded"]
    assert notes["finish badly"] == ["wandb stopped, the run continues: ValueError: the upload failed"]
    assert notes["interrupt"] == ["wandb stopped, the run continues: KeyboardInterrupt: "]
    for kind in ("finish", "slow"):
        assert notes[kind] == ["wandb did not finish within 0.5 s; its record of this run is incomplete"]


def test_a_full_queue_drops_records_and_never_waits_for_room(misbehave):
    runs = misbehave(["slow"], "steps=300", queue=5)
    run, seconds = runs["slow"]
    assert run.code == 0 and run.result["seconds"] < STALLED and seconds < STALLED
    assert len(run.of("note")) == 1


def test_each_job_of_a_sweep_is_a_wandb_run_of_its_own_inside_its_run_directory(settings, spawn, tmp_path):
    words = [w for w in settings("callbacks=[default,wandb]", "callbacks.wandb.artifacts=true",
                                     "callbacks.gguf_export.every=6", "seed=0,1", engine="noop")
             if "hydra.run" not in w]  # fmt: skip
    process = spawn("-m", "toyexp", "-m", *words, f"hydra.sweep.dir={tmp_path / 'the-sweep'}",
                    env={"WANDB_DATA_DIR": str(tmp_path)})  # fmt: skip
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    jobs = sorted((tmp_path / "the-sweep").glob("*-*"))
    assert len(jobs) == 2
    ids = set()
    for job in jobs:
        records = list(job.glob("wandb/offline-run-*/run-*.wandb"))
        assert len(records) == 1, out
        ids.add(records[0].stem)
        # Hyperparameters and metrics stand in wandb's own record as plain text keys.
        content = records[0].read_bytes()
        assert b"train/loss" in content and b"held_out/loss" in content and b"batch_size" in content
        model = f"{records[0].stem}-model.gguf".encode()
        assert content.count(model) == 2 and b"step-6" in content and b"step-12" in content, "two versions of a model"
        told = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
        (note,) = (event["text"] for event in told if event["kind"] == "note")
        assert f"wandb sync {records[0].parent}" in note, "where an offline run lies, and what sends it"
    assert len(ids) == 2
    assert not (tmp_path / "wandb").exists()
    assert "wandb stopped" not in out and "wandb did not finish" not in out


def test_a_file_of_which_too_little_is_said_is_not_sent_and_does_not_hurt_the_run():
    callback = Wandb(artifacts=True)
    callback.on_event(None, "export", {"path": "table.csv", "step": 6})  # as a plugin's callback may say it


@pytest.mark.parametrize(
    ("word", "hint"),
    [("mode=ofline", "did you mean offline?"), ("every=0", "must be at least 1")],
)
def test_settings_that_cannot_work_are_refused(train, word, hint):
    run = train("callbacks=[wandb]", f"callbacks.wandb.{word}")
    assert run.code == 2 and f"callbacks.wandb.{word}" in run.err and hint in run.err
    assert not run.dir.exists()


def test_without_wandb_the_run_is_refused_with_what_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = train("callbacks=[default,wandb]")
    assert run.code == 2
    assert run.err == "toyexp: error: callbacks.wandb: wandb is not installed: pip install 'toyexp[wandb]'\n"
    assert not run.dir.exists()


@pytest.mark.parametrize(("mode", "asked"), [("offline", None), ("online", "allow")])
def test_a_resumed_run_stays_the_same_wandb_run(train, tmp_path, monkeypatch, mode, asked):
    started = []

    class Record:
        def log(self, fields, step):
            started[-1]["steps"].append(step)

        def finish(self):
            pass

    def init(**options):
        started.append({**options, "steps": []})
        return Record()

    fake = SimpleNamespace(Settings=SimpleNamespace, init=init, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    words = ["callbacks=[default,wandb]", f"callbacks.wandb.mode={mode}", "callbacks.wandb.entity=us",
             "callbacks.wandb.tags='first, small'"]  # fmt: skip
    assert train(*words, engine="noop").code == 0
    assert main([f"resume={tmp_path / 'run'}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").touch()
    assert train(*words, engine="noop", to="swept/other").code == 0
    first, second, other = started
    assert first["id"] == second["id"] != other["id"] and len(first["id"]) == 8
    assert (first["resume"], second["resume"]) == (None, asked)
    assert first["steps"][-1] == 12 and second["steps"][-1] == 15 and min(second["steps"]) > 12
    assert (
        first["entity"] == "us"
        and first["tags"] == ["first", "small"]
        and first["group"] is None
        and other["group"] == "swept"
    )
    settings = first["settings"]
    assert settings.init_timeout == 20 and settings.disable_git and not settings.save_code
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert first["dir"] == str(tmp_path / "run")
