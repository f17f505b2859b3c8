import json
import os
import sys
from types import SimpleNamespace

import pytest

from toyexp.cli.main import main
from toyexp_callbacks.dashboard import Wandb

# A fake wandb that misbehaves as MISBEHAVE says; it comes first on the path of the child process.
FAKE_WANDB = """
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
STALL_SECONDS = (
    25  # seconds; much longer than FINISH_SECONDS even on a busy machine, much shorter than the fake's sleep
)
KINDS = ["init", "log", "finish", "finish badly", "slow", "interrupt", "nothing"]


@pytest.fixture
def run_with_fake_wandb(settings, spawn, tmp_path, read_run):
    """Return a function that runs with a fake wandb and returns, by kind of misbehaviour, the run and its seconds.

    The runs share a process, which threads that hang must not keep alive.
    """

    def run(kinds, *overrides, queue=10_000):
        package = tmp_path / "fake" / "wandb"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(FAKE_WANDB)
        words = [w for w in settings("callbacks=[default,wandb]", *overrides, engine="noop") if "hydra.run" not in w]
        path = os.pathsep.join(filter(None, [str(tmp_path / "fake"), os.environ.get("PYTHONPATH")]))
        environment = {"PYTHONPATH": path, "QUEUE_LIMIT": str(queue)}
        process = spawn("-c", PROGRAM, ",".join(kinds), *words, env=environment)
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0, out
        outcomes = [json.loads(s.removeprefix("OUTCOME ")) for s in out.splitlines() if s.startswith("OUTCOME ")]
        assert [o["kind"] for o in outcomes] == kinds, out
        return {o["kind"]: (read_run(o["code"], to=o["kind"]), o["seconds"]) for o in outcomes}

    return run


def test_errors_and_hangs_of_wandb_never_fail_or_delay_a_run(run_with_fake_wandb):
    runs = run_with_fake_wandb(KINDS, "callbacks.wandb.mode=online", "steps=50")
    notes = {kind: [e["text"] for e in run.select("note")] for kind, (run, _) in runs.items()}
    for kind, (run, seconds) in runs.items():
        assert run.code == 0, kind
        assert run.events[-1]["reason"] == "completed" and run.events[-1]["final_step"] == 50
        assert (run.dir / "model.gguf").exists()
        assert run.result["seconds"] < STALL_SECONDS, "training must not wait for wandb"
        assert seconds < STALL_SECONDS, "the end must not wait longer than FINISH_SECONDS"
    assert notes["nothing"] == []
    assert notes["init"] == [
        "wandb stopped, the run continues: RuntimeError: api.wandb.ai cannot be reached\\nsecond line"
    ]
    assert notes["log"] == ["wandb stopped, the run continues: ValueError: disk quota exceeded"]
    assert notes["finish badly"] == ["wandb stopped, the run continues: ValueError: the upload failed"]
    assert notes["interrupt"] == ["wandb stopped, the run continues: KeyboardInterrupt: "]
    for kind in ("finish", "slow"):
        assert notes[kind] == ["wandb did not finish within 0.5 s; its record of this run is incomplete"]


def test_a_full_queue_drops_records_and_does_not_block(run_with_fake_wandb):
    runs = run_with_fake_wandb(["slow"], "steps=300", queue=5)
    run, seconds = runs["slow"]
    assert run.code == 0 and run.result["seconds"] < STALL_SECONDS and seconds < STALL_SECONDS
    assert len(run.select("note")) == 1


def test_each_job_of_a_sweep_is_a_wandb_run_in_its_run_directory(settings, spawn, tmp_path):
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
        # Names of hyperparameters and metrics are plain text in wandb's record.
        content = records[0].read_bytes()
        assert b"train/loss" in content and b"held_out/loss" in content and b"batch_size" in content
        model = f"{records[0].stem}-model.gguf".encode()
        assert content.count(model) == 2 and b"step-6" in content and b"step-12" in content, (
            "the model must have two versions"
        )
        events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
        (note,) = (event["text"] for event in events if event["kind"] == "note")
        assert f"wandb sync {records[0].parent}" in note, "the note must name the path and the sync command"
    assert len(ids) == 2
    assert not (tmp_path / "wandb").exists()
    assert "wandb stopped" not in out and "wandb did not finish" not in out


def test_an_export_event_without_details_is_not_uploaded():
    callback = Wandb(artifacts=True)
    callback.on_event(None, "export", {"path": "table.csv", "step": 6})  # as a plugin's callback may emit it


@pytest.mark.parametrize(
    ("word", "hint"),
    [("mode=ofline", "did you mean offline?"), ("every=0", "must be at least 1")],
)
def test_invalid_settings_are_rejected(train, word, hint):
    run = train("callbacks=[wandb]", f"callbacks.wandb.{word}")
    assert run.code == 2 and f"callbacks.wandb.{word}" in run.err and hint in run.err
    assert not run.dir.exists()


def test_without_wandb_the_run_is_rejected_with_the_package_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = train("callbacks=[default,wandb]")
    assert run.code == 2
    assert run.err == "toyexp: error: callbacks.wandb: wandb is not installed: pip install 'toyexp[wandb]'\n"
    assert not run.dir.exists()


@pytest.mark.parametrize(("mode", "resume"), [("offline", None), ("online", "allow")])
def test_a_resumed_run_continues_the_same_wandb_run(train, tmp_path, monkeypatch, mode, resume):
    wandb_runs = []

    class Record:
        def log(self, fields, step):
            wandb_runs[-1]["steps"].append(step)

        def finish(self):
            pass

    def init(**options):
        wandb_runs.append({**options, "steps": []})
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
    first, second, other = wandb_runs
    assert first["id"] == second["id"] != other["id"] and len(first["id"]) == 8
    assert (first["resume"], second["resume"]) == (None, resume)
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
