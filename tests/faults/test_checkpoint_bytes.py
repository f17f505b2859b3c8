"""Any changed byte of a checkpoint is detected: the damaged checkpoint is reported and the previous one used."""

import itertools
import json
import os
import random
import shutil

import pytest
from faults import FIGURES, words

from toyexp.cli.main import main
from toyexp.training import checkpoint
from toyexp.training.checkpoint import ARRAYS, MANIFEST, STATE

NAMES = (MANIFEST, STATE, ARRAYS)


@pytest.fixture
def folder(here, capsys):
    """Train a tiny run and return its directory of checkpoints, of steps 9 and 12."""
    directory = here / "bytes"
    if not directory.exists():
        assert main([*words("scratch", "gpt2", "ggml"), "model.d_model=8", f"hydra.run.dir={directory}"]) == 0
    checkpoints = directory / "checkpoints"
    assert list(checkpoint.list_checkpoints(checkpoints)) == [12, 9]
    return checkpoints


def damage(good, dice, every):
    """Yield copies with a changed, missing or added byte, or cut off, at every `every`-th offset."""
    for offset in range(0, len(good), every):
        yield good[:offset] + bytes([good[offset] ^ (1 << dice.randrange(8))]) + good[offset + 1 :]
        yield good[:offset] + good[offset + 1 :]
        yield good[:offset] + bytes([dice.randrange(256)]) + good[offset:]
        yield good[:offset]


def check_detected(folder, change, expected):
    """Check that the damaged step-12 is reported and step 9 is used, or that its content is unchanged."""
    FIGURES["damaged checkpoints: tried"] += 1
    try:
        loaded, damaged = checkpoint.read_newest(folder)
    except checkpoint.NewerCheckpointFormat as error:  # the change hit the format number
        assert "step-12" in str(error)
        FIGURES["damaged checkpoints: rejected as a newer format"] += 1
        return
    if loaded is not None and loaded.step == 12:
        assert (loaded.state, {n: a.tobytes() for n, a in loaded.arrays.items()}) == expected, change
        assert not damaged
        FIGURES["damaged checkpoints: changes of blanks, without effect"] += 1
        return
    assert loaded is not None and loaded.step == 9, change
    (line,) = damaged
    assert "step-12" in line and "\n" not in line and len(line) < 400, change
    FIGURES["damaged checkpoints: reported, and the previous one used"] += 1


def corrupt(folder, strides):
    newest = checkpoint.read_checkpoint(folder / "step-12")
    expected = (newest.state, {n: a.tobytes() for n, a in newest.arrays.items()})
    rng = random.Random(7)
    for name, every in zip(NAMES, strides, strict=True):
        path = folder / "step-12" / name
        good = path.read_bytes()
        try:
            for number, damaged in enumerate(damage(good, rng, every)):
                if damaged != good:
                    path.write_bytes(damaged)
                    check_detected(folder, (name, number), expected)
        finally:
            path.write_bytes(good)
    assert checkpoint.read_newest(folder)[1] == []


def test_damage_at_some_bytes_is_detected(folder):
    corrupt(folder, (23, 197, 1999))


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_damage_at_every_json_byte_and_many_array_bytes_is_detected(folder):
    corrupt(folder, (1, 1, 61))


def test_files_copied_from_another_step_are_detected(folder, tmp_path):
    for count in (1, 2, 3):
        for names in itertools.combinations(NAMES, count):
            copy = tmp_path / "-".join(names)
            shutil.copytree(folder, copy)
            for name in names:
                shutil.copy(folder / "step-9" / name, copy / "step-12" / name)
            check_detected(copy, names, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m["files"].update({ARRAYS: m["files"][STATE], STATE: m["files"][ARRAYS]}),
            "does not match the manifest",
        ),
        (lambda m: m["files"][ARRAYS].update(bytes=m["files"][ARRAYS]["bytes"] + 1), "does not match the manifest"),
        (lambda m: m["files"][ARRAYS].update(sha256=m["files"][ARRAYS]["sha256"].upper()), "does not match"),
        (lambda m: m["files"].update({ARRAYS: None}), "does not match the manifest"),
        (lambda m: m["files"].update({"../../x": m["files"][STATE]}), "does not list"),
        (lambda m: m["files"].pop(STATE), "does not list"),
        (lambda m: m.update(files=[ARRAYS, STATE]), "does not list"),
        (lambda m: m.update(step=13), "names step 13"),
        (lambda m: m.update(step="12"), "names step 12"),
        (lambda m: m.update(step=10**4000), "names step 10000"),
        (lambda m: m.update(format="2"), "has format '2'"),
    ],
)
def test_a_wrong_manifest_is_detected_and_described(change, message, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "step-12" / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    check_detected(tmp_path / "copy", message, None)
    assert message in checkpoint.read_newest(tmp_path / "copy")[1][0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "device", "loop"])
def test_missing_and_special_files_in_a_checkpoint_are_detected(name, kind, folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "step-12" / name
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    check_detected(copy, (name, kind), None)
