"""Checkpoints on disk: written atomically, verified when read, and kept as configured."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from toyexp.base.errors import UserError
from toyexp.training import checkpointing as keeper_module
from toyexp.training.checkpoint import (
    ARRAYS,
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    list_checkpoints,
    matches_type,
    read_checkpoint,
    read_newest,
    write_checkpoint,
)  # fmt: skip
from toyexp.training.checkpointing import CheckpointKeeper
from toyexp.training.resume import _outcome
from toyexp.training.run_config import Outcome
from toyexp.training.settings import Interval

ARRAY = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "w@m": np.array([1e-30, -0.0, np.pi])}


def constant_snapshot(arrays: dict[str, np.ndarray]):
    """Return a session's snapshot() that always returns these arrays."""
    return lambda into: arrays


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def checkpoint_path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints", 7, ARRAY, {"outcome": {"steps": 7}, "third": 1 / 3})


@pytest.mark.parametrize("evals", [[], {"2": 1.0}, {"2": {"loss": "low"}}, {"8": {"loss": 1.0}}, {"x": {}}])
def test_invalid_evals_in_a_checkpoint_are_rejected(checkpoint_path, evals):
    """A run of 7 steps writes the scores of an evaluation by its step, each a number or null."""
    state = {"outcome": asdict(Outcome(steps=7)), "scores": {}}
    valid = replace(read_checkpoint(checkpoint_path), state={**state, "evals": {"2": {"loss": 1.0, "accuracy": None}}})
    assert _outcome(valid).steps == _outcome(replace(valid, state=state)).steps == 7
    with pytest.raises(UserError, match="invalid evals"):
        _outcome(replace(valid, state={**state, "evals": evals}))


def test_a_checkpoint_is_read_back_bit_for_bit(checkpoint_path):
    restored = read_checkpoint(checkpoint_path)
    assert (restored.step, restored.path) == (7, checkpoint_path)
    assert {n: (a.dtype, a.tobytes()) for n, a in restored.arrays.items()} == {
        n: (a.dtype, a.tobytes()) for n, a in ARRAY.items()
    }
    assert restored.state["third"] == 1 / 3


