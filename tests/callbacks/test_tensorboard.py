"""The event files are read back by hand: length, its checksum, the record, its checksum (TFRecord)."""

import struct
import sys
from types import SimpleNamespace

import pytest

from toyexp.commands.line import main

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
    assert main([f"resume={tmp_path / 'run'}", "plugins=[toyexp.testing.null]", "steps=15"]) == 0
    (second,) = set((run.dir / "tensorboard").glob("events.out.tfevents.*")) - {first}
    found, purged = scalars(second)
    assert purged == [13] and sorted({step for name, step, _ in found if name == "train/loss"}) == [13, 14, 15]


def test_a_writer_that_fails_never_fails_the_run_and_is_told_of(train, monkeypatch):
    class Writer:
        def __init__(self, *_, **__):
            pass

        def add_text(self, *_):
            raise OSError("no space left")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer, __spec__=SimpleNamespace()))
    run = train("callbacks=[default,tensorboard]", engine="noop")
    assert run.code == 0
    assert [e["text"] for e in run.of("note")] == ["tensorboard gave up, the run goes on: OSError: no space left"]


def test_without_tensorboardx_the_run_is_refused_with_what_to_install(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    run = train("callbacks=[default,tensorboard]")
    assert run.code == 2
    assert run.err == (
        "toyexp: error: callbacks.tensorboard: tensorboardX is not installed: pip install 'toyexp[tensorboard]'\n"
    )
    assert not run.dir.exists()
