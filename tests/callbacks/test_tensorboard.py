"""The event files are read back by hand: length, its checksum, the record, its checksum (TFRecord)."""

import multiprocessing
import struct
import sys
import threading
from pathlib import Path

import pytest

from toyexp.cli.main import main

tensorboardX = pytest.importorskip("tensorboardX")


def scalars(path):
    """What an event file says: (name, step, value), and the steps from which on it takes back earlier files."""
    from tensorboardX.proto.event_pb2 import Event

    data, place, found, purged = path.read_bytes(), 0, [], []
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        event = Event.FromString(data[place + 12 : place + 12 + length])
        place += 12 + length + 4
        if event.HasField("session_log"):
            purged.append(event.step)
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                found.append((value.tag, event.step, value.simple_value))
    return found, purged


def test_a_run_has_all_its_numbers_in_an_event_file_and_goes_on_in_another_beside_it(train, tmp_path):
    run = train("callbacks=[default,tensorboard]", "steps=12", engine="noop")
    (first,) = (run.dir / "tensorboard").glob("events.out.tfevents.*")
    found, purged = scalars(first)
    losses = {step: value for name, step, value in found if name == "train/loss"}
    assert losses == pytest.approx({e["step"]: e["loss"] for e in run.of("step")}, rel=1e-6)
    held_out = {step: value for name, step, value in found if name == "held_out/loss"}
    assert held_out == pytest.approx({e["step"]: e["loss"] for e in run.of("eval")}, rel=1e-6)
    assert {"train/lr", "train/grad_norm", "held_out/ppl"} <= {name for name, _, _ in found} and purged == []
    assert str(run.dir / "tensorboard") in run.result["artifacts"]
    assert b'"batch_size": ' in first.read_bytes(), "the configuration is there as a text"
    assert main([f"resume={tmp_path / 'run'}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    (second,) = set((run.dir / "tensorboard").glob("events.out.tfevents.*")) - {first}
    found, purged = scalars(second)
    assert purged == [13] and sorted({step for name, step, _ in found if name == "train/loss"}) == [13, 14, 15]


def test_a_full_disk_ends_the_writing_with_one_line_and_gives_its_room_to_the_run(train, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    before, flush = {*threading.enumerate(), *multiprocessing.active_children()}, RecordWriter.flush

    def flush_until_full(self):
        flush(self)
        if self.path and Path(self.path).stat().st_size > 2000:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "flush", flush_until_full)
    run = train("callbacks=[default,tensorboard]", engine="noop")
    assert run.code == 0 and "Traceback" not in run.err
    told = "tensorboard stopped, the run continues: OSError: [Errno 28] No space left on device"
    assert [e["text"] for e in run.of("note")] == [told]
    assert list((run.dir / "tensorboard").iterdir()) == [] and "tensorboard" not in str(run.result["artifacts"])
    assert {*threading.enumerate(), *multiprocessing.active_children()} == before, "nothing may keep the process"


def test_a_clock_that_is_set_back_does_no_harm(train, monkeypatch):
    times = iter(range(1_800_000_000, 0, -40_000_000))
    monkeypatch.setattr("time.time", lambda: next(times, 0))
    run = train("callbacks=[default,tensorboard]", engine="noop")
    (file,) = (run.dir / "tensorboard").iterdir()
    assert run.code == 0 and len({step for name, step, _ in scalars(file)[0] if name == "train/loss"}) == 12


def test_without_tensorboardx_the_run_is_refused_with_what_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    run = train("callbacks=[default,tensorboard]")
    assert run.code == 2
    assert run.err == (
        "toyexp: error: callbacks.tensorboard: tensorboardX is not installed: pip install 'toyexp[tensorboard]'\n"
    )
    assert not run.dir.exists()