def test_a_change_of_any_byte_is_detected(checkpoint_path):
    """A changed, missing or added byte anywhere is noticed."""
    for path in sorted(checkpoint_path.iterdir()):
        good = path.read_bytes()
        for at in range(0, len(good), max(len(good) // 60, 1)):
            for bad in (good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :], good[:at], good[:at] + b" " + good[at:]):
                path.write_bytes(bad)
                if path.name == MANIFEST and _same_manifest(bad, good):
                    continue
                with pytest.raises(DamagedCheckpoint, match=str(checkpoint_path)):
                    read_checkpoint(checkpoint_path)
        path.write_bytes(good)
    read_checkpoint(checkpoint_path)


def _same_manifest(bad: bytes, good: bytes) -> bool:
    """A blank between two tokens of JSON changes nothing."""
    try:
        return bool(json.loads(bad) == json.loads(good))
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        (MANIFEST, "[]", "is not a JSON object"),
        (MANIFEST, "[" * 100_000, "is not valid JSON"),
        (MANIFEST, json.dumps({"format": 0}), "has format 0, this toyexp reads format 1"),
        (MANIFEST, json.dumps({"format": "1"}), "has format '1', this toyexp reads format 1"),
        (MANIFEST, json.dumps({"format": 1, "step": 7, "files": {"../../etc/passwd": {}}}), "does not list"),
        (STATE, "[1]", "does not match the manifest"),
        (ARRAYS, "", "does not match the manifest"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(checkpoint_path, file, content, cause):
    folder = checkpoint_path.parent
    write_checkpoint(folder, 9, ARRAY, {})
    (folder / "step-9" / file).write_text(content)
    newest, damaged = read_newest(folder)
    assert newest is not None and newest.step == 7
    assert len(damaged) == 1 and "step-9" in damaged[0] and cause in damaged[0]


@pytest.mark.parametrize("file", [ARRAYS, STATE, MANIFEST])
def test_a_link_inside_a_checkpoint_is_not_followed(checkpoint_path, tmp_path, file):
    write_checkpoint(checkpoint_path.parent, 9, ARRAY, {})
    (checkpoint_path.parent / "step-9" / file).rename(tmp_path / file)
    (checkpoint_path.parent / "step-9" / file).symlink_to(tmp_path / file)
    with pytest.raises(UserError, match=f"step-9/{file}: is a link"):
        read_checkpoint(checkpoint_path.parent / "step-9")
    newest, (line,) = read_newest(checkpoint_path.parent)
    assert newest is not None and newest.step == 7 and f"step-9/{file}: is a link" in line


def test_a_checkpoint_whose_manifest_names_another_step_is_damaged(checkpoint_path):
    shutil.copytree(checkpoint_path, checkpoint_path.with_name("step-8"))
    newest, damaged = read_newest(checkpoint_path.parent)
    assert newest is not None and newest.step == 7
    assert "names step 7" in damaged[0]


def test_other_files_in_the_checkpoint_directory_are_ignored(checkpoint_path):
    for name in ("step-", "step-1x", ".tmp-8-1", "step--1"):
        (checkpoint_path.parent / name).mkdir()
    (checkpoint_path.parent / "step-11").write_text("a file")
    assert list(list_checkpoints(checkpoint_path.parent)) == [7]
    assert read_newest(checkpoint_path.parent / "nowhere") == (None, [])


def test_a_failed_write_keeps_the_existing_checkpoint(checkpoint_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(checkpoint_path.parent, 7, ARRAY, {})
    assert [p.name for p in checkpoint_path.parent.iterdir()] == ["step-7"]
    read_checkpoint(checkpoint_path)


def _file(path):
    path.write_text("mine")


def _link(path):
    path.symlink_to("nowhere")


def _with_notes(path):
    write_checkpoint(path.parent, 8, ARRAY, {})
    (path / "theirs").mkdir()
    (path / "theirs/notes.txt").write_text("mine")


def _names_alone(path):
    path.mkdir()
    for name in ("manifest.json", "state.json", "state.safetensors"):
        (path / name).write_text("mine")


def _torn_manifest(path):
    write_checkpoint(path.parent, 8, ARRAY, {})
    (path / "manifest.json").write_text("{")


def _whole(root):
    if root.is_dir():
        return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return str(root.readlink()) if root.is_symlink() else root.read_text()


@pytest.mark.parametrize("put", [_file, _link, _with_notes, _names_alone, _torn_manifest])
def test_a_foreign_file_at_the_path_of_a_checkpoint_is_moved_aside(checkpoint_path, put, caplog):
    path, aside = checkpoint_path.parent / "step-8", checkpoint_path.parent / "step-8.1"
    put(path)
    before = _whole(path)
    keeper = CheckpointKeeper(checkpoint_path.parent, Interval(1), keep=9)
    keeper.save(8, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert [done.step for done in keeper.pop_written_checkpoints()] == [8]
    read_checkpoint(path)
    assert _whole(aside) == before
    assert f"moved to {aside}" in caplog.text


# -- when, and how many -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("0", Interval()),
        ("500", Interval(500)),
        ("30s", Interval(0, 30)),
        ("10min", Interval(0, 600)),
        ("2h", Interval(0, 7200)),
    ],
)
def test_an_interval_is_parsed_as_steps_or_time(text, interval):
    assert Interval.parse(text, "checkpoint_every") == interval
    assert bool(interval) == (text != "0")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "10 minutes", "min", "1e3", "1d"])
def test_an_invalid_interval_is_rejected_with_what_to_type(text):
    with pytest.raises(UserError, match=r"checkpoint_every=.*10min"):
        Interval.parse(text, "checkpoint_every")


