import json
import math
import os
import shutil
import signal
import time
from datetime import datetime
from types import MappingProxyType

import numpy as np
import pytest

import toyexp
from toyexp.base import dump_json
from toyexp.cli.main import main
from toyexp.formats.gguf.read import GGUFFile
from toyexp.interfaces.model import LOGGED_METRICS
from toyexp.interfaces.run import Run
from toyexp.training import checkpoint
from toyexp_callbacks import events as events_module
from toyexp_callbacks.events import Lines, truncate_events


def check_rules(events):
    """Assert the rules of schema toy/v1 that every events.jsonl must satisfy."""
    kinds = [e["kind"] for e in events]
    assert kinds[0] == "run_start" and kinds.count("run_start") == 1
    assert kinds[-1] == "run_end" and kinds.count("run_end") == 1
    assert events[0]["schema"] == "toy/v1"
    times = [e["t"] for e in events]
    assert times == sorted(times) and times[0] >= 0
    steps = [e["step"] for e in events if e["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "steps are not consecutive from 1"
    end = events[-1]
    assert datetime.fromisoformat(end["ended_at"]) >= datetime.fromisoformat(events[0]["started_at"])
    assert {"reason", "exit_code"} <= end.keys()
    if steps:
        assert end["final_step"] == steps[-1]
        assert end["final_loss"] == next(e for e in reversed(events) if e["kind"] == "step")["loss"]


def test_a_line_is_strict_json_for_any_values():
    fields = {"a": 0.1, "b": {"c": [1, "x", None]}, "d": MappingProxyType({"e": np.float32(2)}), "f": np.arange(2)}
    assert json.loads(dump_json(fields)) == {"a": 0.1, "b": {"c": [1, "x", None]}, "d": {"e": 2.0}, "f": [0, 1]}
    bad = {**fields, "a": math.nan, "d": MappingProxyType({"e": np.array([1, np.inf])}), "g": [{"h": -math.inf}]}
    assert json.loads(dump_json(bad)) == {
        "a": None, "b": {"c": [1, "x", None]}, "d": {"e": [1.0, None]}, "f": [0, 1], "g": [{"h": None}]
    }  # fmt: skip


def test_a_completed_run_is_recorded_from_start_to_end(train):
    run = train("callbacks=[default,sample]", "callbacks.sample.every=6", "name=small")
    assert run.code == 0
    check_rules(run.events)
    start = run.events[0]
    assert start["run_id"] == "run" and start["name"] == "small" and start["phase"] == "train"
    assert start["backend"]["kind"] == "cpu"
    assert start["model"]["arch"] == "llama" and start["model"]["d_model"] == 16 and start["model"]["vocab"] == 257
    assert start["config"] == {"steps": 12, "lr": 0.003, "seed": 0, "batch": 4}
    assert {"name", "os", "arch"} <= start["host"].keys()
    assert len(run.select("step")) == 12
    assert {"loss", "lr", "tokens", "wall_us", "grad_norm", "phase"} <= run.select("step")[0].keys()
    assert run.select("step")[0]["tokens"] == 4 * 16
    assert [e["step"] for e in run.select("eval")] == [0, 4, 8, 12]
    assert all(e["ppl"] == pytest.approx(math.exp(e["loss"])) for e in run.select("eval"))
    assert [e["step"] for e in run.select("sample")] == [6, 12]
    assert [(e["step"], e["bytes"]) for e in run.select("export")] == [(12, (run.dir / "model.gguf").stat().st_size)]
    end = run.events[-1]
    assert (end["reason"], end["exit_code"], end["final_step"]) == ("completed", 0, 12)
    assert end["final_loss"] == run.result["train_loss"]  # few steps are not smoothed
    assert run.result["first_train_loss"] == run.select("step")[0]["loss"] and run.result["diverged"] is False
    assert "error" not in end and "quality_gate" not in end


def test_the_setting_every_reduces_step_events_but_not_the_end(train):
    run = train("callbacks=[events]", "callbacks.events.every=5", engine="noop")
    assert [e["step"] for e in run.select("step")] == [5, 10]
    assert run.events[-1]["final_step"] == 12


def test_a_run_that_diverges_records_null_and_ends_as_errored(train):
    run = train("lr=1e9", "steps=30")
    assert run.code == 1
    assert "try a lower lr" in run.err and "Traceback" not in run.err
    check_rules(run.events)
    end = run.events[-1]
    assert end["reason"] == "errored" and end["exit_code"] == 1 and end["error"].startswith("RunFailed: ")
    assert run.select("step")[-1]["grad_norm"] is None
    assert not (run.dir / "model.gguf").exists()


def test_the_step_with_a_nan_loss_is_the_last_one_recorded(train):
    run = train("engine.nan_at=7", engine="noop")
    assert run.code == 1
    check_rules(run.events)
    assert [e["loss"] is None for e in run.select("step")] == [False] * 6 + [True]
    assert run.events[-1]["final_loss"] is None


CHATTY_PLUGIN = """
from dataclasses import dataclass
import numpy as np
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Chatty(Callback):
    '''Emit events, and raise in the hook `raise_in`.'''
    name = "chatty"
    raise_in: str = ""  # the hook that raises

    def _maybe(self, hook):
        if self.raise_in == hook:
            raise ValueError(f"boom in {hook}")
    @hookimpl
    def on_start(self, run):
        run.emit("note", text="before anything")
        self._maybe("on_start")
    @hookimpl
    def on_step(self, run, step):
        run.emit("tap", step=step, mean=float("nan"), top=float("inf"), list=[1.0, float("-inf")],
                 nested={"x": float("nan")}, scalar=np.float32(0.5), whole=np.int64(3), none=np.float32("nan"))
        self._maybe("on_step")
    @hookimpl
    def on_end(self, run):
        self._maybe("on_end")

@hookimpl
def register_callbacks(register):
    register(Chatty)
"""


@pytest.fixture
def train_with_chatty_plugin(train, local_plugin):
    """Return a function that trains with a plugin's callback before `events` in the list."""

    def run(raise_in="nothing"):
        plugins = f"plugins=[toyexp.testing.null,{local_plugin(CHATTY_PLUGIN)}]"
        return train("callbacks=[chatty,events]", plugins, f"callbacks.chatty.raise_in={raise_in}", engine="noop")

    return run


def test_events_of_other_callbacks_are_recorded_in_strict_json(train_with_chatty_plugin):
    run = train_with_chatty_plugin()
    check_rules(run.events)
    assert run.select("note")[0]["text"] == "before anything"
    assert [e["step"] for e in run.select("tap")] == list(range(1, 13))
    tap = run.select("tap")[0]
    assert tap["mean"] is None and tap["top"] is None and tap["list"] == [1.0, None] and tap["nested"] == {"x": None}
    assert (tap["scalar"], tap["whole"], tap["none"]) == (0.5, 3, None), "numpy scalars must become JSON numbers"


@pytest.mark.parametrize("hook", ["on_start", "on_step"])
def test_a_run_whose_callback_raises_is_recorded_as_errored(train_with_chatty_plugin, hook):
    run = train_with_chatty_plugin(raise_in=hook)
    when = "at the start" if hook == "on_start" else "at step 1"
    assert run.code == 1 and f"callbacks.chatty failed {when}: ValueError: boom in {hook}" in run.err
    check_rules(run.events)
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("errored", 1) and f"ValueError: boom in {hook}" in end["error"]
    assert len(run.select("note")) == 1
    assert run.result["reason"] == "errored"


def test_the_record_has_the_exit_code_of_a_callback_that_raises_at_the_end(train_with_chatty_plugin):
    run = train_with_chatty_plugin(raise_in="on_end")
    assert run.code == 1 and "boom in on_end" in run.err
    check_rules(run.events)
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("completed", 1) and "ValueError: boom in on_end" in end["error"]


@pytest.fixture
def interrupt_run(settings, spawn, tmp_path, read_run):
    """Return a function that sends a signal to a process after its first recorded step; it returns the run and its
    output.
    """

    def run(number):
        process = spawn("-m", "toyexp", *settings("callbacks=[default,sample,plots]", "steps=10000000", "engine=ggml"))
        path = tmp_path / "run" / "events.jsonl"
        deadline = time.monotonic() + 60
        while not (path.exists() and '"kind": "step"' in path.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        return read_run(process.returncode), out

    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_step_with_all_files_written(interrupt_run, number, code):
    run, out = interrupt_run(number)
    assert run.code == code, out
    message = (
        f"interrupted by {number.name}; {run.result['steps']} of 10000000 steps are saved; to resume: toyexp resume=run"
    )
    assert out.splitlines()[-1] == f"toyexp: {message}" and "Traceback" not in out
    check_rules(run.events)
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("interrupted", code)
    assert run.result["reason"] == "interrupted"
    with GGUFFile(run.dir / "model.gguf") as file:
        assert file.metadata["general.step"] == end["final_step"]
        assert all(np.isfinite(file.read(name)).all() for name in file.tensors)
    assert (run.dir / "plots" / "curves.png").exists()
    assert not list(run.dir.rglob("*.tmp"))


# -- a disk that is temporarily full ---------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Return a Lines file whose writes take at most 7 bytes and fail when no room is left, and the room in bytes."""
    os_write, room = os.write, [10**9]

    def write(file, data):
        count = min(len(data), room[0], 7)
        if not count:
            raise OSError(28, "No space left on device")
        room[0] -= count
        return os_write(file, data[:count])

    monkeypatch.setattr(events_module.os, "write", write)
    (tmp_path / "lines").touch()
    return Lines(tmp_path / "lines"), room


def test_lines_wait_for_room_and_are_written_in_order(lines, tmp_path):
    event_lines, room = lines
    event_lines.add("first", 0)
    room[0] = 10  # the first line and half of the second
    event_lines.add("second", 0)
    event_lines.flush()
    assert event_lines.trouble == "No space left on device"
    assert event_lines.position() == {"bytes": 6, "waiting": "second\n"}, (
        "the position must not count an incomplete line"
    )
    assert (tmp_path / "lines").read_text() == "first\nseco"
    event_lines.add("third", 0)
    room[0] = 10**9
    assert event_lines.close() is None
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\n"


def test_the_position_for_a_checkpoint_is_synced_separately(lines, monkeypatch):
    """Training does not wait for the disk: `position` writes, and `sync` waits."""
    event_lines, _ = lines
    synced_sizes = []
    monkeypatch.setattr(events_module.os, "fsync", lambda file: synced_sizes.append(os.fstat(file).st_size))
    event_lines.add("first", 0)
    assert event_lines.position() == {"bytes": 6, "waiting": ""} and not synced_sizes
    event_lines.sync()
    assert synced_sizes == [6]


def test_a_disk_that_stays_full_leaves_only_complete_lines(lines, tmp_path):
    event_lines, room = lines
    room[0] = 8
    for line in ("first", "second", "third"):
        event_lines.add(line, 0)
    assert event_lines.close() == "2 lines could not be written: No space left on device"
    assert (tmp_path / "lines").read_text() == "first\n"


def test_lines_beyond_the_memory_limit_are_dropped_and_counted(lines, tmp_path, monkeypatch):
    event_lines, room = lines
    monkeypatch.setattr(events_module, "MAX_WAITING", 20)
    room[0] = 0
    for _ in range(10):
        event_lines.add("x" * 9, 0)
    room[0] = 10**9
    assert event_lines.close() == "8 lines were lost while the disk was full"
    assert (tmp_path / "lines").read_text() == ("x" * 9 + "\n") * 2


def test_a_file_is_truncated_to_its_checkpoint(tmp_path):
    path = tmp_path / "lines"
    path.write_text('first\n{"kind": "step", "t": 1}\nthi')
    assert truncate_events(path, 6, b"waiting\n") == (b"waiting\n", "its last line was incomplete and is written again")
    assert truncate_events(path, 6, b"") == (b"", None)
    assert path.read_text() == "first\n"
    assert truncate_events(path, 1 << 49, b"") == (b"", f"{(1 << 49) - 6} bytes written before the checkpoint are lost")
    assert path.read_text() == "first\n"
    path.write_text("first\nsec")
    waiting, note = truncate_events(path, 100, b"waiting\n")
    assert waiting == b"" and "bytes written before the checkpoint are lost" in note, (
        "waiting lines must not follow a gap"
    )
    assert path.read_text() == "first\n"


@pytest.mark.parametrize(
    ("cut", "message"), [(-3, "its last line was incomplete and is written again"), (5, "are lost")]
)
def test_an_incomplete_last_line_is_repaired_and_reported_when_the_run_resumes(train, cut, message, capsys):
    run = train("steps=4", "checkpoint_every=2", engine="noop")
    path = run.dir / "events.jsonl"
    checkpoint_bytes = checkpoint.read_checkpoint(run.dir / "checkpoints" / "step-2").state["callbacks"]["events"][
        "bytes"
    ]
    shutil.rmtree(run.dir / "checkpoints" / "step-4")
    content = path.read_bytes()
    path.write_bytes(content[:cut] if cut < 0 else content[: checkpoint_bytes - cut])
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]"]) == 0
    assert "events.jsonl: " in capsys.readouterr().out and message in (run.dir / "log.txt").read_text()
    assert [e["kind"] for e in run.events][-1] == "run_end" and (run.select("note")[0]["text"].count(message) == 1)
    steps = [e["step"] for e in run.select("step")]
    assert steps == [1, 2, 3, 4] if cut < 0 else steps[-2:] == [3, 4]


@pytest.mark.parametrize(
    ("foreign_lines", "count"), [("", 0), ("mine\n", 1), ('{"kind": "note", "t": 9.0, "text": "mine"}\n[]\n', 2)]
)
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_resumed_run_counts_the_removed_lines_of_other_programs(train, capsys, foreign_lines, count, is_complete):
    run = train("steps=4", "checkpoint_every=2", engine="noop")
    path, message = run.dir / "events.jsonl", "removed lines that this run did not write: "
    shutil.rmtree(run.dir / "checkpoints" / "step-4")
    own_lines = (
        path.read_text() if is_complete else path.read_text().rpartition('{"kind": "run_end"')[0]
    )  # as after a kill
    path.write_text(own_lines + foreign_lines)
    count -= foreign_lines.startswith("{") and not is_complete  # a line in the run's own format may be its own
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]"]) == 0
    assert (f"events.jsonl: {message}{count}\n" in capsys.readouterr().out) is bool(count) is bool(run.select("note"))
    assert "mine" not in path.read_text()


def test_a_missing_events_file_is_reported_when_the_run_resumes(train):
    run = train("steps=4", "checkpoint_every=2", engine="noop")
    (run.dir / "events.jsonl").unlink()
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]", "steps=6"]) == 0
    assert [e["step"] for e in run.select("step")] == [5, 6]
    assert any("is missing" in e["text"] and "up to step 4" in e["text"] for e in run.select("note"))


