"""`toyexp predict` against the model's forward pass in float64, and against pictures that are none."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from float64_models import vit
from PIL import Image
from saved_vit import load_vit
from tiny import write_base

import toyexp
from toyexp.cli.main import main
from toyexp.formats.gguf.write import write_model
from toyexp.inference.predict import Prediction, Predictions
from toyexp_data.images import Digits
from toyexp_models.vit import ViT

TINY = ["model=vit", "recipe=vit_tiny", "data=digits", "model.d_model=32", "model.n_layers=1", "model.d_ff=32",
        "engine=ggml", "engine.threads=1", "eval_every=0", "steps=20", "batch_size=32"]  # fmt: skip
COUNT = 40  # more than are computed at a time


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A run, and pictures of digits as files: as they are, at twice the size, and in colour."""
    root = tmp_path_factory.mktemp("predict")
    assert main([*TINY, f"hydra.run.dir={root / 'run'}", "checkpoint_every=20"]) == 0
    images, _ = Digits().open(None).held_out
    for i, pixels in enumerate(images[:COUNT, ..., 0]):
        place = root / "pictures" / ("left", "right")[i % 2] / f"{i:02}.{('png', 'bmp')[i % 2]}"
        place.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(pixels)
        (picture.convert("RGB") if i % 3 else picture).save(place)
    (root / "pictures" / "left" / ".hidden.png").write_text("of the system's own")
    return root, images[:COUNT]