def keep(folder: Path, upto: int, scores: dict[int, float] | None = None, **settings) -> list[int]:
    """Return the steps of the checkpoints on disk after `upto` steps."""
    keeper = CheckpointKeeper(folder, settings.pop("interval", Interval(10)), **{"keep": 2, **settings})
    for step in range(1, upto + 1):
        score = {"loss": scores[step]} if scores and step in scores else {}
        if keeper.is_due(step, score, last=step == upto):
            keeper.save(step, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert keeper.trouble is None
    return sorted(list_checkpoints(folder))


def test_the_last_checkpoints_are_kept(tmp_path):
    assert keep(tmp_path / "a", 35) == [30, 35]
    assert keep(tmp_path / "b", 35, keep=3) == [20, 30, 35]
    assert keep(tmp_path / "c", 35, interval=Interval()) == []
    assert keep(tmp_path / "d", 35, interval=Interval(seconds=3600)) == [35]


def test_the_best_checkpoint_is_kept(tmp_path):
    scores = {5: 3.0, 12: 1.0, 20: 2.0, 30: 1.5}
    assert keep(tmp_path, 40, scores, best="loss", keep=1) == [12, 40]


def test_of_a_metric_that_should_rise_the_highest_is_the_best(tmp_path):
    scores = {5: 0.3, 12: 0.9, 20: 0.5, 30: 0.9}
    keeper = CheckpointKeeper(tmp_path, Interval(10), keep=1, best="accuracy")
    for step in range(1, 41):
        looked = {"loss": 1.0, "accuracy": scores[step]} if step in scores else {}
        if keeper.is_due(step, looked, last=step == 40):
            keeper.save(step, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert sorted(list_checkpoints(tmp_path)) == [12, 40]


def test_an_unknown_best_metric_is_rejected_and_nan_is_never_the_best(tmp_path):
    keeper = CheckpointKeeper(tmp_path, Interval(10), keep=1, best="acuracy")
    with pytest.raises(UserError, match="checkpoint_best=acuracy: did you mean accuracy"):
        keeper.is_due(5, {"loss": 1.0, "accuracy": 0.5}, last=False)
    with pytest.raises(UserError, match="checkpoint_best=acuracy"):
        keeper.check({"loss": 1.0, "accuracy": 0.5})
    keeper.check({})  # there was no eval yet
    keeper = CheckpointKeeper(tmp_path, Interval(10), keep=1, best="loss")
    assert keeper.is_due(5, {"loss": 1.0}, last=False) and not keeper.is_due(6, {"loss": math.nan}, last=False)
    assert keeper.is_due(7, {"loss": 0.5}, last=False) and not keeper.is_due(8, {"loss": 0.5}, last=False)


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    keeper = CheckpointKeeper(tmp_path, Interval(10), keep=2)
    keeper.save(10, constant_snapshot(ARRAY), {})
    keeper.save(20, constant_snapshot({**ARRAY, "w": ARRAY["w"] * np.nan}), {})
    keeper.wait()
    assert [s.step for s in keeper.pop_written_checkpoints()] == [10] and sorted(list_checkpoints(tmp_path)) == [10]
    assert keeper.trouble == (
        "checkpoint of step 20: not written (weight w has NaN or infinity; the previous checkpoint stays the newest)"
    )
    # An overflowed moment only slows its weight down: such a run can be resumed.
    keeper.save(30, constant_snapshot({**ARRAY, "w@m": np.array([np.inf])}), {})
    keeper.wait()
    assert sorted(list_checkpoints(tmp_path)) == [10, 30]


def test_the_keeper_needs_attention_when_a_checkpoint_is_due_or_was_written(tmp_path):
    keeper = CheckpointKeeper(tmp_path, Interval(10), keep=2)
    assert [step for step in range(1, 22) if keeper.needs_attention(step)] == [10, 20]
    keeper.save(10, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert keeper.needs_attention(11)
    assert [checkpoint_path.step for checkpoint_path in keeper.pop_written_checkpoints()] == [
        10
    ] and not keeper.needs_attention(11)


def test_a_time_interval_makes_a_checkpoint_due(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(keeper_module, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))
    keeper = CheckpointKeeper(tmp_path, Interval(seconds=60), keep=1)
    now = 1059.0
    assert not keeper.is_due(1, {}, last=False)
    now = 1060.0
    assert keeper.is_due(2, {}, last=False)
    keeper.save(2, constant_snapshot(ARRAY), {})
    now = 1119.0
    assert not keeper.is_due(3, {}, last=False)
    keeper.wait()


def test_the_resumed_checkpoint_is_kept_until_two_others_exist(tmp_path):
    resumed = read_checkpoint(write_checkpoint(tmp_path, 100, ARRAY, {}))
    keeper = CheckpointKeeper(tmp_path, Interval(10), keep=1, resumed=resumed)
    assert not keeper.is_due(100, {}, last=False), "it stands already"
    for step, standing in ((110, [100, 110]), (120, [120])):
        keeper.save(step, constant_snapshot(ARRAY), {})
        keeper.wait()
        assert sorted(list_checkpoints(tmp_path)) == standing


def test_a_failed_write_is_reported_once_and_the_next_checkpoint_is_tried(tmp_path):
    folder = tmp_path / "checkpoints"
    keeper = CheckpointKeeper(folder, Interval(1), keep=2)
    keeper.save(1, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert [s.step for s in keeper.pop_written_checkpoints()] == [1]
    shutil.rmtree(folder)
    folder.write_text("in the way")
    errors = []
    for step in (2, 3):
        keeper.save(step, constant_snapshot(ARRAY), {})
        keeper.wait()
        assert not keeper.pop_written_checkpoints()
        errors.append(keeper.trouble)
        keeper.trouble = None
    assert errors[0] is not None and "step 2" in errors[0] and errors[1] is None
    folder.unlink()
    keeper.save(4, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert [s.step for s in keeper.pop_written_checkpoints()] == [4]


def test_a_damaged_later_checkpoint_does_not_displace_a_valid_one(tmp_path):
    resumed = read_checkpoint(write_checkpoint(tmp_path, 7, ARRAY, {}))
    (write_checkpoint(tmp_path, 90, ARRAY, {}) / STATE).write_text("damaged")
    keeper = CheckpointKeeper(tmp_path, Interval(1), keep=1, resumed=resumed)
    for step in (8, 9, 10):
        keeper.save(step, constant_snapshot(ARRAY), {})
        keeper.wait()
        newest, _ = read_newest(tmp_path)
        assert newest is not None and newest.step == step


def test_the_result_of_the_last_write_is_known_after_earlier_failures(tmp_path):
    folder = tmp_path / "checkpoints"
    keeper = CheckpointKeeper(folder, Interval(1), keep=2)
    keeper.save(1, constant_snapshot(ARRAY), {})
    keeper.wait()
    shutil.rmtree(folder)
    folder.write_text("in the way")
    keeper.save(2, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert [s.step for s in keeper.pop_written_checkpoints()] == [1]
    assert keeper.missing is not None and "checkpoint of step 2: not written" in keeper.missing
    folder.unlink()
    keeper.save(3, constant_snapshot(ARRAY), {})
    keeper.wait()
    assert [s.step for s in keeper.pop_written_checkpoints()] == [3]
    assert keeper.missing is None


class Slow:
    """A session whose snapshots fill arrays with their number, and a disk that writes when it is let."""

    def __init__(self, monkeypatch, overwrites: bool = True):
        self.taken, self.made, self.overwrites = 0, [], overwrites
        self.let, self.writing = threading.Semaphore(0), threading.Semaphore(0)
        self.found: dict[int, list[float]] = {}
        monkeypatch.setattr(keeper_module, "write_checkpoint", self.write)

    def snapshot(self, into):
        self.taken += 1
        if into is None or not self.overwrites:
            into = {name: np.empty(1000, np.float32) for name in ("w", "w@m")}
            self.made.append(into)
        for array in into.values():
            array.fill(self.taken)
        return into

    def write(self, folder, step, arrays, state):
        first = {name: array.copy() for name, array in arrays.items()}
        self.writing.release()
        assert self.let.acquire(timeout=30)
        assert all((first[name] == array).all() for name, array in arrays.items()), "changed while it was written"
        self.found[step] = [float(array[0]) for array in arrays.values()]
        return write_checkpoint(folder, step, arrays, state)


def test_arrays_being_written_are_never_overwritten_and_two_snapshots_suffice(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    keeper = CheckpointKeeper(tmp_path / "checkpoints", Interval(1), keep=9)
    for step in (1, 2):  # the second need not wait
        keeper.save(step, slow.snapshot, {})
    assert slow.writing.acquire(timeout=30)
    third = threading.Thread(target=keeper.save, args=(3, slow.snapshot, {}))
    third.start()
    third.join(0.2)
    assert third.is_alive() and slow.taken == 2, "two are unwritten: nothing may be overwritten yet"
    for _ in range(5):
        slow.let.release()
    third.join(30)
    for step in (4, 5):
        keeper.save(step, slow.snapshot, {})
    keeper.wait()
    assert slow.found == {step: [step, step] for step in range(1, 6)} and len(slow.made) == 2
    assert [checkpoint_path.step for checkpoint_path in keeper.pop_written_checkpoints()] == [1, 2, 3, 4, 5]
    assert read_checkpoint(tmp_path / "checkpoints" / "step-5").arrays["w@m"].tolist() == [5.0] * 1000


def test_without_memory_for_a_second_snapshot_the_next_one_waits(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    monkeypatch.setattr(keeper_module, "available_bytes", lambda: 15_999)  # two sets of 8000 bytes would not fit
    keeper = CheckpointKeeper(tmp_path / "checkpoints", Interval(1), keep=9)
    keeper.save(1, slow.snapshot, {})
    second = threading.Thread(target=keeper.save, args=(2, slow.snapshot, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive() and slow.taken == 1
    for _ in range(3):
        slow.let.release()
    second.join(30)
    keeper.save(3, slow.snapshot, {})
    keeper.wait()
    assert slow.found == {step: [step, step] for step in (1, 2, 3)} and len(slow.made) == 1


def test_arrays_that_a_session_does_not_reuse_are_freed(tmp_path, monkeypatch):
    slow = Slow(monkeypatch, overwrites=False)
    keeper = CheckpointKeeper(tmp_path / "checkpoints", Interval(1), keep=1)
    for step in range(1, 7):
        slow.let.release()
        keeper.save(step, slow.snapshot, {})
        keeper.wait()
    assert slow.found == {step: [step, step] for step in range(1, 7)}
    alive = [weakref.ref(arrays["w"]) for arrays in slow.made]
    slow.made.clear()
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1


def test_arrays_are_released_after_a_failed_write(tmp_path):
    keeper, seen = CheckpointKeeper(tmp_path / "gone" / "checkpoints", Interval(1), keep=1), []
    for step in range(1, 5):
        keeper.save(step, lambda into: (seen.append(into), into or dict(ARRAY))[1], {})
        keeper.wait()
    assert seen[0] is None and seen[1] is not None and seen[1] is seen[3]
    assert not keeper.pop_written_checkpoints() and "step 4: not written" in str(keeper.missing)


def test_files_that_a_checkpoint_refers_to_are_synced_before_it_is_written(tmp_path):
    """Callbacks sync their files in the writing thread; if that fails, no checkpoint is written."""
    folder, seen = tmp_path / "checkpoints", []
    keeper = CheckpointKeeper(folder, Interval(1), keep=9)
    keeper.save(
        1,
        constant_snapshot(ARRAY),
        {},
        lambda: seen.append((threading.current_thread().name, list(list_checkpoints(folder)))),
    )
    keeper.save(2, constant_snapshot(ARRAY), {}, lambda: os.fsync(10**6))
    keeper.wait()
    assert seen == [("checkpoint", [])] and list(list_checkpoints(folder)) == [1]
    assert [checkpoint_path.step for checkpoint_path in keeper.pop_written_checkpoints()] == [1]
    assert keeper.missing == "checkpoint of step 2: not written (Bad file descriptor)"


def test_the_best_weights_are_available_while_their_checkpoint_is_being_written(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    keeper = CheckpointKeeper(tmp_path / "checkpoints", Interval(10), keep=1, best="loss")
    assert keeper.is_due(1, {"loss": 1.0}, last=False)
    keeper.save(1, slow.snapshot, {})
    assert slow.writing.acquire(timeout=30)
    threading.Timer(0.1, slow.let.release).start()
    best = keeper.best(5)
    assert best is not None and best.step == 1 and best.weights is not None and best.weights["w"][0] == 1


@pytest.mark.parametrize(
    ("value", "hint", "good"),
    [
        (1, int, True), (10**400, int, False), (1.0, int, False),
        (True, int, False), (True, bool, True), (None, int, False),
        (None, float | None, True), (1.5, float | None, True), ("1.5", float | None, False),
        (["a"], list[str], True), (["a", 1], list[str], False), ("a", list[str], False), ([{}], list[Any], True),
        ({"a": None}, Mapping[str, float | None], True), ({"a": [1.0]}, Mapping[str, float | None], False),
        ([], dict[str, Any], False),
    ],
)  # fmt: skip
def test_json_values_are_checked_against_type_hints(value, hint, good):
    assert matches_type(value, hint) == good


def test_temporary_files_of_a_dead_process_are_removed(tmp_path):
    for name in (".tmp-5-123", ".tmp-12", ".tmp-mine", ".tmp-5-mine"):
        (tmp_path / name).mkdir()
    CheckpointKeeper(tmp_path, Interval(1), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-5-mine", ".tmp-mine"]
    assert CheckpointKeeper(tmp_path / "none", Interval(1), keep=1).missing is None
