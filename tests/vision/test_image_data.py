"""Images as data: the split, the batches, the digits, and folders of files of every sort."""

import csv
import io
import warnings

import numpy as np
import pytest
from PIL import Image

from toyexp import ImageDataset, RunPreview, UserError
from toyexp.batching.images import augment_image, held_out_mask
from toyexp.interfaces.dataset import batch_digest
from toyexp.testing import DataSuite, image_dataset
from toyexp_data.images import Digits, Images


class TestDigits(DataSuite):
    data = Digits()
    epoch = 1440 // DataSuite.rows


class TestDigitsShifted(DataSuite):
    data = Digits(augment="flip_shift")


class TestImages(DataSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.data = Images(path=str(folder(tmp_path, red=6, blue=5)), image_size=8)

    def subject(self):
        return Images


def folder(root, size=(8, 8), **counts):
    """A folder per class of PNG files, each of the colour its class names, a little varied."""
    draw = np.random.default_rng(0)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
            pixels[..., {"red": 0, "green": 1, "blue": 2}[name]] += 180
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


def opened(path, **settings):
    data = Images(path=str(path), **{"image_size": 8, **settings})
    data.check()
    return data.open(None)


# -- batches ----------------------------------------------------------------------------------------------------------


def rows_of(batches, count):
    rows = batches.inputs["targets"].shape
    assert rows == ()
    parts = [batches.batch(k)["images"] for k in range(-(-count // len(batches.batch(0)["targets"])))]
    return np.concatenate(parts)[:count]


def test_an_epoch_shows_every_image_once_and_the_next_one_in_another_order():
    data = image_dataset(count=40)
    count = len(data.train[1])
    stream = rows_of(data.batches(0, 7, seed=1), 2 * count)
    first, second = ([r.tobytes() for r in part] for part in (stream[:count], stream[count:]))
    assert len(set(first)) == count and sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize("augment", ["none", "flip_shift"])
def test_a_large_batch_is_its_micro_batches_one_after_the_other(augment):
    whole = image_dataset()
    data = ImageDataset(whole.train[0], whole.train[1], whole.classes, 0.2, augment=augment)
    small, large = (data.batches(0, n, seed=3) for n in (3, 12))
    for k in range(6):  # over the end of an epoch
        joined = np.concatenate([small.batch(4 * k + i)["images"] for i in range(4)])
        np.testing.assert_array_equal(large.batch(k)["images"], joined)


def test_augmenting_changes_pixels_and_neither_order_nor_held_out_images():
    plain, moved = (Digits(augment=a).open(None).batches(0, 16, 5) for a in ("none", "shift"))
    for k in range(3):
        one, two = plain.batch(k), moved.batch(k)
        np.testing.assert_array_equal(one["targets"], two["targets"])
        changed = (one["images"] != two["images"]).any(axis=(1, 2, 3))
        assert 0 < changed.sum() < 16  # one shift in nine is none
    assert [batch_digest(b) for b in plain.held_out()] == [batch_digest(b) for b in moved.held_out()]


def test_what_an_augmented_image_may_look_like():
    image = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16, 1)
    draw = np.random.default_rng(0).integers(0, 2**63, 400)
    mirrored = {augment_image(image, int(b), True, False).tobytes() for b in draw}
    assert mirrored == {image.tobytes(), np.ascontiguousarray(image[:, ::-1]).tobytes()}
    wide = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="edge")
    expected = {wide[y : y + 16, x : x + 16].tobytes() for y in range(5) for x in range(5)}  # an eighth of 16 is 2
    assert {np.ascontiguousarray(augment_image(image, int(b), False, True)).tobytes() for b in draw} == expected


def test_training_pixels_are_normalised_by_channel_and_held_out_ones_by_the_same_numbers():
    data = image_dataset(channels=3)
    exact = data.train[0] / 255
    np.testing.assert_allclose(data.mean, exact.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.std, exact.std(axis=(0, 1, 2)), rtol=1e-12)
    held_out = data.batches(0, len(data.held_out[1]), 0).held_out()[0]["images"]
    np.testing.assert_allclose(held_out, (data.held_out[0] / 255 - data.mean) / data.std, atol=1e-5)
    fixed = ImageDataset(data.train[0], data.train[1], data.classes, 0.2, normalise="fixed").batches(0, 8, 0).batch(0)
    assert -1 <= fixed["images"].min() < -0.5 and 0.5 < fixed["images"].max() <= 1


def test_images_of_one_colour_do_not_divide_by_zero():
    data = ImageDataset(np.full((6, 2, 2, 1), 7, np.uint8), np.arange(6) % 2, ["a", "b"], 0.3)
    np.testing.assert_allclose(data.batches(0, 2, 0).batch(0)["images"], np.zeros((2, 2, 2, 1)), atol=1e-6)


# -- the held-out part ------------------------------------------------------------------------------------------------


def test_a_fixed_share_of_every_class_is_held_out_and_never_its_last_image():
    labels = np.repeat([0, 1, 2], [50, 10, 1])
    mask = held_out_mask(labels, 0.2)
    assert [mask[labels == c].sum() for c in range(3)] == [10, 2, 0]
    np.testing.assert_array_equal(mask, held_out_mask(labels, 0.2))
    assert held_out_mask(labels, 0.999)[labels == 1].sum() == 9


def test_no_held_out_image_is_trained_on_whatever_the_seed():
    data = image_dataset(count=50)
    held_out = {image.tobytes() for image in data.held_out[0]}
    assert len(held_out) + len(data.train[1]) == 50
    assert held_out.isdisjoint({image.tobytes() for image in data.train[0]})
    digests = [[batch_digest(b) for b in data.batches(0, 4, seed).held_out()] for seed in (0, 1)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("eval_images", "looked_at"), [(0, 15), (6, 6), (100, 15)])
def test_a_look_takes_so_many_images_of_all_classes_and_fills_up_with_weightless_ones(eval_images, looked_at):
    whole = image_dataset()
    order = np.argsort(whole.train[1], kind="stable")  # class after class, as folders are read
    images, labels = whole.train[0][order], whole.train[1][order]
    data = ImageDataset(images, labels, whole.classes, 1 / 3, eval_images=eval_images)
    batches = data.batches(0, 4, 0).held_out()
    weights = np.concatenate([b["weights"] for b in batches])
    targets = np.concatenate([b["targets"] for b in batches])
    assert weights.sum() == looked_at and all(len(b["targets"]) == 4 for b in batches)
    assert set(targets[weights > 0]) == {0, 1, 2}
    kept = np.concatenate([b["images"] for b in batches])[weights > 0]
    assert len({image.tobytes() for image in kept}) == looked_at


# -- digits -----------------------------------------------------------------------------------------------------------


def test_classes_get_the_numbers_that_a_models_file_gives_their_names():
    images, labels = np.zeros((6, 2, 2, 1), np.uint8), np.arange(6) % 2
    data = ImageDataset(images, labels, ["cat", "dog"], 1 / 3)
    data.match_preprocessing({"classes": ["bird", "cat", "dog", "emu"]})
    assert sorted(data.held_out[1]) == [1, 2] and data.vocab == 4
    listed = ImageDataset(images, labels, ["0", "1"], 1 / 3)  # of a list of labels, which has numbers alone
    listed.match_preprocessing({"classes": ["bird", "cat", "dog"]})
    assert sorted(listed.held_out[1]) == [0, 1]
    with pytest.raises(UserError, match=r"(?s)cat.*bird, dog"):
        ImageDataset(images, labels, ["cat", "dog"], 1 / 3).match_preprocessing({"classes": ["bird", "dog"]})
    named = ImageDataset(images, np.arange(6) // 2, ["0", "1", "2"], 1 / 2)  # names that are numbers, in another order
    named.match_preprocessing({"classes": ["0", "1", "10", "2"]})
    assert {*named.held_out[1], *named.train[1]} == {0, 1, 3}


@pytest.mark.parametrize("written", [
    {"image_mean": ["a"]}, {"image_mean": "x"}, {"image_mean": [float("nan")]}, {"image_std": [0.0]}, {"classes": 3},
])  # fmt: skip
def test_what_a_models_file_cannot_say_of_its_data_is_refused(written):
    data = ImageDataset(np.zeros((6, 2, 2, 1), np.uint8), np.arange(6) % 2, ["cat", "dog"], 1 / 3)
    with pytest.raises(UserError, match=next(iter(written))):
        data.match_preprocessing(written)


def test_digits_are_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    theirs, ours = datasets.load_digits(), Digits().open(None)
    expected = {(np.round(i * 255 / 16).astype(np.uint8).tobytes(), t) for i, t in zip(theirs.images, theirs.target)}  # noqa: B905
    found = {(i.tobytes(), t) for part in (ours.train, ours.held_out) for i, t in zip(*part, strict=True)}
    assert found == expected
    assert len(ours.train[1]) + len(ours.held_out[1]) == 1797 and len(ours.held_out[1]) == 359


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_per_class_in_the_order_of_their_names(tmp_path):
    data = opened(folder(tmp_path, red=4, blue=6, green=5), val_fraction=0.25)
    assert data.classes == ("blue", "green", "red") and data.vocab == 3
    for images, labels in (data.train, data.held_out):
        np.testing.assert_array_equal(images.mean(axis=(1, 2)).argmax(-1), 2 - labels)  # the channel that is bright
    assert data.describe()["train_images"] == 11 and data.describe()["held_out_images"] == 4
    assert data.describe()["skipped"] == 0


@pytest.mark.parametrize("held", ["val", "valid", "Validation", "test"])
def test_folders_named_train_and_val_are_the_parts_and_not_the_classes(tmp_path, held):
    folder(tmp_path / "train", red=6, blue=5)
    folder(tmp_path / held, red=2, blue=1)
    data = opened(tmp_path)
    assert data.classes == ("blue", "red")
    assert (len(data.train[1]), sorted(data.held_out[1].tolist())) == (11, [0, 1, 1])
    assert data.remarks() == ["2 classes: blue, red", f"held out: {tmp_path / held}"]
    assert Images.recognises(tmp_path) == 2
    (tmp_path / held / "green").mkdir()
    with pytest.raises(UserError, match=r"green: is held out, but .*train has no class of that name"):
        opened(tmp_path)


def test_of_val_and_test_the_first_is_held_out_and_the_other_left_out(tmp_path):
    for part, count in (("train", 4), ("test", 3), ("val", 2)):
        folder(tmp_path / part, red=count, blue=count)
    data = opened(tmp_path)
    assert (len(data.train[1]), len(data.held_out[1])) == (8, 4)
    assert data.omissions() == ["6 other files, such as test/blue/0.png"]


def test_a_part_without_images_is_refused(tmp_path):
    folder(tmp_path / "train", red=4, blue=4)
    (tmp_path / "val" / "red").mkdir(parents=True)
    with pytest.raises(UserError, match="val, to be held out, has no image"):
        opened(tmp_path)


def test_a_class_may_be_called_train(tmp_path):
    for name in ("train", "test"):
        folder(tmp_path / "of" / name, red=10)
        (tmp_path / "pictures").mkdir(exist_ok=True)
        (tmp_path / "of" / name / "red").rename(tmp_path / "pictures" / name)
    assert opened(tmp_path / "pictures").classes == ("test", "train"), "which hold images, and no folders of them"


def test_beside_another_folder_train_and_val_are_classes(tmp_path):
    for name in ("cats", "train", "val"):
        folder(tmp_path / name, red=10)
    assert opened(tmp_path).classes == ("cats", "train", "val")


def test_a_share_to_hold_out_has_no_effect_where_a_folder_is_held_out(tmp_path):
    for name in ("train", "val"):
        folder(tmp_path / name, red=3, blue=3)
    for settings, told in (({}, []), ({"val_fraction": 0.3}, ["data.val_fraction=0.3: has no effect"])):
        data = Images(path=str(tmp_path), image_size=8, **settings)
        found = [*data.warnings(RunPreview({}, data.open(None), None, None))]
        assert len(found) == len(told) and all(f"{tmp_path}/val is held out" in line for line in found)
        assert [line.partition(";")[0] for line in found] == told


def test_what_is_scaled_is_said(tmp_path):
    small = folder(tmp_path / "a", red=10, blue=10)
    assert opened(small).remarks() == ["2 classes: blue, red"]
    told = "images of 8 x 8 pixels are cropped to their centred square and scaled to 4 x 4"
    assert told in opened(small, image_size=4).remarks()
    folder(tmp_path / "b", size=(20, 10), red=1)
    (tmp_path / "b" / "red" / "0.png").rename(small / "red" / "large.png")
    assert any("images of 8 x 8 and 20 x 10 pixels are cropped" in line for line in opened(small).remarks())


def test_every_sort_of_image_comes_out_at_one_size(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "deeper").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (21, 34, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a" / "x.JPG", format="JPEG")
    image.convert("L").save(tmp_path / "a" / "grey.png")
    image.convert("P").save(tmp_path / "a" / "deeper" / "palette.gif")
    image.convert("1").save(tmp_path / "a" / "bits.tiff")
    image.convert("CMYK").save(tmp_path / "b" / "print.jpg")
    image.convert("RGBA").save(tmp_path / "b" / "alpha.webp", lossless=True)
    image.convert("P").save(tmp_path / "b" / "see_through.png", transparency=bytes(range(256)))
    image.save(tmp_path / "b" / "plain.ppm")
    (tmp_path / "b" / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "b" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        color, grey = opened(tmp_path, val_fraction=0.3), opened(tmp_path, color=False, val_fraction=0.3)
    assert color.image_shape == (8, 8, 3) and grey.image_shape == (8, 8, 1)
    assert color.describe()["train_images"] + color.describe()["held_out_images"] == 8


def test_the_centred_square_is_scaled_and_the_cameras_turn_is_undone(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:4, 4:12] = (250, 0, 0)  # the upper half of the middle
    pixels[4:, 4:12] = (0, 250, 0)
    pixels[:, :4] = pixels[:, 12:] = (0, 0, 250)  # what is cut off
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    for name, options in (("a", {}), ("b", {"exif": exif})):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png", **options)
    data = opened(tmp_path, val_fraction=0.5, image_size=4)
    upright, turned = (data.train[0][data.train[1] == c][0] for c in (0, 1))
    assert (upright[0, :, 0] > 200).all() and (upright[3, :, 1] > 200).all() and (upright[..., 2] < 50).all()
    np.testing.assert_array_equal(turned, upright[::-1])


def test_transparent_pixels_are_black_whatever_colour_they_hide(tmp_path):
    pixels = np.full((8, 8, 4), 200, np.uint8)
    pixels[:4, :, 3] = 0
    pixels[4:, :, 3] = 255
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    image = opened(tmp_path, val_fraction=0.5).train[0][0]
    assert not image[:4].any() and (image[4:] == 200).all()


# -- what cannot be used ----------------------------------------------------------------------------------------------


def png(width=8, height=8, mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def noisy_png():
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def forged_png(width, height):
    """A PNG whose header claims another size, with the checksum that belongs to it."""
    import zlib

    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    return png()[:8] + (13).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big") + png()[33:]


BAD = {
    "empty": (b"", "cannot be read as an image"),
    "text": (b"this is no image at all", "cannot be read as an image"),
    "cut short": (noisy_png()[:2000], "cannot be read as an image"),
    "one flipped byte": (noisy_png()[:300] + b"\xff\x00" + noisy_png()[302:], "cannot be read as an image"),
    "a bomb": (forged_png(12_000, 12_000), "has more than 89478485 pixels"),
    "a larger bomb": (forged_png(60_000, 60_000), "has more than 89478485 pixels"),
    "16 bits": (png(mode="I;16"), "has pixels of mode I;16"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "cannot be read as an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_by_name_or_skipped_and_counted(tmp_path, name):
    content, reason = BAD[name]
    (folder(tmp_path, red=6, blue=6) / "red" / "3b.png").write_bytes(content)
    with pytest.raises(UserError) as error:
        opened(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'red' / '3b.png'}: {reason}")
    assert "data.on_error=skip" in str(error.value) and "\n" not in str(error.value)
    facts = opened(tmp_path, on_error="skip").describe()
    assert facts["skipped"] == 1 and facts["skipped_files"][0].startswith(f"red/3b.png: {reason}")
    assert facts["train_images"] + facts["held_out_images"] == 12


def test_a_link_that_leads_nowhere_is_a_bad_image(tmp_path):
    (folder(tmp_path, red=6, blue=6) / "red" / "lost.png").symlink_to("moved.png")
    with pytest.raises(UserError, match=r"lost\.png: is a link to moved\.png, which does not exist \(data\.on_error"):
        opened(tmp_path)
    facts = opened(tmp_path, on_error="skip").describe()
    assert facts["skipped"] == 1 and facts["train_images"] + facts["held_out_images"] == 12


def test_another_size_is_refused_or_skipped_where_sizes_are_to_stay(tmp_path):
    Image.new("RGB", (9, 8)).save(folder(tmp_path, red=6, blue=6) / "blue" / "wide.png")
    assert opened(tmp_path).describe()["skipped"] == 0
    with pytest.raises(UserError, match=r"wide\.png: is 9 x 8 pixels, expected 8 x 8"):
        opened(tmp_path, resize=False)
    facts = opened(tmp_path, resize=False, on_error="skip").describe()
    assert facts["skipped_files"] == ["blue/wide.png: is 9 x 8 pixels, expected 8 x 8"]


def labels_file(tmp_path, *lines):
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return str(tmp_path / "labels.csv")


def test_a_list_of_labels_instead_of_folders(tmp_path):
    folder(tmp_path / "all", red=4, blue=4)
    listed = [(f"{name}/{i}.png", {"red": 0, "blue": 1}[name]) for name in ("blue", "red") for i in range(4)]
    data = opened(tmp_path / "all", labels=labels_file(tmp_path, *listed), val_fraction=0.25)
    assert data.classes == ("0", "1")
    np.testing.assert_array_equal(data.train[0].mean(axis=(1, 2)).argmax(-1), 2 * data.train[1])


@pytest.mark.parametrize(("label", "classes"), [(2, 2), (-1, 2), (-1, 0)])
def test_a_label_out_of_range_is_refused_by_name_or_skipped_and_counted(tmp_path, label, classes):
    folder(tmp_path / "all", red=4, blue=4)
    listed = [(f"{name}/{i}.png", n) for n, name in enumerate(("red", "blue")) for i in range(4)]
    listed[5] = (listed[5][0], label)
    settings = {"labels": labels_file(tmp_path, *listed), "classes": classes, "val_fraction": 0.25}
    with pytest.raises(UserError, match=rf"blue/1\.png: its class {label} is not one of 0\.\.1 .*data\.on_error=skip"):
        opened(tmp_path / "all", **settings)
    assert opened(tmp_path / "all", **settings, on_error="skip").describe()["skipped"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": ""}, "data=images needs a directory"),
        ({"path": "missing"}, "data.path=missing: not found"),
        ({"labels": "missing.csv"}, "data.labels=missing.csv: not found"),
        ({"classes": 3}, "data.classes=3: only applies with data.labels"),
        ({"image_size": 0}, "data.image_size=0: must be at least 1"),
        ({"on_error": "skp"}, "data.on_error=skp: did you mean skip?"),
        ({"normalise": "mean"}, "data.normalise=mean: there is: fixed, train"),
        ({"augment": "flop"}, "data.augment=flop: did you mean flip?"),
        ({"val_fraction": 1.1}, "data.val_fraction=1.1"),
        ({"eval_images": -1}, "data.eval_images=-1"),
        ({"max_mb": 0.0}, "data.max_mb=0.0"),
        ({"max_mb": 0.001}, "12 images of 8 x 8 pixels are more than data.max_mb=0.001"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_wrong_settings(tmp_path, settings, words):
    with pytest.raises(UserError) as error:
        opened(**{"path": folder(tmp_path, red=6, blue=6), **settings})
    assert words in str(error.value)


def test_folders_that_are_no_classes_to_learn(tmp_path):
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "flat" / "a.png")
    with pytest.raises(UserError, match="contains no directories"):
        opened(tmp_path / "flat")
    with pytest.raises(UserError, match="fewer than two classes"):
        opened(folder(tmp_path / "one", red=4))
    (folder(tmp_path / "empty", red=4, blue=4) / "green").mkdir()
    with pytest.raises(UserError, match=r"class green has no image$"):
        opened(tmp_path / "empty")
    (tmp_path / "empty" / "green" / "a.png").write_bytes(b"no")
    with pytest.raises(UserError, match=r"class green has no image that can be used \(green/a\.png: cannot be read"):
        opened(tmp_path / "empty", on_error="skip")
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.1 holds out none of 2 images"):
        opened(folder(tmp_path / "few", red=1, blue=1))


@pytest.mark.parametrize("line", [["red/0.png"], ["red/0.png", "zero"], ["red/0.png", "0", "1"]])
def test_a_line_of_the_labels_that_is_no_file_and_class(tmp_path, line):
    folder(tmp_path / "all", red=2)
    with pytest.raises(UserError, match="a line is a file and a class number"):
        opened(tmp_path / "all", labels=labels_file(tmp_path, line))


@pytest.mark.parametrize(("again", "number", "words"), [("red/0.png", 1, ", as class 0 and 1"), ("./red/0.png", 0, "")])
@pytest.mark.parametrize("on_error", ["refuse", "skip"])
def test_an_image_is_listed_once(tmp_path, again, number, words, on_error):
    folder(tmp_path / "all", red=2)
    listed = labels_file(tmp_path, ("red/0.png", 0), ("red/1.png", 1), (again, number))
    with pytest.raises(UserError) as error:
        opened(tmp_path / "all", labels=listed, on_error=on_error)
    assert str(error.value).endswith(f"labels.csv: {again} is listed twice{words}")


def test_a_listed_file_that_is_not_there_is_named(tmp_path):
    folder(tmp_path / "all", red=2)
    with pytest.raises(UserError, match=r"red/9\.png: does not exist"):
        opened(tmp_path / "all", labels=labels_file(tmp_path, ("red/0.png", 0), ("red/9.png", 1)))
