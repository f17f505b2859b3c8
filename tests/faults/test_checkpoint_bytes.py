"""No byte of a checkpoint can change unseen: what is damaged is named, and the one before it is used."""

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
    """The checkpoints of steps 9 and 12 of a tiny run, and their contents."""
    directory = here / "bytes"
    if not directory.exists():
        assert main([*words("scratch", "gpt2", "ggml"), "model.d_model=8", f"hydra.run.dir={directory}"]) == 0
    found = directory / "checkpoints"
    assert list(checkpoint.list_checkpoints(found)) == [12, 9]
    return found


def damage(good, dice, every):
    """Changed, missing and added bytes at every so many places, and every so many lengths."""
    for at in range(0, len(good), every):
        yield good[:at] + bytes([good[at] ^ (1 << dice.randrange(8))]) + good[at + 1 :]
        yield good[:at] + good[at + 1 :]
        yield good[:at] + bytes([dice.randrange(256)]) + good[at:]
        yield good[:at]


def require_seen(folder, what, wanted):
    """The damaged step-12 is told by name and step 9 used; or nothing that counts was changed."""
    FIGURES["corruptions: made"] += 1
    try:
        found, damaged = checkpoint.read_newest(folder)
    except checkpoint.NewerCheckpointFormat as error:  # a bit of the format's number: rejected, nothing is lost
        assert "step-12" in str(error)
        FIGURES["corruptions: taken for a newer format, and refused"] += 1
        return
    if found is not None and found.step == 12:
        assert (found.state, {n: a.tobytes() for n, a in found.arrays.items()}) == wanted, what
        assert not damaged
        FIGURES["corruptions: of blanks and the like, which change nothing"] += 1
        return
    assert found is not None and found.step == 9, what
    (line,) = damaged
    assert "step-12" in line and "\n" not in line and len(line) < 400, what
    FIGURES["corruptions: found, named, and the one before it used"] += 1


def corrupt(folder, strides):
    newest = checkpoint.read_checkpoint(folder / "step-12")
    wanted = (newest.state, {n: a.tobytes() for n, a in newest.arrays.items()})
    dice = random.Random(7)
    for name, every in zip(NAMES, strides, strict=True):
        path = folder / "step-12" / name
        good = path.read_bytes()
        try:
            for number, bad in enumerate(damage(good, dice, every)):
                if bad != good:
                    path.write_bytes(bad)
                    require_seen(folder, (name, number), wanted)
        finally:
            path.write_bytes(good)
    assert checkpoint.read_newest(folder)[1] == []


def test_some_bytes(folder):
    corrupt(folder, (23, 197, 1999))


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_byte_of_the_json_and_many_of_the_arrays(folder):
    corrupt(folder, (1, 1, 61))


def test_files_of_another_step(folder, tmp_path):
    for count in (1, 2, 3):
        for names in itertools.combinations(NAMES, count):
            copy = tmp_path / "-".join(names)
            shutil.copytree(folder, copy)
            for name in names:
                shutil.copy(folder / "step-9" / name, copy / "step-12" / name)
            require_seen(copy, names, None)


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_a_manifest_that_says_something_else(change, said, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "step-12" / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    require_seen(tmp_path / "copy", said, None)
    assert said in checkpoint.read_newest(tmp_path / "copy")[1][0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "device", "loop"])
def test_what_is_no_file(name, kind, folder, tmp_path):
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
    require_seen(copy, (name, kind), None)
