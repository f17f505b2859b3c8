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
    """What schema toy/v1 demands of every record, whatever happened in the run."""
    kinds = [e["kind"] for e in events]
    assert kinds[0] == "run_start" and kinds.count("run_start") == 1
    assert kinds[-1] == "run_end" and kinds.count("run_end") == 1
    assert events[0]["schema"] == "toy/v1"
    times = [e["t"] for e in events]
    assert times == sorted(times) and times[0] >= 0
    steps = [e["step"] for e in events if e["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "dense and counted from 1"
    end = events[-1]
    assert datetime.fromisoformat(end["ended_at"]) >= datetime.fromisoformat(events[0]["started_at"])
    assert {"reason", "exit_code"} <= end.keys()
    if steps:
        assert end["final_step"] == steps[-1]
        assert end["final_loss"] == next(e for e in reversed(events) if e["kind"] == "step")["loss"]


def test_a_line_is_strict_json_whatever_stands_in_it():
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
    assert len(run.of("step")) == 12
    assert {"loss", "lr", "tokens", "wall_us", "grad_norm", "phase"} <= run.of("step")[0].keys()
    assert run.of("step")[0]["tokens"] == 4 * 16
    assert [e["step"] for e in run.of("eval")] == [0, 4, 8, 12]
    assert all(e["ppl"] == pytest.approx(math.exp(e["loss"])) for e in run.of("eval"))
    assert [e["step"] for e in run.of("sample")] == [6, 12]
    assert [(e["step"], e["bytes"]) for e in run.of("export")] == [(12, (run.dir / "model.gguf").stat().st_size)]
    end = run.events[-1]
    assert (end["reason"], end["exit_code"], end["final_step"]) == ("completed", 0, 12)
    assert end["final_loss"] == run.result["train_loss"]  # of so few steps nothing is smoothed
    assert run.result["first_train_loss"] == run.of("step")[0]["loss"] and run.result["diverged"] is False
    assert "error" not in end and "quality_gate" not in end


def test_every_thins_out_the_steps_but_not_the_end(train):
    run = train("callbacks=[events]", "callbacks.events.every=5", engine="noop")
    assert [e["step"] for e in run.of("step")] == [5, 10]
    assert run.events[-1]["final_step"] == 12


def test_a_run_that_blows_up_says_null_and_errored(train):
    run = train("lr=1e9", "steps=30")
    assert run.code == 1
    assert "try a lower lr" in run.err and "Traceback" not in run.err
    check_rules(run.events)
    end = run.events[-1]
    assert end["reason"] == "errored" and end["exit_code"] == 1 and end["error"].startswith("RunFailed: ")
    assert run.of("step")[-1]["grad_norm"] is None
    assert not (run.dir / "model.gguf").exists()


def test_the_step_that_has_no_loss_is_the_last_one_recorded(train):
    run = train("engine.nan_at=7", engine="noop")
    assert run.code == 1
    check_rules(run.events)
    assert [e["loss"] is None for e in run.of("step")] == [False] * 6 + [True]
    assert run.events[-1]["final_loss"] is None


CHATTY = """
from dataclasses import dataclass
import numpy as np
from toyexp import Callback, hookimpl

@dataclass(eq=False)
class Chatty(Callback):
    '''Says things, and can raise.'''
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
def chatty(train, local_plugin):
    """Runs with a callback of our own that stands before events in the list."""

    def run(raise_in="nothing"):
        plugins = f"plugins=[toyexp.testing.null,{local_plugin(CHATTY)}]"
        return train("callbacks=[chatty,events]", plugins, f"callbacks.chatty.raise_in={raise_in}", engine="noop")

    return run


def test_what_other_callbacks_say_is_recorded_in_strict_json(chatty):
    run = chatty()
    check_rules(run.events)
    assert run.of("note")[0]["text"] == "before anything"
    assert [e["step"] for e in run.of("tap")] == list(range(1, 13))
    tap = run.of("tap")[0]
    assert tap["mean"] is None and tap["top"] is None and tap["list"] == [1.0, None] and tap["nested"] == {"x": None}
    assert (tap["scalar"], tap["whole"], tap["none"]) == (0.5, 3, None), "numpy's numbers are numbers"


@pytest.mark.parametrize("hook", ["on_start", "on_step"])
def test_a_callback_that_raises_makes_the_record_end_as_errored(chatty, hook):
    run = chatty(raise_in=hook)
    when = "at the start" if hook == "on_start" else "at step 1"
    assert run.code == 1 and f"callbacks.chatty failed {when}: ValueError: boom in {hook}" in run.err
    check_rules(run.events)
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("errored", 1) and f"ValueError: boom in {hook}" in end["error"]
    assert len(run.of("note")) == 1
    assert run.result["reason"] == "errored"


def test_a_callback_that_raises_at_the_end_gives_the_record_the_exit_code_of_the_process(chatty):
    run = chatty(raise_in="on_end")
    assert run.code == 1 and "boom in on_end" in run.err
    check_rules(run.events)
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("completed", 1) and "ValueError: boom in on_end" in end["error"]


@pytest.fixture
def interrupted(settings, spawn, tmp_path, trained):
    """A real process that got a signal as soon as it had recorded a step, and what it printed."""

    def run(number):
        process = spawn("-m", "toyexp", *settings("callbacks=[default,sample,plots]", "steps=10000000", "engine=ggml"))
        path = tmp_path / "run" / "events.jsonl"
        until = time.monotonic() + 60
        while not (path.exists() and '"kind": "step"' in path.read_text()):
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.02)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        return trained(process.returncode), out

    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_step_with_everything_written(interrupted, number, code):
    run, out = interrupted(number)
    assert run.code == code, out
    told = (
        f"interrupted by {number.name}; {run.result['steps']} of 10000000 steps are saved; to resume: toyexp resume=run"
    )
    assert out.splitlines()[-1] == f"toyexp: {told}" and "Traceback" not in out
    check_rules(run.events)
    end = run.events[-1]
    assert (end["reason"], end["exit_code"]) == ("interrupted", code)
    assert run.result["reason"] == "interrupted"
    with GGUFFile(run.dir / "model.gguf") as file:
        assert file.metadata["general.step"] == end["final_step"]
        assert all(np.isfinite(file.read(name)).all() for name in file.tensors)
    assert (run.dir / "plots" / "curves.png").exists()
    assert not list(run.dir.rglob("*.tmp"))


# -- a disk that is full for a while ----------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """A file of lines whose writes can be refused, or take a few bytes at a time."""
    real, room = os.write, [10**9]

    def write(file, data):
        count = min(len(data), room[0], 7)
        if not count:
            raise OSError(28, "No space left on device")
        room[0] -= count
        return real(file, data[:count])

    monkeypatch.setattr(events_module.os, "write", write)
    (tmp_path / "lines").touch()
    return Lines(tmp_path / "lines"), room


def test_lines_wait_for_room_and_come_in_their_order(lines, tmp_path):
    written, room = lines
    written.add("first", 0)
    room[0] = 10  # the first line and half of the second
    written.add("second", 0)
    written.flush()
    assert written.trouble == "No space left on device"
    assert written.position() == {"bytes": 6, "waiting": "second\n"}, (
        "whole lines, though four bytes more are in the file"
    )
    assert (tmp_path / "lines").read_text() == "first\nseco"
    written.add("third", 0)
    room[0] = 10**9
    assert written.close() is None
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\n"


def test_what_a_checkpoint_says_of_the_file_is_brought_to_the_disk_apart_from_it(lines, monkeypatch):
    """The training waits for no disk: `place` writes, and `sync` waits."""
    written, _ = lines
    synced = []
    monkeypatch.setattr(events_module.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    written.add("first", 0)
    assert written.position() == {"bytes": 6, "waiting": ""} and not synced
    written.sync()
    assert synced == [6]


def test_lines_that_never_find_room_leave_whole_ones(lines, tmp_path):
    written, room = lines
    room[0] = 8
    for line in ("first", "second", "third"):
        written.add(line, 0)
    assert written.close() == "2 lines could not be written: No space left on device"
    assert (tmp_path / "lines").read_text() == "first\n"


def test_lines_beyond_what_memory_may_hold_are_counted(lines, tmp_path, monkeypatch):
    written, room = lines
    monkeypatch.setattr(events_module, "MAX_WAITING", 20)
    room[0] = 0
    for _ in range(10):
        written.add("x" * 9, 0)
    room[0] = 10**9
    assert written.close() == "8 lines were lost while the disk was full"
    assert (tmp_path / "lines").read_text() == ("x" * 9 + "\n") * 2


def test_a_file_goes_back_to_its_checkpoint(tmp_path):
    path = tmp_path / "lines"
    path.write_text('first\n{"kind": "step", "t": 1}\nthi')
    assert truncate_events(path, 6, b"waiting\n") == (b"waiting\n", "its last line was incomplete and is written again")
    assert truncate_events(path, 6, b"") == (b"", None)
    assert path.read_text() == "first\n"
    assert truncate_events(path, 1 << 49, b"") == (b"", f"{(1 << 49) - 6} bytes written before the checkpoint are lost")
    assert path.read_text() == "first\n"
    path.write_text("first\nsec")
    waiting, told = truncate_events(path, 100, b"waiting\n")
    assert waiting == b"" and "bytes written before the checkpoint are lost" in told, "behind a gap nothing follows"
    assert path.read_text() == "first\n"


@pytest.mark.parametrize(("left", "told"), [(-3, "its last line was incomplete and is written again"), (5, "are lost")])
def test_a_torn_last_line_is_repaired_when_the_run_is_resumed_and_said(train, left, told, capsys):
    run = train("steps=4", "checkpoint_every=2", engine="noop")
    path = run.dir / "events.jsonl"
    place = checkpoint.read_checkpoint(run.dir / "checkpoints" / "step-2").state["callbacks"]["events"]["bytes"]
    shutil.rmtree(run.dir / "checkpoints" / "step-4")
    whole = path.read_bytes()
    path.write_bytes(whole[:left] if left < 0 else whole[: place - left])
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]"]) == 0
    assert "events.jsonl: " in capsys.readouterr().out and told in (run.dir / "log.txt").read_text()
    assert [e["kind"] for e in run.events][-1] == "run_end" and (run.of("note")[0]["text"].count(told) == 1)
    steps = [e["step"] for e in run.of("step")]
    assert steps == [1, 2, 3, 4] if left < 0 else steps[-2:] == [3, 4]


@pytest.mark.parametrize(
    ("added", "count"), [("", 0), ("mine\n", 1), ('{"kind": "note", "t": 9.0, "text": "mine"}\n[]\n', 2)]
)
@pytest.mark.parametrize("ended", [True, False])
def test_lines_of_others_that_a_resumed_run_removes_are_counted(train, capsys, added, count, ended):
    run = train("steps=4", "checkpoint_every=2", engine="noop")
    path, left = run.dir / "events.jsonl", "removed lines that this run did not write: "
    shutil.rmtree(run.dir / "checkpoints" / "step-4")
    own = path.read_text() if ended else path.read_text().rpartition('{"kind": "run_end"')[0]  # as of a killed run
    path.write_text(own + added)
    count -= added.startswith("{") and not ended  # a line as the run writes them, which may be its own
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]"]) == 0
    assert (f"events.jsonl: {left}{count}\n" in capsys.readouterr().out) is bool(count) is bool(run.of("note"))
    assert "mine" not in path.read_text()


def test_a_record_that_is_gone_when_the_run_goes_on_is_told(train):
    run = train("steps=4", "checkpoint_every=2", engine="noop")
    (run.dir / "events.jsonl").unlink()
    assert main([f"resume={run.dir}", "plugins=[toyexp.testing.null]", "steps=6"]) == 0
    assert [e["step"] for e in run.of("step")] == [5, 6]
    assert any("is missing" in e["text"] and "up to step 4" in e["text"] for e in run.of("note"))


LOGGER = """
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Callback, hookimpl


@dataclass(eq=False)
class Mine(Callback):
    "Reports numbers of its own."

    name: ClassVar[str] = "mine"
    logs: ClassVar[tuple] = ("goodness",)

    at: str = ""  # what to do wrong

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
def logger(local_plugin):
    yield local_plugin(LOGGER)
    LOGGED_METRICS.discard("goodness")


def test_numbers_that_a_callback_logs_reach_whatever_records_and_decides(train, logger):
    """The record, history, terminal, pictures, the best checkpoint and early stopping, though it comes last."""
    words = ["checkpoint_best=goodness", "checkpoint_every=4", "callbacks=[default,early_stop,plots,tensorboard,mine]"]
    words += ["callbacks.early_stop.metric=goodness", "callbacks.early_stop.patience=1", f"plugins=[{logger}]"]
    run = train(*words)
    assert run.code == 0, run.err
    steps, evals = run.of("step"), run.of("eval")
    assert all(step["double"] == 2 * step["loss"] for step in steps)
    assert [event["goodness"] for event in evals] == [-4, 0, -4] and evals[0]["begun"] == 0.5
    assert not any("begun" in event for event in (*steps, *evals[1:])), "it was logged once"
    assert run.of("log")[-1]["over"] == 7
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
def test_a_name_of_the_records_own_is_refused_in_any_hook(name):
    with pytest.raises(ValueError, match=rf"run\.log\({name}=...\): the run records a number of that name"):
        Run.log(None, **{name: 1.0})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("write", "metrics are read-only; add your own numbers with run.log(name=value)"),
        ("taken", "run.log(grad_norm=...): the run records a number of that name"),
        ("text", "run.log(mine='much'): takes numbers"),
        ("nan", "run.log(goodness=nan): a held-out metric must be a finite number"),
    ],
)
def test_a_number_that_cannot_be_logged_fails_the_run_in_words(train, logger, wrong, words):
    run = train(f"plugins=[{logger}]", "callbacks=[default,mine]", f"callbacks.mine.at={wrong}", engine="cpu")
    assert run.code == 1 and words in run.err and "callbacks.mine" in run.err


def test_a_search_goes_by_a_logged_score(settings, tmp_path, logger, capsys):
    module = tmp_path / f"{logger}.py"
    module.write_text(LOGGER.replace("float(-abs(step - 4))", "float(-run.seed)"))
    words = [word for word in settings(f"plugins=[{logger}]", "callbacks=[default,mine]") if "hydra" not in word]
    sweep = ["seed=1,0,2", "sweep.search=grid", "sweep.metric=goodness", f"hydra.sweep.dir={tmp_path / 's'}"]
    assert main(["-m", *words, *sweep, "sweep.isolate=false", "steps=2"]) == 0, capsys.readouterr().err
    assert toyexp.open(tmp_path / "s").best.settings["seed"] == 0
