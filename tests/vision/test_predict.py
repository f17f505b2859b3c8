"""`toyexp predict` compared with a forward pass in float64, and its rejection of files that are not images."""

import base64
import csv
import html
import io
import json
import re
import shutil
from collections import Counter
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
COUNT = 40  # more than one batch


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """Train a run, and write digits as images: some in colour, in two formats."""
    root = tmp_path_factory.mktemp("predict")
    assert main([*TINY, f"hydra.run.dir={root / 'run'}", "checkpoint_every=20"]) == 0
    images, _ = Digits().open(None).held_out
    for i, pixels in enumerate(images[:COUNT, ..., 0]):
        path = root / "pictures" / ("left", "right")[i % 2] / f"{i:02}.{('png', 'bmp')[i % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(pixels)
        (picture.convert("RGB") if i % 3 else picture).save(path)
    (root / "pictures" / "left" / ".hidden.png").write_text("a file of the system")
    return root, images[:COUNT]


def run_predict(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["predict", *map(str, words), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", ["cpu", "ggml:threads=1"])
def test_the_probabilities_of_a_directory_agree_with_float64(digits_run, capsys, engine):
    root, images = digits_run
    saved = load_vit(root / "run" / "model.gguf")
    weights = {name: torch.tensor(array, dtype=torch.float64) for name, array in saved.tensors.items()}
    pixels = torch.tensor((images / 255 - saved.mean) / saved.std, dtype=torch.float64)
    probabilities = torch.softmax(vit(weights, saved.model, pixels), -1).numpy()
    report = run_predict(capsys, root / "run", root / "pictures", "--top", 3, "--engine", engine)
    assert report["classes"] == [str(digit) for digit in range(10)]
    by_number = {int(prediction["file"].rsplit("/")[-1][:2]): prediction for prediction in report["images"]}
    assert sorted(by_number) == list(range(COUNT))
    for number, prediction in by_number.items():
        order = np.argsort(-probabilities[number])[:3]
        assert [top["class"] for top in prediction["top"]] == [str(i) for i in order]
        np.testing.assert_allclose(
            [top["probability"] for top in prediction["top"]], probabilities[number][order], atol=2e-5
        )
        assert (prediction["class"], prediction["probability"]) == (
            prediction["top"][0]["class"],
            prediction["top"][0]["probability"],
        )


def test_the_python_api_and_the_command_agree(digits_run, capsys):
    root, _ = digits_run
    predictions = toyexp.predict(root / "run", root / "pictures" / "left", top=3, engine="ggml:threads=1")
    assert predictions.plain() == run_predict(
        capsys, root / "run", root / "pictures" / "left", "--top", 3, "--engine", "ggml:threads=1"
    )


def test_a_run_its_file_and_its_checkpoint_agree_on_a_larger_image(digits_run, tmp_path, capsys):
    root, images = digits_run
    Image.fromarray(images[3, ..., 0]).resize((24, 24), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    models = ("run", "run/model.gguf", "run/checkpoints/step-20")
    predictions = [
        run_predict(capsys, root / model, tmp_path / "large.png", "--top", 99)["images"][0] for model in models
    ]
    assert predictions[0] == predictions[1] == predictions[2] and len(predictions[0]["top"]) == 10
    assert sum(top["probability"] for top in predictions[0]["top"]) == pytest.approx(1)


def test_files_left_out_and_scaled_images_are_reported_once(digits_run, tmp_path, capsys):
    root, images = digits_run
    for name, size in (("a.png", 24), ("b.png", 20), ("c.png", 8)):
        Image.fromarray(images[3, ..., 0]).resize((size, size)).save(tmp_path / name)
    for name in ("photo.heic", "notes", ".hidden"):
        (tmp_path / name).write_bytes(b"x")
    assert main(["predict", str(root / "run"), str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert f"2 other files left out, such as {tmp_path / 'notes'}\n" in errors
    assert errors.count("images of sizes such as 8 x 8 and 24 x 24 pixels are cropped") == 1


def test_a_line_break_in_a_class_name_is_escaped():
    predictions = Predictions("m.gguf", "cpu", ["a\nb"], [Prediction(f"{n}.png", [("a\nb", 1.0)]) for n in range(2)])
    assert predictions.summary() == "2 images: a\\nb (2)"


def test_the_csv_has_a_row_per_image_and_replaces_no_file(digits_run, tmp_path, capsys, monkeypatch):
    root, _ = digits_run
    monkeypatch.chdir(tmp_path)
    shutil.copytree(root / "pictures" / "left", "photos")
    (tmp_path / "photos" / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    words = ["predict", str(root / "run"), "photos", "--top", "2", "--csv", "sheet.csv"]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "photos/torn.jpg: cannot be read as an image" in captured.err and "sheet.csv" in captured.out
    rows = list(csv.DictReader((tmp_path / "sheet.csv").read_text().splitlines()))
    assert [*rows[0]] == ["file", "class", "probability", "class_2", "probability_2", "label", "correct", "error"]
    assert {row["label"] + row["correct"] for row in rows} == {""}, "no class is called photos"
    assert len(rows) == COUNT // 2 + 1 and [row["file"] for row in rows if row["error"]] == ["photos/torn.jpg"]
    assert all(float(row["probability"]) >= float(row["probability_2"]) for row in rows if not row["error"])
    before = (tmp_path / "sheet.csv").read_text() + "mine.png,left,1\n"  # edited by the user
    (tmp_path / "sheet.csv").write_text(before)
    assert main(words) == 2
    assert "--csv sheet.csv: already exists and is not overwritten; choose" in capsys.readouterr().err
    assert (tmp_path / "sheet.csv").read_text() == before


@pytest.fixture
def labelled(digits_run, tmp_path, monkeypatch):
    """Copy digits to directories with the names of classes, 12 of each: three of class 8 into the directory of 1."""
    root, _ = digits_run
    monkeypatch.chdir(tmp_path)
    images, labels = Digits().open(None).held_out
    for digit in (1, 8):
        Path("val", str(digit)).mkdir(parents=True)
        for i, pixels in enumerate(images[labels == digit][:12, ..., 0]):
            Image.fromarray(pixels).save(Path("val", "1" if i < 3 else str(digit), f"{digit}<{i}.png"))
    return root / "run"


def test_the_directory_of_an_image_is_its_label_in_table_json_and_summary(labelled, capsys):
    report = run_predict(capsys, labelled, "val")
    images = report["images"]
    assert [image["label"] for image in images] == [Path(image["file"]).parent.name for image in images]
    assert all(image["correct"] is (image["class"] == image["label"]) for image in images)
    assert 0 < report["accuracy"] == np.mean([image["correct"] for image in images]) < 1
    assert main(["predict", str(labelled), "val", "--csv", "sheet.csv"]) == 0
    assert f"; accuracy {report['accuracy']:.4f} of 24 with a label; sheet.csv" in capsys.readouterr().out
    rows = csv.DictReader(Path("sheet.csv").read_text().splitlines())
    assert [(r["label"], r["correct"]) for r in rows] == [(i["label"], str(i["correct"]).lower()) for i in images]
    Path("else").mkdir()
    shutil.copy(next(Path("val", "1").iterdir()), "else/a.png")
    report = run_predict(capsys, labelled, "else")
    assert report["accuracy"] is report["images"][0]["label"] is report["images"][0]["correct"] is None


def test_a_page_shows_the_wrong_images_and_replaces_no_file(labelled, capsys):
    report = run_predict(capsys, labelled, "val", "--top", 2, "--html", "wrong.html")
    wrong = [image for image in report["images"] if not image["correct"]]
    page = Path("wrong.html").read_text()
    sources = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" width="96" height="96" alt="([^"]+)">', page)
    assert [html.unescape(name) for _, name in sources] == [
        image["file"] for image in sorted(wrong, key=lambda image: -image["probability"])
    ]
    assert page.count("<img") == len(wrong) and all("<" not in name for _, name in sources)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(sources[0][0]))))
    expected = Image.open(html.unescape(sources[0][1])).convert("RGB").resize((96, 96))
    assert shown.shape == (96, 96, 3) and abs(shown - np.asarray(expected).astype(float)).mean() < 6  # JPEG
    pairs = Counter((image["label"], image["class"]) for image in wrong).most_common()
    cells = re.findall(r"<tr><td>(.+)<td>(.+)<td>(.+)</tr>", page)
    assert sorted(cells) == sorted((*pair, str(count)) for pair, count in pairs)
    assert [int(count) for *_, count in cells] == [count for _, count in pairs]
    assert "http" not in page and "color-scheme: light dark" in page
    assert main(["predict", str(labelled), "val", "--html", "wrong.html"]) == 2
    assert "--html wrong.html: already exists and is not overwritten; choose" in capsys.readouterr().err
    assert Path("wrong.html").read_text() == page
    shutil.copytree("val/1", "else")
    assert main(["predict", str(labelled), "else", "--html", "x.html", "--csv", "x.csv"]) == 2
    assert "--html: no image lies in a directory named like one of the model's classes" in capsys.readouterr().err
    assert not Path("x.html").exists() and not Path("x.csv").exists()


def test_a_broken_link_is_reported_and_the_other_images_are_classified(digits_run, tmp_path, capsys):
    root, _ = digits_run
    (tmp_path / "lost.png").symlink_to(tmp_path / "moved" / "away.png")
    assert main(["predict", str(root / "run"), str(tmp_path)]) == 2
    assert f"lost.png: is a link to {tmp_path}/moved/away.png, which does not exist" in capsys.readouterr().err
    shutil.copy(root / "pictures" / "left" / "00.png", tmp_path / "here.png")
    predictions = run_predict(capsys, root / "run", tmp_path, code=1)["images"]
    assert [(Path(prediction["file"]).name, prediction["class"] is None) for prediction in predictions] == [
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
def test_bad_arguments_are_rejected_in_one_line(digits_run, tmp_path, capsys, monkeypatch, words, parts):
    root, images = digits_run
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


def test_a_single_image_is_computed_on_the_first_of_several_devices(digits_run, capsys):
    root, _ = digits_run
    picture = root / "pictures" / "left" / "00.png"
    on_one_device, on_two_devices = (
        run_predict(capsys, root / "run", picture, "--engine", f"cpu:devices={n}") for n in (1, 2)
    )
    assert on_two_devices["images"] == on_one_device["images"] and "first device only" in on_two_devices["engine"]


def test_a_run_without_resize_rejects_another_size(digits_run, tmp_path, capsys):
    root, images = digits_run
    shutil.copytree(root / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("  name: digits", "  name: digits\n  resize: false"))
    Image.fromarray(images[0, ..., 0]).resize((9, 9)).save(tmp_path / "odd.png")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "odd.png")]) == 2
    assert "is 9 x 9 pixels, expected 8 x 8" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [
    {"image_mean": None}, {"image_mean": [0.1, 0.2]}, {"image_std": [0.0]}, {"image_std": ["a"]},
    {"image_mean": [float("nan")]},
])  # fmt: skip
def test_a_file_without_valid_mean_and_deviation_is_rejected(tmp_path, capsys, changes):
    model = ViT(d_model=8, n_layers=1, n_heads=2, d_ff=8, image_size=4, channels=1, classes=2)
    data = {"classes": ["a", "b"], "image_mean": [0.5], "image_std": [0.5], **changes}
    values = {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}
    metadata = {key: value for key, value in data.items() if value is not None}
    write_model(tmp_path / "v.gguf", model, values, None, data=metadata)
    Image.new("L", (4, 4)).save(tmp_path / "one.png")
    assert main(["predict", str(tmp_path / "v.gguf"), str(tmp_path / "one.png")]) == 2
    assert "has no valid pixel mean and standard deviation" in capsys.readouterr().err