LOGGER_PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Callback, hookimpl


@dataclass(eq=False)
class Mine(Callback):
    "Log numbers of its own."

    name: ClassVar[str] = "mine"
    logs: ClassVar[tuple] = ("goodness",)

    at: str = ""  # the error to make

    @hookimpl
    def on_start(self, run):
        run.log(begun=0.5)

    @hookimpl
    def on_step(self, run, step, metrics):
        if self.at == "write":
            metrics["mine"] = 1
        if self.at == "taken":
            run.log(grad_norm=1.0)
        if self.at == "text":
            run.log(mine="much")
        run.log(double=2 * metrics["loss"])

    @hookimpl
    def on_eval(self, run, step, metrics):
        run.log(goodness=float("nan") if self.at == "nan" else float(-abs(step - 4)))

    @hookimpl
    def on_end(self, run):
        run.log(over=7)


@hookimpl
def register_callbacks(register):
    register(Mine)
"""


@pytest.fixture
def logger_plugin(local_plugin):
    yield local_plugin(LOGGER_PLUGIN)
    LOGGED_METRICS.discard("goodness")


def test_numbers_logged_by_a_callback_reach_all_records_and_decisions(train, logger_plugin):
    """These are events, history, terminal, plots, the best checkpoint and early stopping, though the callback comes
    last.
    """
    words = ["checkpoint_best=goodness", "checkpoint_every=4", "callbacks=[default,early_stop,plots,tensorboard,mine]"]
    words += ["callbacks.early_stop.metric=goodness", "callbacks.early_stop.patience=1", f"plugins=[{logger_plugin}]"]
    run = train(*words)
    assert run.code == 0, run.err
    steps, evals = run.select("step"), run.select("eval")
    assert all(step["double"] == 2 * step["loss"] for step in steps)
    assert [event["goodness"] for event in evals] == [-4, 0, -4] and evals[0]["begun"] == 0.5
    assert not any("begun" in event for event in (*steps, *evals[1:])), "a number logged once is repeated"
    assert run.select("log")[-1]["over"] == 7
    result = toyexp.open(run.dir)
    np.testing.assert_array_equal(result.history["double"], 2 * result.history.loss)
    assert list(result.history.held_out["goodness"]) == [-4, 0, -4] and "double" in result.history
    assert run.result["eval_scores"]["goodness"] == 0 and result.best["step"] == run.result["eval_step"] == 4
    assert run.result["last_eval"]["scores"]["goodness"] == -4
    assert run.result["why"].startswith("early_stop: 1 eval without a held-out goodness")
    assert "held-out goodness -4.0000 -> -4.0000" in run.out and "goodness 0.0000" in run.out
    picture = (run.dir / "plots" / "curves.svg").read_text()
    assert "goodness" in picture and "double" in picture  # long names are wrapped
    logged = b"".join(path.read_bytes() for path in (run.dir / "tensorboard").iterdir())
    assert b"train/double" in logged and b"held_out/goodness" in logged


@pytest.mark.parametrize("name", ["kind", "t", "phase", "name", "step", "batch", "loss", "ppl", "lr", "grad_norm",
                                  "tokens", "wall_us"])  # fmt: skip
def test_a_name_that_the_run_records_itself_is_rejected(name):
    with pytest.raises(ValueError, match=rf"run\.log\({name}=...\): the run itself records a number named so"):
        Run.log(None, **{name: 1.0})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("write", "metrics are read-only; add your own numbers with run.log(name=value)"),
        ("taken", "run.log(grad_norm=...): the run itself records a number named so"),
        ("text", "run.log(mine='much'): the value must be a number"),
        ("nan", "run.log(goodness=nan): a held-out metric must be a finite number"),
    ],
)
def test_an_invalid_logged_number_fails_the_run(train, logger_plugin, wrong, words):
    run = train(f"plugins=[{logger_plugin}]", "callbacks=[default,mine]", f"callbacks.mine.at={wrong}", engine="cpu")
    assert run.code == 1 and words in run.err and "callbacks.mine" in run.err


def test_a_search_can_use_a_logged_metric(settings, tmp_path, logger_plugin, capsys):
    module = tmp_path / f"{logger_plugin}.py"
    module.write_text(LOGGER_PLUGIN.replace("float(-abs(step - 4))", "float(-run.seed)"))
    words = [word for word in settings(f"plugins=[{logger_plugin}]", "callbacks=[default,mine]") if "hydra" not in word]
    sweep = ["seed=1,0,2", "sweep.search=grid", "sweep.metric=goodness", f"hydra.sweep.dir={tmp_path / 's'}"]
    assert main(["-m", *words, *sweep, "sweep.isolate=false", "steps=2"]) == 0, capsys.readouterr().err
    assert toyexp.open(tmp_path / "s").best.settings["seed"] == 0