def predicted(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["predict", *map(str, words), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", ["cpu", "ggml:threads=1"])
def test_a_folder_has_the_probabilities_of_a_forward_pass_in_float64(here, capsys, engine):
    root, images = here
    saved = load_vit(root / "run" / "model.gguf")
    weights = {name: torch.tensor(array, dtype=torch.float64) for name, array in saved.tensors.items()}
    pixels = torch.tensor((images / 255 - saved.mean) / saved.std, dtype=torch.float64)
    shares = torch.softmax(vit(weights, saved.model, pixels), -1).numpy()
    found = predicted(capsys, root / "run", root / "pictures", "--top", 3, "--engine", engine)
    assert found["classes"] == [str(digit) for digit in range(10)]
    by_number = {int(one["file"].rsplit("/")[-1][:2]): one for one in found["images"]}
    assert sorted(by_number) == list(range(COUNT))
    for number, one in by_number.items():
        order = np.argsort(-shares[number])[:3]
        assert [top["class"] for top in one["top"]] == [str(i) for i in order]
        np.testing.assert_allclose([top["probability"] for top in one["top"]], shares[number][order], atol=2e-5)
        assert (one["class"], one["probability"]) == (one["top"][0]["class"], one["top"][0]["probability"])


def test_python_says_what_the_command_says(here, capsys):
    root, _ = here
    found = toyexp.predict(root / "run", root / "pictures" / "left", top=3, engine="ggml:threads=1")
    assert found.plain() == predicted(
        capsys, root / "run", root / "pictures" / "left", "--top", 3, "--engine", "ggml:threads=1"
    )


def test_a_checkpoint_and_a_file_say_the_same_of_a_larger_picture(here, tmp_path, capsys):
    root, images = here
    Image.fromarray(images[3, ..., 0]).resize((24, 24), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    models = ("run", "run/model.gguf", "run/checkpoints/step-20")
    told = [predicted(capsys, root / model, tmp_path / "large.png", "--top", 99)["images"][0] for model in models]
    assert told[0] == told[1] == told[2] and len(told[0]["top"]) == 10
    assert sum(top["probability"] for top in told[0]["top"]) == pytest.approx(1)


def test_what_is_left_out_or_scaled_is_said_once(here, tmp_path, capsys):
    root, images = here
    for name, size in (("a.png", 24), ("b.png", 20), ("c.png", 8)):
        Image.fromarray(images[3, ..., 0]).resize((size, size)).save(tmp_path / name)
    for name in ("photo.heic", "notes", ".hidden"):
        (tmp_path / name).write_bytes(b"x")
    assert main(["predict", str(root / "run"), str(tmp_path)]) == 0
    told = capsys.readouterr().err
    assert f"2 other files left out, such as {tmp_path / 'notes'}\n" in told
    assert told.count("images of sizes such as 8 x 8 and 24 x 24 pixels are cut") == 1


def test_a_line_break_in_a_class_is_no_line_break_in_the_summary():
    shown = Predictions("m.gguf", "cpu", ["a\nb"], [Prediction(f"{n}.png", [("a\nb", 1.0)]) for n in range(2)])
    assert shown.summary() == "2 images: a\\nb (2)"


def test_a_sheet_has_a_row_for_each_and_replaces_no_file(here, tmp_path, capsys, monkeypatch):
    root, _ = here
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "pictures" / "left", "photos")
    (tmp_path / "photos" / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    words = ["predict", str(root / "run"), "photos", "--top", "2", "--csv", "sheet.csv"]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "photos/torn.jpg: cannot be read as an image" in captured.err and "sheet.csv" in captured.out
    rows = list(csv.DictReader((tmp_path / "sheet.csv").read_text().splitlines()))
    assert [*rows[0]] == ["file", "class", "probability", "class_2", "probability_2", "error"]
    assert len(rows) == COUNT // 2 + 1 and [row["file"] for row in rows if row["error"]] == ["photos/torn.jpg"]
    assert all(float(row["probability"]) >= float(row["probability_2"]) for row in rows if not row["error"])
    before = (tmp_path / "sheet.csv").read_text() + "mine.png,left,1\n"  # a person went on with it
    (tmp_path / "sheet.csv").write_text(before)
    assert main(words) == 2
    assert "--csv sheet.csv: already exists and is not overwritten; choose" in capsys.readouterr().err
    assert (tmp_path / "sheet.csv").read_text() == before


def test_a_link_in_a_folder_that_leads_nowhere_is_told_and_the_rest_is_classified(here, tmp_path, capsys):
    root, _ = here
    (tmp_path / "lost.png").symlink_to(tmp_path / "moved" / "away.png")
    assert main(["predict", str(root / "run"), str(tmp_path)]) == 2
    assert f"lost.png: is a link to {tmp_path}/moved/away.png, which does not exist" in capsys.readouterr().err
    shutil.copy(root / "pictures" / "left" / "00.png", tmp_path / "here.png")
    found = predicted(capsys, root / "run", tmp_path, code=1)["images"]
    assert [(Path(one["file"]).name, one["class"] is None) for one in found] == [
        ("here.png", False), ("lost.png", True),
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "parts"), [
    (["run"], ["predict run: needs a model, then images"]),
    (["run", "none.png"], ["none.png: not found"]),
    (["run", "empty"], ["empty: has no images (", "png"]),
    (["run", "torn.png"], ["torn.png: cannot be read as an image"]),
    (["text.gguf", "one.png"], ["text.gguf: a llama reads tokens, but predict takes images; try toyexp generate"]),
    (["none", "one.png"], ["none: not found"]),
    (["run", "one.png", "--top", "0"], ["--top 0: must be a whole number"]),
    (["run", "one.png", "--engine", "cpx"], ["--engine cpx", "did you mean cpu?"]),
    (["run", "one.png", "--csv", "x.csv", "--json"], ["leave out the other"]),
    (["run", "one.png", "--csv", "away/x.csv"], ["there is no directory away"]),
    (["run", "one.png", "batch_size=3"], ["predict batch_size=3: is a setting of a run"]),
])  # fmt: skip
def test_what_cannot_be_is_one_line(here, tmp_path, capsys, monkeypatch, words, parts):
    root, images = here
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(root / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.png").write_text("no picture")
    Image.fromarray(images[0, ..., 0]).save("one.png")
    write_base(tmp_path / "text.gguf", "llama")
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in parts), error
    assert not (tmp_path / "x.csv").exists()


def test_one_picture_is_of_the_first_of_several_devices(here, capsys):
    root, _ = here
    picture = root / "pictures" / "left" / "00.png"
    alone, first = (predicted(capsys, root / "run", picture, "--engine", f"cpu:devices={n}") for n in (1, 2))
    assert first["images"] == alone["images"] and "first device only" in first["engine"]


def test_where_a_run_took_one_size_alone_another_is_an_error(here, tmp_path, capsys):
    root, images = here
    shutil.copytree(root / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("  name: digits", "  name: digits\n  resize: false"))
    Image.fromarray(images[0, ..., 0]).resize((9, 9)).save(tmp_path / "odd.png")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "odd.png")]) == 2
    assert "is 9 x 9 pixels, expected 8 x 8" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [
    {"image_mean": None}, {"image_mean": [0.1, 0.2]}, {"image_std": [0.0]}, {"image_std": ["a"]},
    {"image_mean": [float("nan")]},
])  # fmt: skip
def test_a_file_that_does_not_say_how_pixels_are_seen_is_refused(tmp_path, capsys, changed):
    model = ViT(d_model=8, n_layers=1, n_heads=2, d_ff=8, image_size=4, channels=1, classes=2)
    data = {"classes": ["a", "b"], "image_mean": [0.5], "image_std": [0.5], **changed}
    values = {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}
    known = {key: value for key, value in data.items() if value is not None}
    write_model(tmp_path / "v.gguf", model, values, None, data=known)
    Image.new("L", (4, 4)).save(tmp_path / "one.png")
    assert main(["predict", str(tmp_path / "v.gguf"), str(tmp_path / "one.png")]) == 2
    assert "has no valid pixel mean and standard deviation" in capsys.readouterr().err
