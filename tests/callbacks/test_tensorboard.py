"""The event files are parsed by hand as TFRecord: length, its checksum, the record, its checksum."""

import multiprocessing
import struct
import sys
import threading
from pathlib import Path

import pytest

from toyexp.cli.main import main

tensorboardX = pytest.importorskip("tensorboardX")


def read_scalars(path):
    """Return an event file's (name, step, value) triples, and the steps from which it replaces earlier files."""
    from tensorboardX.proto.event_pb2 import Event

    data, offset, values, purge_steps = path.read_bytes(), 0, [], []
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        event = Event.FromString(data[offset + 12 : offset + 12 + length])
        offset += 12 + length + 4
        if event.HasField("session_log"):
            purge_steps.append(event.step)
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                values.append((value.tag, event.step, value.simple_value))
    return values, purge_steps


def test_a_run_writes_all_its_numbers_and_a_resumed_run_adds_a_second_file(train, tmp_path):
    run = train("callbacks=[default,tensorboard]", "steps=12", engine="noop")
    (first,) = (run.dir / "tensorboard").glob("events.out.tfevents.*")
    values, purge_steps = read_scalars(first)
    losses = {step: value for name, step, value in values if name == "train/loss"}
    assert losses == pytest.approx({e["step"]: e["loss"] for e in run.select("step")}, rel=1e-6)
    held_out = {step: value for name, step, value in values if name == "held_out/loss"}
    assert held_out == pytest.approx({e["step"]: e["loss"] for e in run.select("eval")}, rel=1e-6)
    assert {"train/lr", "train/grad_norm", "held_out/ppl"} <= {name for name, _, _ in values} and purge_steps == []
    assert str(run.dir / "tensorboard") in run.result["artifacts"]
    assert b'"batch_size": ' in first.read_bytes(), "the file must contain the configuration as text"
    assert main([f"resume={tmp_path / 'run'}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    (second,) = set((run.dir / "tensorboard").glob("events.out.tfevents.*")) - {first}
    values, purge_steps = read_scalars(second)
    assert purge_steps == [13] and sorted({step for name, step, _ in values if name == "train/loss"}) == [13, 14, 15]


def test_a_full_disk_stops_tensorboard_with_one_note_and_removes_its_files(train, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    before, flush = {*threading.enumerate(), *multiprocessing.active_children()}, RecordWriter.flush

    def flush_until_full(self):
        flush(self)
        if self.path and Path(self.path).stat().st_size > 2000:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "flush", flush_until_full)
    run = train("callbacks=[default,tensorboard]", engine="noop")
    assert run.code == 0 and "Traceback" not in run.err
    message = "tensorboard stopped, the run continues: OSError: [Errno 28] No space left on device"
    assert [e["text"] for e in run.select("note")] == [message]
    assert list((run.dir / "tensorboard").iterdir()) == [] and "tensorboard" not in str(run.result["artifacts"])
    assert {*threading.enumerate(), *multiprocessing.active_children()} == before, "a thread or process is left running"


def test_a_clock_that_is_set_back_loses_no_numbers(train, monkeypatch):
    times = iter(range(1_800_000_000, 0, -40_000_000))
    monkeypatch.setattr("time.time", lambda: next(times, 0))
    run = train("callbacks=[default,tensorboard]", engine="noop")
    (file,) = (run.dir / "tensorboard").iterdir()
    assert run.code == 0 and len({step for name, step, _ in read_scalars(file)[0] if name == "train/loss"}) == 12


def test_without_tensorboardx_the_run_is_rejected_with_the_package_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    run = train("callbacks=[default,tensorboard]")
    assert run.code == 2
    assert run.err == (
        "toyexp: error: callbacks.tensorboard: tensorboardX is not installed: pip install 'toyexp[tensorboard]'\n"
    )
    assert not run.dir.exists()
